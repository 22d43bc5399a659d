"""CREMA-D and CrisisMMD: the publishers' files become .npz files of features, which become samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import error_message
from fedtailor.data.features.files import DAMAGES, read_crema_d, read_crisis_mmd
from fedtailor.data.features.filterbank import log_mel_filterbank
from support.examples import run_example
from support.feature_files import feature_file, wav_bytes

RNG = np.random.default_rng(3)
VOTES = {
    "1001_DFA_ANG_XX": "A", "1001_IEO_SAD_HI": "N", "1001_TIE_FEA_XX": "F", "1002_DFA_HAP_XX": "H",
    "1002_ITS_SAD_XX": "A:S", "1002_TSI_NEU_XX": "S", "1076_MTI_SAD_XX": "S",
}  # fmt: skip
USED = ["1001_DFA_ANG_XX", "1001_IEO_SAD_HI", "1002_DFA_HAP_XX", "1002_TSI_NEU_XX"]  # no fear, no tie, no silence
TSV = "event_name\ttweet_id\timage_id\ttweet_text\timage\tlabel\tlabel_text\tlabel_image\tlabel_text_image\n"


def write_crema_d(folder: Path) -> dict[str, NDArray[np.int16]]:
    """Write the publisher's files and video features, and return the waveforms."""
    (folder / "AudioWAV").mkdir(parents=True)
    (folder / "processedResults").mkdir()
    rows = [f'"{i}","{name}","A",50,"A",50,"{vote}",70\n' for i, (name, vote) in enumerate(VOTES.items())]
    header = '"","FileName","VoiceVote","VoiceLevel","FaceVote","FaceLevel","MultiModalVote","MultiModalLevel"\n'
    (folder / "processedResults" / "summaryTable.csv").write_text(header + "".join(rows))
    waveforms = {}
    for count, name in enumerate(VOTES):
        waveforms[name] = RNG.integers(-(2**14), 2**14, 16_000 // 10 + 400 * count).astype(np.int16)
        (folder / "AudioWAV" / f"{name}.wav").write_bytes(wav_bytes(waveforms[name]))
    names = sorted(VOTES, reverse=True)  # in another order than the samples
    video = np.arange(len(names) * 2 * 5, dtype=np.float32).reshape(-1, 2, 5)
    np.savez(folder / "video.npz", id=np.array(names), video=video, video_length=np.arange(len(names)) % 2 + 1)
    return waveforms


def test_crema_d_script_writes_features_that_become_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waveforms = write_crema_d(tmp_path)
    run_example(
        monkeypatch,
        "feature_files.py",
        "crema-d",
        tmp_path,
        "--video",
        tmp_path / "video.npz",
        "--out",
        tmp_path / "out",
    )
    table = read_crema_d(tmp_path / "out")
    assert isinstance(table.x, dict) and list(table.x) == ["audio", "video", "audio_length", "video_length"]
    assert table.y.tolist() == [0, 3, 2, 1], "the emotion that viewers recognized, not the one in the name"
    assert table.class_names == ("anger", "sadness", "happiness", "neutral")
    assert table.owner is not None and table.owner.tolist() == [0, 0, 1, 1] and table.owner_names == ("1001", "1002")
    raw = [log_mel_filterbank(waveforms[name] / 2**15) for name in USED]
    assert table.x["audio_length"].tolist() == [len(frames) for frames in raw]
    for speaker in ((0, 1), (2, 3)):
        frames = np.concatenate([raw[sample] for sample in speaker])
        for sample in speaker:
            length = len(raw[sample])
            expected = (raw[sample] - frames.mean(0)) / (frames.std(0) + 1e-5)
            np.testing.assert_allclose(table.x["audio"][sample, :length], expected, atol=1e-3)
            assert not table.x["audio"][sample, length:].any(), "padding is 0"
    position = [sorted(VOTES, reverse=True).index(name) for name in USED]
    assert table.x["video"][:, 0, 0].tolist() == [10 * row for row in position]
    assert table.x["video_length"].tolist() == [row % 2 + 1 for row in position]


def move_and_link(folder: Path) -> None:
    """Move a folder out of its parent, and leave a link to it."""
    moved = folder.rename(folder.parent.parent / folder.name)
    folder.symlink_to(moved)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "processedResults" / "summaryTable.csv").unlink(), "give the folder of CREMA-D"),
        (lambda f: (f / "processedResults" / "summaryTable.csv").write_text("a,b\n1,2\n"), "the columns FileName"),
        (lambda f: move_and_link(f / "AudioWAV"), "'AudioWAV' is a link that leads out of"),
        (lambda f: (f / "AudioWAV" / f"{USED[1]}.wav").unlink(), "summaryTable.csv names it"),
        (lambda f: (f / "AudioWAV" / f"{USED[1]}.wav").write_bytes(b"RIFF"), "is not a WAV file"),
        (lambda f: np.savez(f / "video.npz", id=np.array(["x"]), video=np.ones((1, 2, 5)), video_length=np.array([1])),
         "has no video for 4 of 4 samples, such as '1001_DFA_ANG_XX'"),
        (lambda f: (f / "video.npz").unlink(), "must contain id and video"),
    ],
)  # fmt: skip
def test_crema_d_script_with_damaged_files_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "CREMA-D"
    write_crema_d(folder)
    damage(folder)
    command: list[str | Path] = ["crema-d", folder, "--video", folder / "video.npz", "--out", folder]
    assert words in error_message(lambda: run_example(monkeypatch, "feature_files.py", *command))
    assert not (folder / "crema-d.npz").exists()


