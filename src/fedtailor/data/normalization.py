"""The mean and standard deviation by which inputs are normalized."""

from collections.abc import Iterator
from math import floor, log10
from typing import Literal

import torch
from torch import Tensor

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


def _round(mean: float, std: float) -> tuple[float, float]:
    if std <= _CONSTANT * abs(mean):
        return float(f"{mean:.{_DIGITS}g}"), 1.0
    return round(mean, _DIGITS - 1 - floor(log10(std))), float(f"{std:.{_DIGITS}g}")
