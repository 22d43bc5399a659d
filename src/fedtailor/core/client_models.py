"""`ClientModels`: networks of different architectures, and the architecture of every client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.core.model import Model, ModelLike, as_model
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

    Two networks are the same if they have equal layers, attributes, and initial weights for the same seed.
    """
    found: list[tuple[Any, Model, nn.Module]] = []  # what the factory returned, its model, and a module to compare
    of_client = []
    for client in range(clients):
        made = _seeded(lambda client=client: factory(client))
        position = next((i for i, (other, _, _) in enumerate(found) if other is made), None)
        if position is None:
            module = _comparable_module(made)
            position = next((i for i, (o, m, known) in enumerate(found) if _is_same(made, module, o, m, known)), None)
        if position is None:
            position = len(found)
            is_module = isinstance(made, nn.Module)
            model = as_model((lambda client=client: factory(client)) if is_module else made)
            found.append((made, model, module))
        of_client.append(position)
    return ClientModels(tuple(model for _, model, _ in found), tuple(of_client))


def _seeded(build: Callable[[], Any]) -> Any:
    """Return what a function builds from a fixed seed, without changing torch's generators."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


def _comparable_module(made: Any) -> nn.Module:
    """Return the module of what a factory returned, with weights drawn from a fixed seed if it draws them."""
    if isinstance(made, nn.Module):
        return made
    model = as_model(made)
    return model.module if model.build is None else _seeded(model.build)


def _is_same(made: Any, module: nn.Module, other: Any, model: Model, known: nn.Module) -> bool:
    if isinstance(made, Model):
        same = isinstance(other, Model) and _choices(made) == _choices(model)
    else:
        same = type(made) is type(other)
    return same and all(
        one is not None and two is not None and _layer(one) == _layer(two) and _equal_attributes(one[1], two[1])
        for one, two in zip_longest(module.named_modules(), known.named_modules())
    )


def _choices(model: Model) -> list[Any]:
    return [model.head, model.loss, dict(model.metrics), dict(model.parts), dict(model.description)]


def _layer(named: tuple[str, nn.Module]) -> tuple[str, type[nn.Module]]:
    return named[0], type(named[1])


def _equal_attributes(one: nn.Module, two: nn.Module) -> bool:
    """Return whether two layers have the same tensors and attributes; what cannot be compared is not the same."""
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
