# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for small convolutions of many clients, and for what follows them.

A convolution is a product of the weights and of patches of the input; the patches are gathered while the product is
computed and never lie in memory. Programs run over the clients, so one client's convolution need not fill the device.
Sums are made in a fixed order, so results can be repeated to the bit. Values and gradients in the input are computed in
full float32; the gradient in the weights uses tensor cores where cuDNN may (torch.backends.cudnn.allow_tf32).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedtailor.engines.convolution_forms import Geometry, Pair


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time of a gradient in the weights."""

    outputs: int
    taps: int
    pixels: int
    warps: int
    stages: int


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    """Every client's convolution."""
    out = x.new_empty(*x.shape[:2], weight.shape[1], *of.out)
    walk = (of.stride, (-of.padding[0], -of.padding[1]), of.dilation, (1, 1))
    _gather(x.contiguous(), weight.permute(0, 2, 3, 4, 1), bias, out, walk)
    return out


def input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    """Every client's gradient in the input: the kernel walks back from each pixel to the outputs that saw it."""
    out = g.new_empty(*g.shape[:2], weight.shape[2], *of.size)
    walk = ((1, 1), of.padding, (-of.dilation[0], -of.dilation[1]), of.stride)
    _gather(g.contiguous(), weight.permute(0, 1, 3, 4, 2), None, out, walk)
    return out


