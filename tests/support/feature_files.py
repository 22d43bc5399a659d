"""Tiny files in the layout of CREMA-D."""

import io
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

CREMA_D: dict[str, Any] = {
    "audio": np.ones((2, 6, 3), np.float32), "audio_length": np.array([6, 1]), "label": np.array([0, 3]),
    "video": np.ones((2, 4, 5), np.float32), "video_length": np.array([4, 2]), "speaker": np.array([7, 7]),
}  # fmt: skip


def feature_file(**changes: Any) -> bytes:
    """Return a file crema-d.npz with two samples; arrays may be changed, and removed with None."""
    arrays = {name: array for name, array in {**CREMA_D, **changes}.items() if array is not None}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def wav_bytes(samples: NDArray[np.int16]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue()
