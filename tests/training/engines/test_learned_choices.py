"""Tests of what `auto` remembers: a second run starts without a benchmark, and a bad entry never stops a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import TinyNet, tiny_federation
from fedtailor.training.engines import EngineChoice, auto, learned_choices
from fedtailor.training.engines.auto import EngineBenchmark
from fedtailor.training.engines.learned_choices import LearnedChoice, describe_workload
from support.contexts import make_engine

SIZES = (9, 4, 7, 5)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an own cache, benchmarks for every run, and a machine that is not busy; vectorized is the fastest."""
    monkeypatch.setattr(learned_choices, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(learned_choices, "_BUSY", 1e9)
    monkeypatch.setattr(auto, "_SHORT_RUN_SECONDS", 0.0)
    monkeypatch.setattr(auto, "_QUICK_RUN_SECONDS", 0.0)
    return tmp_path


def measure_as(monkeypatch: pytest.MonkeyPatch, fast: str) -> list[str]:
    """Let this engine be the fastest, and return a list of the engines that are measured from now on."""
    measured: list[str] = []

    def seconds(self: EngineBenchmark, choice: EngineChoice, clients: Any, batches: int) -> float:
        measured.append(choice.engine)
        return len(clients) * (0.01 if choice.engine == fast else 0.5)

    monkeypatch.setattr(EngineBenchmark, "_seconds", seconds)
    return measured


def run(**settings: Any) -> ft.Run:
    method = ft.methods.FedAvg(lr=settings.pop("lr", 0.1))
    return ft.simulate(method, TinyNet().double(), tiny_federation(SIZES), rounds=1, device="cpu", **settings)


def test_second_run_uses_choice_of_first_without_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_as(monkeypatch, "vectorized")
    first = run()
    measured = measure_as(monkeypatch, "sequential")
    second = run(seed=1, lr=0.2)
    assert [first.info["engine"], second.info["engine"]] == ["vectorized"] * 2
    assert second.info["chunk_size"] == first.info["chunk_size"]
    assert measured == ["vectorized"]  # only tried, on two clients
    assert second.info["engine_reason"].endswith("Measured in an earlier run.")


def test_choice_depends_on_batch_size_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_as(monkeypatch, "vectorized")
    run()
    measured = measure_as(monkeypatch, "sequential")
    assert run(batch_size=2).info["engine"] == "sequential" and len(measured) > 1
    shared = make_engine(TinyNet().double())[0]
    keys = {
        describe_workload(each, [shared], [3, 4], 20, 1, CPU).key for each in (ft.methods.FedAvg(), ft.methods.Ditto())
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"choice": {"engine": "warp"}, "reason": ""}', '{"choice": {"engine": "pool", "size": 1}}',
     '{"choice": {"engine": "vectorized", "chunk_size": -1}, "reason": ""}', "x" * 100_000],
)  # fmt: skip
def test_damaged_entry_is_measured_again(monkeypatch: pytest.MonkeyPatch, cache: Path, content: str) -> None:
    measure_as(monkeypatch, "vectorized")
    run()
    (entry,) = (cache / "engines").iterdir()
    entry.write_text(content)
    measure_as(monkeypatch, "sequential")
    assert run().info["engine"] == "sequential"
    assert json.loads(entry.read_text())["choice"]["engine"] == "sequential"


def test_cache_that_cannot_be_written_does_not_stop_a_run(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (cache / "engines").write_text("a file instead of a folder")
    measure_as(monkeypatch, "vectorized")
    assert run().info["engine"] == "vectorized"


def test_remembered_engine_that_fails_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_as(monkeypatch, "vectorized")
    run()

    def seconds(self: EngineBenchmark, choice: EngineChoice, clients: Any, batches: int) -> float:
        if choice.engine == "vectorized":
            raise ft.FedTailorError("the model does not support vmap any more")
        return 0.01 * len(clients)

    monkeypatch.setattr(EngineBenchmark, "_seconds", seconds)
    assert run().info["engine"] in ("sequential", "pool")


def test_measurement_on_busy_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(learned_choices, "_BUSY", -1.0)
    LearnedChoice("key").put(EngineChoice("pool"), "")
    assert not list(cache.iterdir())
