"""Training on a mapped federation file gives the same bits as in memory, and needs little memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import MEASURED, error_message
from fedtailor.core.trees import flatten
from fedtailor.methods import METHODS
from fedtailor.training import client_update
from fedtailor.training.engines import staging

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RNG = np.random.default_rng(0)


def images() -> ft.Federation:
    """Return byte images with normalization and a common test set."""
    x, y = RNG.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8), np.arange(60) % 3
    owners = [f"client {i % 4}" for i in range(60)]
    return ft.Federation.from_owners(x, y, owners, common_test=0.2, mean=(0.4,), std=(0.3,))


class TwoParts(nn.Module):
    """A network for inputs with the parts tokens and length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(7, 1)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(torch.cat([self.embed(x["tokens"]).mean(1), x["length"][:, None]], 1))  # type: ignore[no-any-return]


def several_parts() -> ft.Federation:
    """Return inputs with several parts and numbers as targets."""
    x = {"tokens": RNG.integers(0, 9, (40, 5)), "length": RNG.random(40)}
    return ft.Federation.from_owners(x, RNG.normal(size=(40, 1)), [i % 4 for i in range(40)])


def assert_same_run(left: ft.Run, right: ft.Run) -> None:
    for ours, theirs in zip(left.records, right.records, strict=True):
        assert {n: v for n, v in ours.items() if not n.startswith(MEASURED)} == {
            n: v for n, v in theirs.items() if not n.startswith(MEASURED)
        }
    for client, moment in ((0, "received"), (3, "trained")):
        one, other = left.personal(client, moment), right.personal(client, moment)
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    one, other = flatten(left.server), flatten(right.server)
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "pool"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "scaffold", "centralized"])
def test_mapped_images_train_with_the_same_bits(method: str, engine: str, tmp_path: Path) -> None:
    fed = images()
    fed.save(tmp_path / "fed")
    settings: dict[str, Any] = {"rounds": 2, "engine": engine, "validation": 0.2, "batch_size": 4}
    settings |= {} if method == "centralized" else {"held_out_clients": 1}
    mapped = ft.Federation.from_file(tmp_path / "fed")
    runs = [ft.simulate(METHODS[method](), ft.network("mlp", each), each, **settings) for each in (fed, mapped)]
    assert_same_run(*runs)
    assert "common_accuracy_received" in runs[1].records[-1]


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "pool"])
def test_mapped_parts_train_with_the_same_bits(engine: str, tmp_path: Path) -> None:
    fed = several_parts()
    fed.save(tmp_path / "fed")
    mapped = ft.Federation.from_file(tmp_path / "fed")
    model = ft.wrap(TwoParts(), loss=lambda outputs, y: (outputs - y).square().mean(1), head="head")
    settings: dict[str, Any] = {"rounds": 2, "engine": engine, "batch_size": 4}
    assert_same_run(*(ft.simulate(ft.methods.FedPer(), model, each, **settings) for each in (fed, mapped)))


def stopped_run(fed: ft.Federation, folder: Path) -> None:
    def stop(record: Any) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=3, folder=folder, on_round_end=stop)


def test_run_started_in_memory_continues_from_the_file_and_vice_versa(tmp_path: Path) -> None:
    fed = images()
    fed.save(tmp_path / "fed")
    mapped = ft.Federation.from_file(tmp_path / "fed")
    expected = ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=3)
    for name, first, second in (("one", fed, mapped), ("two", mapped, fed)):
        stopped_run(first, tmp_path / name)
        assert_same_run(ft.resume(tmp_path / name, fed=second), expected)


def test_resume_in_another_process_opens_the_file_again(tmp_path: Path) -> None:
    fed = images()
    fed.save(tmp_path / "fed")
    stopped_run(ft.Federation.from_file(tmp_path / "fed"), tmp_path / "run")
    code = "import sys, fedtailor as ft; ft.resume(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    expected = ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=3)
    found = ft.load_run(tmp_path / "run")
    assert found.records[-1]["accuracy_trained"] == expected.records[-1]["accuracy_trained"]
    one, other = found.personal(2, "trained"), expected.personal(2, "trained")
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_resume_with_other_samples_in_the_file_raises(tmp_path: Path) -> None:
    images().save(tmp_path / "fed")
    stopped_run(ft.Federation.from_file(tmp_path / "fed"), tmp_path / "run")
    images().save(tmp_path / "fed")  # the generator has moved on
    assert "data differs" in error_message(lambda: ft.resume(tmp_path / "run"))


LARGE = """
import resource, sys
from pathlib import Path
import numpy as np, torch
import fedtailor as ft

def clients():
    for client in range(60):
        x = np.random.default_rng(client).integers(0, 256, (64, 100_000), dtype=np.uint8)
        yield client, x, np.arange(64) % 2, x[:2], np.arange(2)

ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed := ft.load("digits", clients=2)), fed, rounds=1)  # warm up
used = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 300 * 2**20,) * 2)
fed = ft.Federation.write(sys.argv[1], clients())
net = ft.wrap(torch.nn.Sequential(torch.nn.Linear(100_000, 2)), head="0")
ft.simulate(ft.methods.FedAvg(epochs=1), net, fed, schedule=[[0, 59]], batch_size=16, folder=sys.argv[2])
try:
    fed.x.clone()
except RuntimeError:
    print("A copy does not fit.")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory with RLIMIT_DATA")
def test_data_larger_than_memory_is_written_and_trained(tmp_path: Path) -> None:
    """400 MB of samples are written, checked, and trained on with 300 MB of memory, which does not hold a copy."""
    command = [sys.executable, "-c", LARGE, str(tmp_path / "fed"), str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1", **os.environ}
    )
    assert done.stdout.strip() == "A copy does not fit.", done.stderr


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_samples_that_stay_on_the_host_train_with_the_same_bits(
    device: str, engine: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are copied to the device for each chunk of clients, or, if these do not fit either, for each batch."""
    fed, settings = images(), {"rounds": 3, "engine": engine, "validation": 0.2, "batch_size": 4, "device": device}
    model = ft.network("mlp", fed)
    expected = ft.simulate(ft.methods.FedPer(), model, fed, **settings)  # type: ignore[arg-type]
    staged = []

    def fits_on_device(size: int, device: torch.device) -> bool:
        staged.append(size)
        return fits

    monkeypatch.setattr(client_update, "fits_on_device", lambda size, device: False)
    monkeypatch.setattr(staging, "fits_on_device", fits_on_device)
    monkeypatch.setattr(staging, "is_on_host", lambda shared: True)  # also without a GPU
    assert_same_run(ft.simulate(ft.methods.FedPer(), model, fed, **settings), expected)  # type: ignore[arg-type]
    assert staged
