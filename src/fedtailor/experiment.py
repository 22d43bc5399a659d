"""An experiment as a dataclass, as TOML and as flags of the command: three forms of one thing.

rounds = 20
[method]
name = "fedper"
lr = 0.1
[data]
name = "digits"
[network]
name = "mlp"
"""

import inspect
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import FailFast, TypeAdapter, ValidationError

from fedtailor.data.datasets import DATASETS, Data
from fedtailor.errors import Refused, unknown
from fedtailor.federation import Federation
from fedtailor.lines import Record
from fedtailor.method import Method
from fedtailor.methods import METHODS, FedAvg
from fedtailor.model import Model
from fedtailor.networks import NETWORKS, Network, network
from fedtailor.rounds import Rounds
from fedtailor.run import Run
from fedtailor.settings import Settings
from fedtailor.simulate import carry_out, describe_run
from fedtailor.untrusted import check_plain, read_toml

Named = Mapping[str, Any]  # settings by name, nested
_MOST = 10**6  # of a method's whole numbers: epochs, steps, widths; nobody waits for more, and no memory holds it


@dataclass(frozen=True)
class Experiment(Settings):
    """All that determines a run."""

    method: Method = field(default_factory=FedAvg)
    data: Data = field(default_factory=Data)
    network: Network | None = None  # None: the one that suits the data set

    def load(self) -> Federation:
        """The federation; its split follows the run's seed unless it has one of its own."""
        return (self.data if self.data.seed is not None else replace(self.data, seed=self.seed)).load()

    def run(
        self, fed: Federation | None = None, record: Callable[[Record], None] | None = None, folder: Path | None = None
    ) -> Run:
        """Do it."""
        fed = fed or self.load()
        return carry_out(self, self.method, self.model(fed), fed, record, folder)

    def describe(self, fed: Federation) -> dict[str, Any]:
        """What a run's folder says of it."""
        return describe_run(self, self.method, self.model(fed), fed)

    def check(self, fed: Federation) -> None:
        """Refuse what does not fit together, without training."""
        self.channel.check(self.method)
        Rounds.build(self, self.method, self.model(fed), fed, [[0]])

    def model(self, fed: Federation) -> Model:
        if self.network is None:
            return network(DATASETS[self.data.name].network if self.data.name in DATASETS else _suited(fed), fed)
        name = next(name for name, kind in NETWORKS.items() if isinstance(self.network, kind))
        return network(name, fed, **vars(self.network))


def from_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    return read_toml(path, "The experiment")


def make(settings: Named) -> Experiment:
    """An experiment from nested settings, as TOML holds them.

    >>> make({"rounds": 5, "method": {"name": "ditto", "lam": 0.5}}).method
    Ditto(lr=0.1, epochs=2, momentum=0.0, weight_decay=0.0, lam=0.5)
    """
    check_plain(settings, "The experiment")
    plain = dict(settings)
    parts: dict[str, Any] = {}
    kinds: list[tuple[str, Mapping[str, type[Any]], str | None]]
    kinds = [("method", METHODS, "fedavg"), ("network", NETWORKS, None)]
    for part, known, default in kinds:
        if made := choose(part, plain.pop(part, {}), known, default):
            parts[part] = made
    data = _named("data", plain.pop("data", {}), "digits")
    if data["name"] not in (known_data := [*DATASETS, "folder"]):
        raise unknown("data set", data["name"], known_data)
    parts["data"] = build(Data, data, data["name"], "data")
    experiment: Experiment = build(Experiment, plain | parts, "the experiment")
    return experiment


