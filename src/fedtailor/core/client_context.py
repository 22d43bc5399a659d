"""`ClientContext`: a client's data and the operations on it that methods use, such as SGD, gradients, and sums.

Every operation runs in two ways with the same result: for one client at a time, and under `torch.func.vmap` for many
clients in parallel. Under `vmap`, all clients take the same number of steps; steps beyond a client's last are masked.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import Batch, SharedContext, take_samples
from fedtailor.core.functional_layers import batch_key, capture_batch_stats
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Params, Tree, add, leaves, map_leaves, scale, select, zeros_like
from fedtailor.core.vmap_context import Number, VmapContext, select_entry, sequential_loop, vmap_max
from fedtailor.errors import ConfigError

_EVALUATION_ROWS = 512  # examples per forward pass in evaluation; this limits memory and does not affect results
_ORDER, _NOISE, _SHARED, _SPLIT = 1, 2, 3, 4  # salts: sample order, `uniform`, `shared_uniform`, `split_data`


class ClientContext:
    """A client's data in one round, and the operations on it. Hooks of `Method` receive it as `ctx`.

    Attributes for methods: `model` (in training mode), `round` (from 1), `rounds`, `num_clients`, `index` (the client's
    number), `size` (the client's training samples), `total_size` (training samples of all clients), and
    `participation` (the mean fraction of clients per round). `index` and `size` are tensors, because they differ
    between the clients that `torch.func.vmap` runs in parallel.
    """

    def __init__(
        self,
        shared: SharedContext,
        round: int,
        index: Tensor,
        size: Tensor,
        samples: Tensor,
        *,
        vmap: VmapContext | None = None,  # None: this client runs by itself, without torch.func.vmap
    ) -> None:
        self._shared, self._samples, self._vmap = shared, samples, vmap
        self.model: Model = shared.model
        self.round, self.rounds = round, shared.rounds
        self.num_clients, self.total_size = shared.num_clients, shared.total_size
        self.participation = shared.participation
        self.index, self._count = index, size
        self.size = size.to(shared.dtype)  # in the dtype of the tensors that it weights
        # Padding affects batch statistics, and dropout if samples are not the first axis. With such models, all engines
        # pad, so that they compute the same values.
        self._padded = vmap is not None or bool(shared.model.running_stats) or shared.model.has_dropout
        self._max_batches = -(-len(samples) // shared.batch_size) if vmap is None else vmap.max_batches
        self._equal_batches = vmap is None or vmap.min_batches == vmap.max_batches  # no step of a pass is masked

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClientContext cannot be pickled, because a client's data must not leave the client")

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the model's mean loss on a batch."""
        return batch.mean(self.model.loss(self.model.logits(params, batch.x), batch.y))

    def num_steps(self, epochs: int) -> Tensor:
        """Return the number of batches in `epochs` passes over the data, in the dtype of the run."""
        return epochs * self._num_batches().to(self._shared.dtype)

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
        """Minimize objective(params, batch) with SGD for `epochs` passes or `steps` batches and return the parameters.

        With `epochs`, `stop(params)` is called before each pass, and training ends when it returns true. `steps` is an
        integer, or a tensor of at most `max_steps`; the steps continue through as many passes as they need.
        """

        def step(carry: Tree, batch: Batch) -> Tree:
            params, update = carry["params"], self.grad(objective, carry["params"], batch)
            if weight_decay:
                update = map_leaves(lambda g, w: g.add(w, alpha=weight_decay), update, params)
            if momentum:
                update = map_leaves(lambda g, v: g.add(v, alpha=momentum), update, carry["velocity"])
            new_params = map_leaves(lambda w, g: w.sub(g, alpha=lr), params, update)
            new_params = _replace_leaves(new_params, self._running_stats(params))
            return {"params": new_params, "velocity": update} if momentum else {"params": new_params}

        carry = {"params": start, "velocity": zeros_like(start)} if momentum else {"params": start}
        stop_scan = stop and (lambda carry: stop(carry["params"]))
        end: Tree = self.scan(step, carry, epochs=epochs, steps=steps, max_steps=max_steps, stop=stop_scan)["params"]
        return self.update_batch_stats(end, objective)

    def scan(
        self,
        step: Callable[[Tree, Batch], Tree],
        start: Tree,
        *,
        epochs: int | None = None,
        steps: int | Tensor | None = None,
        max_steps: int | None = None,
        stop: Callable[[Tree], Tensor] | None = None,
    ) -> Tree:
        """Return the last state of state = step(state, batch) over the batches; for the other arguments see `sgd`."""
        max_steps = steps if isinstance(steps, int) else max_steps
        if (epochs is None) == (steps is None) or (steps is None) != (max_steps is None):
            raise ConfigError("Training takes either epochs or steps; if steps is a tensor, it also needs max_steps.")
        if epochs is None:
            assert steps is not None and max_steps is not None
            return self._run_steps(step, start, steps, max_steps)
        if stop is None:
            max_steps = epochs * self._max_batches
            steps = max_steps if self._equal_batches else epochs * self._num_batches()
            return self._run_steps(step, start, steps, max_steps, passes=epochs)
        state, active = start, torch.ones_like(self._count, dtype=torch.bool)
        for epoch in range(epochs):
            active = active & ~stop(state)
            if self._vmap is None and not active:
                break
            steps = torch.where(active, self._num_batches(), 0)
            state = self._run_steps(step, state, steps, self._max_batches, passes=1, first_pass=epoch)
        return state

    def grad(self, objective: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch) -> Tree:
        """Return the gradient of objective(params, batch) with respect to the parameters."""
        if self._vmap is not None:
            return torch.func.grad(objective)(params, batch)  # type: ignore[no-any-return]
        with torch.enable_grad():  # without vmap, autograd is 20 % faster than torch.func.grad
            live = map_leaves(lambda leaf: leaf.detach().requires_grad_(), params)
            inputs = [leaf for _, leaf in leaves(live) if isinstance(leaf, Tensor)]
            grads = iter(torch.autograd.grad(objective(live, batch), inputs, materialize_grads=True))
        return map_leaves(lambda _: next(grads), params)

    def full_grad(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tree:
        """Return the gradient of the objective's mean over all of the client's data."""
        return self.sum_over_data(lambda batch: scale(self.grad(objective, params, batch), self._data_fraction(batch)))

    def full_loss(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tensor:
        """Return the objective's mean over all of the client's data."""
        total = self.sum_over_data(lambda batch: {"loss": objective(params, batch) * self._data_fraction(batch)})
        loss: Tensor = total["loss"]
        return loss

    def sum_over_data(self, statistic: Callable[[Batch], Tree]) -> Tree:
        """Return the sum of statistic(batch) over all of the client's data; `statistic` must apply `batch.weight`."""
        order = torch.arange(len(self._samples), device=self._samples.device)

        def part(number: Number) -> Tree:
            return statistic(self._batch_at(order, number, pass_number=0))  # beyond the data, all weights are 0

        if self._vmap is None:
            return sequential_loop(lambda total, number: add(total, part(number)), part(0), 1, self._max_batches)
        first = self._copy_mapped(part(0))
        return self._vmap.loop(lambda total, number: add(total, part(number)), first, 1, self._max_batches)

    def update_batch_stats(self, params: Tree, objective: Callable[[Tree, Batch], Tensor] | None = None) -> Tree:
        """Return the parameters with batch-normalization statistics recomputed in one pass over the client's data.

        The statistics are those of the forward passes that `objective` makes (default: the model's loss). `sgd` calls
        this at its end; training with `scan` should do the same.
        """
        old = self._running_stats(params)
        if not old:
            return params

        def captured(batch: Batch) -> Tree:
            with capture_batch_stats() as statistics:
                (objective or self.loss)(params, batch)
            return scale({name: statistics[name] for name in old}, self._data_fraction(batch))

        return _replace_leaves(params, self.sum_over_data(captured))

    def cond(self, condition: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """Return compute() if the condition is true, else `otherwise`; under vmap, `compute` is always called."""
        if self._vmap is None and not condition:
            return otherwise
        return torch.where(condition, compute(), otherwise)

    def uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Return random numbers in (0, 1) that depend on the seed, round, client, and salt.

        Use `batch.uniform` for numbers that differ between batches.
        """
        key = random.make_key(self._shared.seed, self.round, _NOISE, self.index, salt)
        return random.uniform(key, shape, self._shared.dtype, self.index.device)

    def shared_uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Return random numbers in (0, 1) that are equal for all clients and rounds, without being sent."""
        key = random.make_key(self._shared.seed, _SHARED, salt)
        return random.uniform(key, shape, self._shared.dtype, self.index.device)

    def split_data(
        self, fraction: float, salt: int, every_round: bool = False
    ) -> tuple["ClientContext", "ClientContext"]:
        """Split the data at random and return a context for the given fraction of the samples and one for the rest.

        The split is the same in all rounds unless `every_round` is true. Both contexts have at least one sample; if the
        client has a single sample, both contain it.
        """
        key = random.make_key(self._shared.seed, self.round if every_round else 0, _SPLIT, self.index, salt)
        size = None if self._vmap is None else self._count
        order = random.permutation(key, len(self._samples), size, self._samples.device)
        count = (self._count.double() * fraction).long().clamp(min=1)
        rest = (self._count - count).clamp(min=1)
        rest_positions = (torch.arange(len(order), device=order.device) + count) % self._count
        largest = self._max_batches * self._shared.batch_size
        return (
            self._subset(order, count, max(1, int(fraction * largest))),
            self._subset(order[rest_positions], rest, min(largest, int((1 - fraction) * largest) + 1)),
        )

    def _subset(self, order: Tensor, count: Tensor, max_count: int) -> "ClientContext":
        """Return a context for the first `count` samples in this order; no mapped client has more than `max_count`."""
        samples, vmap = self._samples[order], self._vmap
        if vmap is None:
            samples = samples[: int(count)]
        else:
            vmap = VmapContext(1, -(-max_count // self._shared.batch_size), vmap.loop)
        return ClientContext(self._shared, self.round, self.index, count, samples, vmap=vmap)

    def map_samples(self, compute: Callable[[Inputs], Tensor], width: int) -> Tensor:
        """Return compute(x) for all samples in order, [width, ...]; rows beyond the client's size are arbitrary."""
        rows = _EVALUATION_ROWS if self._vmap is None else 4 * self._shared.batch_size
        slots = torch.arange(min(width, len(self._samples)), device=self._samples.device) % self._count
        outputs = [compute(self._inputs(self._samples[part])) for part in torch.split(slots, rows)]
        return F.pad(torch.cat(outputs), (0, 0) * (outputs[0].ndim - 1) + (0, width - len(slots)))

    def _run_steps(
        self,
        step: Callable[[Tree, Batch], Tree],
        state: Tree,
        steps: int | Tensor,
        max_steps: int,
        passes: int | None = None,
        first_pass: int = 0,
    ) -> Tree:
        """Apply `step` to `steps` batches, pass after pass; under vmap, steps beyond a client's last are masked."""
        if self._vmap is None:
            return self._run_steps_unmapped(step, state, min(int(steps), max_steps), first_pass)
        if isinstance(steps, Tensor) and passes is None:
            max_steps = min(max_steps, vmap_max(steps))
        passes = -(-max_steps // self._vmap.min_batches) if passes is None else passes
        batch_of_step = self._plan_batches(max_steps, passes, first_pass)

        def advance(state: Tree, number: Number) -> Tree:
            new = step(state, batch_of_step(number))
            return select(number < steps, new, state) if isinstance(steps, Tensor) else new

        return self._vmap.loop(advance, self._copy_mapped(state), 0, max_steps)

    def _run_steps_unmapped(
        self, step: Callable[[Tree, Batch], Tree], state: Tree, steps: int, first_pass: int
    ) -> Tree:
        for number in range(steps):
            passes, position = divmod(number, self._max_batches)
            if position == 0:
                order = self._sample_order(first_pass + passes)
            state = step(state, self._batch_at(order, position, first_pass + passes))
        return state

    def _copy_mapped(self, tree: Tree) -> Tree:
        """Return a copy in which every tensor has the vmap dimension, because the loop may overwrite it in place."""
        return select(self._count > 0, tree, tree)

    def _plan_batches(self, steps: int, passes: int, first_pass: int) -> Callable[[Number], Batch]:
        """Compute the samples of all batches in advance and return a function from a step's number to its batch."""
        rows, device = self._shared.batch_size, self._samples.device
        numbers = torch.arange(steps, device=device)
        pass_numbers, positions = numbers // self._num_batches(), numbers % self._num_batches()
        slots = positions[:, None] * rows + torch.arange(rows, device=device)  # [steps, rows]
        weights, slots = (slots < self._count).to(self._shared.dtype), slots % self._count
        chosen = torch.zeros_like(slots)
        for number in range(passes):
            order = self._sample_order(first_pass + number)
            chosen = torch.where((pass_numbers == number)[:, None], order[slots], chosen)
        chosen = self._samples[chosen]
        keys = self._random_key(first_pass + pass_numbers, positions) if self.model.has_dropout else None

        def batch_of_step(number: Number) -> Batch:
            def key() -> Tensor:
                all_keys = self._random_key(first_pass + pass_numbers, positions) if keys is None else keys
                return select_entry(all_keys, number)

            if keys is not None:
                batch_key.set(key())
            return self._gather(select_entry(chosen, number), select_entry(weights, number), key)

        return batch_of_step

    def _num_batches(self) -> Tensor:
        """Return the number of batches in one pass over this client's data."""
        return (self._count + (self._shared.batch_size - 1)) // self._shared.batch_size

    def _data_fraction(self, batch: Batch) -> Tensor:
        """Return the fraction of the client's examples that are in a batch."""
        return batch.weight.sum() / self.size

    def _sample_order(self, pass_number: int | Tensor) -> Tensor:
        """Return the order of samples in a pass; it depends on seed, round, pass, and client, but not on the engine."""
        key = random.make_key(self._shared.seed, self.round, _ORDER, pass_number, self.index)
        size = None if self._vmap is None else self._count
        return random.permutation(key, len(self._samples), size, self._samples.device)

    def _random_key(self, pass_number: Number, position: Number) -> Tensor:
        """Return the key of the random numbers in a batch, such as dropout masks."""
        return torch.as_tensor(random.make_key(self._shared.seed, self.round, pass_number, self.index, position))

    def _batch_at(self, order: Tensor, position: Number, pass_number: int) -> Batch:
        """Return the batch at a position of a pass."""
        rows = self._shared.batch_size

        def key() -> Tensor:
            return self._random_key(pass_number, position)

        if self.model.has_dropout:
            batch_key.set(key())
        if self._padded:
            slots = position * rows + torch.arange(rows, device=order.device)
            chosen = order[slots % self._count]
            weight = (slots < self._count).to(self._shared.dtype)
        else:
            start = int(position) * rows
            chosen = order[start : start + rows]
            weight = torch.ones(len(chosen), dtype=self._shared.dtype, device=order.device)
        return self._gather(self._samples[chosen], weight, key)

    def _gather(self, chosen: Tensor, weight: Tensor, key: Callable[[], Tensor]) -> Batch:
        return Batch(self._inputs(chosen), self._shared.y[chosen], weight, key)

    def _inputs(self, chosen: Tensor) -> Inputs:
        x = self._shared.prepare(take_samples(self._shared.x, chosen))
        if self._vmap is None and isinstance(x, Tensor) and x.ndim == 4 and not x.is_cuda:
            return x.contiguous(memory_format=torch.channels_last)  # convolution and pooling are 10 % faster
        return x

    def _running_stats(self, tree: Tree) -> Params:
        """Return the running statistics in a tree, by their parameter names."""
        if not self.model.running_stats:
            return {}
        named = ((path.split("/")[-1], leaf) for path, leaf in leaves(tree))
        return {name: leaf for name, leaf in named if name in self.model.running_stats and isinstance(leaf, Tensor)}


def _replace_leaves(tree: Tree, new: Params) -> Tree:
    """Return the tree with new values for the leaves of these names, at any depth."""
    return {
        name: _replace_leaves(node, new) if isinstance(node, dict) else new.get(name, node)
        for name, node in tree.items()
    }
