"""Ways of applying a client's function to many clients; which one runs never changes what is computed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from fedtailor.engines.sequential import Sequential
from fedtailor.errors import unknown
from fedtailor.local import Common
from fedtailor.trees import Tree


class Engine(Protocol):
    """`apply` calls function(local, *trees) for every client, with its own part of the stacked trees, and stacks the
    results in the order of the clients."""

    @property
    def name(self) -> str: ...

    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree: ...


ENGINES: dict[str, Callable[[Common, Sequence[Tensor]], Engine]] = {"sequential": Sequential}


def make_engine(name: str, common: Common, samples: Sequence[Tensor]) -> Engine:
    """The engine of that name over clients whose training samples these are; "auto" picks one."""
    if name == "auto":
        name = "sequential"
    if name not in ENGINES:
        raise unknown("engine", name, ["auto", *ENGINES])
    return ENGINES[name](common, samples)
