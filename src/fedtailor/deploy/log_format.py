"""The format of logs and of what the server and the clients print: plain text, or one JSON object per line."""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["plain", "json"]
_WARNING = "Warning: "  # how a printed sentence starts that is a warning
_chosen: list[LogFormat] = ["plain"]  # of this process


def use_log_format(log_format: LogFormat) -> None:
    """Choose the format of all logs of this process and of the lines from `printer`.

    >>> use_log_format("plain")
    """
    _chosen[0] = log_format


def json_line(message: str, process: str, level: str = "info", at: float | None = None) -> str:
    """Return a line of a log as a JSON object.

    >>> json_line("Serving.", "server", at=0.0)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "process": "server", "message": "Serving."}'
    """
    when = datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat(timespec="milliseconds")
    fields = {"time": when.replace("+00:00", "Z"), "level": level, "process": process, "message": message}
    return json.dumps(fields, ensure_ascii=False)


class LogFormatter(logging.Formatter):
    """Formats the records of a log file; `process` is who writes them."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        if _chosen[0] == "plain":
            return super().format(record)
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        level = record.levelname.lower() if record.levelno else "info"
        return json_line(text, self._process, level, record.created)


def printer(process: str, plain: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that prints a sentence with `plain`, or as a JSON object.

    >>> printer("server", print)("Warning: The disk is almost full.")
    Warning: The disk is almost full.
    """
    return plain if _chosen[0] == "plain" else lambda text: print_json(text, process)


def print_json(text: str, process: str, level: str = "info") -> None:
    """Print a sentence as a JSON object.

    >>> print_json("Warning: It is late.", "server")  # doctest: +ELLIPSIS
    {"time": "...", "level": "warning", "process": "server", "message": "It is late."}
    """
    level = "warning" if text.startswith(_WARNING) else level
    sys.stdout.write(json_line(text.removeprefix(_WARNING), process, level) + "\n")
    sys.stdout.flush()
