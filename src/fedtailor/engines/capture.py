"""On a GPU, the kernels of a step are launched once, captured, and replayed together for every further step."""

from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch

from fedtailor.together import Number, one_after_another
from fedtailor.trees import Tree, flatten, map_leaves

_FEW = 4  # steps for which capturing does not pay


class Replay:
    """A loop for clients that are mapped together on a GPU (see `together.Loop`).

    State and number lie in tensors that stay where they are, and a step writes over them: so one captured step is
    every step. Who calls it gives the state away.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._warm: set[tuple[object, ...]] = set()
        self._works = True
        self.clients = 0  # that are mapped together now

    def __call__(self, advance: Callable[[Tree, Number], Tree], state: Tree, first: int, last: int) -> Tree:
        if not self._works or last - first < _FEW:
            return one_after_another(advance, state, first, last)
        kind = (self.clients, *((path, leaf.shape) for path, leaf in flatten(state).items()))
        if kind not in self._warm:  # what starts up lazily must do so before capturing
            self._warm.add(kind)
            return self(advance, advance(state, first), first + 1, last)
        number = torch.tensor(first, device=self._device)

        def step() -> None:
            old = {id(leaf) for leaf in flatten(state).values()}
            new = map_leaves(lambda leaf: leaf.clone() if id(leaf) in old else leaf, advance(state, number))
            map_leaves(lambda kept, leaf: kept.copy_(leaf), state, new)
            number.add_(1)

        graph = self._capture(step)
        if graph is None:
            return one_after_another(advance, state, first, last)
        for _ in range(first, last):
            graph.replay()
        return state

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph of a step; None where the step cannot be captured, as when it asks for a number of a tensor."""
        graph, failure, usual = torch.cuda.CUDAGraph(), None, torch.cuda.current_stream(self._device)
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            except BaseException as error:
                failure = error
            with nullcontext() if failure is None else suppress(RuntimeError):
                graph.capture_end()
        usual.wait_stream(stream)
        self._graphs.append(graph)
        if isinstance(failure, torch.OutOfMemoryError) or not isinstance(failure, RuntimeError | None):
            raise failure
        self._works = failure is None
        return graph if self._works else None

    def release(self) -> None:
        """Wait for what is replaying and forget the graphs, whose memory must not be taken before."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
            self._graphs.clear()
