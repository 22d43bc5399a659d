"""How many clients fit on a GPU at once. No GPU is needed: the measured peaks are given."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import TinyNet, all_same, models, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.training import engine_selection
from fedtailor.training.engines import memory_estimate
from fedtailor.training.engines.memory_estimate import MemoryUse, limit_clients, measure_memory

GPU = torch.device("cuda")
MESSAGE, CLIENT, WORKSPACE = 4, 100, 1000  # bytes


def peak_of(run: Callable[[], Tree], device: torch.device) -> tuple[int, Tree]:
    result = run()
    return WORKSPACE + CLIENT * len(result["w"]), result


def train(clients: Sequence[int]) -> Tree:
    return {"w": torch.zeros(len(clients), 1)}


def test_measured_memory_separates_fixed_and_per_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "measure_peak", peak_of)
    assert measure_memory(train, [5, 6, 7], GPU) == MemoryUse(WORKSPACE, CLIENT, kept=MESSAGE)


@pytest.mark.parametrize(
    ("available", "limit"),
    [
        (10**9, None),  # far more than the rough estimate: not measured
        (2_500, (2_000 - WORKSPACE - 30 * MESSAGE) // CLIENT),  # 80 % of the memory, less what all clients keep
        (100, 1),  # not even one client fits: the run tries
    ],
)
def test_limit_leaves_room_for_results_of_the_round(
    available: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_estimate, "measure_peak", peak_of)
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: available)
    assert limit_clients(train, range(30), CLIENT, GPU) == limit
    assert limit_clients(train, range(30), CLIENT, torch.device("cpu")) is None


def test_two_clients_that_run_out_of_memory_train_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(memory_estimate, "measure_peak", fail)
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: 100)
    assert limit_clients(train, range(30), CLIENT, GPU) == 1


def test_round_that_does_not_fit_is_split_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"engine": "vectorized", "device": "cpu", "rounds": 1, "batch_size": 4}
    whole = ft.simulate(ft.methods.FedAvg(), TinyNet, tiny_federation(), **settings)
    measured: list[int] = []

    def limit(train: Callable[[Sequence[int]], Tree], clients: Sequence[int], *_: Any) -> int:
        measured.extend(len(train(clients[:count])["upload"]["params"]["fc.weight"]) for count in (1, 2))
        return 3

    monkeypatch.setattr(engine_selection, "limit_clients", limit)
    split = ft.simulate(ft.methods.FedAvg(), TinyNet, tiny_federation(), **settings)
    assert measured == [1, 2]
    assert (whole.info["chunk_size"], split.info["chunk_size"]) == (32, 3)
    assert "3 clients fit into the memory" in split.info["engine_reason"]
    assert all_same(models(split), models(whole), 1e-5)
