"""Optimizers of local training, and learning-rate schedules over rounds, as pure functions over trees.

The updates are those of `torch.optim`: weight decay is part of the gradient for SGD and Adam, and separate for AdamW.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from torch import Tensor

from fedtailor.core.system import float64_on
from fedtailor.core.trees import Tree, dot, leaves, map_leaves, scale, zeros_like

OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "step", "cosine"]


@dataclass(frozen=True)
class Optimizer:
    """The update of a training step, and its settings; see `torch.optim.SGD`, `Adam`, and `AdamW`.

    >>> import torch
    >>> optimizer = Optimizer(lr=0.1, momentum=0.9)
    >>> params, grad = {"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}
    >>> params, state = optimizer.step(params, grad, optimizer.init(params))
    >>> params, state
    ({'w': tensor(0.8000)}, {'velocity': {'w': tensor(2.)}})
    """

    lr: float
    kind: OptimizerName = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step; it is empty for SGD without momentum."""
        if self.kind == "sgd":
            return {"velocity": zeros_like(params)} if self.momentum else {}
        like = next(leaf for _, leaf in leaves(params) if isinstance(leaf, Tensor))
        # The number of steps is a tensor, because it differs between clients that run in parallel. It is float64 in
        # every run, because 1 − β₂ᵗ would lose its digits in float32.
        return {
            "mean": zeros_like(params),
            "square": zeros_like(params),
            "steps": like.new_zeros((), dtype=float64_on(like.device)),
        }

    def step(self, params: Tree, grad: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the parameters and the state after one step."""
        if self.clip_norm is not None:
            grad = clip_norm(grad, self.clip_norm)
        if self.weight_decay and self.kind != "adamw":
            grad = map_leaves(lambda g, w: g.add(w, alpha=self.weight_decay), grad, params)
        return self._sgd(params, grad, state) if self.kind == "sgd" else self._adam(params, grad, state)

    def _sgd(self, params: Tree, grad: Tree, state: Tree) -> tuple[Tree, Tree]:
        update = grad
        if self.momentum:
            update = map_leaves(lambda g, v: g.add(v, alpha=self.momentum), grad, state["velocity"])
            state = {"velocity": update}
        if self.nesterov:
            update = map_leaves(lambda g, v: g.add(v, alpha=self.momentum), grad, update)
        return map_leaves(lambda w, g: w.sub(g, alpha=self.lr), params, update), state

    def _adam(self, params: Tree, grad: Tree, state: Tree) -> tuple[Tree, Tree]:
        (beta1, beta2), steps = self.betas, state["steps"] + 1
        mean = map_leaves(lambda m, g: m.lerp(g, 1 - beta1), state["mean"], grad)
        square = map_leaves(lambda s, g: (s * beta2).addcmul(g, g, value=1 - beta2), state["square"], grad)
        step_size, root = self.lr / (1 - beta1**steps), (1 - beta2**steps).sqrt()  # bias correction

        def move(w: Tensor, m: Tensor, s: Tensor) -> Tensor:
            if self.kind == "adamw":
                w = w * (1 - self.lr * self.weight_decay)
            scaled: Tensor = step_size.to(w.dtype) * m / (s.sqrt() / root.to(w.dtype) + self.eps)
            return w - scaled

        return map_leaves(move, params, mean, square), {"mean": mean, "square": square, "steps": steps}


def clip_norm(grad: Tree, maximum: float) -> Tree:
    """Scale a gradient down to the maximum norm, over all tensors, if its norm is larger.

    >>> import torch
    >>> clip_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    {'w': tensor([0.6000, 0.8000])}
    """
    return scale(grad, (maximum / (dot(grad, grad).sqrt() + 1e-6)).clamp(max=1))


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule over the rounds of a run.

    In the first `warmup_rounds` rounds, the learning rate rises linearly. Then it is constant, or it is multiplied by
    `step_factor` every `step_rounds` rounds, or it falls to 0 along half a period of the cosine.

    >>> [round(Schedule("cosine", warmup_rounds=1).factor(r, rounds=5), 2) for r in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 0.85, 0.5, 0.15]
    """

    kind: ScheduleName = "constant"
    step_rounds: int = 10
    step_factor: float = 0.1
    warmup_rounds: int = 0

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of the learning rate in a round from 1 to `rounds`; later rounds are like the last."""
        done = min(round, rounds) - 1 - self.warmup_rounds  # rounds since the warm-up
        if done < 0:
            return min(round, rounds) / (self.warmup_rounds + 1)
        if self.kind == "step":
            return self.step_factor ** (done // self.step_rounds)
        return (1 + cos(pi * done / (rounds - self.warmup_rounds))) / 2 if self.kind == "cosine" else 1.0
