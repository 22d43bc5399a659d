"""Flags of the command as nested settings: --method.lr 0.1 is {"method": {"lr": 0.1}}."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedtailor.errors import Refused

T = TypeVar("T")
_TEXT = ("out", "data.folder")  # names of folders, which may have commas and brackets


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
            raise Refused(f"--{name} takes values such as 0,1,2, not {given!r}.")
        return values

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The flags laid over nested settings."""
        result: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
        for name, value in self.settings.items():
            part, dot, key = name.partition(".")
            if dot:
                before = result.get(part, {})
                if not isinstance(before, (str, dict)):
                    raise Refused(f"--{name} has no meaning, for {part} is a value and has no fields.")
                result[part] = ({"name": before} if isinstance(before, str) else before) | {key: value}
            elif isinstance(result.get(part), dict):
                result[part] = result[part] | {"name": value}
            else:
                result[part] = value
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
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise Refused(f"--{name} needs a value.")
            value = rest.pop(0)
        name = name.replace("-", "_")
        settings[name] = value if name in _TEXT else _value(value)
    return Flags(plain, settings)


def _value(text: str) -> Any:
    """Numbers, true and false, lists in brackets or with commas; everything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [_value(part) for part in text.split(",")] if "," in text else text
