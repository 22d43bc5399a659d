"""Layers without hidden state, in place of those that PyTorch gives some.

So every engine computes the same: dropout takes its random numbers from the key of the batch; batch normalisation uses
the statistics of the batch while training and tells them to whoever listens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedtailor import hashing
from fedtailor.errors import Refused
from fedtailor.trees import Params

batch_key: ContextVar[int | Tensor] = ContextVar("batch_key")  # what dropout draws from while a batch is in work
_heard: ContextVar[Params | None] = ContextVar("heard", default=None)


def join(path: str, name: str) -> str:
    """The name of something inside a module."""
    return f"{path}.{name}" if path else name


@contextmanager
def listen() -> Iterator[Params]:
    """Collect the batch statistics of every normalisation layer that runs inside."""
    heard: Params = {}
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


class BatchNorm(nn.modules.batchnorm._NormBase):
    """Batch normalisation without side effects; `path` is its name in the network."""

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, path: str) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(original.__dict__)  # the same parameters: tied ones stay tied, frozen ones frozen
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_var is not None:
            mean, var = self.running_mean.detach(), self.running_var.detach()  # no gradient moves them
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        heard = _heard.get()
        if heard is not None:
            over = [axis for axis in range(x.ndim) if axis != 1]
            heard[join(self.path, "running_mean")] = x.detach().mean(over)
            heard[join(self.path, "running_var")] = x.detach().var(over)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Dropout(nn.Module):
    """Dropout whose mask is a function of the batch's key, the layer (`salt`) and how often it ran before in the same
    pass (`uses`); `channels` drops whole feature maps."""

    def __init__(self, share: float, salt: int, channels: bool) -> None:
        super().__init__()
        self.share, self.salt, self.channels, self.uses = share, salt, channels, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        of = batch_key.get(None)
        if of is None:
            raise Refused("Dropout draws from the key of a batch, and there is none; take model.mode(training=False).")
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.channels else tuple(x.shape)
        noise = hashing.uniform(hashing.key(of, self.salt, self.uses), shape, torch.float32, x.device)
        self.uses += 1
        return x * (noise >= self.share) * (1 / (1 - self.share) if self.share < 1 else 0.0)


def purify(module: nn.Module) -> nn.Module:
    """Replace the layers that carry hidden state, in place; a layer that stands in two places stays one."""
    pure: dict[nn.Module, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if layer not in pure:
            pure[layer] = _pure(layer, path, salt=len(pure))
        if pure[layer] is not layer and path:
            module.set_submodule(path, pure[layer])
    return pure[module]


def _pure(layer: nn.Module, path: str, salt: int) -> nn.Module:
    kind = type(layer).__name__
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        raise Refused(f"{kind} '{path}' has no weights yet; run the module once on an example, then wrap it.")
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return BatchNorm(layer, path)
    if isinstance(layer, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return Dropout(layer.p, salt, channels=not isinstance(layer, nn.Dropout))
    if _draws_by_itself(layer):
        raise Refused(f"Dropout inside {kind} '{path}' cannot be repeated; set it to 0 and add nn.Dropout layers.")
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        raise Refused(f"{kind} '{path}' keeps running statistics; set track_running_stats=False or take BatchNorm.")
    return layer


def _draws_by_itself(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return layer.dropout > 0
    return isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
