"""Readers of untrusted text, TOML, and JSON, with limits on size, nesting, and the length of numbers."""

import json
import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import category

from fedtailor.errors import ConfigError, reason

MAX_SETTINGS_BYTES = 2**24  # of a settings file; a schedule of 2,000 rounds with 1,000 clients needs 10 million
_MAX_DEPTH = 32  # levels of nested tables and lists, and dots in a line; real settings have three or four
_MAX_LENGTH = 4096  # characters of a string; the longest path that Linux allows
_MAX_DIGITS = 18  # of an integer, so that it fits into 64 bits
_DECIMALS = re.compile(r"\d\.\d")  # a dot in a number, not in a name


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the content of a TOML file; `what` is its name in error messages.

    >>> read_toml(Path("nowhere.toml"), "The experiment")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: The experiment 'nowhere.toml' cannot be read: No such file or directory.
    """
    return parse_toml(read_text(path, what, MAX_SETTINGS_BYTES), f"{what} '{path}'")


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Return the content of TOML text; `what` is its name in error messages.

    >>> parse_toml("rounds = 5", "The experiment")
    {'rounds': 5}
    """
    for number, line in enumerate(text.split("\n"), start=1):
        # Names with many dots are rejected, because the run time of tomllib is quadratic in their number.
        if _DECIMALS.sub("", line).count(".") > _MAX_DEPTH and not line.lstrip().startswith("#"):
            raise ConfigError(f"{what} has more than {_MAX_DEPTH} dots in line {number}; is it the right file?")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or the error of int() for thousands of digits
        problem = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "a number has too many digits"
        raise ConfigError(f"{what} is not valid TOML: {problem}.") from error
    except RecursionError as error:
        raise ConfigError(f"{what} has too many nested lists; is it the right file?") from error


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """Return the text of a file of at most `max_bytes` bytes; `what` is its name in error messages.

    >>> read_text(Path("nowhere"), "The record", max_bytes=1000)
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: The record 'nowhere' cannot be read: No such file or directory.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(f"{what} '{path}' cannot be read: it is not a file.")
        if size > max_bytes:
            limit = f"the limit is {max_bytes:,}"
            raise ConfigError(f"{what} '{path}' cannot be read: it has {size:,} bytes, {limit}.")
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{what} '{path}' cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} '{path}' cannot be read: byte {error.start} is not UTF-8.") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid, nested too deeply, or has numbers with too many digits.

    >>> parse_json("[1, 2]")
    [1, 2]
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_settings(settings: Any, what: str) -> None:
    """Raise `ConfigError` if settings are nested too deeply or contain large integers or long or unprintable strings.

    >>> check_settings({"rounds": 10**5000}, "The experiment")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: The experiment has an integer of more than 18 digits.
    """
    level = [settings]  # all values at the same depth
    for _ in range(_MAX_DEPTH):
        for value in level:
            _check_value(value, what)
        tables = [value for value in level if isinstance(value, Mapping)]
        lists = [value for value in level if isinstance(value, list | tuple)]
        level = [part for table in tables for pair in table.items() for part in pair]
        level += [part for values in lists for part in values]
        if not level:
            return
    raise ConfigError(f"{what} has more than {_MAX_DEPTH} nested tables and lists.")


def is_printable(text: str) -> bool:
    """Return whether a string has no control characters, which can control a terminal, and no surrogates.

    >>> is_printable("Größe 3"), is_printable("\\x1b[2J")
    (True, False)
    """
    return text.isprintable() or not any(category(character) in ("Cc", "Cs") for character in text)


def sanitize(text: str, max_length: int = 300) -> str:
    """Return untrusted text for use in a message, truncated to `max_length` and without unprintable characters.

    >>> sanitize("all is\\x1b[2J well")
    'all is[2J well'
    """
    return "".join(character for character in text[:max_length] if is_printable(character))


def _check_value(value: Any, what: str) -> None:
    if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        raise ConfigError(f"{what} has an integer of more than {_MAX_DIGITS} digits.")
    if isinstance(value, str) and len(value) > _MAX_LENGTH:
        raise ConfigError(f"{what} has a string of {len(value):,} characters; the limit is {_MAX_LENGTH:,}.")
    if isinstance(value, str) and not is_printable(value):
        raise ConfigError(f"{what} has a string with unprintable characters, {reprlib.repr(value)}.")
