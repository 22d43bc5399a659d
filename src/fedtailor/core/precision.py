"""The precision of training: float32, TF32, or bfloat16 for products, with weights, losses, and sums in float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Precision = Literal["float32", "tf32", "bf16"]

# Functions that sum or exponentiate. Which of them autocast computes in float32 differs between devices, and under
# vmap, normalization cannot mix bfloat16 inputs with float32 weights. So their inputs are converted on all devices.
_IN_FLOAT32: frozenset[Any] = frozenset({
    F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm, F.local_response_norm, F.normalize,
    torch.batch_norm, torch.instance_norm, torch.group_norm, torch.layer_norm, torch.rms_norm,
    F.softmax, F.log_softmax, F.cosine_similarity, F.cross_entropy, F.binary_cross_entropy,
    torch.softmax, torch.log_softmax, torch.logsumexp, torch.cosine_similarity, torch.var, torch.std, torch.norm,
    Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp, Tensor.var, Tensor.std, Tensor.norm,
})  # fmt: skip


def to_float32(x: Any) -> Any:
    """Return a bfloat16 tensor in float32, and anything else unchanged.

    >>> to_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_float32(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x


class _NormalizeInFloat32(TorchFunctionMode):
    """Converts the bfloat16 inputs of normalization, softmax, and similar functions to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IN_FLOAT32:
            args, kwargs = [to_float32(arg) for arg in args], {name: to_float32(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def _bfloat16(device: str) -> Iterator[None]:
    # A cache of converted weights would keep tensors of an earlier transform or captured step.
    with torch.autocast(device, torch.bfloat16, cache_enabled=False), _NormalizeInFloat32():
        yield


def forward_precision(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of a forward pass: in bfloat16, products and convolutions convert their inputs.

    The backward pass follows the forward pass, so it needs no context.

    >>> with forward_precision("bf16", torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    return _bfloat16(device.type) if precision == "bf16" else nullcontext()


@contextmanager
def training_precision(precision: Precision) -> Iterator[None]:
    """Let products and convolutions in float32 use TF32 inside the `with` block, if the precision is "tf32".

    Other precisions leave PyTorch's settings as they are.

    >>> with training_precision("tf32"):
    ...     torch.get_float32_matmul_precision()
    'high'
    >>> torch.get_float32_matmul_precision()
    'highest'
    """
    if precision != "tf32":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = (torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    torch.set_float32_matmul_precision("high")
    cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def autocast_inputs(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the dtype of autocast, if it is enabled; for operations that autocast does not know.

    >>> with forward_precision("bf16", torch.device("cpu")):
    ...     autocast_inputs(torch.ones(1))[0].dtype
    torch.bfloat16
    """
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
