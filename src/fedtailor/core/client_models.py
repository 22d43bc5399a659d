"""`ClientModels`: networks of different architectures, and the architecture of every client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.core.model import Model, ModelLike, as_model, wrap
from fedtailor.errors import ConfigError

BY_CLIENT = "by_client"  # name of several networks in the settings of a run
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, eq=False)
class ClientModels:
    """Networks of different architectures; `ft.client_models` makes it. All have the same loss and metrics."""

    models: tuple[Model, ...]  # one per architecture
    of_client: tuple[int, ...]  # position in `models` of every client's network

    def __post_init__(self) -> None:
        first = self.models[0]
        for model in self.models[1:]:
            if model.loss != first.loss or list(model.metrics) != list(first.metrics):
                raise ConfigError("All clients' networks must have the same loss and the same metrics.")

    def __repr__(self) -> str:
        parts = [f"{self.of_client.count(i)} clients with {model!r}" for i, model in enumerate(self.models)]
        return f"ClientModels({', '.join(parts)})"

    def __getitem__(self, client: int) -> Model:
        """Return the network of a client."""
        return self.models[self.of_client[client]]

    def select(self, clients: Sequence[int]) -> "ClientModels":
        """Return the networks of some clients, in this order; architectures that none of them has are kept.

        The positions of architectures do not change.
        """
        return replace(self, of_client=tuple(self.of_client[client] for client in clients))

    @property
    def description(self) -> Mapping[str, Any]:
        """The networks and the clients that have them, for the run folder; without clients, they take turns."""
        in_turn = self.of_client == assign_in_turn(len(self.models), len(self.of_client))
        networks = [dict(model.description) for model in self.models]
        return {"name": BY_CLIENT, "networks": networks} | ({} if in_turn else {"clients": list(self.of_client)})


AnyModel = Model | ClientModels
AnyModelLike = ModelLike | ClientModels


def as_any_model(model: AnyModelLike) -> AnyModel:
    """Return a Model or ClientModels as they are and wrap everything else, as `as_model` does."""
    return model if isinstance(model, ClientModels) else as_model(model)


def assign_in_turn(models: int, clients: int) -> tuple[int, ...]:
    """Return the position of every client's network if clients take turns.

    >>> assign_in_turn(2, 5)
    (0, 1, 0, 1, 0)
    """
    return tuple(client % models for client in range(clients))


def group_by_architecture(factory: Callable[[int], ModelLike], clients: int) -> ClientModels:
    """Call the factory for every client and group clients whose networks are the same.

    Two networks are the same if they have equal layers, attributes, and, for the same seed, initial weights.
    """
    found: list[_Architecture] = []
    of_client = []
    for client in range(clients):
        build = partial(factory, client)
        made = _seeded(build)
        position = next((i for i, other in enumerate(found) if other.made is made), None)
        if position is None:
            module = _comparable_module(made)
            position = next((i for i, other in enumerate(found) if other.is_same(made, module)), len(found))
        if position == len(found):
            model = wrap(build) if isinstance(made, nn.Module) else as_model(made)  # type: ignore[arg-type]
            found.append(_Architecture(made, model, module))
        of_client.append(position)
    return ClientModels(tuple(architecture.model for architecture in found), tuple(of_client))


@dataclass(frozen=True, eq=False)
class _Architecture:
    """A network that a factory made for its first client."""

    made: ModelLike  # what the factory returned
    model: Model
    module: nn.Module  # for comparisons

    def is_same(self, made: ModelLike, module: nn.Module) -> bool:
        """Return whether the factory made the same network for another client."""
        if isinstance(made, Model) != isinstance(self.made, Model):
            return False
        if isinstance(made, Model) and _choices(made) != _choices(self.model):
            return False
        pairs = zip_longest(self.module.named_modules(), module.named_modules(), fillvalue=("", None))
        return all(own == name and _is_same_layer(one, other) for (own, one), (name, other) in pairs)


def _seeded(build: Callable[[], Any]) -> Any:
    """Return what a function builds from a fixed seed, without changing torch's generators."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


def _comparable_module(made: ModelLike) -> nn.Module:
    """Return the module of what a factory returned, with weights drawn from a fixed seed if it draws them."""
    if isinstance(made, nn.Module):
        return made
    model = as_model(made)
    return model.module if model.build is None else _seeded(model.build)


def _choices(model: Model) -> list[Any]:
    return [model.head, model.loss, dict(model.metrics), dict(model.parts), dict(model.description)]


def _is_same_layer(one: nn.Module | None, two: nn.Module | None) -> bool:
    """Return whether two layers have the same class, tensors, and attributes; what cannot be compared differs."""
    if one is None or two is None or type(one) is not type(two):
        return False
    mine, others = _attributes(one), _attributes(two)
    return mine.keys() == others.keys() and all(_is_equal(mine[name], others[name]) for name in mine)


def _attributes(layer: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(layer).items() if name not in _MODULE_ATTRIBUTES}
    return own | layer._parameters | layer._buffers


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.dtype == two.dtype and one.requires_grad == two.requires_grad and torch.equal(one, two)
    try:
        return bool(one == two)
    except Exception:  # a user's object may raise anything
        return False
