# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for small convolutions of many clients, and for ReLU with max pooling.

A convolution is a product of the weights and the input patches (im2col); the patches are gathered during the product
and never stored in memory. The grid covers all clients, so one client's convolution need not fill the device. Sums have
a fixed order, so results are reproducible to the bit. Outputs and input gradients are computed in full float32; weight
gradients use tensor cores if cuDNN may use them (torch.backends.cudnn.allow_tf32), or if inputs are in bfloat16, whose
products TF32 computes exactly. Results in bfloat16 are rounded once, after the sum.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedtailor.training.engines.kernels.geometry import Geometry, Pair


@dataclass(frozen=True)
class Tile:
    """The part of a weight gradient that one program computes at a time."""

    outputs: int
    taps: int
    pixels: int
    warps: int
    stages: int


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution of every client."""
    out = x.new_empty(*x.shape[:2], weight.shape[1], *geometry.out)
    walk = (geometry.stride, (-geometry.padding[0], -geometry.padding[1]), geometry.dilation, (1, 1))
    _gather(x.contiguous(), weight.permute(0, 2, 3, 4, 1), bias, out, walk)
    return out


def input_gradient(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the input gradient of every client: each pixel gathers from the outputs that depend on it."""
    out = g.new_empty(*g.shape[:2], weight.shape[2], *geometry.size)
    walk = ((1, 1), geometry.padding, (-geometry.dilation[0], -geometry.dilation[1]), geometry.stride)
    _gather(g.contiguous(), weight.permute(0, 1, 3, 4, 2), None, out, walk)
    return out


