"""Text from whoever's hands, TOML and JSON: bounded in size, depth and numbers before anybody works with it."""

import json
import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import category

from fedtailor.errors import Refused

LARGEST = 2**24  # bytes of a file of settings: a schedule of 2,000 rounds of 1,000 clients takes ten million
_DEEPEST = 32  # tables and lists within each other, and dots in a name; settings have three or four
_LONGEST = 4096  # letters of a text: the longest path there can be
_DIGITS = 18  # of a whole number: all that 64 bits hold
_DECIMALS = re.compile(r"\d\.\d")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables in a TOML file, which the words `what` name in a refusal.

    >>> read_toml(Path("nowhere.toml"), "The experiment")
    Traceback (most recent call last):
    fedtailor.errors.Refused: The experiment 'nowhere.toml' cannot be read: No such file or directory.
    """
    text = read_text(path, what, LARGEST)
    for number, line in enumerate(text.split("\n"), start=1):
        # the time that tomllib takes grows with the square of a name's dots
        if _DECIMALS.sub("", line).count(".") > _DEEPEST and not line.lstrip().startswith("#"):
            raise Refused(f"{what} '{path}' has more than {_DEEPEST} dots in line {number}; is it the right file?")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError is one; so is what int says of thousands of digits
        said = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "a number has too many digits"
        raise Refused(f"{what} '{path}' is not TOML: {said}.") from error
    except RecursionError as error:
        raise Refused(f"{what} '{path}' has lists within lists beyond all measure.") from error


def read_text(path: Path, what: str, most: int) -> str:
    """The text of a file of at most so many bytes.

    >>> read_text(Path("nowhere"), "The record", most=1000)
    Traceback (most recent call last):
    fedtailor.errors.Refused: The record 'nowhere' cannot be read: No such file or directory.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe or a device may never end
            raise Refused(f"{what} '{path}' cannot be read: it is no file.")
        if size > most:
            raise Refused(f"{what} '{path}' cannot be read: it has {size:,} bytes, and {most:,} are the most.")
        return path.read_bytes().decode()
    except OSError as error:
        raise Refused(f"{what} '{path}' cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{what} '{path}' cannot be read: its byte {error.start} is no text in UTF-8.") from error


def parse_json(text: str | bytes) -> Any:
    """What JSON says, or a ValueError; of too deep lists and too long numbers too.

    >>> parse_json("[1, 2]")
    [1, 2]
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error


def check_plain(settings: Any, what: str) -> None:
    """Refuse settings that go too deep, and numbers and texts that cannot be told in a sentence.

    >>> check_plain({"rounds": 10**5000}, "The experiment")
    Traceback (most recent call last):
    fedtailor.errors.Refused: The experiment has a whole number of more than 18 digits.
    """
    layer = [settings]
    for _ in range(_DEEPEST):
        for node in layer:
            _check_leaf(node, what)
        tables = [node for node in layer if isinstance(node, Mapping)]
        lists = [node for node in layer if isinstance(node, list | tuple)]
        layer = [part for table in tables for pair in table.items() for part in pair]
        layer += [part for node in lists for part in node]
        if not layer:
            return
    raise Refused(f"{what} has more than {_DEEPEST} tables and lists within each other.")


def is_printable(text: str) -> bool:
    """Whether a text has no control codes, which disturb a screen, and nothing that is no letter at all.

    >>> is_printable("Größe 3"), is_printable("\\x1b[2J")
    (True, False)
    """
    return text.isprintable() or not any(category(letter) in ("Cc", "Cs") for letter in text)


def quoted(text: str, most: int = 300) -> str:
    """Somebody else's words as part of a sentence: what disturbs a screen is left out, and so is what is too much.

    >>> quoted("all is\\x1b[2J well")
    'all is[2J well'
    """
    return "".join(letter for letter in text[:most] if is_printable(letter))


def _check_leaf(value: Any, what: str) -> None:
    if isinstance(value, int) and abs(value) >= 10**_DIGITS:
        raise Refused(f"{what} has a whole number of more than {_DIGITS} digits.")
    if isinstance(value, str) and len(value) > _LONGEST:
        raise Refused(f"{what} has a text of {len(value):,} letters, and {_LONGEST:,} are the most.")
    if isinstance(value, str) and not is_printable(value):
        raise Refused(f"{what} has a text with letters that cannot be printed, {reprlib.repr(value)}.")
