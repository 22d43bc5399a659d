"""Settings as TOML, which Python reads but does not write."""

import json
from collections.abc import Mapping
from typing import Any


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, tables last; None is left out.

    >>> print(to_toml({"rounds": 2, "schedule": None, "method": {"name": "fedavg", "lr": 0.1}}), end="")
    rounds = 2
    <BLANKLINE>
    [method]
    name = "fedavg"
    lr = 0.1
    """
    return "\n".join(_toml_lines(settings, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> list[str]:
    given = {name: value for name, value in table.items() if value is not None}
    lines = [f"{name} = {_toml_value(value)}" for name, value in given.items() if not isinstance(value, Mapping)]
    for name, value in given.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{name}]", *_toml_lines(value, f"{path}{name}.")]
    return lines


def _toml_value(value: Any) -> str:
    """JSON writes numbers, texts and lists as TOML does; what is neither (a function, say) is named."""
    return json.dumps(value, ensure_ascii=False, default=_named)


def _named(odd: Any) -> Any:
    """A number of numpy or torch as a number, a function by its name."""
    return odd.item() if hasattr(odd, "item") else getattr(odd, "__qualname__", str(odd))
