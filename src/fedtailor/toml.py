"""Settings as TOML, which Python reads but does not write; and by dotted names."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, tables last; None is left out.

    >>> print(to_toml({"rounds": 2, "schedule": None, "method": {"name": "fedavg", "lr": 0.1}}), end="")
    rounds = 2
    <BLANKLINE>
    [method]
    name = "fedavg"
    lr = 0.1
    """
    return "\n".join(_lines(settings, "")) + "\n"


def flat(settings: Mapping[str, Any], between: str = ".") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flat({"rounds": 5, "method": {"name": "lag", "inner": {"name": "fedavg"}}})
    {'rounds': 5, 'method.name': 'lag', 'method.inner.name': 'fedavg'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inside = flat(value, between) if isinstance(value, Mapping) else None
        found |= {name: value} if inside is None else {f"{name}{between}{n}": v for n, v in inside.items()}
    return found


def _lines(table: Mapping[str, Any], path: str) -> list[str]:
    given = {_key(name): value for name, value in table.items() if value is not None}
    lines = [f"{name} = {_value(value)}" for name, value in given.items() if not isinstance(value, Mapping)]
    for name, value in given.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{name}]", *_lines(value, f"{path}{name}.")]
    return lines


def _key(name: object) -> str:
    return str(name) if _BARE.fullmatch(str(name)) else _text(str(name))


def _text(text: str) -> str:
    return json.dumps(text.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Numbers, texts, lists and tables as they are; what is none of these (a function, an array) by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf and nan, as TOML spells them
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(part) for part in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_value(part)}' for name, part in value.items() if part is not None)}}}"
    return _text(value) if isinstance(value, str) else _odd(value)


def _odd(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:  # a number of numpy or torch
        return _value(value.item())
    if shape is not None:
        return _text(f"{type(value).__name__} {tuple(shape)}")
    return _text(getattr(value, "__qualname__", str(value)))
