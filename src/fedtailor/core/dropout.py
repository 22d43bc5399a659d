"""Dropout, and attention with dropout, from the key of the batch, so that all engines drop the same values."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedtailor.core import random
from fedtailor.core.vmap_context import is_transformed
from fedtailor.errors import ConfigError

batch_key: ContextVar[int | Tensor] = ContextVar("batch_key")  # key of dropout masks in the current batch
_CALLS = 2**32 - 1  # salt of functional calls; layers are numbered from 0


class Dropout(nn.Module):
    """Dropout whose mask depends on the batch's key, the layer (`salt`), and its number of calls in the same forward
    pass (`uses`). `channels` drops whole feature maps."""

    inplace = False  # as in `nn.Dropout`

    def __init__(self, p: float, salt: int, channels: bool = False) -> None:
        super().__init__()
        self.p, self.salt, self.channels, self.uses = p, salt, channels, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.uses += 1
        return _drop(x, self.p, self.salt, self.uses - 1, self.channels)


def _drop(x: Tensor, p: float, salt: int, use: int, channels: bool) -> Tensor:
    key = batch_key.get(None)
    if key is None:
        raise ConfigError("Dropout in training mode needs a batch; outside of one, use model.mode(training=False).")
    shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if channels else tuple(x.shape)
    noise = random.uniform(random.make_key(key, salt, use), shape, torch.float32, x.device)
    return x * (noise >= p) * (1 / (1 - p) if p < 1 else 0.0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    need_weights: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return scaled dot-product attention, and its weights after dropout if they are needed.

    `mask` is added to the scores. A query that may attend to no key gets zeros.

    >>> x = torch.ones(1, 3, 4)
    >>> attend(x, x, x)[0].shape
    torch.Size([1, 3, 4])
    """
    if dropout is None and not need_weights and not is_transformed():  # PyTorch's kernel has no rule for vmap
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale), None
    excluded = None if mask is None else (mask == -torch.inf).all(-1, keepdim=True)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if mask is not None and excluded is not None:
        scores = scores + mask.masked_fill(excluded, 0.0)  # a softmax of −∞ alone would be NaN
    weights = scores.softmax(-1) if dropout is None else dropout(scores.softmax(-1))
    found = (weights @ value, weights if need_weights else None)
    if excluded is None:
        return found
    return found[0].masked_fill(excluded, 0.0), None if found[1] is None else found[1].masked_fill(excluded, 0.0)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores: −∞ where a boolean mask is true.

    >>> additive_mask(torch.tensor([False, True]), torch.float32)
    tensor([0., -inf])
    """
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


class FunctionalDropout(TorchFunctionMode):
    """Computes calls of `F.dropout`, and of attention with `dropout_p`, from the key of the batch.

    It serves modules that call these functions instead of layers, such as BERT of Hugging Face. `calls` is their
    number in this forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        return func(*args, **kwargs or {}) if replacement is None else replacement(self, *args, **kwargs or {})

    def drop(self, x: Tensor, p: float, channels: bool = False) -> Tensor:
        """Return the values after dropout with the mask of the next call."""
        self.calls += 1
        return _drop(x, p, _CALLS, self.calls, channels)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Compute `F.dropout`."""
        return self._dropout(input, p, training, inplace, channels=False)

    def channel_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Compute `F.dropout1d`, `F.dropout2d`, and `F.dropout3d`."""
        return self._dropout(input, p, training, inplace, channels=True)

    def _dropout(self, x: Tensor, p: float, training: bool, inplace: bool, channels: bool) -> Tensor:
        if not training or p == 0:
            return x
        return x.copy_(self.drop(x, p, channels)) if inplace else self.drop(x, p, channels)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute `F.scaled_dot_product_attention`."""
        if dropout_p == 0 and not is_transformed():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        if is_causal:
            size, device = (query.shape[-2], key.shape[-2]), query.device
            attn_mask = torch.ones(size, dtype=torch.bool, device=device).tril()
        if attn_mask is not None:  # here, a boolean mask is true for the keys that a query may attend to
            is_boolean = attn_mask.dtype == torch.bool
            attn_mask = additive_mask(~attn_mask if is_boolean else attn_mask, query.dtype)
        drop = None if dropout_p == 0 else lambda weights: self.drop(weights, dropout_p)
        return attend(query, key, value, attn_mask, drop, scale=scale)[0]


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: FunctionalDropout.dropout,
    torch.dropout: FunctionalDropout.dropout,
    F.dropout1d: FunctionalDropout.channel_dropout,
    F.dropout2d: FunctionalDropout.channel_dropout,
    F.dropout3d: FunctionalDropout.channel_dropout,
    F.scaled_dot_product_attention: FunctionalDropout.attention,
}
