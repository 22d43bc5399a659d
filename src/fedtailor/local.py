"""What one client sees in a round: its own data through batches, and ways to learn from them.

Every function is written once for two ways of running: plainly, one client at a time, and under `torch.func.vmap`
with many clients at once (`together`), where clients with fewer batches than others wait, masked.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor import hashing
from fedtailor.batch import Batch, Common, pick
from fedtailor.errors import Refused
from fedtailor.model import Inputs, Model
from fedtailor.pure import batch_key, listen
from fedtailor.together import Number, Together, entry, most_of, one_after_another
from fedtailor.trees import Params, Tree, add, leaves, map_leaves, scale, select, zeros_like

_ROWS = 512  # examples evaluated at once; bounds memory, changes nothing else
_ORDER, _NOISE, _SHARED, _PART = 1, 2, 3, 4  # salts: order of samples, own and common random numbers, parts of data


class LocalView:
    """All that one client sees in a round. Methods call it `local`."""

    def __init__(
        self,
        common: Common,
        round: int,
        index: Tensor,
        size: Tensor,
        samples: Tensor,
        *,
        together: Together | None = None,  # None: alone, nothing is mapped
    ) -> None:
        self._common, self._samples, self._together = common, samples, together
        self.model: Model = common.model
        self.round, self.rounds = round, common.rounds
        self.num_clients, self.total_size = common.num_clients, common.total_size
        self.participation = common.participation  # the mean share of clients in a round
        self.index, self._count = index, size
        self.size = size.to(common.dtype)  # a tensor, for it is mapped over; in the dtype of what it weighs
        # padding changes batch statistics, and dropout where samples are not the first axis: there, every engine pads
        self._padded = together is not None or bool(common.model.statistics) or common.model.has_dropout
        alone = -(-len(samples) // common.batch_size)
        self._most_batches = alone if together is None else together.most
        self._alike = together is None or together.fewest == together.most  # nobody waits in a pass

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
        max_steps = steps if isinstance(steps, int) else max_steps
        if (epochs is None) == (steps is None) or (steps is None) != (max_steps is None):
            raise Refused("Training takes either epochs, or steps, and with steps as a tensor max_steps.")
        if epochs is None:
            assert steps is not None and max_steps is not None
            return self._walk(step, start, steps, max_steps)
        if stop is None:
            most = epochs * self._most_batches
            return self._walk(step, start, most if self._alike else epochs * self._batches(), most, passes=epochs)
        state, going = start, torch.ones_like(self._count, dtype=torch.bool)
        for number in range(epochs):
            going = going & ~stop(state)
            if self._together is None and not going:
                break
            batches = torch.where(going, self._batches(), 0)
            state = self._walk(step, state, batches, self._most_batches, passes=1, first_pass=number)
        return state

    def slope(self, objective: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch) -> Tree:
        """The gradient of an objective on one batch."""
        if self._together is not None:
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
        order = torch.arange(len(self._samples), device=self._samples.device)

        def part(number: Number) -> Tree:
            return statistic(self._batch(order, number, pass_number=0))  # all padding: weight 0 everywhere

        if self._together is None:
            return one_after_another(lambda total, number: add(total, part(number)), part(0), 1, self._most_batches)
        first = self._owned(part(0))
        return self._together.loop(lambda total, number: add(total, part(number)), first, 1, self._most_batches)

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
        if self._together is None and not condition:
            return otherwise
        return torch.where(condition, compute(), otherwise)

    def uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Random numbers in (0, 1), the same whenever asked with the same salt in this round; `batch.uniform` gives
        others for every batch."""
        of = hashing.key(self._common.seed, self.round, _NOISE, self.index, salt)
        return hashing.uniform(of, shape, self._common.dtype, self.index.device)

    def shared_uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Random numbers in (0, 1) that all clients have alike in all rounds: from the seed, so nothing crosses."""
        of = hashing.key(self._common.seed, _SHARED, salt)
        return hashing.uniform(of, shape, self._common.dtype, self.index.device)

    def divide(self, share: float, salt: int, every_round: bool = False) -> tuple["LocalView", "LocalView"]:
        """Two views of this client, on a random share of its samples and on the rest, each on at least one; the same
        division in all rounds, or another in every round. One sample alone is in both."""
        of = hashing.key(self._common.seed, self.round if every_round else 0, _PART, self.index, salt)
        mapped = None if self._together is None else self._count
        order = hashing.order(of, len(self._samples), mapped, self._samples.device)
        count = (self._count.double() * share).long().clamp(min=1)
        rest = (self._count - count).clamp(min=1)
        after = (torch.arange(len(order), device=order.device) + count) % self._count
        largest = self._most_batches * self._common.batch_size
        return (
            self._part(order, count, max(1, int(share * largest))),
            self._part(order[after], rest, min(largest, int((1 - share) * largest) + 1)),
        )

    def _part(self, order: Tensor, count: Tensor, most: int) -> "LocalView":
        """A view on the first `count` samples in this order, `most` of which no client has more."""
        samples, together = self._samples[order], self._together
        if together is None:
            samples = samples[: int(count)]
        else:
            together = Together(1, -(-most // self._common.batch_size), together.loop)
        return LocalView(self._common, self.round, self.index, count, samples, together=together)

    def outputs(self, compute: Callable[[Inputs], Tensor], width: int) -> Tensor:
        """compute(x) of all samples in their order, [width, ...]; from the client's own size on, rows mean nothing."""
        rows = _ROWS if self._together is None else 4 * self._common.batch_size
        slots = torch.arange(min(width, len(self._samples)), device=self._samples.device) % self._count
        found = [compute(self._inputs(self._samples[some])) for some in torch.split(slots, rows)]
        return F.pad(torch.cat(found), (0, 0) * (found[0].ndim - 1) + (0, width - len(slots)))

    def _walk(
        self,
        step: Callable[[Tree, Batch], Tree],
        state: Tree,
        steps: int | Tensor,
        max_steps: int,
        passes: int | None = None,
        first_pass: int = 0,
    ) -> Tree:
        """Through so many batches, pass after pass; of clients that are mapped together, who is done waits, masked."""
        if self._together is None:
            return self._walk_alone(step, state, min(int(steps), max_steps), first_pass)
        if isinstance(steps, Tensor) and passes is None:
            max_steps = min(max_steps, most_of(steps))
        passes = -(-max_steps // self._together.fewest) if passes is None else passes
        batch = self._plan(max_steps, passes, first_pass)

        def advance(state: Tree, number: Number) -> Tree:
            new = step(state, batch(number))
            return select(number < steps, new, state) if isinstance(steps, Tensor) else new

        return self._together.loop(advance, self._owned(state), 0, max_steps)

    def _walk_alone(self, step: Callable[[Tree, Batch], Tree], state: Tree, steps: int, first_pass: int) -> Tree:
        for number in range(steps):
            passed, position = divmod(number, self._most_batches)
            if position == 0:
                order = self._order(first_pass + passed)
            state = step(state, self._batch(order, position, first_pass + passed))
        return state

    def _owned(self, tree: Tree) -> Tree:
        """A copy in which every tensor is mapped: the loop may write over it."""
        return select(self._count > 0, tree, tree)

    def _plan(self, steps: int, passes: int, first_pass: int) -> Callable[[Number], Batch]:
        """The batches of so many steps by their number; what can be known before the first is worked out once."""
        rows, device = self._common.batch_size, self._samples.device
        numbers = torch.arange(steps, device=device)
        passed, position = numbers // self._batches(), numbers % self._batches()
        slots = position[:, None] * rows + torch.arange(rows, device=device)  # [steps, rows]
        weights, slots = (slots < self._count).to(self._common.dtype), slots % self._count
        chosen = torch.zeros_like(slots)
        for number in range(passes):
            order = self._order(first_pass + number)
            chosen = torch.where((passed == number)[:, None], order[slots], chosen)
        chosen = self._samples[chosen]
        keys = self._key(first_pass + passed, position) if self.model.has_dropout else None

        def batch(number: Number) -> Batch:
            def key() -> Tensor:
                of = self._key(first_pass + passed, position) if keys is None else keys
                return entry(of, number)

            if keys is not None:
                batch_key.set(key())
            return self._gather(entry(chosen, number), entry(weights, number), key)

        return batch

    def _batches(self) -> Tensor:
        return (self._count + (self._common.batch_size - 1)) // self._common.batch_size

    def _share(self, batch: Batch) -> Tensor:
        return batch.weight.sum() / self.size

    def _order(self, number: int | Tensor) -> Tensor:
        """The order of samples in a pass: a function of (seed, round, pass, client), so the same in every engine."""
        of = hashing.key(self._common.seed, self.round, _ORDER, number, self.index)
        size = None if self._together is None else self._count
        return hashing.order(of, len(self._samples), size, self._samples.device)

    def _key(self, pass_number: Number, position: Number) -> Tensor:
        """What dropout draws from in a batch."""
        return torch.as_tensor(hashing.key(self._common.seed, self.round, pass_number, self.index, position))

    def _batch(self, order: Tensor, position: Number, pass_number: int) -> Batch:
        rows = self._common.batch_size

        def key() -> Tensor:
            return self._key(pass_number, position)

        if self.model.has_dropout:
            batch_key.set(key())
        if self._padded:
            slots = position * rows + torch.arange(rows, device=order.device)
            chosen = order[slots % self._count]
            weight = (slots < self._count).to(self._common.dtype)
        else:
            start = int(position) * rows
            chosen = order[start : start + rows]
            weight = torch.ones(len(chosen), dtype=self._common.dtype, device=order.device)
        return self._gather(self._samples[chosen], weight, key)

    def _gather(self, chosen: Tensor, weight: Tensor, key: Callable[[], Tensor]) -> Batch:
        return Batch(self._inputs(chosen), self._common.y[chosen], weight, key)

    def _inputs(self, chosen: Tensor) -> Inputs:
        x = self._common.prepare(pick(self._common.x, chosen))
        if self._together is None and isinstance(x, Tensor) and x.ndim == 4 and not x.is_cuda:
            return x.contiguous(memory_format=torch.channels_last)  # convolutions and pooling gain a tenth
        return x

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
