"""Filterbank features of speech: the definition written out for one frame, and properties of all frames."""

import math

import numpy as np

from fedtailor.data.features.filterbank import log_mel_filterbank

RATE, LENGTH, POINTS, BINS = 16_000, 400, 512, 80


def mel(frequency: float) -> float:
    return 1127 * math.log(1 + frequency / 700)


def literal_frame(frame: list[float]) -> list[float]:
    """Return the features of one frame of 25 ms, step by step as Kaldi's fbank with a Hamming window."""
    mean = sum(frame) / LENGTH
    centered = [value - mean for value in frame]
    emphasized = [value - 0.97 * centered[max(i - 1, 0)] for i, value in enumerate(centered)]
    windowed = [v * (0.54 - 0.46 * math.cos(2 * math.pi * i / (LENGTH - 1))) for i, v in enumerate(emphasized)]
    angle = -2 * math.pi / POINTS
    power = []
    for k in range(POINTS // 2):
        real = sum(value * math.cos(angle * k * i) for i, value in enumerate(windowed))
        imaginary = sum(value * math.sin(angle * k * i) for i, value in enumerate(windowed))
        power.append(real**2 + imaginary**2)
    low, step = mel(20), (mel(8000) - mel(20)) / (BINS + 1)
    features = []
    for b in range(BINS):
        energy = 0.0
        for k, value in enumerate(power):
            position = (mel(k * RATE / POINTS) - low) / step - b  # 0 at the left end, 1 at the center, 2 at the right
            energy += value * max(0.0, min(position, 2 - position))
        features.append(math.log(max(energy, float(np.finfo(np.float32).eps))))
    return features


def test_log_mel_filterbank_of_one_frame_equals_the_definition() -> None:
    frame = np.random.default_rng(1).uniform(-1, 1, LENGTH)
    np.testing.assert_allclose(log_mel_filterbank(frame)[0], literal_frame(frame.tolist()), rtol=1e-5, atol=1e-5)


def test_log_mel_filterbank_has_one_row_per_complete_frame_of_a_tone() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(LENGTH + 3 * 160 + 159) / RATE)
    features = log_mel_filterbank(tone)
    assert features.shape == (4, BINS), "frames start every 160 samples, and an incomplete one is left out"
    centers = [mel(20) + (b + 1) * (mel(8000) - mel(20)) / (BINS + 1) for b in range(BINS)]
    nearest = int(np.argmin([abs(center - mel(1000)) for center in centers]))
    assert set(features.argmax(1)) == {nearest}
    np.testing.assert_allclose(log_mel_filterbank(2 * tone + 0.3), features + math.log(4), atol=1e-3)
    assert log_mel_filterbank(tone[: LENGTH - 1]).shape == (0, BINS)
