"""Write settings as TOML (the standard library only reads it), and flatten them to dotted names."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML with tables last; None values are omitted.

    >>> print(to_toml({"rounds": 2, "schedule": None, "method": {"name": "fedavg", "lr": 0.1}}), end="")
    rounds = 2
    <BLANKLINE>
    [method]
    name = "fedavg"
    lr = 0.1
    """
    return "\n".join(_lines(settings, "")) + "\n"


def flatten_settings(settings: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Return nested settings as one dict with dotted names.

    >>> flatten_settings({"rounds": 5, "method": {"name": "lag", "inner": {"name": "fedavg"}}})
    {'rounds': 5, 'method.name': 'lag', 'method.inner.name': 'fedavg'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flatten_settings(value, separator) if isinstance(value, Mapping) else None
        found |= {name: value} if inner is None else {f"{name}{separator}{n}": v for n, v in inner.items()}
    return found


def _lines(table: Mapping[str, Any], path: str) -> list[str]:
    entries = {_key(name): value for name, value in table.items() if value is not None}
    lines = [f"{name} = {_value(value)}" for name, value in entries.items() if not isinstance(value, Mapping)]
    for name, value in entries.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{name}]", *_lines(value, f"{path}{name}.")]
    return lines


def _key(name: object) -> str:
    return str(name) if _BARE_KEY.fullmatch(str(name)) else _string(str(name))


def _string(text: str) -> str:
    return json.dumps(text.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Return a value as TOML; a value without a TOML type, such as a function or an array, is described by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # TOML has inf and nan
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(part) for part in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_value(part)}' for name, part in value.items() if part is not None)}}}"
    return _string(value) if isinstance(value, str) else _describe(value)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:  # a numpy or torch scalar
        return _value(value.item())
    if shape is not None:
        return _string(f"{type(value).__name__} {tuple(shape)}")
    return _string(getattr(value, "__qualname__", str(value)))
