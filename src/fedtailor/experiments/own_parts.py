"""Networks and data that a user's own class or function makes from keyword arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import nn

from fedtailor.core.code_reference import is_reference
from fedtailor.core.model import Model, wrap
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent, call_own_code
from fedtailor.experiments.parsing import NestedSettings, build_named, named_settings, parse_value
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS, network
from fedtailor.networks.layers import Network
from fedtailor.training.attacks import ATTACKS

_ANY = inspect.Parameter.VAR_KEYWORD
_RESPLIT = ("repeat", "folds")  # of any data: `Federation.resplit`
_NOT_SETTINGS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY, _ANY)


@dataclass(frozen=True)
class OwnPart:
    """A user's class or function with the keyword arguments that the settings give it."""

    name: str  # its reference
    arguments: Mapping[str, Any] = field(hash=False)  # as in the settings
    function: Callable[..., Any] = field(compare=False, repr=False)

    def call(self, *args: Any, **more: Any) -> Any:
        """Call the function with its arguments, converted to the types that it declares."""
        hints = _hints(self.function)
        typed = {name: parse_value(hints.get(name, Any), value, name) for name, value in self.arguments.items()}
        return call_own_code(self.name, self.function, *args, **typed, **more)


@dataclass(frozen=True)
class OwnNetwork(OwnPart):
    """What returns an `nn.Module` or an `ft.Model`; it gets the federation if its first parameter is `fed`."""

    def model(self, fed: Federation) -> Model:
        """Return the network; its initial weights are drawn from the run's seed."""
        build = partial(self.call, *[fed] * takes_federation(self.function))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            made = build()
        if isinstance(made, Model):
            model = made if made.build is not None else replace(made, build=lambda: build().module)
        elif isinstance(made, nn.Module):
            model = wrap(build, loss=fed.task)
        else:
            kind = type(made).__name__
            raise ConfigError(f"The network '{self.name}' must return an nn.Module or an ft.Model, got {kind}.")
        return replace(model, description={"name": self.name, **self.arguments})


@dataclass(frozen=True)
class OwnData(OwnPart):
    """What returns a `Federation`; it gets a seed if it has a parameter `seed`."""

    seed: int | None = None
    repeat: int | None = None  # number of a redrawn split into training and test samples
    folds: int | None = None

    def load(self) -> Federation:
        """Return the federation; with `repeat`, its clients' samples are split anew."""
        seed = {"seed": self.seed or 0} if _takes_seed(self.function) else {}
        fed = self.call(**seed)
        if not isinstance(fed, Federation):
            fix = "return ft.Federation.from_arrays(...) or another ft.Federation"
            raise ConfigError(f"The data '{self.name}' returned {type(fed).__name__}; {fix}.")
        fed = replace(fed, settings={"name": self.name, **self.arguments, **seed})
        return fed if self.repeat is None else fed.resplit(self.repeat, self.folds)


def build_network(given: Any, consent: CodeConsent = NO_CONSENT) -> Network | OwnNetwork | None:
    """Return a network from its name and settings; None if no name is given."""
    settings = named_settings("network", given, None)
    name = settings.pop("name", "")
    if is_reference(name):
        function = consent.load("network", name)
        return OwnNetwork(name, _check_arguments("network", name, function, settings), function)
    built: Network | None = build_named("network", given, NETWORKS, None)
    return built


def make_model(spec: Network | OwnNetwork, fed: Federation) -> Model:
    """Return a network for a federation."""
    if isinstance(spec, OwnNetwork):
        return spec.model(fed)
    name = next(name for name, kind in NETWORKS.items() if isinstance(spec, kind))
    return network(name, fed, **vars(spec))


def build_data(given: Any, consent: CodeConsent = NO_CONSENT) -> Data | OwnData:
    """Return a data set from its name and settings."""
    settings = named_settings("data", given, "digits")
    name = settings["name"]
    if is_reference(name):
        del settings["name"]
        function = consent.load("data", name)
        names = [n for n in _RESPLIT if n not in _settings_of("data", name, function)]  # own arguments take precedence
        resplit = {n: parse_value(int | None, settings.pop(n, None), f"data.{n}") for n in names}
        arguments = _check_arguments("data", name, function, settings)
        seed = parse_value(int | None, arguments.pop("seed", None), "data.seed") if _takes_seed(function) else None
        return OwnData(name, arguments, function, seed, **resplit)
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    data: Data = build_named("data", settings, DATASETS, None)
    return data


def part_types(part: str, name: str, consent: CodeConsent = NO_CONSENT) -> dict[str, Any]:
    """Return setting -> type of the method, network, or data set with this name; empty if there is none."""
    if is_reference(name) and part in ("network", "data"):
        function = consent.load(part, name)
        hints = _hints(function)
        return {parameter: hints.get(parameter, Any) for parameter in _settings_of(part, name, function)}
    if is_reference(name):
        return _field_types(consent.load_method(part, name))
    known: dict[str, Mapping[str, type[Any]]] = {"network": NETWORKS, "data": DATASETS, "attack": ATTACKS}
    kind = known.get(part, METHODS).get(name)
    return {} if kind is None else _field_types(kind)


def _field_types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _check_arguments(part: str, name: str, function: Any, given: NestedSettings) -> dict[str, Any]:
    """Return the arguments of a function if it accepts them, with the types that it declares, and needs no others."""
    if not isinstance(function, type) and not inspect.isroutine(function) and not isinstance(function, partial):
        raise ConfigError(
            f"The {part} '{name}' has the type {type(function).__name__}; it must be a class or a function."
        )
    known = _settings_of(part, name, function)
    accepts_any = any(p.kind is _ANY for p in inspect.signature(function).parameters.values())
    hints = _hints(function)
    for argument, value in given.items():
        if argument not in known and not accepts_any:
            raise unknown_name(f"argument of {name}", argument, known)
        parse_value(hints.get(argument, Any), value, f"{part}.{argument}")  # raises an error if it has another type
    filled = {*given, *["seed"] * (part == "data")}  # the run's seed is the default
    for argument, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and argument not in filled:
            raise ConfigError(f"'{name}' needs the argument '{argument}'; set it with --{part}.{argument}.")
    return dict(given)


def _settings_of(part: str, name: str, function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that settings can set."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The arguments of '{name}' are unknown; write a Python function that calls it.") from error
    if part == "network" and takes_federation(function):
        del parameters["fed"]
    return {n: parameter for n, parameter in parameters.items() if parameter.kind not in _NOT_SETTINGS}


def takes_federation(function: Any) -> bool:
    """Return whether the first parameter of a class or function is named `fed`."""
    return next(iter(inspect.signature(function).parameters), None) == "fed"


def _takes_seed(function: Any) -> bool:
    return "seed" in inspect.signature(function).parameters


def _hints(function: Any) -> dict[str, Any]:
    """Return the types of a function's parameters, as far as they can be determined."""
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):  # names that only type checkers import; objects without hints
        return {}
