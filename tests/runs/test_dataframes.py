"""Runs as pandas data frames."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import error_message
from fedtailor.core.trees import Tree
from support.simulation import simulate


@dataclass(frozen=True)
class Recording(ft.methods.FedAvg):
    """FedAvg with a scalar metric, an array, and a metric that has the name of an entry of the record."""

    def server_metrics(self, before: Tree, after: Tree, exchange: ft.Exchange) -> Tree:
        return {"step": torch.tensor(exchange.round), "table": torch.ones(3), "seconds": torch.tensor(-1)}


def test_frame_per_round_has_all_numbers_of_the_records(net: nn.Module) -> None:
    run = simulate(net, Recording(), rounds=3, evaluate_every=2, participation=0.5)
    frame = run.to_pandas()
    assert list(frame["round"]) == [1, 2, 3] and list(frame["num_participants"]) == [2, 2, 2]
    assert frame["bytes_up"].sum() == run.total("bytes_up")
    for name in ("accuracy_trained", "loss_received_mean"):
        expected = [np.nan if record[name] is None else record[name] for record in run.records]
        np.testing.assert_array_equal(frame[name], expected)
    assert np.isnan(frame["accuracy_trained"][0]) and frame["accuracy_trained"][1] > 0
    assert list(frame["step"]) == [1, 2, 3] and "table" not in frame  # arrays have no column
    assert list(frame["method_seconds"]) == [-1, -1, -1] and (frame["seconds"] > 0).all()


def test_frame_per_client_has_one_row_per_client_and_its_values(net: nn.Module) -> None:
    run = simulate(net, rounds=2, schedule=[[0, 1], [1, 2]], evaluate="participants")
    run.info["clients"][2]["name"] = "third"
    frame = run.to_pandas(per="client")
    pairs = list(zip(frame["round"], frame["client"], frame["participated"], strict=True))
    assert pairs == [(1, 0, True), (1, 1, True), (2, 1, True), (2, 2, True)]
    assert frame["name"].iloc[-1] == "third"
    last = frame[frame["round"] == 2].set_index("client")["accuracy_received"]
    assert dict(last) == run.scores("received")
    everyone = simulate(net, rounds=1, schedule=[[0]]).to_pandas(per="client")
    assert list(everyone["participated"]) == [True, False, False, False]
    assert everyone["accuracy_received"].notna().all() and everyone["bytes_up"].notna().sum() == 1


def test_frame_of_unknown_kind_or_without_pandas_raises(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(net, rounds=1)
    assert "did you mean 'client'" in error_message(lambda: run.to_pandas(per="clients"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert "pip install 'fedtailor[pandas]'" in error_message(run.to_pandas)
