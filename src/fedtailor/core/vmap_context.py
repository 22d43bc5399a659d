"""What clients that `torch.func.vmap` runs in parallel share: the loop over steps, and a maximum over the clients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor.core.trees import Tree

Number = int | Tensor


class StepLoop(Protocol):
    """A loop that computes state = advance(state, number) for number = first, ..., last − 1.

    An engine may pass the number as a tensor and overwrite the state in place.
    """

    def __call__(self, advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree: ...


def sequential_loop(advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree:
    """Run the steps in a Python loop; see `StepLoop`."""
    for number in range(first, last):
        state = advance(state, number)
    return state


@dataclass(frozen=True)
class VmapContext:
    """What a client must know about the other clients in the same `vmap` call."""

    min_size: int  # samples of the client with the fewest, or fewer
    max_size: int  # samples of the client with the most, or more
    clients: int = 1  # in this call
    loop: StepLoop = sequential_loop


def select_entry(stacked: Tensor, number: Number) -> Tensor:
    """Return stacked[number]; a tensor is not converted to an int, so that a CUDA graph can capture the step."""
    return stacked[number] if isinstance(number, int) else stacked.index_select(0, number.reshape(1))[0]


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, such as vmap, is active.

    >>> is_transformed(), bool(torch.func.vmap(lambda x: x * is_transformed())(torch.ones(1)))
    (False, True)
    """
    return torch._C._functorch.maybe_current_level() is not None


class _VmapMax(torch.autograd.Function):
    """Pass the maximum over all clients of a `vmap` call to a callback, and return the values unchanged."""

    @staticmethod
    def forward(values: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        report(values.max())
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, report: Callable[[Tensor], None]) -> tuple[Tensor, int | None]:
        return _report_max(values, report), in_dims[0]


_report_max: Callable[[Tensor, Callable[[Tensor], None]], Tensor] = _VmapMax.apply


def vmap_max(values: Tensor) -> int:
    """Return the largest value over all clients of the `vmap` call.

    >>> vmap_max(torch.tensor([2, 5]))
    5
    """
    found: list[Tensor] = []
    _report_max(values, found.append)
    return int(found[0])
