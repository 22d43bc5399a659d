"""Refused replies: the reverse proxy tells the run, a process of its own, that a client's reply will never arrive.

home/refusals/NAME.json contains the message to which the client replied, and the reason.
"""

import json
from pathlib import Path

from fedtailor.core.untrusted_input import parse_json, read_text, sanitize

_MAX_BYTES = 2**12
_MAX_ID_LENGTH = 200  # of Flower's message IDs, which have 64 characters


def write_refusal(folder: Path, client: str, message_id: str, reason: str) -> None:
    """Tell the run that a client's reply to a message was refused.

    The file may be lost in a crash, because the round is then lost as well.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> write_refusal(folder, "hospital-a", "message-1", "it is too large")
    >>> find_refusal(folder, "hospital-a", "message-1"), find_refusal(folder, "hospital-a", "message-2")
    ('it is too large', None)
    """
    if len(message_id) > _MAX_ID_LENGTH:
        return
    path = _path(folder, client)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"message": message_id, "reason": reason}))
    new.replace(path)


def find_refusal(folder: Path, client: str, message_id: str) -> str | None:
    """Return why a client's reply to a message was refused, or None if it was not."""
    try:
        refusal = parse_json(read_text(_path(folder, client), "The refusal", _MAX_BYTES))
        return sanitize(str(refusal["reason"])) if refusal["message"] == message_id else None
    except (OSError, ValueError, KeyError, TypeError):  # there is none
        return None


def _path(folder: Path, client: str) -> Path:
    return folder / "home" / "refusals" / f"{client}.json"
