"""The data sets of features as users load them: clients, common test set, and default networks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.experiments.experiment import make_experiment


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
