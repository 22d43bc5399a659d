# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for group normalization, with the addition of a residual and ReLU, and for its gradient.

One program computes one group of one sample, whose values are adjacent in memory, so it reads each of them once. Sums
are computed in float32 and have a fixed order, so results are reproducible to the bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedtailor.training.engines.kernels.geometry import Normalization

_MAX_TILE = 16384  # values of a group that one program holds


def fits(channels: int, area: int) -> bool:
    """Whether one program can hold a group of so many channels and pixels."""
    rows, columns = _tile(channels, area)
    return rows * columns <= _MAX_TILE


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, kind: Normalization
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result for x [..., samples, channels, height, width], and mean and 1 / deviation of every group.

    The weights and biases are [..., channels].
    """
    x = x.contiguous()
    out, added = torch.empty_like(x), x if residual is None else residual.contiguous()
    mean, scale = (x.new_empty(*x.shape[:-3], kind.groups, dtype=torch.float32) for _ in range(2))
    _launch(_normalize_kernel, x, kind, x, weight.contiguous(), bias.contiguous(), added, out, mean, scale, kind.eps)
    return out, mean, scale


def gradient(
    g: Tensor, x: Tensor, weight: Tensor, out: Tensor, mean: Tensor, scale: Tensor, kind: Normalization
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, bias, and of the residual if there is one, given that of `out`."""
    g, x = g.contiguous(), x.contiguous()
    x_gradient = torch.empty_like(x)
    masked = torch.empty_like(g) if kind.residual else g
    parts = x.new_empty(2, *x.shape[:-2], dtype=torch.float32)  # weight and bias gradients of every sample
    saved = weight.contiguous(), out.contiguous(), mean.contiguous(), scale.contiguous()
    _launch(_gradient_kernel, x, kind, g, x, *saved, x_gradient, masked, parts, parts[0].numel())
    found = x_gradient, *parts.sum(-2)
    return (*found, masked) if kind.residual else found


def _launch(kernel: Any, x: Tensor, kind: Normalization, *args: Any) -> None:
    samples, channels, area = x.shape[-4], x.shape[-3] // kind.groups, x.shape[-2] * x.shape[-1]
    programs = x.shape[:-3].numel() * kind.groups
    rows, columns = _tile(channels, area)
    warps = max(1, min(16, rows * columns // 512))
    if programs:
        kernel[(programs,)](
            *args, samples, kind.residual, kind.relu, kind.groups, channels, area, rows, columns, num_warps=warps
        )


def _tile(channels: int, area: int) -> tuple[int, int]:
    return int(triton.next_power_of_2(channels)), int(triton.next_power_of_2(area))


@triton.jit
def _normalize_kernel(
    x, weight, bias, residual, out, means, scales, eps, samples,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, AREA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    channel, place = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    known, inside = channel < CHANNELS, (channel < CHANNELS) & (place < AREA)
    where = program * (CHANNELS * AREA) + channel * AREA + place
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(value, 1), 0) / (CHANNELS * AREA)
    centered = tl.where(inside, value - mean, 0.0)
    variance = tl.sum(tl.sum(centered * centered, 1), 0) / (CHANNELS * AREA)
    scale = 1 / tl.sqrt(variance + eps)
    parameter = program // GROUPS // samples * (GROUPS * CHANNELS) + program % GROUPS * CHANNELS + channel
    result = centered * scale * tl.load(weight + parameter, mask=known, other=0.0).to(tl.float32)
    result += tl.load(bias + parameter, mask=known, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        result = tl.where(result <= 0, 0.0, result)  # NaN stays, as in PyTorch
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)
    tl.store(means + program, mean)
    tl.store(scales + program, scale)


@triton.jit
def _gradient_kernel(
    g, x, weight, out, means, scales, x_gradient, masked, parts, size, samples,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, AREA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    channel, place = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    known, inside = channel < CHANNELS, (channel < CHANNELS) & (place < AREA)
    where = program * (CHANNELS * AREA) + channel * AREA + place
    scale = tl.load(scales + program)
    centered = tl.load(x + where, mask=inside, other=0.0).to(tl.float32) - tl.load(means + program)
    normed = tl.where(inside, centered * scale, 0.0)
    given = tl.load(g + where, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        given = tl.where(tl.load(out + where, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, given)
    if RESIDUAL:
        tl.store(masked + where, given.to(masked.dtype.element_ty), mask=inside)
    own = program * CHANNELS + tl.arange(0, ROWS)
    tl.store(parts + own, tl.sum(given * normed, 1), mask=tl.arange(0, ROWS) < CHANNELS)
    tl.store(parts + size + own, tl.sum(given, 1), mask=tl.arange(0, ROWS) < CHANNELS)
    parameter = program // GROUPS // samples * (GROUPS * CHANNELS) + program % GROUPS * CHANNELS + channel
    given *= tl.load(weight + parameter, mask=known, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(given, 1), 0) / (CHANNELS * AREA)
    product = tl.sum(tl.sum(given * normed, 1), 0) / (CHANNELS * AREA)
    result = scale * (given - mean - normed * product)
    tl.store(x_gradient + where, result.to(x_gradient.dtype.element_ty), mask=inside)
