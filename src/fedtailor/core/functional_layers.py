"""Layers without hidden state that replace the stateful layers of PyTorch, so that all engines compute the same values.

Dropout takes its random numbers from the key of the batch (`dropout`). In training, batch normalization uses the
statistics of the batch, and `capture_batch_stats` collects them. Recurrent and attention layers run under
`torch.func.vmap` (`recurrent_layers`, `attention_layers`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedtailor.core.attention_layers import make_attention_functional
from fedtailor.core.dropout import Dropout
from fedtailor.core.precision import to_float32
from fedtailor.core.recurrent_layers import make_recurrent_functional
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError

_captured: ContextVar[Params | None] = ContextVar("captured", default=None)


def join_path(path: str, name: str) -> str:
    """Return the path of a parameter or submodule inside a module."""
    return f"{path}.{name}" if path else name


@contextmanager
def capture_batch_stats() -> Iterator[Params]:
    """Collect the batch statistics of all batch-normalization layers that run inside the `with` block."""
    statistics: Params = {}
    token = _captured.set(statistics)
    try:
        yield statistics
    finally:
        _captured.reset(token)


class BatchNorm(nn.modules.batchnorm._NormBase):
    """Batch normalization without side effects; `path` is its name in the network."""

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, path: str) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(original.__dict__)  # share the parameters, so that they stay tied or frozen
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_var is not None:
            mean, var = self.running_mean.detach(), self.running_var.detach()  # no gradient
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        statistics = _captured.get()
        if statistics is not None:
            axes = [axis for axis in range(x.ndim) if axis != 1]
            values = to_float32(x.detach())
            statistics[join_path(self.path, "running_mean")] = values.mean(axes)
            statistics[join_path(self.path, "running_var")] = values.var(axes)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def make_functional(module: nn.Module) -> nn.Module:
    """Replace the stateful layers of a module in place; a layer that is used in two places stays one layer."""
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if layer not in replaced:
            replaced[layer] = _make_layer_functional(layer, path, salt=len(replaced))
        if replaced[layer] is not layer and path:
            module.set_submodule(path, replaced[layer])
    return replaced[module]


def _make_layer_functional(layer: nn.Module, path: str, salt: int) -> nn.Module:
    kind = type(layer).__name__
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        raise ConfigError(f"{kind} '{path}' has no weights yet; run the module on one example before you wrap it.")
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return BatchNorm(layer, path)
    if isinstance(layer, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return Dropout(layer.p, salt, channels=not isinstance(layer, nn.Dropout))
    if make_recurrent_functional(layer, salt) or make_attention_functional(layer, salt):
        return layer
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        layer.sparse = False  # vmap and optimizers need dense gradients, which have the same values
    if _has_internal_dropout(layer):
        raise ConfigError(f"Dropout inside {kind} '{path}' is not reproducible; set it to 0 and add nn.Dropout layers.")
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        raise ConfigError(f"{kind} '{path}' keeps running statistics; set track_running_stats=False or use BatchNorm.")
    return layer


def _has_internal_dropout(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return layer.dropout > 0
    return isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
