"""`ClientContext`: a client's data and the operations on it that methods use, such as training, gradients, and sums."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.client_training import ClientTraining
from fedtailor.core.model import Inputs
from fedtailor.core.system import to_float64

# Examples per forward pass in evaluation: of one client, and of all clients of a vmap call on a GPU. They limit memory
# and do not affect results.
_EVALUATION_ROWS = 512
_GPU_EVALUATION_ROWS = 2**15
_NOISE, _SHARED, _SPLIT = 2, 3, 4  # salts of `uniform`, `shared_uniform`, `split_data`; 1 is the order of samples


class ClientContext(ClientTraining):
    """A client's data in one round, and the operations on it. Hooks of `Method` receive it as `ctx`.

    Attributes for methods: `model` (in training mode), `round` (from 1), `rounds`, `num_clients`, `index` (the client's
    number), `size` (the client's training samples), `total_size` (training samples of all clients), and
    `participation` (the mean fraction of clients per round). `index` and `size` are tensors, because they differ
    between the clients that `torch.func.vmap` runs in parallel.

    An *objective* is a function of (parameters, batch) that returns a scalar, such as `ctx.loss`. The parameters may be
    any tree: the model's, a part of them, or two models at once. To try an operation, make a client:

    >>> import fedtailor as ft
    >>> ctx, params = ft.example_client()
    >>> trained = ctx.optimize(ctx.loss, params, lr=0.1, epochs=1)
    >>> bool(ctx.full_loss(ctx.loss, trained) < ctx.full_loss(ctx.loss, params))
    True
    """

    def cond(self, condition: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """Return compute() if the condition is true, else `otherwise`; under vmap, `compute` is always called.

        Use it instead of `if`, which cannot depend on a tensor. Here, the loss is computed only in later rounds:

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> ctx.cond(torch.tensor(ctx.round > 1), lambda: ctx.full_loss(ctx.loss, params), torch.tensor(0.0))
        tensor(0.)
        """
        if self._vmap is None and not condition:
            return otherwise
        return torch.where(condition, compute(), otherwise)

    def uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Return random numbers in (0, 1) that depend on the seed, round, client, and salt.

        Use `batch.uniform` for numbers that differ between batches. The salt separates several uses in one method.

        >>> import fedtailor as ft
        >>> ctx, _ = ft.example_client()
        >>> bool((ctx.uniform((3,), salt=1) == ctx.uniform((3,), salt=1)).all())
        True
        """
        key = random.make_key(self._shared.seed, self.round, _NOISE, self.index, salt)
        return random.uniform(key, shape, self._shared.dtype, self.index.device)

    def shared_uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        """Return random numbers in (0, 1) that are equal for all clients and rounds, without being sent.

        >>> import fedtailor as ft
        >>> one, other = (ft.example_client(client=client)[0].shared_uniform((3,), salt=1) for client in (0, 1))
        >>> bool((one == other).all())
        True
        """
        key = random.make_key(self._shared.seed, _SHARED, salt)
        return random.uniform(key, shape, self._shared.dtype, self.index.device)

    def split_data(
        self, fraction: float, salt: int, every_round: bool = False
    ) -> tuple["ClientContext", "ClientContext"]:
        """Split the data at random and return a context for the given fraction of the samples and one for the rest.

        The split is the same in all rounds unless `every_round` is true. Both contexts have at least one sample; if the
        client has a single sample, both contain it.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> fit, check = ctx.split_data(0.8, salt=1)
        >>> loss = check.full_loss(check.loss, fit.optimize(fit.loss, params, lr=0.1, epochs=1))
        """
        key = random.make_key(self._shared.seed, self.round if every_round else 0, _SPLIT, self.index, salt)
        size = None if self._vmap is None else self._count
        order = random.permutation(key, len(self._samples), size, self._samples.device)
        count = (to_float64(self._count) * fraction).long().clamp(min=1)
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
            vmap = replace(vmap, min_size=1, max_size=max_count)
        return ClientContext(self._shared, self.round, self.index, count, samples, vmap=vmap)

    def map_samples(self, compute: Callable[[Inputs], Tensor], width: int) -> Tensor:
        """Return compute(x) for all samples in order, [width, ...]; rows beyond the client's size are arbitrary.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> ctx.map_samples(lambda x: ctx.model.logits(params, x), width=20).shape
        torch.Size([20, 10])
        """
        rows = self._evaluation_rows
        slots = torch.arange(min(width, len(self._samples)), device=self._samples.device) % self._count
        outputs = [compute(self._inputs(self._samples[part])) for part in torch.split(slots, rows)]
        return F.pad(torch.cat(outputs), (0, 0) * (outputs[0].ndim - 1) + (0, width - len(slots)))

    @property
    def _evaluation_rows(self) -> int:
        """Examples of this client per forward pass in evaluation."""
        if self._vmap is None:
            return _EVALUATION_ROWS
        rows = 4 * self._shared.batch_size  # small enough for the caches of a CPU
        return max(rows, _GPU_EVALUATION_ROWS // self._vmap.clients) if self._samples.is_cuda else rows
