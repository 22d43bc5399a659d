"""What methods record of themselves: cheap numbers every round, dear ones when evaluating, large arrays beside."""

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
from conftest import refusal, tiny_federation
from fedtailor.trees import Tree, flatten

PARTS = [[0, 1], [2, 3], [0, 1, 2, 3]]


@dataclass(frozen=True)
class Watched(ft.methods.FedAvg):
    """FedAvg that tells about itself in every way there is."""

    def monitor(self, before: Tree, after: Tree, exchange: ft.Exchange) -> Tree:
        moved = before["params"]["fc.bias"] != after["params"]["fc.bias"]
        return {
            "moved": moved.sum(),
            "clients": torch.tensor(exchange.clients),
            "nothing": torch.tensor([math.nan, 1.0]),
            "per_client": {"size": exchange.sizes},
        }

    def note(self, local: ft.LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {"drawn": local.index * 10}

    def measure(self, local: ft.LocalView, state: Tree, message: Tree) -> Tree:
        return {"mass": local.value(local.loss, message["params"]), "vector": torch.ones(2) * (local.index + 1)}

    def overall(self, totals: Tree) -> Tree:
        return {"sum": totals["vector"]}


def go(net: nn.Module, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    usual: dict[str, Any] = {"schedule": PARTS, "batch_size": 3, "dtype": torch.float64}
    return ft.simulate(method or Watched(), net, tiny_federation(), **usual | settings)


def test_cheap_numbers_are_of_every_round_and_its_clients(net: nn.Module) -> None:
    run = go(net, evaluate_every=3)
    for record, clients in zip(run.records, PARTS, strict=True):
        assert record["monitor"]["moved"] == 5 and record["monitor"]["clients"] == clients
        assert record["per_client"]["drawn"] == {client: 10 * client for client in clients}
        assert record["per_client"]["size"] == {client: (9, 4, 7, 1)[client] for client in clients}


@pytest.mark.parametrize(("who", "measured"), [("all", [0, 1, 2, 3]), ("participants", [2, 3]), (2, None)])
def test_dear_numbers_are_of_evaluated_rounds_and_clients(net: nn.Module, who: Any, measured: list[int] | None) -> None:
    run = go(net, schedule=PARTS[:2], evaluate_every=2, evaluate=who)
    assert "mass" not in run.records[0]["per_client"] and "sum" not in run.records[0]["monitor"]
    last = run.records[1]
    found = sorted(last["per_client"]["mass"])
    assert found == measured or (measured is None and len(found) == 2)
    assert last["monitor"]["sum"] == [float(sum(client + 1 for client in found))] * 2
    assert last["mass_mean"] == pytest.approx(sum(last["per_client"]["mass"].values()) / len(found))
    assert "vector" not in last["per_client"]  # only what is one number a client


def test_monitors_come_back_from_disk_as_they_were(net: nn.Module, tmp_path: Path) -> None:
    run = go(net, folder=tmp_path)
    again = ft.open(tmp_path)
    for name in ("moved", "sum"):
        assert run.monitor(name).keys() == {1, 2, 3}
    assert all(torch.equal(run.monitor("sum")[r], again.monitor("sum")[r]) for r in (1, 2, 3))
    assert again.monitor("moved") == run.monitor("moved")
    assert math.isnan(again.monitor("nothing")[2][0]) and float(again.monitor("nothing")[2][1]) == 1
    assert "did you mean 'moved'?" in refusal(lambda: run.monitor("movd"))


def many_clients(count: int) -> ft.Federation:
    return tiny_federation([2] * count)


def test_large_arrays_lie_beside_the_record(net: nn.Module, tmp_path: Path) -> None:
    """101 clients: 10,201 weights a round are a file, not a line; the record says where."""
    fed = many_clients(101)
    seen: list[dict[str, Any]] = []
    schedule: Sequence[Sequence[int]] = [[0, 1, 2], [3, 4]]
    settings: dict[str, Any] = {"schedule": schedule, "evaluate": 1, "dtype": torch.float64}
    method = ft.methods.FedAPA(weight_lr=0.05)
    kept = ft.simulate(method, net, fed, folder=tmp_path, record=seen.append, **settings)
    line = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[1])
    file = tmp_path / "arrays" / "0002.safetensors"
    sum_ = hashlib.sha256(file.read_bytes()).hexdigest()
    assert line["monitor"]["weights"] == {"file": "arrays/0002.safetensors", "sha256": sum_, "shape": [101, 101]}
    assert len(line["monitor"]["entropy"]) == 101
    assert seen == kept.records  # one record, whoever reads it
    plain = ft.simulate(method, net, fed, **settings)
    for run in (kept, ft.open(tmp_path)):
        for number in (1, 2):
            assert torch.equal(run.monitor("weights")[number], plain.monitor("weights")[number])
    assert torch.equal(plain.monitor("weights")[2], plain.server["weights"])
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "not as they were written" in refusal(lambda: ft.open(tmp_path).monitor("weights"))


def test_smaller_ones_are_in_the_line(net: nn.Module, tmp_path: Path) -> None:
    ft.simulate(ft.methods.FedAPA(), net, many_clients(100), schedule=[[0]], evaluate=1, folder=tmp_path)
    line = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert len(line["monitor"]["weights"]) == 100 and not (tmp_path / "arrays").exists()


@pytest.mark.parametrize("method", [ft.methods.FedAPA(), ft.methods.FedLAG(), ft.methods.SelfFL(), ft.methods.FedAPM()])
def test_monitors_are_never_sent(net: nn.Module, method: ft.Method) -> None:
    """What crosses is the model, a part of it, and at most two scalars."""
    for record in go(net, method).records:
        most = sum(p.numel() for p in net.parameters()) * 8 + 16
        assert all(
            0 < size <= most for way in ("bytes_up", "bytes_down") for size in record["per_client"][way].values()
        )


def test_a_run_without_monitors_has_none(net: nn.Module) -> None:
    run = go(net, ft.methods.FedAvg())
    assert all(record["monitor"] == {} for record in run.records)
    assert "there are none" in refusal(lambda: run.monitor("weights"))


def test_no_state_holds_a_tensor_that_is_no_number(net: nn.Module) -> None:
    """A client of one sample, another that never takes part, rounds of one client."""
    for method in (ft.methods.FedAPA(), ft.methods.FedAPM(), ft.methods.FedLAG(), ft.methods.SelfFL(warmup=0)):
        run = go(net, method, schedule=[[0, 3], [3], [0], [0, 1, 3], [3]])
        trees = [run.server, *(run.client(i) for i in range(4)), *(run.personal(i, "received") for i in range(4))]
        assert all(bool(torch.isfinite(leaf).all()) for tree in trees for leaf in flatten(tree).values())


def test_lag_hands_on_what_its_inner_method_tells(net: nn.Module) -> None:
    """All numbers of the inner method are there, beside LAG's own."""
    alone, inside = go(net, Watched()), go(net, ft.methods.LAG(Watched(), personal_layers=0))
    for one, other in zip(inside.records, alone.records, strict=True):
        assert {"conflicts", "personal"} <= one["monitor"].keys() and "gain_term" in one["per_client"]
        for name in ("moved", "clients", "sum"):
            assert one["monitor"][name] == other["monitor"][name]
        for name in ("drawn", "size", "mass"):
            assert one["per_client"][name] == other["per_client"][name]


def test_lag_answers_as_its_inner_method_does(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Contrary(ft.methods.FedAvg):
        def logits(self, model: ft.Model, personal: Tree, x: Any) -> torch.Tensor:
            return -model.logits(personal, x)

    alone, inside = go(net, Contrary()), go(net, ft.methods.LAG(Contrary(), personal_layers=0))
    assert alone.records[-1]["loss_trained"] == inside.records[-1]["loss_trained"]
    assert alone.records[-1]["loss_trained"] != go(net, ft.methods.FedAvg()).records[-1]["loss_trained"]


@pytest.mark.parametrize("name", ["bytes_up", "loss", "accuracy_trained"])
def test_a_number_cannot_take_the_name_of_another(net: nn.Module, name: str) -> None:
    @dataclass(frozen=True)
    class Taking(ft.methods.FedAvg):
        def measure(self, local: ft.LocalView, state: Tree, message: Tree) -> Tree:
            return {name: local.size}

    assert f"already has '{name}'" in refusal(lambda: go(net, Taking()))


def test_arrays_are_as_precise_as_the_run(net: nn.Module) -> None:
    run = go(net, ft.methods.FedAPA(weight_lr=0.05))
    assert torch.equal(run.monitor("weights")[3], run.server["weights"])
