"""Command-line flags as nested settings: --method.lr 0.1 is {"method": {"lr": 0.1}}."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedtailor.core.untrusted_input import parse_json
from fedtailor.errors import ConfigError

T = TypeVar("T")
_MAX_DOTS = 8  # in a flag; --method.inner.lr has two
# Values that are not parsed: paths may contain commas and brackets, and a decimal separator may be a comma.
_TEXT_FLAGS = ("out", "data.folder", "data.file", "data.schema", "unreliable.trace", "data.decimal", "decimal")


@dataclass(frozen=True)
class Overrides:
    """Positional arguments, and settings by their dotted names."""

    positional: list[str]
    settings: dict[str, Any]

    def pop(self, name: str, default: str) -> str:
        """Remove a flag and return its value."""
        return str(self.settings.pop(name, default))

    def pop_list(self, name: str, kind: type[T], default: Sequence[T]) -> list[T]:
        """Remove a flag with several values, such as 0,1,2, and return them."""
        given = self.settings.pop(name, None)
        if given is None:
            return list(default)
        values = given if isinstance(given, list) else [given]
        if not values or not all(isinstance(value, kind) for value in values):
            raise ConfigError(f"--{name} must have values such as 0,1,2, got {reprlib.repr(given)}.")
        return values

    def apply_to(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested settings in which the flags take precedence."""
        result = dict(settings)
        for name, value in self.settings.items():
            result = _set(result, name.split("."), value, name)
        return result


def parse_overrides(words: Sequence[str]) -> Overrides:
    """Parse command-line arguments.

    >>> parse_overrides(["fedavg", "--batch-size", "16", "--network.hidden=64,32"])
    Overrides(positional=['fedavg'], settings={'batch_size': 16, 'network.hidden': [64, 32]})
    """
    positional: list[str] = []
    settings: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            positional.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not name:
            raise ConfigError("A flag needs a name directly after its two dashes, as in --rounds 10.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value, as in --rounds 10.")
            value = rest.pop(0)
        name = name.replace("-", "_")
        if name.count(".") > _MAX_DOTS:
            raise ConfigError(f"A flag can have at most {_MAX_DOTS} dots, got {name.count('.')}.")
        settings[name] = value if name in _TEXT_FLAGS else _value(value)
    return Overrides(positional, settings)


def _set(settings: Mapping[str, Any], path: Sequence[str], value: Any, flag: str) -> dict[str, Any]:
    """Return settings with one more value; a flag without a field sets the name of a part: --method fedprox."""
    part, *deeper = path
    before = settings.get(part, {} if deeper else None)
    if deeper:
        if not isinstance(before, (str, Mapping)):
            raise ConfigError(f"--{flag} is invalid because {part} is a value without fields.")
        value = _set({"name": before} if isinstance(before, str) else before, deeper, value, flag)
    elif isinstance(before, Mapping):
        value = {**before, "name": value}
    return {**settings, part: value}


def _value(text: str) -> Any:
    """Parse numbers, booleans, and lists in brackets or with commas; everything else is a string."""
    try:
        return parse_json(text)
    except ValueError:
        return [_value(part) for part in text.split(",")] if "," in text else text
