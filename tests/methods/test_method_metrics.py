"""Method metrics: cheap ones per round, expensive ones at evaluation, and large arrays in separate files."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import error_message, tiny_federation
from fedtailor.core.trees import Tree

SCHEDULE = [[0, 1], [2, 3], [0, 1, 2, 3]]


@dataclass(frozen=True)
class MeasuredFedAvg(ft.methods.FedAvg):
    """FedAvg that implements all metric hooks."""

    def server_metrics(self, before: Tree, after: Tree, exchange: ft.Exchange) -> Tree:
        moved = before["params"]["fc.bias"] != after["params"]["fc.bias"]
        return {
            "moved": moved.sum(),
            "clients": torch.tensor(exchange.clients),
            "nothing": torch.tensor([math.nan, 1.0]),
            "per_client": {"size": exchange.sizes},
        }

    def client_metrics(self, ctx: ft.ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {"index_times_10": ctx.index * 10}

    def evaluation_metrics(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
        return {"mass": ctx.full_loss(ctx.loss, message["params"]), "vector": torch.ones(2) * (ctx.index + 1)}

    def reduce_metrics(self, totals: Tree) -> Tree:
        return {"sum": totals["vector"]}


def simulate(net: nn.Module, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    defaults: dict[str, Any] = {"schedule": SCHEDULE, "batch_size": 3, "dtype": torch.float64}
    return ft.simulate(method or MeasuredFedAvg(), net, tiny_federation(), **defaults | settings)


def test_server_and_client_metrics_are_recorded_per_round(net: nn.Module) -> None:
    run = simulate(net, evaluate_every=3)
    for record, clients in zip(run.records, SCHEDULE, strict=True):
        assert record["method_metrics"]["moved"] == 5 and record["method_metrics"]["clients"] == clients
        assert record["per_client"]["index_times_10"] == {client: 10 * client for client in clients}
        assert record["per_client"]["size"] == {client: (9, 4, 7, 1)[client] for client in clients}


@pytest.mark.parametrize(("evaluate", "measured"), [("all", [0, 1, 2, 3]), ("participants", [2, 3]), (2, None)])
def test_evaluation_metrics_are_recorded_for_evaluated_rounds_and_clients(
    net: nn.Module, evaluate: Any, measured: list[int] | None
) -> None:
    run = simulate(net, schedule=SCHEDULE[:2], evaluate_every=2, evaluate=evaluate)
    assert "mass" not in run.records[0]["per_client"] and "sum" not in run.records[0]["method_metrics"]
    last = run.records[1]
    found = sorted(last["per_client"]["mass"])
    assert found == measured or (measured is None and len(found) == 2)
    assert last["method_metrics"]["sum"] == [float(sum(client + 1 for client in found))] * 2
    assert last["mass_mean"] == pytest.approx(sum(last["per_client"]["mass"].values()) / len(found))
    assert "vector" not in last["per_client"]  # only scalars are recorded per client


def test_method_metrics_are_equal_after_loading(net: nn.Module, tmp_path: Path) -> None:
    run = simulate(net, folder=tmp_path)
    again = ft.load_run(tmp_path)
    for name in ("moved", "sum"):
        assert run.metric(name).keys() == {1, 2, 3}
    assert all(torch.equal(run.metric("sum")[r], again.metric("sum")[r]) for r in (1, 2, 3))
    assert again.metric("moved") == run.metric("moved")
    assert math.isnan(again.metric("nothing")[2][0]) and float(again.metric("nothing")[2][1]) == 1
    assert "did you mean 'moved'?" in error_message(lambda: run.metric("movd"))


def many_clients(count: int) -> ft.Federation:
    return tiny_federation([2] * count)


def test_large_arrays_are_saved_in_separate_files(net: nn.Module, tmp_path: Path) -> None:
    """With 101 clients, the 10,201 weights per round are saved in a file, and the record names the file."""
    fed = many_clients(101)
    seen: list[dict[str, Any]] = []
    schedule: Sequence[Sequence[int]] = [[0, 1, 2], [3, 4]]
    settings: dict[str, Any] = {"schedule": schedule, "evaluate": 1, "dtype": torch.float64}
    method = ft.methods.FedAPA(weight_lr=0.05)
    saved = ft.simulate(method, net, fed, folder=tmp_path, on_round_end=seen.append, **settings)
    line = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[1])
    file = tmp_path / "arrays" / "0002.safetensors"
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    assert line["method_metrics"]["weights"] == {
        "file": "arrays/0002.safetensors",
        "sha256": checksum,
        "shape": [101, 101],
    }
    assert len(line["method_metrics"]["entropy"]) == 101
    assert seen == saved.records  # the callback gets the same records
    plain = ft.simulate(method, net, fed, **settings)
    for run in (saved, ft.load_run(tmp_path)):
        for number in (1, 2):
            assert torch.equal(run.metric("weights")[number], plain.metric("weights")[number])
    assert torch.equal(plain.metric("weights")[2], plain.server["weights"])
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "does not match its checksum" in error_message(lambda: ft.load_run(tmp_path).metric("weights"))


def test_smaller_arrays_are_saved_in_record(net: nn.Module, tmp_path: Path) -> None:
    ft.simulate(ft.methods.FedAPA(), net, many_clients(100), schedule=[[0]], evaluate=1, folder=tmp_path)
    line = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert len(line["method_metrics"]["weights"]) == 100 and not (tmp_path / "arrays").exists()


def test_method_without_metrics_records_none(net: nn.Module) -> None:
    run = simulate(net, ft.methods.FedAvg())
    assert all(record["method_metrics"] == {} for record in run.records)
    assert "there are none" in error_message(lambda: run.metric("weights"))


def test_lag_includes_metrics_of_inner_method(net: nn.Module) -> None:
    """The records contain all metrics of the inner method in addition to those of LAG."""
    inner, wrapped = simulate(net, MeasuredFedAvg()), simulate(net, ft.methods.LAG(MeasuredFedAvg(), personal_layers=0))
    for one, other in zip(wrapped.records, inner.records, strict=True):
        assert {"conflicts", "personal"} <= one["method_metrics"].keys() and "gain_term" in one["per_client"]
        for name in ("moved", "clients", "sum"):
            assert one["method_metrics"][name] == other["method_metrics"][name]
        for name in ("index_times_10", "size", "mass"):
            assert one["per_client"][name] == other["per_client"][name]


def test_lag_uses_logits_of_inner_method(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class NegatedLogits(ft.methods.FedAvg):
        def logits(self, model: ft.Model, personal: Tree, x: Any) -> torch.Tensor:
            return -model.logits(personal, x)

    inner, wrapped = simulate(net, NegatedLogits()), simulate(net, ft.methods.LAG(NegatedLogits(), personal_layers=0))
    assert inner.records[-1]["loss_trained"] == wrapped.records[-1]["loss_trained"]
    assert inner.records[-1]["loss_trained"] != simulate(net, ft.methods.FedAvg()).records[-1]["loss_trained"]


@pytest.mark.parametrize("name", ["bytes_up", "loss", "accuracy_trained"])
def test_metric_with_reserved_name_raises(net: nn.Module, name: str) -> None:
    @dataclass(frozen=True)
    class ReservedName(ft.methods.FedAvg):
        def evaluation_metrics(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
            return {name: ctx.size}

    assert f"already has a metric '{name}'" in error_message(lambda: simulate(net, ReservedName()))