def build(kind: type[Any], values: Named, name: str, prefix: str = "") -> Any:
    """An instance of a dataclass from named values, each checked against its field."""
    hints, known = get_type_hints(kind), [f.name for f in fields(kind)]
    made = {}
    for key, value in values.items():
        if key not in known:
            raise unknown(f"field of {name}", key, known)
        if key in ("method", "data", "network") and not prefix:
            made[key] = value
            continue
        if is_dataclass(hints[key]) and not issubclass(hints[key], Method) and isinstance(value, Mapping):
            made[key] = build(hints[key], value, key, key)
            continue
        if hints[key] is Method:
            made[key] = choose(f"{prefix}.{key}", value, METHODS, None)
            continue
        if str(value).lower() == "none" and NoneType in get_args(hints[key]):  # as the command writes it
            value = None
        if isinstance(value, (int, float)) and _is_list(hints[key]):
            value = [value]  # a list of one, as the command writes it
        try:
            made[key] = TypeAdapter(_fail_fast(hints[key], value)).validate_python(value)
        except ValidationError as error:
            where = f"{prefix}.{key}" if prefix else key
            raise Refused(f"{where} cannot be {reprlib.repr(value)}: {error.errors()[0]['msg'].lower()}.") from error
        if issubclass(kind, Method) and isinstance(made[key], int) and abs(made[key]) > _MOST:
            raise Refused(f"{prefix}.{key} must be at most {_MOST}, not {value}.")
    return kind(**made)


def _is_list(hint: Any) -> bool:
    """Whether a field takes a list of any length, and nothing but that or none."""
    kinds = [part for part in get_args(hint) if part is not NoneType] if get_origin(hint) is UnionType else [hint]
    return all(get_origin(kind) is list or (get_origin(kind) is tuple and ... in get_args(kind)) for kind in kinds)


def _fail_fast(hint: Any, value: Any) -> Any:
    """The type, made to stop at its first error where a list is given: of a list of millions it would keep them all."""
    if not isinstance(value, list):
        return hint
    if get_origin(hint) in (list, tuple):
        parts = tuple(_fail_fast(part, value) for part in get_args(hint))
        return Annotated[get_origin(hint)[parts], FailFast()]
    lists = [part for part in get_args(hint) if get_origin(part) in (list, tuple)]  # of a type that has alternatives
    return _fail_fast(lists[0], value) if lists else hint


def choose(part: str, given: Any, known: Mapping[str, type[Any]], default: str | None) -> Any:
    """One of the known kinds, from its name and fields; None where nothing is given."""
    settings = _named(part, given, default)
    name = settings.pop("name", None)
    if name is None and settings:
        raise Refused(f"The {part} has fields but no name; add {part}.name, one of {', '.join(known)}.")
    if name is not None and name not in known:
        raise unknown(part, name, known)
    return None if name is None else build(known[name], settings, name, part)


def field_notes(kind: type[Any]) -> dict[str, tuple[str, str]]:
    """Field -> (default, the comment beside it in the source).

    >>> field_notes(METHODS["fedprox"])["mu"]
    ('0.1', 'μ, pull towards the received model')
    """
    comments: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        comments |= _comments(owner)
    return {f.name: (_default(f), comments.get(f.name, "")) for f in fields(kind)}


@cache
def _comments(owner: type[Any]) -> dict[str, str]:
    """Those beside a class's own fields; finding its source takes a while."""
    return dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(owner), re.MULTILINE))


def _default(field: Field[Any]) -> str:
    """A field's default as the command takes it; a method stands for itself by its name."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return "" if value is MISSING else type(value).__name__.lower() if isinstance(value, Method) else str(value)


def _named(part: str, given: Any, default: str | None) -> dict[str, Any]:
    """A part may be given as its name alone."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise Refused(f"{part} must be a name or a table with a name, not {reprlib.repr(given)}.")
    named = ({"name": default} if default else {}) | dict(given)
    if not isinstance(named.get("name", ""), str):
        raise Refused(f"{part}.name must be a text, not {reprlib.repr(named['name'])}.")
    return named


def _suited(fed: Federation) -> str:
    return "lenet5" if fed.shape is not None and len(fed.shape) == 3 and min(fed.shape[1:]) >= 28 else "mlp"
