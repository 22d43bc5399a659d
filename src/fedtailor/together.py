"""What clients share that `torch.func.vmap` runs at once: the loop over their steps, and a look over all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor.trees import Tree

Number = int | Tensor


class Loop(Protocol):
    """How clients that are mapped together take their steps: state = advance(state, number) for number = first, ...,
    last − 1, where an engine may give the number as a tensor and write over the state."""

    def __call__(self, advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree: ...


def one_after_another(advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree:
    """The plain loop."""
    for number in range(first, last):
        state = advance(state, number)
    return state


@dataclass(frozen=True)
class Together:
    """What clients that are mapped together must know of each other: the batches in a pass of those with fewest and
    most, and the loop they share."""

    fewest: int
    most: int
    loop: Loop = one_after_another


def entry(stacked: Tensor, number: Number) -> Tensor:
    """One entry; a number that is a tensor stays one, so that the step can be captured and replayed."""
    return stacked[number] if isinstance(number, int) else stacked.index_select(0, number.reshape(1))[0]


class _MostOf(torch.autograd.Function):
    """Looks over all clients that are mapped together."""

    @staticmethod
    def forward(values: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        tell(values.max())
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, tell: Callable[[Tensor], None]) -> tuple[Tensor, int | None]:
        return _look(values, tell), in_dims[0]


_look: Callable[[Tensor, Callable[[Tensor], None]], Tensor] = _MostOf.apply


def most_of(values: Tensor) -> int:
    """The largest value over all clients that are mapped together.

    >>> most_of(torch.tensor([2, 5]))
    5
    """
    found: list[Tensor] = []
    _look(values, found.append)
    return int(found[0])
