"""Features of CREMA-D from the publisher's files, as FedMultimodal computes them.

    CREMA-D/
      AudioWAV/1001_DFA_ANG_XX.wav ...   16 kHz; the name starts with the speaker
      processedResults/summaryTable.csv  FileName, ..., MultiModalVote: the emotion that most viewers recognized

The features of the videos need a pretrained network, so the user supplies them.
"""

import csv
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.core.untrusted_input import read_text
from fedtailor.data.features.files import Arrays, join_features
from fedtailor.data.features.filterbank import log_mel_filterbank
from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.errors import DataError

_LABELS = {"A": 0, "S": 1, "H": 2, "N": 3}  # indices of EMOTIONS; other votes and ties are left out
_SILENT = "1076_MTI_SAD_XX"  # a recording without sound
_MAX_FRAMES, _BINS, _RATE = 600, 80, 16_000
_MAX_TABLE = 10**7  # bytes of summaryTable.csv
_MAX_SECONDS = 60  # of a recording; they have about 3


def make_crema_d(folder: Path, video: Path) -> Arrays:
    """Return the arrays of crema-d.npz; `video` is a file with id (1001_DFA_ANG_XX), video, and video_length.

    The first 600 frames of a recording are kept, and each filter is standardized over all frames of a speaker.

    >>> make_crema_d(Path("nowhere"), Path("video.npz"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no file 'nowhere/processedResults/summaryTable.csv'; give the folder ...
    """
    label = {name: _LABELS[vote] for name, vote in _read_votes(folder).items() if vote in _LABELS and name != _SILENT}
    ids = sorted(label)
    features = join_features(video, "video", ids, sequence=True)
    speaker = np.array([_speaker(name) for name in ids])
    audio = _standardize([_audio(folder, name) for name in ids], speaker)
    length = np.array([len(frames) for frames in audio])
    check_memory(len(ids) * int(length.max()) * _BINS * 4, "The audio features")
    padded = np.zeros((len(ids), int(length.max()), _BINS), np.float32)
    for row, frames in zip(padded, audio, strict=True):
        row[: len(frames)] = frames
    y = np.array([label[name] for name in ids])
    return {"audio": padded, "audio_length": length, **features, "label": y, "speaker": speaker}


def _read_votes(folder: Path) -> dict[str, str]:
    """Return the emotion that most viewers of each recording recognized."""
    path = _find(folder, "processedResults/summaryTable.csv", "; give the folder of CREMA-D")
    try:
        rows = list(csv.DictReader(read_text(path, "The file", _MAX_TABLE).splitlines()))
        votes = {row["FileName"]: row["MultiModalVote"] for row in rows}
    except (KeyError, csv.Error) as error:
        raise DataError(f"'{path}' must have the columns FileName and MultiModalVote; download it again.") from error
    if not any(vote in _LABELS for vote in votes.values()):
        raise DataError(f"'{path}' names no recording with the emotion {', '.join(_LABELS)}; download it again.")
    return votes


def _speaker(name: str) -> int:
    number = name.partition("_")[0]
    if not number.isdecimal() or len(number) > 6 or not name.replace("_", "").isalnum():
        raise DataError(f"The recording {name!r} must be named after its speaker, as 1001_DFA_ANG_XX.")
    return int(number)


def _audio(folder: Path, name: str) -> NDArray[np.float32]:
    return read_audio(_find(folder, f"AudioWAV/{name}.wav", ", but summaryTable.csv names it; download CREMA-D again"))


def _find(folder: Path, name: str, fix: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise DataError(f"There is no file '{path}'{fix}.")
    for entry in (path.parent, path):
        check_entry(entry, folder)
    return path


def read_audio(path: Path) -> NDArray[np.float32]:
    """Return the features of a WAV file before they are standardized: [frames, 80].

    >>> read_audio(Path("nowhere.wav"))
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.wav' is not a WAV file; download it again.
    """
    try:
        with wave.open(str(path)) as file:
            if (file.getframerate(), file.getsampwidth()) != (_RATE, 2) or file.getnframes() > _MAX_SECONDS * _RATE:
                raise DataError(f"'{path}' must have 16 bits, 16 kHz, and at most {_MAX_SECONDS} seconds; convert it.")
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    except DataError:
        raise
    except Exception as error:  # `wave` raises many types on broken files
        raise DataError(f"'{path}' is not a WAV file; download it again.") from error
    features = log_mel_filterbank(samples.mean(1) / 2**15, _RATE, _BINS)[:_MAX_FRAMES]
    if not len(features):
        raise DataError(f"'{path}' is too short for features of speech; download it again.")
    return features


def _standardize(audio: list[NDArray[np.float32]], speaker: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Subtract each speaker's mean from each filter, and divide it by the standard deviation plus 10⁻⁵."""
    result = list(audio)
    for number in np.unique(speaker):
        own = np.flatnonzero(speaker == number)
        frames = np.concatenate([audio[index] for index in own]).astype(np.float64)
        mean, std = frames.mean(0), frames.std(0) + 1e-5
        for index in own:
            result[index] = ((audio[index] - mean) / std).astype(np.float32)
    return result
