"""`ClientContext`: a client's data and the operations on it that methods use, such as SGD, gradients, and sums.

Every operation runs in two ways with the same result: for one client at a time, and under `torch.func.vmap` for many
clients in parallel. Under `vmap`, all clients take the same number of steps; steps beyond a client's last are masked.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import Batch
from fedtailor.core.client_batches import ClientBatches
from fedtailor.core.functional_layers import capture_batch_stats
from fedtailor.core.model import Inputs
from fedtailor.core.trees import Params, Tree, add, leaves, map_leaves, scale, zeros_like
from fedtailor.core.vmap_context import Number, VmapContext, sequential_loop
from fedtailor.errors import ConfigError

_EVALUATION_ROWS = 512  # examples per forward pass in evaluation; this limits memory and does not affect results
_NOISE, _SHARED, _SPLIT = 2, 3, 4  # salts of `uniform`, `shared_uniform`, `split_data`; 1 is the order of samples


class ClientContext(ClientBatches):
    """A client's data in one round, and the operations on it. Hooks of `Method` receive it as `ctx`.

    Attributes for methods: `model` (in training mode), `round` (from 1), `rounds`, `num_clients`, `index` (the client's
    number), `size` (the client's training samples), `total_size` (training samples of all clients), and
    `participation` (the mean fraction of clients per round). `index` and `size` are tensors, because they differ
    between the clients that `torch.func.vmap` runs in parallel.

    An *objective* is a function of (parameters, batch) that returns a scalar, such as `ctx.loss`. The parameters may be
    any tree: the model's, a part of them, or two models at once. To try an operation, make a client:

    >>> import fedtailor as ft
    >>> ctx, params = ft.example_client()
    >>> trained = ctx.sgd(ctx.loss, params, lr=0.1, epochs=1)
    >>> bool(ctx.full_loss(ctx.loss, trained) < ctx.full_loss(ctx.loss, params))
    True
    """

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the model's mean loss on a batch. This is the usual objective, or its first term:

        >>> import fedtailor as ft
        >>> ctx, start = ft.example_client()
        >>> proximal = lambda w, batch: ctx.loss(w, batch) + 0.05 * ft.trees.squared_distance(w, start)
        >>> bool(ctx.full_loss(proximal, start) == ctx.full_loss(ctx.loss, start))
        True
        """
        return batch.mean(self.model.loss(self.model.logits(params, batch.x), batch.y))

    def num_steps(self, epochs: int) -> Tensor:
        """Return the number of batches in `epochs` passes over the data, in the dtype of the run.

        >>> import fedtailor as ft
        >>> ctx, _ = ft.example_client(batch_size=64)
        >>> bool(ctx.num_steps(epochs=2) == 2 * (ctx.size / 64).ceil())
        True
        """
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

        `start` may be any tree, so several models are trained in one pass. Here, only the head is trained:

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> rest, head = ctx.model.split(params, "head")
        >>> head = ctx.sgd(lambda head, batch: ctx.loss(rest | head, batch), head, lr=0.1, epochs=1, momentum=0.9)
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
        """Return the last state of state = step(state, batch) over the batches; for the other arguments see `sgd`.

        Use it if a step is more than SGD on an objective. Here, a step moves a second model toward the first:

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> def step(state, batch):
        ...     fast = ft.trees.sub(state["fast"], ft.trees.scale(ctx.grad(ctx.loss, state["fast"], batch), 0.1))
        ...     slow = ft.trees.add(ft.trees.scale(state["slow"], 0.9), ft.trees.scale(fast, 0.1))
        ...     return {"fast": fast, "slow": slow}
        >>> sorted(ctx.scan(step, {"fast": params, "slow": params}, steps=3))
        ['fast', 'slow']
        """
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
        """Return the gradient of objective(params, batch) with respect to the parameters; see `scan` for an example."""
        if self._vmap is not None:
            return torch.func.grad(objective)(params, batch)  # type: ignore[no-any-return]
        with torch.enable_grad():  # without vmap, autograd is 20 % faster than torch.func.grad
            live = map_leaves(lambda leaf: leaf.detach().requires_grad_(), params)
            inputs = [leaf for _, leaf in leaves(live) if isinstance(leaf, Tensor)]
            grads = iter(torch.autograd.grad(objective(live, batch), inputs, materialize_grads=True))
        return map_leaves(lambda _: next(grads), params)

    def full_grad(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tree:
        """Return the gradient of the objective's mean over all of the client's training data, in one pass.

        Every example counts the same, although the last batch is smaller. The model has training mode, so dropout and
        batch normalization act as in training.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> ctx.full_grad(ctx.loss, params)["head.bias"].shape
        torch.Size([10])
        """
        return self.sum_over_data(lambda batch: scale(self.grad(objective, params, batch), self._data_fraction(batch)))

    def full_loss(self, objective: Callable[[Tree, Batch], Tensor], params: Tree) -> Tensor:
        """Return the objective's mean over all of the client's training data, a scalar; see `full_grad`.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> zero = ft.trees.zeros_like(params)  # all ten classes are equally likely, so the loss is log 10
        >>> round(float(ctx.full_loss(ctx.loss, zero)), 3)
        2.303
        """
        total = self.sum_over_data(lambda batch: {"loss": objective(params, batch) * self._data_fraction(batch)})
        loss: Tensor = total["loss"]
        return loss

    def sum_over_data(self, statistic: Callable[[Batch], Tree]) -> Tree:
        """Return the sum of statistic(batch) over all of the client's data; `statistic` must apply `batch.weight`.

        The batches are not augmented; only those of `sgd` and `scan` are. The weight is 0 for padding and 1 otherwise,
        so a count of the examples is the sum of the weights:

        >>> import fedtailor as ft
        >>> ctx, _ = ft.example_client()
        >>> bool(ctx.sum_over_data(lambda batch: {"count": batch.weight.sum()})["count"] == ctx.size)
        True
        """
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
        this at its end; training with `scan` should do the same. A model without such layers is returned unchanged.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> ctx.update_batch_stats(params) is params
        True
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
        >>> loss = check.full_loss(check.loss, fit.sgd(fit.loss, params, lr=0.1, epochs=1))
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
        """Return compute(x) for all samples in order, [width, ...]; rows beyond the client's size are arbitrary.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> ctx.map_samples(lambda x: ctx.model.logits(params, x), width=20).shape
        torch.Size([20, 10])
        """
        rows = _EVALUATION_ROWS if self._vmap is None else 4 * self._shared.batch_size
        slots = torch.arange(min(width, len(self._samples)), device=self._samples.device) % self._count
        outputs = [compute(self._inputs(self._samples[part])) for part in torch.split(slots, rows)]
        return F.pad(torch.cat(outputs), (0, 0) * (outputs[0].ndim - 1) + (0, width - len(slots)))

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
