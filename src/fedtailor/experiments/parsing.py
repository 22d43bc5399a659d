"""Build dataclasses from nested settings, and describe their fields."""

import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import FailFast, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from fedtailor.core.code_reference import PARTS, is_reference
from fedtailor.core.fields import help_texts
from fedtailor.core.method import Method
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent
from fedtailor.methods import METHODS

NestedSettings = Mapping[str, Any]
_MAX_INTEGER = 10**6  # of a method's fields (epochs, steps, widths), to bound time and memory


def build_dataclass(
    kind: type[Any], values: NestedSettings, name: str, prefix: str = "", consent: CodeConsent = NO_CONSENT
) -> Any:
    """Return an instance of a dataclass from named values, each validated against the type of its field."""
    hints, known = get_type_hints(kind), [f.name for f in fields(kind)]
    made = {}
    if issubclass(kind, Method):
        kind.check_settings(values)
    for key, value in values.items():
        if key not in known:
            raise unknown_name(f"field of {name}", key, known)
        if key in ("method", "data", "network", "attack") and not prefix:
            made[key] = value
            continue
        if is_dataclass(hints[key]) and not issubclass(hints[key], Method) and isinstance(value, Mapping):
            made[key] = build_dataclass(hints[key], value, key, key)
            continue
        if hints[key] is Method:
            made[key] = build_named(f"{prefix}.{key}", value, METHODS, None, consent)
            continue
        made[key] = parse_value(hints[key], value, f"{prefix}.{key}" if prefix else key)
        if issubclass(kind, Method) and isinstance(made[key], int) and abs(made[key]) > _MAX_INTEGER:
            raise ConfigError(f"{prefix}.{key} must be at most {_MAX_INTEGER}, got {value}.")
    return kind(**made)


def parse_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value as the type of its setting; `where` is the setting's name in error messages.

    >>> parse_value(tuple[int, ...], 64, "network.hidden")
    (64,)
    >>> parse_value(list[str] | None, "accuracy", "metrics")
    ['accuracy']
    """
    if str(value).lower() == "none" and NoneType in get_args(hint):  # as flags write it
        value = None
    holds_text = "list[str]" in str(hint) or "tuple[str" in str(hint)
    if _is_list(hint) and (isinstance(value, (int, float)) or (isinstance(value, str) and holds_text)):
        value = [value]  # a list of one, as the command writes it
    if isinstance(value, list) and "tuple[str" in str(hint):
        value = [str(part) if isinstance(part, int | float) else part for part in value]  # such as --data.missing -999
    try:
        return TypeAdapter(_fail_fast(hint, value)).validate_python(value)
    except PydanticSchemaGenerationError:  # a type that only users' own code has
        return value
    except ValidationError as error:
        raise ConfigError(f"{where} cannot be {reprlib.repr(value)}: {error.errors()[0]['msg'].lower()}.") from error


def _is_list(hint: Any) -> bool:
    """Return whether a field accepts only a list of any length, or None."""
    kinds = [part for part in get_args(hint) if part is not NoneType] if get_origin(hint) is UnionType else [hint]
    return all(get_origin(kind) is list or (get_origin(kind) is tuple and ... in get_args(kind)) for kind in kinds)


def _fail_fast(hint: Any, value: Any) -> Any:
    """Return a type that stops at the first error in a list; otherwise pydantic would keep millions of errors."""
    if not isinstance(value, list):
        return hint
    if get_origin(hint) in (list, tuple):
        parts = tuple(_fail_fast(part, value) for part in get_args(hint))
        return Annotated[get_origin(hint)[parts], FailFast()]
    lists = [part for part in get_args(hint) if get_origin(part) in (list, tuple)]  # of a union type
    return _fail_fast(lists[0], value) if lists else hint


def build_named(
    part: str, given: Any, known: Mapping[str, type[Any]], default: str | None, consent: CodeConsent = NO_CONSENT
) -> Any:
    """Return an instance of one of the known classes, or of a method of the user's own, from its name and fields; None
    if no name is given."""
    settings = named_settings(part, given, default)
    name = settings.pop("name", None)
    if name is None and settings:
        raise ConfigError(f"The {part} has fields but no name; add {part}.name, one of {', '.join(known)}.")
    if name is None:
        return None
    if is_reference(name) and part.partition(".")[0] in PARTS:
        return build_dataclass(consent.load_method(part, name), settings, name, part, consent)
    if name not in known:
        raise unknown_name(part, name, known)
    return build_dataclass(known[name], settings, name, part, consent)


def field_help(kind: type[Any]) -> dict[str, tuple[str, str]]:
    """Return field -> (default, help text), without settings that a method does not allow.

    >>> field_help(METHODS["fedprox"])["mu"]
    ('0.1', 'μ, weight of the proximal term toward the received model')
    """
    texts, fixed = help_texts(kind), getattr(kind, "fixed_settings", {})
    return {f.name: (_default(f), texts[f.name]) for f in fields(kind) if f.name not in fixed}


def first_line(kind: type[Any]) -> str:
    """Return the first line of a class's docstring, which says what a data set or network is.

    >>> first_line(METHODS["local"]).partition(":")[0]
    'Local training'
    """
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _default(field: Field[Any]) -> str:
    """Return a field's default as a flag would write it; a method is written as its name."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return "" if value is MISSING else type(value).__name__.lower() if isinstance(value, Method) else str(value)


def named_settings(part: str, given: Any, default: str | None) -> dict[str, Any]:
    """Return the settings of a part with its name; a part may be given as a name only."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{part} must be a name or a table with a name, got {reprlib.repr(given)}.")
    named = ({"name": default} if default else {}) | dict(given)
    if not isinstance(named.get("name", ""), str):
        raise ConfigError(f"{part}.name must be a string, got {reprlib.repr(named['name'])}.")
    return named