def write_crisis_mmd(folder: Path) -> None:
    """Write the publisher's tables with 3, 2, and 1 images, and features of all of them."""
    place = folder / "crisismmd_datasplit_all"
    place.mkdir(parents=True)
    number = 0
    for split, count in (("train", 3), ("dev", 2), ("test", 1)):
        rows = ""
        for _ in range(count):
            rows += f'wildfires\t7\tid_{number}\tan "odd text\tp.jpg\tx\t{DAMAGES[0]}\t{DAMAGES[number]}\tPositive\n'
            number += 1
        (place / f"task_humanitarian_text_img_{split}.tsv").write_text(TSV + rows)
    ids = np.array([f"id_{i}" for i in range(number)])
    np.savez(folder / "image.npz", id=ids[::-1], image=np.arange(number)[::-1, None] * np.ones(7, np.float32))
    text = np.arange(number)[:, None, None] * np.ones((4, 2), np.float32)
    np.savez(folder / "text.npz", id=ids, text=text, text_length=np.arange(number) % 4 + 1)


def test_crisis_mmd_script_writes_features_that_become_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_crisis_mmd(tmp_path)
    features: list[str | Path] = ["--image", tmp_path / "image.npz", "--text", tmp_path / "text.npz"]
    run_example(monkeypatch, "feature_files.py", "crisis-mmd", tmp_path, *features, "--out", tmp_path)
    for dev, kept, tested in ((False, [0, 1, 2, 5], [5]), (True, [0, 1, 2, 3, 4, 5], [5])):
        table = read_crisis_mmd(tmp_path, dev=dev)
        assert isinstance(table.x, dict) and list(table.x) == ["image", "text", "text_length"]
        assert table.y.tolist() == kept and table.class_names == DAMAGES
        assert table.x["image"][:, 0].tolist() == table.x["text"][:, 3, 1].tolist() == kept
        assert table.x["text_length"].tolist() == [row % 4 + 1 for row in kept]
        assert table.is_test is not None and table.y[table.is_test].tolist() == tested


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"audio": np.ones((2, 6), np.float32)}, "audio in"),
        ({"audio": np.ones((2, 6, 3), int)}, "must have 3 dimensions and 2 rows of numbers"),
        ({"audio": np.full((2, 6, 3), np.nan)}, "not finite"),
        ({"video": np.ones((3, 4, 5), np.float32)}, "video in"),
        ({"audio_length": np.array([7, 1])}, "from 1 to 6, the number of steps of audio"),
        ({"video_length": np.array([0, 1])}, "from 1 to 4"),
        ({"label": np.array([0, 4])}, "from 0 to 3: anger, sadness, happiness, neutral"),
        ({"speaker": np.array(["a", "b"])}, "speaker in"),
        ({"speaker": np.array([{}, {}], dtype=object)}, "cannot be read as an .npz file of plain arrays"),
        ({"label": None}, "has no array label, it has audio"),
    ],
)
def test_read_crema_d_with_other_arrays_raises(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "crema-d.npz").write_bytes(feature_file())
    assert read_crema_d(tmp_path / "crema-d.npz").num_samples == 2, "the file may be given instead of its folder"
    (tmp_path / "crema-d.npz").write_bytes(feature_file(**changes))
    assert words in error_message(lambda: read_crema_d(tmp_path))
