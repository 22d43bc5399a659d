"""Flags of the command as nested settings: --method.lr 0.1 is {"method": {"lr": 0.1}}."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedtailor.errors import Refused
from fedtailor.untrusted import parse_json

T = TypeVar("T")
_DEEPEST = 8  # parts within parts; --method.inner.lr has two dots
_TEXT = ("out", "data.folder", "unreliable.trace")  # names of folders, which may have commas and brackets


@dataclass(frozen=True)
class Flags:
    """Words without a flag, and settings by their dotted names."""

    words: list[str]
    settings: dict[str, Any]

    def pop(self, name: str, default: str) -> str:
        return str(self.settings.pop(name, default))

    def pop_list(self, name: str, kind: type[T], default: Sequence[T]) -> list[T]:
        """A flag with several values, such as 0,1,2."""
        given = self.settings.pop(name, None)
        if given is None:
            return list(default)
        values = given if isinstance(given, list) else [given]
        if not values or not all(isinstance(value, kind) for value in values):
            raise Refused(f"--{name} takes values such as 0,1,2, not {reprlib.repr(given)}.")
        return values

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The flags laid over nested settings."""
        result = dict(settings)
        for name, value in self.settings.items():
            result = _lay(result, name.split("."), value, name)
        return result


def read_flags(words: Sequence[str]) -> Flags:
    """The command's words, taken apart.

    >>> read_flags(["fedavg", "--batch-size", "16", "--network.hidden=64,32"])
    Flags(words=['fedavg'], settings={'batch_size': 16, 'network.hidden': [64, 32]})
    """
    plain: list[str] = []
    settings: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not name:
            raise Refused("A flag's name follows its two dashes at once, as in --rounds 10.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise Refused(f"--{name} needs a value behind it.")
            value = rest.pop(0)
        name = name.replace("-", "_")
        if name.count(".") > _DEEPEST:
            raise Refused(f"A flag has at most {_DEEPEST} dots, not {name.count('.')}.")
        settings[name] = value if name in _TEXT else _value(value)
    return Flags(plain, settings)


def _lay(settings: Mapping[str, Any], path: Sequence[str], value: Any, flag: str) -> dict[str, Any]:
    """Settings with one more; a part that has fields is named by its own flag: --method fedprox."""
    part, *deeper = path
    before = settings.get(part, {} if deeper else None)
    if deeper:
        if not isinstance(before, (str, Mapping)):
            raise Refused(f"--{flag} has no meaning, for {part} is a value and has no fields.")
        value = _lay({"name": before} if isinstance(before, str) else before, deeper, value, flag)
    elif isinstance(before, Mapping):
        value = {**before, "name": value}
    return {**settings, part: value}


def _value(text: str) -> Any:
    """Numbers, true and false, lists in brackets or with commas; everything else is text."""
    try:
        return parse_json(text)
    except ValueError:
        return [_value(part) for part in text.split(",")] if "," in text else text