def _gather(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, walk: tuple[Pair, Pair, Pair, Pair]) -> None:
    """weight is [clients, channels of x, *kernel, channels of out]."""
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
    """out[o, p] = Σ_k weight[k, o] · x[where tap k stands for pixel p]; along an axis that is
    (p · SCALE + SHIFT + k · STEP) / PART, if whole and inside. A thread holds all outputs of a few pixels, so that one
    number loaded serves them all; the weights are the same for all threads, which costs one load for all.
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
                    value = tl.load(line + column // PART_X, mask=seen, other=0.0)
                else:
                    if not INSIDE:
                        seen &= (z + j * STEP_X).to(tl.uint32) < WIDTH
                    value = tl.load(line + j * STEP_X, mask=seen, other=0.0)
                tap = (channel * KERNEL_HEIGHT + i) * KERNEL_WIDTH + j
                total += tl.load(weight + tap * PADDED + output) * value
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + output, mask=output < OUTPUTS, other=0.0)
    where = sample * (OUTPUTS * FRAME) + place + output * FRAME
    tl.store(out + where, total, mask=(output < OUTPUTS) & real)


def weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    """Every client's gradient in the weights and the bias: parts over the pixels, then their sum."""
    clients, batch, outputs = g.shape[:3]
    channels = x.shape[2]
    columns = channels * prod(of.kernel) + of.biased
    pixels = batch * prod(of.out)
    tile, splits = slope_tile(outputs, columns, pixels)
    blocks = triton.cdiv(columns, tile.taps), triton.cdiv(outputs, tile.outputs)
    steps = triton.cdiv(triton.cdiv(pixels, tile.pixels), splits)
    parts = g.new_empty(clients, splits, outputs, columns)
    _slope_kernel[(clients * splits * blocks[0] * blocks[1],)](
        g.contiguous(), x.contiguous(), parts, batch, steps, splits, of.biased,
        outputs, channels, *of.size, *of.out, *of.kernel, *of.stride, *of.padding, *of.dilation,
        _precision(), tile.outputs, tile.taps, tile.pixels, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return parts.sum(1) if splits > 1 else parts[:, 0]


@triton.jit
def _slope_kernel(
    g, x, parts, batch, steps, splits, BIASED: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, PADDING_Y: tl.constexpr, PADDING_X: tl.constexpr,
    DILATION_Y: tl.constexpr, DILATION_X: tl.constexpr, PRECISION: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr, TILE_TAPS: tl.constexpr, TILE_PIXELS: tl.constexpr,
):  # fmt: skip
    """parts[o, k] = Σ_p g[o, p] · x[where tap k stands for pixel p], over some of the pixels; the last tap sees 1."""
    AREA: tl.constexpr = KERNEL_HEIGHT * KERNEL_WIDTH
    TAPS: tl.constexpr = CHANNELS * AREA
    COLUMNS: tl.constexpr = TAPS + BIASED
    FRAME: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    IMAGE: tl.constexpr = HEIGHT * WIDTH
    OUTPUT_BLOCKS: tl.constexpr = (OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    TAP_BLOCKS: tl.constexpr = (COLUMNS + TILE_TAPS - 1) // TILE_TAPS
    program = tl.program_id(0)
    part = program // (OUTPUT_BLOCKS * TAP_BLOCKS)  # counts the parts of all clients
    client = (part // splits).to(tl.int64)
    pixels = batch * FRAME
    g += client * batch * (OUTPUTS * FRAME)
    x += client * batch * (CHANNELS * IMAGE)
    parts += part.to(tl.int64) * (OUTPUTS * COLUMNS)

    output = (program % OUTPUT_BLOCKS) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    tap = (program // OUTPUT_BLOCKS % TAP_BLOCKS) * TILE_TAPS + tl.arange(0, TILE_TAPS)
    known = tl.minimum(tap, TAPS - 1)  # what lies beyond the last tap is not stored
    spot = known % AREA
    down, right = spot // KERNEL_WIDTH * DILATION_Y - PADDING_Y, spot % KERNEL_WIDTH * DILATION_X - PADDING_X
    corner = known // AREA * IMAGE + down * WIDTH + right
    total = tl.zeros((TILE_OUTPUTS, TILE_TAPS), tl.float32)
    for step in range(steps):
        pixel = ((part % splits) * steps + step) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
        real = (pixel < pixels)[None, :]
        sample, place = pixel // FRAME, pixel % FRAME
        where = (sample * (OUTPUTS * FRAME) + place)[None, :] + (output * FRAME)[:, None]
        slope = tl.load(g + where, mask=(output < OUTPUTS)[:, None] & real, other=0.0)
        y, z = place // OUT_WIDTH * STRIDE_Y, place % OUT_WIDTH * STRIDE_X
        where = (sample * (CHANNELS * IMAGE) + y * WIDTH + z)[None, :] + corner[:, None]
        if PADDING_Y > 0 or PADDING_X > 0:
            row, column = y[None, :] + down[:, None], z[None, :] + right[:, None]
            seen = (row.to(tl.uint32) < HEIGHT) & (column.to(tl.uint32) < WIDTH)
            patch = tl.load(x + where, mask=seen & real, other=0.0)
        else:
            patch = tl.load(x + where, mask=real, other=0.0)
        if BIASED:
            patch = tl.where((tap == TAPS)[:, None], 1.0, patch)
        total = tl.dot(slope, tl.trans(patch), total, input_precision=PRECISION)
    where = output[:, None] * COLUMNS + tap[None, :]
    tl.store(parts + where, total, mask=(output < OUTPUTS)[:, None] & (tap < COLUMNS)[None, :])


def gather_tile(outputs: int) -> tuple[int, int]:
    """Outputs and pixels that a warp computes in a convolution or in its gradient in the input."""
    return (8, 256) if outputs <= 8 else (16, 128)


def slope_tile(outputs: int, columns: int, pixels: int) -> tuple[Tile, int]:
    """The tile of a gradient in the weights, and in how many parts the pixels are summed."""
    rows = _power(outputs)
    if rows >= 64:
        return Tile(min(rows, 128), 64, 32, 4, 3), max(1, min(8, pixels // 2048))
    # tiles of the loads and of the result should differ in shape: else Triton gives them one layout, bad for loads
    tile = Tile(rows, 16, 64, 4, 1) if columns <= 16 else Tile(rows, 32, 64, 2, 1)
    return tile, max(8, min(32, pixels // 1024))


def _power(count: int) -> int:
    """The next power of two, at least 16: the least that tensor cores take."""
    return max(16, int(triton.next_power_of_2(count)))


def _precision() -> Any:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def relu_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every 2×2 window of [..., height, width], or 0; and which of the four it was, or 4 for none."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-2], x.shape[-2] // 2, x.shape[-1] // 2)
    which = torch.empty_like(out, dtype=torch.uint8)
    _each_element(_relu_pool_kernel, out.numel(), x, out, which, *x.shape[-2:])
    return out, which


def spread(g: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """A gradient of pooled windows, back at the elements that were largest."""
    out = g.new_empty(*g.shape[:-2], height, width)
    _each_element(_spread_kernel, out.numel(), g.contiguous(), which.contiguous(), out, height, width)
    return out


def pick(x: Tensor, which: Tensor) -> Tensor:
    """The elements at the places that were largest: the transpose of `spread`."""
    out = x.new_empty(which.shape)
    _each_element(_pick_kernel, out.numel(), x.contiguous(), which.contiguous(), out, *x.shape[-2:])
    return out


def _each_element(kernel: Any, count: int, *args: Any) -> None:
    if count:
        kernel[(triton.cdiv(count, 1024),)](*args[:3], count, *args[3:], count * 4 >= 2**31, 1024, num_warps=4)


@triton.jit
def _relu_pool_kernel(x, out, which, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    inside = index < count
    corner = (
        x + index // ((H // 2) * (W // 2)) * (H * W) + index // (W // 2) % (H // 2) * (2 * W) + index % (W // 2) * 2
    )
    best = tl.load(corner, mask=inside, other=0.0)
    place = tl.zeros((TILE,), tl.int32)
    for i in tl.static_range(1, 4):
        value = tl.load(corner + (i // 2 * W + i % 2), mask=inside, other=0.0)
        larger = (value > best) | (value != value)  # not-a-number wins, as in PyTorch
        best = tl.where(larger, value, best)
        place = tl.where(larger, i, place)
    tl.store(out + index, tl.where(best <= 0, 0.0, best), mask=inside)
    tl.store(which + index, tl.where(best <= 0, 4, place).to(tl.uint8), mask=inside)


@triton.jit
def _spread_kernel(g, which, out, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    y, z = index // W % H, index % W
    window = index // (H * W) * ((H // 2) * (W // 2)) + y // 2 * (W // 2) + z // 2
    inside = (index < count) & (y < H // 2 * 2) & (z < W // 2 * 2)  # an odd last row or column is in no window
    place = tl.load(which + window, mask=inside, other=4)
    value = tl.load(g + window, mask=inside, other=0.0)
    tl.store(out + index, tl.where(place == y % 2 * 2 + z % 2, value, 0.0), mask=index < count)


@triton.jit
def _pick_kernel(x, which, out, count, H: tl.constexpr, W: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * TILE + tl.arange(0, TILE)
    place = tl.load(which + index, mask=index < count, other=4).to(tl.int32)
    corner = (
        x + index // ((H // 2) * (W // 2)) * (H * W) + index // (W // 2) % (H // 2) * (2 * W) + index % (W // 2) * 2
    )
    value = tl.load(corner + (place // 2 * W + place % 2), mask=place < 4, other=0.0)
    tl.store(out + index, value, mask=index < count)
