"""Capture a training step as a CUDA graph once and replay it for every further step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

from fedtailor.core.trees import Tree, flatten, map_leaves
from fedtailor.core.vmap_context import Number, sequential_loop

_MIN_STEPS = 4  # fewer steps are not worth capturing


class CudaGraphLoop:
    """A `StepLoop` (see `core.vmap_context`) for vectorized clients on a GPU.

    The state and the step number are in tensors with fixed addresses, which each step overwrites, so one captured step
    can be replayed as any step. The loop modifies the state it is called with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._warm: set[tuple[object, ...]] = set()  # signatures for which a step has run without capturing
        self._can_capture = True
        self.clients = 0  # number of vectorized clients, set by the engine

    def __call__(self, advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree:
        if not self._can_capture or last - first < _MIN_STEPS:
            return sequential_loop(advance, state, first, last)
        signature = (self.clients, *((path, leaf.shape) for path, leaf in flatten(state).items()))
        if signature not in self._warm:  # lazy initialization must happen before capturing
            self._warm.add(signature)
            return self(advance, advance(state, first), first + 1, last)
        number = torch.tensor(first, device=self._device)

        def step() -> None:
            old = {id(leaf) for leaf in flatten(state).values()}
            new = map_leaves(lambda leaf: leaf.clone() if id(leaf) in old else leaf, advance(state, number))
            map_leaves(lambda target, leaf: target.copy_(leaf), state, new)
            number.add_(1)

        graph = self._capture(step)
        if graph is None:
            return sequential_loop(advance, state, first, last)
        for _ in range(first, last):
            graph.replay()
        return state

    # All graphs share memory, because they run one after another and leave nothing in it. Free memory is reused only in
    # the same pool and on the same stream, so both live as long as the loop.

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a step, or None if it cannot be captured, for example because it calls `.item()`."""
        graph, failure, main_stream = torch.cuda.CUDAGraph(), None, torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main_stream)
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException as error:
                failure = error
            with nullcontext() if failure is None else suppress(RuntimeError):
                graph.capture_end()
        main_stream.wait_stream(self._stream)
        self._graphs.append(graph)
        if isinstance(failure, torch.OutOfMemoryError) or not isinstance(failure, RuntimeError | None):
            raise failure
        self._can_capture = failure is None
        return graph if self._can_capture else None

    def release(self) -> None:
        """Wait until all replays are finished, then free the graphs but one; later graphs reuse their memory."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
            del self._graphs[:-1]  # a pool exists as long as one of its graphs


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside the `with` block: freeing the graphs of an earlier run would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
