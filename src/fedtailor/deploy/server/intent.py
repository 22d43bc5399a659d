"""What the operator wants to happen when the process of the run ends; in home/intent.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.errors import DeployError
from fedtailor.runs.files import write_atomic

_FILE = "home/intent.json"


@dataclass(frozen=True)
class Intent:
    """Whether the run should continue, and how often the server has restarted it."""

    wanted: bool = False  # the operator started or resumed the run, and nothing has ended it since
    restarts: int = 0  # by the server, in a row, without a new round
    round: int = 0  # last complete round at the last restart


def read_intent(folder: Path) -> Intent:
    """Return the intent in an operator's folder.

    >>> read_intent(Path("nowhere")).wanted
    False
    """
    path = folder / _FILE
    if not path.is_file():
        return Intent()
    try:
        return Intent(**parse_json(read_text(path, "The intent", 2**12)))
    except (ValueError, TypeError) as error:
        raise DeployError(f"'{path}' is damaged; delete it and resume the run.") from error


def write_intent(folder: Path, intent: Intent) -> None:
    """Replace the intent in an operator's folder."""
    write_atomic(folder / _FILE, (json.dumps(asdict(intent)) + "\n").encode())
