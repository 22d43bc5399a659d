"""Go back to an earlier checkpoint of a run that is not running.

removed_rounds.jsonl    the records of the rounds that were undone, to find out later what went wrong
"""

from pathlib import Path

from fedtailor.errors import RunError
from fedtailor.runs import checkpoint
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.files import remove_folder, write_and_sync, write_atomic, write_errors
from fedtailor.runs.reader import read_records

REMOVED_FILE = "removed_rounds.jsonl"


def roll_back(folder: Path, number: int) -> Checkpoint:
    """Undo all rounds of a run after round `number`, which must have a checkpoint, and return this checkpoint.

    The caller must hold the lock of the folder. A finished run is no longer finished.

    >>> roll_back(Path("nowhere"), 3)
    Traceback (most recent call last):
    fedtailor.errors.RunError: The run in 'nowhere' has no checkpoint of round 3; checkpoints exist of no round.
    """
    folders = {int(path.name): path for path in checkpoint.checkpoint_folders(folder)}
    if number not in folders:
        available = f"rounds {', '.join(map(str, folders))}" if folders else "no round"
        raise RunError(f"The run in '{folder}' has no checkpoint of round {number}; checkpoints exist of {available}.")
    found = checkpoint.load(folders[number])
    read_records(folder, found)  # raises an error if they are damaged
    with write_errors(f"The run in '{folder}' cannot be changed"):
        records = (folder / "rounds.jsonl").read_bytes()
        kept = int(found.metadata["records"]["bytes"])
        with (folder / REMOVED_FILE).open("ab") as file:
            write_and_sync(file, b"".join(line for line in records[kept:].splitlines(True) if line.endswith(b"\n")))
        remove_folder(folder / "personal")
        for later in (path for round, path in folders.items() if round > number):
            remove_folder(later)
        write_atomic(folder / "rounds.jsonl", records[:kept])
    return found
