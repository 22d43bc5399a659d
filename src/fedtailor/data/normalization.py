"""The mean and standard deviation by which inputs are normalized: compute, check, and apply them."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from math import floor, inf, isfinite, log10, prod
from typing import Literal

import torch
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.errors import DataError

Normalization = Literal["none", "half", "channel", "pixel"]
Statistics = tuple[float, ...]  # one number for all inputs, or one per channel or pixel

_BLOCK_SIZE = 2**22  # values that are converted to float64 at once; this limits memory
_CONSTANT = 1e-9  # a smaller ratio of standard deviation and mean is rounding of a constant
_DIGITS = 6  # of the results, so that they do not depend on the order in which values are added


def input_statistics(x: Tensor, samples: Tensor, per: Literal["channel", "pixel"]) -> tuple[Statistics, Statistics]:
    """Return the mean and the standard deviation of each channel, the first axis of an input, or of each number of an
    input, over these samples.

    Bytes are divided by 255 first, as in training. The standard deviation of a constant is given as 1.

    >>> input_statistics(torch.tensor([[0.0, 5.0], [2.0, 5.0]]), torch.tensor([0, 1]), "channel")
    ((1.0, 5.0), (1.0, 1.0))
    """
    channels = x[0].numel() if per == "pixel" else x.shape[1] if x.ndim > 1 else 1

    def blocks() -> Iterator[Tensor]:
        for part in torch.split(samples, max(1, _BLOCK_SIZE // x[0].numel())):
            values = x[part].double() / (255 if x.dtype == torch.uint8 else 1)
            yield values.reshape(len(part), channels, -1)

    count = len(samples) * x[0].numel() // channels  # values per channel
    mean = torch.stack([block.sum((0, 2)) for block in blocks()]).sum(0) / count
    squares = torch.stack([(block - mean[:, None]).square().sum((0, 2)) for block in blocks()]).sum(0)
    rounded = [_round(*pair) for pair in zip(mean.tolist(), (squares / count).sqrt().tolist(), strict=True)]
    return tuple(pair[0] for pair in rounded), tuple(pair[1] for pair in rounded)


def to_statistics(values: Sequence[float] | None) -> Statistics | None:
    """Return the mean or the standard deviation that a user gave; raise an error unless they are numbers.

    >>> to_statistics([0, 1])
    (0.0, 1.0)
    """
    try:
        return None if values is None else tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise DataError(f"mean and std must be lists of numbers, one per channel, got {values!r}.") from error


def check_normalization(mean: Statistics | None, std: Statistics | None, shape: tuple[int, ...] | None) -> None:
    """Raise an error unless inputs of this shape can be normalized; the shape is None if they have several parts."""
    for values in (mean, std):
        if values is not None and (shape is None or len(values) not in {1, *shape[:1], prod(shape)}):
            expected = "one value per channel or per pixel, for inputs with a single part"
            raise DataError(f"mean and std need {expected}, got {len(values)} values.")
    if not all(map(isfinite, mean or ())) or not all(0 < value < inf for value in std or ()):
        got = f"{reprlib.repr(mean)} and {reprlib.repr(std)}"
        raise DataError(f"mean must be finite, and std finite and above 0, got {got}.")


def make_normalizer(
    mean: Statistics | None,
    std: Statistics | None,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Inputs], Inputs]:
    """Return the function that converts stored samples to inputs; `Federation.make_preprocessing` explains it.

    >>> make_normalizer((0.5,), (0.5,), (1,), torch.float32, torch.device("cpu"))(torch.tensor([[0.0], [1.0]]))
    tensor([[-1.],
            [ 1.]])
    """
    max_byte = torch.tensor(255, dtype=dtype, device=device)  # in this dtype, so that the quotient has it as well
    shift, scale = (_as_inputs(values, shape, dtype, device) for values in (mean, std))

    def prepare_part(part: Tensor) -> Tensor:
        if part.dtype == torch.uint8:
            part = part / max_byte
        elif part.is_floating_point():
            part = part.to(dtype)
        part = part if shift is None else part - shift
        return part if scale is None else part / scale

    return lambda x: {n: prepare_part(p) for n, p in x.items()} if isinstance(x, dict) else prepare_part(x)


def _as_inputs(
    values: Statistics | None, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return numbers per channel or per pixel as a tensor that can be combined with inputs."""
    if values is None or shape is None:
        return None
    is_per_pixel = len(values) > 1 and len(values) == prod(shape)
    return torch.tensor(values, dtype=dtype, device=device).reshape(
        shape if is_per_pixel else (-1, *[1] * (len(shape) - 1))
    )


def _round(mean: float, std: float) -> tuple[float, float]:
    if std <= _CONSTANT * abs(mean):
        return float(f"{mean:.{_DIGITS}g}"), 1.0
    return round(mean, _DIGITS - 1 - floor(log10(std))), float(f"{std:.{_DIGITS}g}")
