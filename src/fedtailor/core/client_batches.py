"""`ClientBatches`: a client's training samples as batches, and loops over them; the basis of `ClientContext`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import Batch, SharedContext, as_parts, take_samples
from fedtailor.core.dropout import batch_key
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Tree, select
from fedtailor.core.vmap_context import Number, VmapContext, select_entry, vmap_max

_ORDER = 1  # salt that separates the order of samples from the random numbers of `ClientContext`
_BLOCK_VALUES = 2**18  # of inputs that are prepared at once: they stay in a cache of the CPU


class ClientBatches:
    """A client's training samples in one round: the order of their batches, padding, and random keys."""

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
        self._min_size, self._max_size = (len(samples),) * 2 if vmap is None else (vmap.min_size, vmap.max_size)
        self._max_batches = self._batches_for(self._max_size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClientContext cannot be pickled, because a client's data must not leave the client")

    def _run_steps(
        self,
        step: Callable[[Tree, Batch], Tree],
        state: Tree,
        steps: int | Tensor,
        max_steps: int,
        passes: int | None = None,
        first_pass: int = 0,
        drop_last: bool = False,
    ) -> Tree:
        """Apply `step` to `steps` batches, pass after pass; under vmap, steps beyond a client's last are masked."""
        if self._vmap is None:
            return self._run_steps_unmapped(step, state, min(int(steps), max_steps), first_pass, drop_last)
        if isinstance(steps, Tensor) and passes is None:
            max_steps = min(max_steps, vmap_max(steps))
        if max_steps == 0 or passes == 0:
            return state
        passes = -(-max_steps // self._batches_for(self._min_size, drop_last)) if passes is None else passes
        batch_of_step = self._plan_batches(max_steps, passes, first_pass, drop_last)

        def advance(state: Tree, number: Number) -> Tree:
            new = step(state, batch_of_step(number))
            return select(number < steps, new, state) if isinstance(steps, Tensor) else new

        return self._vmap.loop(advance, self._copy_mapped(state), 0, max_steps)

    def _run_steps_unmapped(
        self, step: Callable[[Tree, Batch], Tree], state: Tree, steps: int, first_pass: int, drop_last: bool
    ) -> Tree:
        batches = self._batches_for(self._max_size, drop_last)
        for start in range(0, steps, batches):
            for batch in self._batches_of_pass(first_pass + start // batches, min(batches, steps - start)):
                state = step(state, batch)
        return state

    def _batches_of_pass(self, pass_number: int, count: int) -> Iterator[Batch]:
        """Yield the first `count` training batches of a pass; several small ones are gathered and prepared at once."""
        order, shared, rows = self._sample_order(pass_number), self._shared, self._shared.batch_size
        if self._padded or shared.augmentation:
            for position in range(count):
                yield self._batch_at(order, position, pass_number, training=True)
            return
        samples, ones = self._samples[order], torch.ones(rows, dtype=shared.dtype, device=order.device)
        values = sum(part[0].numel() for part in as_parts(shared.x).values())
        block = rows * max(1, _BLOCK_VALUES // (rows * max(1, values)))
        for first in range(0, count * rows, block):
            chosen = samples[first : min(first + block, count * rows)]
            x, y = self._inputs(chosen), shared.y[chosen]
            for start in range(0, len(chosen), rows):
                own, key = slice(start, start + rows), partial(self._random_key, pass_number, (first + start) // rows)
                targets = y[own]
                weight = ones if len(targets) == rows else ones[: len(targets)]
                yield Batch(take_samples(x, own), targets, weight, key, None if weight.is_cuda else weight)

    def _copy_mapped(self, tree: Tree) -> Tree:
        """Return a copy in which every tensor has the vmap dimension, because the loop may overwrite it in place."""
        return select(self._count > 0, tree, tree)

    def _plan_batches(self, steps: int, passes: int, first_pass: int, drop_last: bool) -> Callable[[Number], Batch]:
        """Compute the samples of all batches in advance and return a function from a step's number to its batch."""
        rows, device = self._shared.batch_size, self._samples.device
        numbers, batches = torch.arange(steps, device=device), self._num_batches(drop_last)
        pass_numbers, positions = numbers // batches, numbers % batches
        slots = positions[:, None] * rows + torch.arange(rows, device=device)  # [steps, rows]
        weights, slots = (slots < self._count).to(self._shared.dtype), slots % self._count
        used = min(steps * rows, len(self._samples))  # of each pass; later samples are in no batch
        orders = torch.cat([self._sample_order(first_pass + number)[:used] for number in range(passes)])
        first_slots = pass_numbers.clamp(max=passes - 1) * used  # masked steps may be beyond the last pass
        chosen = self._samples[orders[first_slots[:, None] + slots]]
        uses_keys = self.model.has_dropout or self._shared.augmentation
        keys = self._random_key(first_pass + pass_numbers, positions) if uses_keys else None
        choices = None if keys is None else self._draw(keys[:, None], rows)
        is_full = self._min_size == self._max_size and self._max_size % rows == 0 and device.type == "cpu"
        ones = self._copy_mapped({"": weights[0]})[""] if is_full else None

        def batch_of_step(number: Number) -> Batch:
            def key() -> Tensor:
                all_keys = self._random_key(first_pass + pass_numbers, positions) if keys is None else keys
                return select_entry(all_keys, number)

            if self.model.has_dropout:
                batch_key.set(key())
            drawn = None if choices is None else select_entry(choices, number)
            weight = select_entry(weights, number) if ones is None else ones
            return self._gather(select_entry(chosen, number), weight, key, drawn, ones)

        return batch_of_step

    def _num_batches(self, drop_last: bool = False) -> Tensor:
        """Return the number of batches in one pass over this client's data."""
        if drop_last:
            return (self._count // self._shared.batch_size).clamp(min=1)
        return (self._count + (self._shared.batch_size - 1)) // self._shared.batch_size

    def _batches_for(self, size: int, drop_last: bool = False) -> int:
        """Return the number of batches in one pass over so many samples."""
        return max(size // self._shared.batch_size, 1) if drop_last else -(-size // self._shared.batch_size)

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

    def _batch_at(self, order: Tensor, position: Number, pass_number: int, training: bool = False) -> Batch:
        """Return the batch at a position of a pass; only batches for training are augmented."""
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
        drawn = self._draw(key(), len(chosen)) if training and self._shared.augmentation else None
        return self._gather(self._samples[chosen], weight, key, drawn)

    def _draw(self, key: Tensor, rows: int) -> Tensor | None:
        """Return the random choices of the augmentation for the keys of batches; None if there is no augmentation."""
        augmentation, x = self._shared.augmentation, self._shared.x
        return augmentation.draw(key, rows, x.shape[2:], self._shared.y.device) if augmentation else None

    def _gather(
        self,
        chosen: Tensor,
        weight: Tensor,
        key: Callable[[], Tensor],
        drawn: Tensor | None,
        ones: Tensor | None = None,
    ) -> Batch:
        return Batch(self._inputs(chosen, drawn), self._shared.y[chosen], weight, key, ones)

    def _inputs(self, chosen: Tensor, drawn: Tensor | None = None) -> Inputs:
        """Return samples as inputs of the model, augmented by random choices if there are any."""
        shared, x = self._shared, take_samples(self._shared.x, chosen)
        x = shared.prepare(x) if drawn is None else shared.augmentation.apply(x, drawn, shared.prepare)
        if self._vmap is None and isinstance(x, Tensor) and x.ndim == 4 and not x.is_cuda:
            return x.contiguous(memory_format=torch.channels_last)  # convolution and pooling are 10 % faster
        return x
