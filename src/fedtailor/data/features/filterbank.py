"""Log-mel filterbank features of speech, as Kaldi computes them without dithering."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PREEMPHASIS = 0.97
_LOWEST_FREQUENCY = 20.0  # Hz, of the first filter; the last one ends at half of the sampling rate
_FLOOR = float(np.finfo(np.float32).eps)  # of the energy, before the logarithm


def log_mel_filterbank(
    waveform: NDArray[Any], rate: int = 16_000, bins: int = 80, frame_ms: int = 25, shift_ms: int = 10
) -> NDArray[np.float32]:
    """Return the logarithm of the energy in `bins` mel filters, for each complete frame of a waveform: [frames, bins].

    From each frame, its mean is subtracted; then it is pre-emphasized and multiplied by a Hamming window. The waveform
    has values from −1 to 1.

    >>> log_mel_filterbank(np.zeros(16_000)).shape
    (98, 80)
    """
    length, shift = rate * frame_ms // 1000, rate * shift_ms // 1000
    if len(waveform) < length:
        return np.empty((0, bins), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(np.asarray(waveform, np.float64), length)[::shift]
    frames = frames - frames.mean(1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)  # the sample before the first one is its copy
    frames = (frames - _PREEMPHASIS * before) * np.hamming(length)
    points = 1 << (length - 1).bit_length()
    power = np.abs(np.fft.rfft(frames, points)) ** 2
    return np.log(np.maximum(power @ _mel_filters(bins, points, rate).T, _FLOOR)).astype(np.float32)


@cache
def _mel_filters(bins: int, points: int, rate: int) -> NDArray[np.float64]:
    """Return triangular filters with equal distances on the mel scale: [bins, points / 2 + 1]."""
    edges = np.linspace(_mel(_LOWEST_FREQUENCY), _mel(rate / 2), bins + 2)
    left, center, right = (edges[i : bins + i, None] for i in range(3))
    mels = _mel(np.arange(points // 2 + 1) * rate / points)
    filters = np.maximum(0, np.minimum((mels - left) / (center - left), (right - mels) / (right - center)))
    filters[:, -1] = 0  # as in Kaldi, which ignores the highest frequency
    return np.asarray(filters)


def _mel(frequency: Any) -> Any:
    return 1127 * np.log1p(frequency / 700)
