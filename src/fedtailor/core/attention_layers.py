"""Attention layers of PyTorch with dropout from the key of the batch, and without branches on the values of masks."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.core.dropout import Dropout, additive_mask, attend
from fedtailor.errors import ConfigError


class MultiheadAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` whose weights pass through `drop`, if it has dropout."""

    drop: Dropout | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ConfigError("Attention with is_causal=True needs the causal mask as attn_mask.")
        is_batched = query.ndim == 3
        if not is_batched:
            query, key, value = (part.unsqueeze(0) for part in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        heads = self._project(query, key, value)
        mask = self._merge_masks(attn_mask, key_padding_mask, heads[0], heads[1].shape[-2])
        out, weights = attend(*heads, mask, self.drop if self.training else None, need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, and values of all heads: [batch, heads, length, width]."""
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = self.in_proj_weight.chunk(3) if self._qkv_same_embed_dim else separate
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(*parts) for parts in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None:
            k, v = (
                torch.cat([part, cast(Tensor, bias).expand(len(part), 1, -1)], 1)
                for part, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        q, k, v = (torch.unflatten(part, -1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(part, (0, 0, 0, 1)) for part in (k, v))
        return q, k, v

    def _merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, keys: int
    ) -> Tensor | None:
        """Return the sum of the masks, which has one column per key and broadcasts to the scores of all heads."""
        parts = []
        if attn_mask is not None:
            parts.append(torch.unflatten(attn_mask, 0, (-1, self.num_heads)) if attn_mask.ndim == 3 else attn_mask)
        if key_padding_mask is not None:
            parts.append(key_padding_mask[:, None, None, :])
        masks = [additive_mask(part, query.dtype) for part in parts]
        masks = [F.pad(mask, (0, keys - mask.shape[-1])) for mask in masks]  # keys that the layer itself adds
        return sum(masks[1:], masks[0]) if masks else None

    def count_cost(self, output: tuple[Tensor, Tensor | None]) -> tuple[int, int]:
        """Return the multiplications and the stored values of self-attention with this output."""
        out = output[0]
        length = out.shape[-2] if self.batch_first or out.ndim == 2 else out.shape[0]
        rows = out.numel() // self.embed_dim  # positions × samples
        multiplications = rows * self.embed_dim * (3 * self.embed_dim + 2 * length)  # `out_proj` counts itself
        return multiplications, rows * (4 * self.embed_dim + 2 * self.num_heads * length)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """An `nn.TransformerEncoderLayer` that computes the same in training and evaluation, without the fast path."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks))
        return cast(Tensor, self.norm2(x + self._ff_block(x)))


class TransformerEncoder(nn.TransformerEncoder):
    """An `nn.TransformerEncoder` that does not look at the values of a mask to find out whether it is causal."""

    use_nested_tensor = False

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        return super().forward(src, mask, src_key_padding_mask, bool(is_causal))


class TransformerDecoder(nn.TransformerDecoder):
    """An `nn.TransformerDecoder` that does not look at the values of a mask to find out whether it is causal."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return super().forward(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
}


def make_attention_functional(layer: nn.Module, salt: int) -> bool:
    """Change the class of an attention layer in place; return whether it is one. Subclasses may compute something else.

    >>> make_attention_functional(nn.MultiheadAttention(4, 2), salt=0)
    True
    """
    kind = _REPLACEMENTS.get(type(layer))
    if kind is None:
        return False
    layer.__class__ = kind
    if isinstance(layer, MultiheadAttention):
        layer.drop = Dropout(layer.dropout, salt) if layer.dropout > 0 else None
    layer.__dict__.pop("use_nested_tensor", None)  # the class of the encoder sets it
    return True
