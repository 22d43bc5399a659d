"""What one client sees in a round: its own data through batches, and ways to learn from them.

Every function is written once for two ways of running: plainly, one client at a time, and under `torch.func.vmap`
with many clients at once (`mapped`), where clients with fewer batches than others wait, masked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.errors import Refused
from fedtailor.model import Inputs, Model
from fedtailor.pure import batch_key, listen
from fedtailor.trees import Params, Tree, add, leaves, map_leaves, scale, select, zeros_like

_ORDER, _NOISE = 1, 2  # salts: the order of samples, and a method's own random numbers


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples; a weight of 0 marks padding, which repeats examples of the same client."""

    x: Inputs
    y: Tensor
    weight: Tensor  # [examples], 0 or 1

    def mean(self, per_example: Tensor) -> Tensor:
        """The only average over examples: padding does not count.

        >>> Batch(None, torch.zeros(2), torch.tensor([1.0, 0.0])).mean(torch.tensor([3.0, 9.0]))
        tensor(3.)
        """
        return (per_example * self.weight).sum() / self.weight.sum().clamp(min=1)

    def halves(self) -> tuple["Batch", "Batch"]:
        """Two independent batches: every second example, so that padding stays at the end of both."""
        return self._rows(slice(0, None, 2)), self._rows(slice(1, None, 2))

    def _rows(self, rows: slice) -> "Batch":
        return Batch(pick(self.x, rows), self.y[rows], self.weight[rows])


@dataclass(frozen=True, eq=False)
class Common:
    """What all clients of a run have in common; an engine makes one and views on it."""

    model: Model  # in training mode
    x: Inputs  # everybody's samples, on the device once
    y: Tensor
    prepare: Callable[[Inputs], Inputs]  # from how samples are kept to what the model takes
    batch_size: int
    rounds: int
    num_clients: int
    total_size: int
    seed: int
    dtype: torch.dtype


