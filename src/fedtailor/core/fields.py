"""Help texts and constraints of settings, declared with the type of a field:

mu: Annotated[NonNegative, "μ, weight of the proximal term"] = 0.1
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class Constraint:
    """A condition on the values of a field; the description follows "must be" in error messages."""

    description: str
    holds: Callable[[Any], bool]


Positive = Annotated[float, Constraint("above 0", lambda value: value > 0)]
NonNegative = Annotated[float, Constraint("at least 0", lambda value: value >= 0)]
Fraction = Annotated[float, Constraint("from 0 to 1", lambda value: 0 <= value <= 1)]
FractionAbove0 = Annotated[float, Constraint("above 0 and at most 1", lambda value: 0 < value <= 1)]
FractionBelow1 = Annotated[float, Constraint("at least 0 and below 1", lambda value: 0 <= value < 1)]
InnerFraction = Annotated[float, Constraint("between 0 and 1", lambda value: 0 < value < 1)]
PositiveInt = Annotated[int, Constraint("at least 1", lambda value: value >= 1)]
AtLeastTwo = Annotated[int, Constraint("at least 2", lambda value: value >= 2)]
NonNegativeInt = Annotated[int, Constraint("at least 0", lambda value: value >= 0)]


def check_fields(settings: Any, prefix: str = "", base: Any = object) -> None:
    """Raise `ConfigError` if a field of a dataclass violates its type or its constraints.

    Numbers, booleans, and `Literal` choices are checked; other types are not. A number must also satisfy what base
    classes, and `base`, declare for a field of the same name.

    >>> @dataclass(frozen=True)
    ... class Penalty:
    ...     lam: Annotated[Positive, "λ, weight of the penalty"] = 1.0
    >>> check_fields(Penalty(lam=-1.0), "penalty.")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: penalty.lam must be above 0, got -1.0.
    """
    kinds: list[Any] = [type(settings), base]
    for f in fields(settings):
        value = getattr(settings, f.name)
        hints = [hint for kind in kinds for hint in _declarations(kind).get(f.name, [])]
        for hint in hints if _is_number(value) else hints[:1]:
            if violated := _violation(hint, value):
                raise ConfigError(f"{prefix}{f.name} must be {violated}, got {value!r}.")


def help_texts(kind: Any) -> dict[str, str]:
    """Return field -> help text: the string in its `Annotated` type, or in that of a base class.

    >>> @dataclass(frozen=True)
    ... class Penalty:
    ...     lam: Annotated[float, "λ, weight of the penalty"] = 1.0
    >>> help_texts(Penalty)
    {'lam': 'λ, weight of the penalty'}
    """
    declared = _declarations(kind)
    return {f.name: next(filter(None, map(_help, declared.get(f.name, []))), "") for f in fields(kind)}


@cache
def _declarations(kind: Any) -> dict[str, list[Any]]:
    """Return field -> its types, as this class and its base classes declare it."""
    found: dict[str, list[Any]] = {}
    for owner in kind.__mro__[:-1]:
        try:
            hints = get_type_hints(owner, include_extras=True)
        except NameError:  # a type that is imported only for type checkers
            hints = {}
        for name, hint in hints.items():
            found.setdefault(name, []).append(hint)
    return found


def _help(hint: Any) -> str:
    return next((text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)), "")


def _violation(hint: Any, value: Any) -> str:
    """Return what a value must be to have this type; empty if it has it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        constraints = [part for part in hint.__metadata__ if isinstance(part, Constraint)]
        if wrong_type := _violation(parts[0], value):
            return ", ".join([wrong_type, *(constraint.description for constraint in constraints)])
        return next((constraint.description for constraint in constraints if not constraint.holds(value)), "")
    if origin in (Union, UnionType):
        found = [_violation(part, value) for part in parts]
        return ", or ".join(found) if all(found) else ""
    if origin is Literal:
        return "" if value in parts else " or ".join(map(repr, parts))
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint is int:
        return "" if isinstance(value, Integral) and not isinstance(value, bool) else "an integer"
    if hint is float:
        return "" if _is_number(value) and -inf < value < inf else "a finite number"
    return "none" if hint is NoneType and value is not None else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
