"""`ClientTraining`: the operations of `ClientContext` that pass over a client's data: training, gradients, and sums.

Every operation runs in two ways with the same result: for one client at a time, and under `torch.func.vmap` for many
clients in parallel. Under `vmap`, all clients take the same number of steps; steps beyond a client's last are masked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_batches import ClientBatches
from fedtailor.core.functional_layers import capture_batch_stats
from fedtailor.core.optimizers import Optimizer, OptimizerName, Schedule
from fedtailor.core.trees import Params, Tree, add, leaves, map_leaves, scale
from fedtailor.core.vmap_context import Number, sequential_loop
from fedtailor.core.vmap_grad import mapped_grad
from fedtailor.errors import ConfigError


class ClientTraining(ClientBatches):
    """Training, gradients, and sums over a client's data; the basis of `ClientContext`."""

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the model's mean loss on a batch. This is the usual objective, or its first term:

        >>> import fedtailor as ft
        >>> ctx, start = ft.example_client()
        >>> proximal = lambda w, batch: ctx.loss(w, batch) + 0.05 * ft.trees.squared_distance(w, start)
        >>> bool(ctx.full_loss(proximal, start) == ctx.full_loss(ctx.loss, start))
        True
        """
        return batch.mean(self.model.losses(self.model.logits(params, batch.x), batch.y, batch.weight))

    def num_steps(self, epochs: int, drop_last: bool = False) -> Tensor:
        """Return the number of batches in `epochs` passes over the data, in the dtype of the run.

        >>> import fedtailor as ft
        >>> ctx, _ = ft.example_client(batch_size=64)
        >>> bool(ctx.num_steps(epochs=2) == 2 * (ctx.size / 64).ceil())
        True
        """
        return epochs * self._num_batches(drop_last).to(self._shared.dtype)

    def optimize(
        self,
        objective: Callable[[Tree, Batch], Tensor],
        start: Tree,
        *,
        lr: float,
        epochs: int | None = None,
        steps: int | Tensor | None = None,
        max_steps: int | None = None,
        drop_last: bool = False,
        stop: Callable[[Tree], Tensor] | None = None,
        optimizer: OptimizerName = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
    ) -> Tree:
        """Minimize objective(params, batch) for `epochs` passes or `steps` batches and return the parameters.

        With `epochs`, `stop(params)` is called before each pass, and training ends when it returns true. `steps` is an
        integer, or a tensor of at most `max_steps`; the steps continue through as many passes as they need. With
        `drop_last`, the last batch of a pass is dropped if it is incomplete and not the only one. The optimizers are
        those of `torch.optim`; `clip_norm` bounds the norm of the gradient, and `schedule` scales `lr` by the round.

        `start` may be any tree, so several models are trained in one pass. Here, only the head is trained:

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> rest, head = ctx.model.split(params, "head")
        >>> head = ctx.optimize(lambda head, batch: ctx.loss(rest | head, batch), head, lr=0.1, epochs=1, momentum=0.9)
        """
        lr = lr if schedule is None else lr * schedule.factor(self.round, self.rounds)
        rule = Optimizer(lr, optimizer, momentum, nesterov, betas, eps, weight_decay, clip_norm)
        loop: dict[str, Any] = {"epochs": epochs, "steps": steps, "max_steps": max_steps, "drop_last": drop_last}
        return self.run_optimizer(rule, objective, start, rule.init(start), stop=stop, **loop)[0]

    def run_optimizer(
        self,
        optimizer: Optimizer,
        objective: Callable[[Tree, Batch], Tensor],
        start: Tree,
        state: Tree,
        *,
        stop: Callable[[Tree], Tensor] | None = None,
        **loop: Any,
    ) -> tuple[Tree, Tree]:
        """Minimize the objective from an optimizer state and return (parameters, optimizer state).

        `optimize` does this from `optimizer.init(start)`; use this function to continue with the state of an earlier
        round. `loop` holds the arguments of `scan`, such as `epochs`.

        >>> import fedtailor as ft
        >>> from fedtailor.core.optimizers import Optimizer
        >>> ctx, params = ft.example_client()
        >>> adam = Optimizer(lr=0.01, kind="adam")
        >>> params, state = ctx.run_optimizer(adam, ctx.loss, params, adam.init(params), steps=3)
        >>> float(state["steps"])
        3.0
        """

        def step(carry: Tree, batch: Batch) -> Tree:
            params = carry["params"]
            new_params, new_state = optimizer.step(params, self.grad(objective, params, batch), carry["optimizer"])
            kept = self._running_stats(params)
            return {"params": _replace_leaves(new_params, kept) if kept else new_params, "optimizer": new_state}

        stop_scan = stop and (lambda carry: stop(carry["params"]))
        end = self.scan(step, {"params": start, "optimizer": state}, stop=stop_scan, **loop)
        return self.update_batch_stats(end["params"], objective), end["optimizer"]

    def scan(
        self,
        step: Callable[[Tree, Batch], Tree],
        start: Tree,
        *,
        epochs: int | None = None,
        steps: int | Tensor | None = None,
        max_steps: int | None = None,
        drop_last: bool = False,
        stop: Callable[[Tree], Tensor] | None = None,
    ) -> Tree:
        """Return the last state of state = step(state, batch) over the batches; for the other arguments see `optimize`.

        Use it if a step is more than that of an optimizer. Here, a step moves a second model toward the first:

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
            return self._run_steps(step, start, steps, max_steps, drop_last=drop_last)
        fewest, most = (self._batches_for(size, drop_last) for size in (self._min_size, self._max_size))
        if stop is None:  # if all clients have equally many batches, no step is masked
            steps = epochs * (most if fewest == most else self._num_batches(drop_last))
            return self._run_steps(step, start, steps, epochs * most, passes=epochs, drop_last=drop_last)
        state, active = start, torch.ones_like(self._count, dtype=torch.bool)
        for epoch in range(epochs):
            active = active & ~stop(state)
            if self._vmap is None and not active:
                break
            steps = torch.where(active, self._num_batches(drop_last), 0)
            state = self._run_steps(step, state, steps, most, passes=1, first_pass=epoch, drop_last=drop_last)
        return state

    def grad(self, objective: Callable[[Tree, Batch], Tensor], params: Tree, batch: Batch) -> Tree:
        """Return the gradient of objective(params, batch) with respect to the parameters; see `scan` for an example."""
        if self._vmap is not None:
            return mapped_grad(lambda live: objective(live, batch), params)
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

        The batches are not augmented; only those of `optimize` and `scan` are. The weight is 0 for padding and 1
        otherwise, so a count of the examples is the sum of the weights:

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

        The statistics are those of the forward passes that `objective` makes (default: the model's loss). `optimize`
        calls this at its end; training with `scan` should do the same. A model without such layers is returned as is.

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