class LocalView:
    """All that one client sees in a round. Methods call it `local`."""

    def __init__(
        self, common: Common, round: int, index: Tensor, size: Tensor, samples: Tensor, *, mapped: bool = False
    ) -> None:
        self._common, self._samples, self._mapped = common, samples, mapped
        self.model: Model = common.model
        self.round, self.rounds = round, common.rounds
        self.num_clients, self.total_size = common.num_clients, common.total_size
        self.index, self._count = index, size
        self.size = size.to(common.dtype)  # a tensor, for it is mapped over; in the dtype of what it weighs
        # padding changes batch statistics, so where these exist every engine pads alike
        self._padded = mapped or bool(common.model.statistics)
        self._most_batches = -(-len(samples) // common.batch_size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client's view of its data does not leave the client: it cannot be pickled")

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The model's mean loss on a batch."""
        return batch.mean(self.model.loss(self.model.logits(params, batch.x), batch.y))

    def steps(self, epochs: int) -> Tensor:
        """How many batches so many passes have, in the dtype of the run."""
        return epochs * self._batches().to(self._common.dtype)

    def sgd(
        self,
        objective: Callable[[Tree, Batch], Tensor],
        start: Tree,
        *,
        lr: float,
        epochs: int | None = None,
        steps: int | Tensor | None = None,
        max_steps: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        stop: Callable[[Tree], Tensor] | None = None,
    ) -> Tree:
        """Stochastic gradient descent on objective(params, batch), for `epochs` passes or for `steps` batches.

        With epochs, `stop(params)` is asked before each pass. With steps (a number; or a tensor, at most `max_steps`),
        batches are taken pass after pass.
        """

        def step(carry: Tree, batch: Batch) -> Tree:
            params, slope = carry["params"], self.slope(objective, carry["params"], batch)
            if weight_decay:
                slope = map_leaves(lambda g, w: g.add(w, alpha=weight_decay), slope, params)
            if momentum:
                slope = map_leaves(lambda g, v: g.add(v, alpha=momentum), slope, carry["velocity"])
            moved = map_leaves(lambda w, g: w.sub(g, alpha=lr), params, slope)
            moved = _replace(moved, self._statistics(params))
            return {"params": moved, "velocity": slope} if momentum else {"params": moved}

        carry = {"params": start, "velocity": zeros_like(start)} if momentum else {"params": start}
        ask = stop and (lambda carry: stop(carry["params"]))
        end: Tree = self.fold(step, carry, epochs=epochs, steps=steps, max_steps=max_steps, stop=ask)["params"]
        return self.refresh(end, objective)

    def fold(
        self,
        step: Callable[[Tree, Batch], Tree],
        start: Tree,
        *,
        epochs: int | None = None,
        steps: int | Tensor | None = None,
        max_steps: int | None = None,
        stop: Callable[[Tree], Tensor] | None = None,
    ) -> Tree:
        """Carry a state through the batches: state = step(state, batch)."""
        if isinstance(steps, int):
            max_steps = steps
            steps = torch.tensor(steps, device=self._count.device)
        if (epochs is None) == (steps is None) or (steps is None) != (max_steps is None):
            raise Refused("Training takes either epochs, or steps, and with steps as a tensor max_steps.")
        if epochs is None:
            assert steps is not None and max_steps is not None
            return self._fold_steps(step, start, steps, max_steps)
        return self._fold_epochs(step, start, epochs, stop)

    def slope(self, objective: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch) -> Tree:
        """The gradient of an objective on one batch."""
        if self._mapped:
            return torch.func.grad(objective)(params, batch)  # type: ignore[no-any-return]
        with torch.enable_grad():  # plain autograd: a fifth faster than torch.func.grad where nothing is mapped
            live = map_leaves(lambda leaf: leaf.detach().requires_grad_(), params)
            inputs = [leaf for _, leaf in leaves(live) if isinstance(leaf, Tensor)]
            slopes = iter(torch.autograd.grad(objective(live, batch), inputs, materialize_grads=True))
        return map_leaves(lambda _: next(slopes), params)

    def gradient(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tree:
        """The exact gradient over all local data."""
        return self.total(lambda batch: scale(self.slope(objective, params, batch), self._share(batch)))

    def value(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tensor:
        """The exact objective over all local data."""
        value: Tensor = self.total(lambda batch: {"value": objective(params, batch) * self._share(batch)})["value"]
        return value

    def total(self, statistic: Callable[[Batch], Tree]) -> Tree:
        """The sum of statistic(batch) over the local data, every example once; the statistic applies `batch.weight`."""
        total: Tree | None = None
        for number in range(self._most_batches):
            batch = self._batch(self._in_order(), number, pass_number=0)
            part = statistic(batch)  # an all-padding batch has weight 0 everywhere
            total = part if total is None else add(total, part)
        assert total is not None
        return total

    def refresh(self, params: Tree, objective: Callable[[Tree, Batch], Tensor] | None = None) -> Tree:
        """The running statistics recomputed with one pass over the data, as the objective sees the network: the end of
        every training. `sgd` does it by itself."""
        old = self._statistics(params)
        if not old:
            return params

        def heard(batch: Batch) -> Tree:
            with listen() as statistics:
                (objective or self.loss)(params, batch)
            return scale({name: statistics[name] for name in old}, self._share(batch))

        return _replace(params, self.total(heard))

    def when(self, condition: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """compute() where the condition holds: alone, it is only called then; mapped, it is called and masked."""
        if not self._mapped and not condition:
            return otherwise
        return torch.where(condition, compute(), otherwise)

    def uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Random numbers in (0, 1), the same whenever asked with the same salt in this round."""
        of = hashing.key(self._common.seed, self.round, _NOISE, self.index, salt)
        return hashing.uniform(of, shape, self._common.dtype, self.index.device)

    def _fold_epochs(
        self, step: Callable[[Tree, Batch], Tree], state: Tree, epochs: int, stop: Callable[[Tree], Tensor] | None
    ) -> Tree:
        going = torch.ones_like(self._count, dtype=torch.bool)
        for number in range(epochs):
            if stop is not None:
                going = going & ~stop(state)
                if not self._mapped and not going:
                    break
            order = self._order(number)
            for position in range(self._most_batches):
                new = step(state, self._batch(order, position, number))
                state = select(going & (position < self._batches()), new, state) if self._mapped else new
        return state

    def _fold_steps(self, step: Callable[[Tree, Batch], Tree], state: Tree, steps: Tensor, max_steps: int) -> Tree:
        for number in range(max_steps if self._mapped else min(int(steps), max_steps)):
            passed, position = number // self._batches(), number % self._batches()
            if self._mapped:
                new = step(state, self._batch(self._order(passed), position, passed))
                state = select(number < steps, new, state)
                continue
            if position == 0:
                order = self._order(passed)
            state = step(state, self._batch(order, int(position), passed))
        return state

    def _batches(self) -> Tensor:
        return (self._count + (self._common.batch_size - 1)) // self._common.batch_size

    def _share(self, batch: Batch) -> Tensor:
        return batch.weight.sum() / self.size

    def _in_order(self) -> Tensor:
        return torch.arange(len(self._samples), device=self._samples.device)

    def _order(self, number: int | Tensor) -> Tensor:
        """The order of samples in a pass: a function of (seed, round, pass, client), so the same in every engine."""
        of = hashing.key(self._common.seed, self.round, _ORDER, number, self.index)
        return hashing.order(of, len(self._samples), self._count if self._mapped else None, self._samples.device)

    def _batch(self, order: Tensor, position: int | Tensor, pass_number: int | Tensor) -> Batch:
        rows = self._common.batch_size
        if self.model.has_dropout:
            batch_key.set(hashing.key(self._common.seed, self.round, pass_number, self.index, position))
        if self._padded:
            slots = position * rows + torch.arange(rows, device=order.device)
            chosen = order[slots % self._count]
            weight = (slots < self._count).to(self._common.dtype)
        else:
            start = int(position) * rows
            chosen = order[start : start + rows]
            weight = torch.ones(len(chosen), dtype=self._common.dtype, device=order.device)
        chosen = self._samples[chosen]
        return Batch(self._common.prepare(pick(self._common.x, chosen)), self._common.y[chosen], weight)

    def _statistics(self, tree: Tree) -> Params:
        """The running statistics in a tree, by their own names."""
        if not self.model.statistics:
            return {}
        named = ((path.split("/")[-1], leaf) for path, leaf in leaves(tree))
        return {name: leaf for name, leaf in named if name in self.model.statistics and isinstance(leaf, Tensor)}


def _replace(tree: Tree, fresh: Params) -> Tree:
    """The tree with new values for some names, wherever they stand."""
    return {
        name: _replace(node, fresh) if isinstance(node, dict) else fresh.get(name, node) for name, node in tree.items()
    }


def pick(x: Inputs, rows: Tensor | slice) -> Inputs:
    """Some samples of the inputs, whether these have one part or several."""
    return {name: part[rows] for name, part in x.items()} if isinstance(x, dict) else x[rows]