def _gather(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, walk: tuple[Pair, Pair, Pair, Pair]) -> None:
    """Gather patches of x and multiply them by `weight` [clients, channels of x, *kernel, channels of out]."""
    clients, batch, channels, height, width = x.shape
    outputs = out.shape[2]
    tile_outputs, tile_pixels = gather_tile(outputs)
    blocks = triton.cdiv(outputs, tile_outputs)
    padded = F.pad(weight, (0, blocks * tile_outputs - outputs)).contiguous()
    pixels = batch * prod(out.shape[3:])
    _gather_kernel[(clients * triton.cdiv(pixels, tile_pixels) * blocks,)](
        x, padded, padded if bias is None else bias.contiguous(), out, batch, bias is not None,
        outputs, channels, height, width, *out.shape[3:], *weight.shape[2:4],
        *walk[0], *walk[1], *walk[2], *walk[3],
        padded.shape[4], tile_outputs, tile_pixels, num_warps=1,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    x, weight, bias, out, batch, BIASED: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    SCALE_Y: tl.constexpr, SCALE_X: tl.constexpr, SHIFT_Y: tl.constexpr, SHIFT_X: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, PART_Y: tl.constexpr, PART_X: tl.constexpr,
    PADDED: tl.constexpr, TILE_OUTPUTS: tl.constexpr, TILE_PIXELS: tl.constexpr,
):  # fmt: skip
    """Compute out[o, p] = Σ_k weight[k, o] · x[position of tap k for pixel p].

    Along an axis, this position is (p · SCALE + SHIFT + k · STEP) / PART, if it is an integer and inside the input.
    A thread holds all outputs of a few pixels, so that one loaded value serves all of them; the weights are the same
    for all threads and are loaded once.
    """
    FRAME: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    IMAGE: tl.constexpr = HEIGHT * WIDTH
    INSIDE: tl.constexpr = SHIFT_Y == 0 and SHIFT_X == 0 and PART_Y == 1 and PART_X == 1 and STEP_Y > 0
    OUTPUT_BLOCKS: tl.constexpr = PADDED // TILE_OUTPUTS
    pixels = batch * FRAME
    blocks = tl.cdiv(pixels, TILE_PIXELS)
    program = tl.program_id(0)
    client = (program // (blocks * OUTPUT_BLOCKS)).to(tl.int64)
    block = (program // OUTPUT_BLOCKS) % blocks
    x += client * batch * (CHANNELS * IMAGE)
    out += client * batch * (OUTPUTS * FRAME)

    pixel = block * TILE_PIXELS + tl.arange(0, TILE_PIXELS)[None, :]
    real = pixel < pixels
    sample, place = pixel // FRAME, pixel % FRAME
    y = place // OUT_WIDTH * SCALE_Y + SHIFT_Y
    z = place % OUT_WIDTH * SCALE_X + SHIFT_X
    corner = sample * (CHANNELS * IMAGE) + y * WIDTH + z
    output = (program % OUTPUT_BLOCKS) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)[:, None]
    weight += client * (CHANNELS * KERNEL_HEIGHT * KERNEL_WIDTH * PADDED)
    total = tl.zeros((TILE_OUTPUTS, TILE_PIXELS), tl.float32)
    for channel in range(CHANNELS):
        for i in range(KERNEL_HEIGHT):
            seen_row = real
            if PART_Y > 1 or PART_X > 1:
                row = y + i * STEP_Y
                seen_row &= (row >= 0) & (row % PART_Y == 0) & (row // PART_Y < HEIGHT)
                line = x + channel * IMAGE + (sample * (CHANNELS * IMAGE) + row // PART_Y * WIDTH)
            else:
                line = x + (channel * IMAGE + i * (STEP_Y * WIDTH)) + corner
                if not INSIDE:
                    seen_row &= (y + i * STEP_Y).to(tl.uint32) < HEIGHT
            for j in tl.static_range(KERNEL_WIDTH):
                seen = seen_row
                if PART_Y > 1 or PART_X > 1:
                    column = z + j * STEP_X
                    seen &= (column >= 0) & (column % PART_X == 0) & (column // PART_X < WIDTH)
                    value = tl.load(line + column // PART_X, mask=seen, other=0.0).to(tl.float32)
                else:
                    if not INSIDE:
                        seen &= (z + j * STEP_X).to(tl.uint32) < WIDTH
                    value = tl.load(line + j * STEP_X, mask=seen, other=0.0).to(tl.float32)
                tap = (channel * KERNEL_HEIGHT + i) * KERNEL_WIDTH + j
                total += tl.load(weight + tap * PADDED + output).to(tl.float32) * value
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    where = sample * (OUTPUTS * FRAME) + place + output * FRAME
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(output < OUTPUTS) & real)


def weight_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """Return the weight and bias gradient of every client: partial sums over the pixels, then their sum."""
    clients, batch, outputs = g.shape[:3]
    channels = x.shape[2]
    columns = channels * prod(geometry.kernel) + geometry.biased
    pixels = batch * prod(geometry.out)
    tile, splits = weight_gradient_tile(outputs, columns, pixels)
    blocks = triton.cdiv(columns, tile.taps), triton.cdiv(outputs, tile.outputs)
    steps = triton.cdiv(triton.cdiv(pixels, tile.pixels), splits)
    parts = g.new_empty(clients, splits, outputs, columns, dtype=torch.float32)
    _weight_gradient_kernel[(clients * splits * blocks[0] * blocks[1],)](
        g.contiguous(), x.contiguous(), parts, batch, steps, splits, geometry.biased,
        outputs, channels, *geometry.size, *geometry.out, *geometry.kernel,
        *geometry.stride, *geometry.padding, *geometry.dilation,
        _precision(g.dtype), tile.outputs, tile.taps, tile.pixels, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return (parts.sum(1) if splits > 1 else parts[:, 0]).to(g.dtype)


@triton.jit
def _weight_gradient_kernel(
    g, x, parts, batch, steps, splits, BIASED: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, PADDING_Y: tl.constexpr, PADDING_X: tl.constexpr,
    DILATION_Y: tl.constexpr, DILATION_X: tl.constexpr, PRECISION: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr, TILE_TAPS: tl.constexpr, TILE_PIXELS: tl.constexpr,
):  # fmt: skip
    """Compute parts[o, k] = Σ_p g[o, p] · x[position of tap k for pixel p] over a part of the pixels.

    With a bias, x is 1 for an additional last tap.
    """
    AREA: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH
    TAPS: tl.constexpr = CHANNELS * AREA
    COLUMNS: tl.constexpr = TAPS + BIASED
    FRAME: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    IMAGE: tl.constexpr = HEIGHT * WIDTH
    OUTPUT_BLOCKS: tl.constexpr = (OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    TAP_BLOCKS: tl.constexpr = (COLUMNS + TILE_TAPS - 1) // TILE_TAPS
    program = tl.program_id(0)
    part = program // (OUTPUT_BLOCKS * TAP_BLOCKS)  # index among the parts of all clients
    client = (part // splits).to(tl.int64)
    pixels = batch * FRAME
    g += client * batch * (OUTPUTS * FRAME)
    x += client * batch * (CHANNELS * IMAGE)
    parts += part.to(tl.int64) * (OUTPUTS * COLUMNS)

    output = (program % OUTPUT_BLOCKS) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    tap = (program // OUTPUT_BLOCKS % TAP_BLOCKS) * TILE_TAPS + tl.arange(0, TILE_TAPS)
    known = tl.minimum(tap, TAPS - 1)  # values beyond the last tap are not stored
    spot = known % AREA
    down, right = spot // KERNEL_WIDTH * DILATION_Y - PADDING_Y, spot % KERNEL_WIDTH * DILATION_X - PADDING_X
    corner = known // AREA * IMAGE + down * WIDTH + right
    total = tl.zeros((TILE_OUTPUTS, TILE_TAPS), tl.float32)
    for step in range(steps):
        pixel = ((part % splits) * steps + step) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
        real = (pixel < pixels)[None, :]
        sample, place = pixel // FRAME, pixel % FRAME
        where = (sample * (OUTPUTS * FRAME) + place)[None, :] + (output * FRAME)[:, None]
        gradient = tl.load(g + where, mask=(output < OUTPUTS)[:, None] & real, other=0.0).to(tl.float32)
        y, z = place // OUT_WIDTH * STRIDE_Y, place % OUT_WIDTH * STRIDE_X
        where = (sample * (CHANNELS * IMAGE) + y * WIDTH + z)[None, :] + corner[:, None]
        if PADDING_Y > 0 or PADDING_X > 0:
            row, column = y[None, :] + down[:, None], z[None, :] + right[:, None]
            seen = (row.to(tl.uint32) < HEIGHT) & (column.to(tl.uint32) < WIDTH)
            patch = tl.load(x + where, mask=seen & real, other=0.0).to(tl.float32)
        else:
            patch = tl.load(x + where, mask=real, other=0.0).to(tl.float32)
        if BIASED:
            patch = tl.where((tap == TAPS)[:, None], 1.0, patch)
        total = tl.dot(gradient, tl.trans(patch), total, input_precision=PRECISION)
    where = output[:, None] * COLUMNS + tap[None, :]
    tl.store(parts + where, total, mask=(output < OUTPUTS)[:, None] & (tap < COLUMNS)[None, :])


def gather_tile(outputs: int) -> tuple[int, int]:
    """Return how many outputs and pixels a warp computes in a convolution or an input gradient."""
    return (8, 256) if outputs <= 8 else (16, 128)


def weight_gradient_tile(outputs: int, columns: int, pixels: int) -> tuple[Tile, int]:
    """Return the tile of a weight gradient, and into how many partial sums the pixels are split."""
    rows = _tile_rows(outputs)
    if rows >= 64:
        return Tile(min(rows, 128), 64, 32, 4, 3), max(1, min(8, pixels // 2048))
    # If the tiles of loads and result had the same shape, Triton would use one layout for both, which slows loads down.
    tile = Tile(rows, 16, 64, 4, 1) if columns <= 16 else Tile(rows, 32, 64, 2, 1)
    return tile, max(8, min(32, pixels // 1024))


def _tile_rows(count: int) -> int:
    """Return the next power of two, at least 16, the minimum for tensor cores."""
    return max(16, int(triton.next_power_of_2(count)))


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.bfloat16 or torch.backends.cudnn.allow_tf32 else "ieee"


def relu_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return max(0, x) over every 2×2 window of [..., height, width], and its argmax: 0 to 3, or 4 if the max is 0."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-2], x.shape[-2] // 2, x.shape[-1] // 2)
    argmax = torch.empty_like(out, dtype=torch.uint8)
    _launch_elementwise(_relu_pool_kernel, out.numel(), x, out, argmax, *x.shape[-2:])
    return out, argmax


def unpool(g: Tensor, argmax: Tensor, height: int, width: int) -> Tensor:
    """Return the input gradient of `relu_pool`: each window's gradient at its argmax, zero elsewhere."""
    out = g.new_empty(*g.shape[:-2], height, width)
    _launch_elementwise(_unpool_kernel, out.numel(), g.contiguous(), argmax.contiguous(), out, height, width)
    return out


def gather(x: Tensor, argmax: Tensor) -> Tensor:
    """Return the elements at each window's argmax: the transpose of `unpool`."""
    out = x.new_empty(argmax.shape)
    _launch_elementwise(_gather_argmax_kernel, out.numel(), x.contiguous(), argmax.contiguous(), out, *x.shape[-2:])
    return out


def _launch_elementwise(kernel: Any, count: int, *args: Any) -> None:
    if count:
        kernel[(triton.cdiv(count, 1024),)](*args[:3], count, *args[3:], count * 4 >= 2**31, 1024, num_warps=4)


@triton.jit
def _relu_pool_kernel(x, out, argmax, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    inside = index < count
    corner = (
        x + index // ((H // 2) * (W // 2)) * (H * W) + index // (W // 2) % (H // 2) * (2 * W) + index % (W // 2) * 2
    )
    best = tl.load(corner, mask=inside, other=0.0).to(tl.float32)
    place = tl.zeros((TILE,), tl.int32)
    for i in tl.static_range(1, 4):
        value = tl.load(corner + (i // 2 * W + i % 2), mask=inside, other=0.0).to(tl.float32)
        larger = (value > best) | (value != value)  # NaN wins, as in PyTorch
        best = tl.where(larger, value, best)
        place = tl.where(larger, i, place)
    tl.store(out + index, tl.where(best <= 0, 0.0, best).to(out.dtype.element_ty), mask=inside)
    tl.store(argmax + index, tl.where(best <= 0, 4, place).to(tl.uint8), mask=inside)


@triton.jit
def _unpool_kernel(g, argmax, out, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    y, z = index // W % H, index % W
    window = index // (H * W) * ((H // 2) * (W // 2)) + y // 2 * (W // 2) + z // 2
    inside = (index < count) & (y < H // 2 * 2) & (z < W // 2 * 2)  # an odd last row or column belongs to no window
    place = tl.load(argmax + window, mask=inside, other=4)
    value = tl.load(g + window, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(place == y % 2 * 2 + z % 2, value, 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < count)


@triton.jit
def _gather_argmax_kernel(
    x, argmax, out, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr
):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    place = tl.load(argmax + index, mask=index < count, other=4).to(tl.int32)
    corner = (
        x + index // ((H // 2) * (W // 2)) * (H * W) + index // (W // 2) % (H // 2) * (2 * W) + index % (W // 2) * 2
    )
    value = tl.load(corner + (place // 2 * W + place % 2), mask=place < 4, other=0.0)
    tl.store(out + index, value, mask=index < count)
