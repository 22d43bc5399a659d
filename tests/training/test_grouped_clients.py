"""Clients with different architectures: grouping changes no number, and each client keeps its own network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, all_same, error_message, models, same, tiny_federation
from fedtailor.experiments.deployment import make_deployment
from fedtailor.export.personal_model import load_all_personal
from fedtailor.methods import METHODS

MIXED = [name for name, kind in METHODS.items() if kind.mixed_architectures]
EACH_MIXED = pytest.mark.parametrize("name", MIXED)
SETTINGS: dict[str, Any] = {"batch_size": 4, "dtype": torch.float64, "device": "cpu"}
SCHEDULE = [[3, 0, 1, 2], [2, 1], [0, 2]]  # not in order; a round with one architecture


class DeepNet(TinyNet):
    """One more hidden layer than TinyNet, and the same head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(5, 5)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc2(torch.tanh(self.fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class WideNet(TinyNet):
    """A head with another number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)


class FailingNet(TinyNet):
    """A network whose training fails."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


def mixed(fed: ft.Federation) -> ft.ClientModels:
    """Return the networks TinyNet, DeepNet, TinyNet, DeepNet."""
    return ft.client_models([TinyNet, DeepNet], fed)


def comparable(run: ft.Run) -> list[dict[str, Any]]:
    """Return the records without measured times."""
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in run.records]


@EACH_MIXED
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_grouping_clients_with_equal_networks_changes_no_number(name: str, engine: str) -> None:
    everyone = tiny_federation((9, 4, 7, 5, 6))
    fed = replace(everyone.select([0, 1, 2, 3]), common_test=everyone.test[4])
    options = SETTINGS | {
        "schedule": SCHEDULE,
        "engine": engine,
        "validation": 0.2,
        "channel": ft.Channel(quantize="int8"),
    }
    one = ft.simulate(METHODS[name](), TinyNet, fed, **options)
    two = ft.simulate(METHODS[name](), ft.client_models([TinyNet, TinyNet], fed), fed, **options)
    assert same(one.server, two.server, 1e-12)
    for moment in ("received", "trained"):
        assert all_same(models(one, moment), models(two, moment), 1e-12)
        for metric in ("loss", "common_loss"):
            tables = [run.records[-1]["per_client"][f"{metric}_{moment}"] for run in (one, two)]
            assert tables[0] == pytest.approx(tables[1], abs=1e-12)
        assert one.scores(moment) == pytest.approx(two.scores(moment), abs=1e-12)
    assert [r["bytes_up"] for r in one.records] == [r["bytes_up"] for r in two.records]


def test_each_client_with_local_training_equals_a_run_with_its_own_network() -> None:
    fed, method = tiny_federation(), ft.methods.Local()
    run = ft.simulate(method, mixed(fed), fed, rounds=2, **SETTINGS)
    alone = [ft.simulate(method, net, fed, rounds=2, **SETTINGS) for net in (TinyNet, DeepNet)]
    for client in range(4):
        for moment in ("received", "trained"):
            assert same(run.personal(client, moment), alone[client % 2].personal(client, moment))
    tables, expected = run.records[-1]["per_client"], [one.records[-1]["per_client"] for one in alone]
    for metric in ("loss", "loss_trained", "accuracy_received"):
        assert tables[metric] == {client: expected[client % 2][metric][client] for client in range(4)}


def test_fedproto_averages_prototypes_over_architectures() -> None:
    """A prototype is the mean feature of all samples of a class, each with the network of its client."""
    fed = tiny_federation()
    run = ft.simulate(ft.methods.FedProto(), mixed(fed), fed, rounds=1, **SETTINGS)
    features, labels = [], []
    for client, samples in enumerate(fed.train):
        net = (TinyNet, DeepNet)[client % 2]().double()
        net.load_state_dict(run.client(client)["params"])
        x = fed.x[samples]
        features.append(net.features(x) if isinstance(net, DeepNet) else torch.tanh(net.fc(x)))
        labels.append(fed.y[samples])
    found = run.server["prototypes"]
    for label in range(3):
        expected = torch.cat(features)[torch.cat(labels) == label].mean(0)
        assert torch.allclose(found.values[label], expected, rtol=0, atol=1e-12)


@EACH_MIXED
@pytest.mark.parametrize("engine", ["vectorized", "pool"])
def test_engines_agree_on_different_architectures(name: str, engine: str) -> None:
    fed = tiny_federation()
    runs = [
        ft.simulate(METHODS[name](), mixed(fed), fed, engine=one, schedule=SCHEDULE, **SETTINGS)
        for one in ("sequential", engine)
    ]
    assert same(runs[0].server, runs[1].server, 1e-12)
    assert all_same(models(runs[0]), models(runs[1]), 1e-12)


def test_engine_is_measured_on_all_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 0)
    fed = tiny_federation()
    run = ft.simulate(ft.methods.FedGH(), mixed(fed), fed, rounds=1, **SETTINGS)
    expected = ft.simulate(ft.methods.FedGH(), mixed(fed), fed, rounds=1, engine="sequential", **SETTINGS)
    assert run.info["engine_reason"].startswith("Milliseconds")
    assert all_same(models(run), models(expected), 1e-12)


def test_clients_of_a_failing_architecture_do_not_stop_the_others() -> None:
    fed = tiny_federation()
    networks = [TinyNet, FailingNet, DeepNet, TinyNet]
    run = ft.simulate(ft.methods.FedGH(), ft.client_models(networks, fed), fed, schedule=SCHEDULE, **SETTINGS)
    without = ft.simulate(
        ft.methods.FedGH(), ft.client_models(networks, fed), fed, schedule=[[3, 0, 2], [2], [0, 2]], **SETTINGS
    )
    assert [list(record["failed"]) for record in run.records] == [[1], [1], []]
    assert [record["clients"] for record in run.records] == [[3, 0, 2], [2], [0, 2]]
    assert same(run.server, without.server)
    assert all(same(run.personal(client), without.personal(client)) for client in (0, 2, 3))


class Stop(Exception):
    """Stops a run."""


def test_resumed_run_with_different_architectures_is_identical(tmp_path: Path) -> None:
    fed, method = tiny_federation((9, 4, 7, 5, 6)), ft.methods.FedProto()
    options = SETTINGS | {"rounds": 4, "participation": 0.7, "engine": "vectorized", "checkpoint_every": 2}
    options |= {"held_out_clients": [1], "validation": 0.2}

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        ft.simulate(method, mixed(fed), fed, folder=tmp_path / "stopped", on_round_end=stop, **options)
    whole = ft.simulate(method, mixed(fed), fed, folder=tmp_path / "whole", **options)
    swapped = ft.client_models([DeepNet, TinyNet], fed)
    assert "The model differs" in error_message(lambda: ft.resume(tmp_path / "stopped", model=swapped, fed=fed))
    ft.resume(tmp_path / "stopped", model=mixed(fed), fed=fed)
    resumed, loaded = ft.load_run(tmp_path / "stopped"), ft.load_run(tmp_path / "whole")
    assert comparable(resumed) == comparable(whole) == comparable(loaded)
    assert same(resumed.server, whole.server)
    for client in range(4):
        assert same(resumed.client(client), whole.client(client))
    for client in range(5):
        assert same(resumed.personal(client), whole.personal(client))


def test_run_names_the_network_of_every_client(tmp_path: Path) -> None:
    """Held-out clients come last and keep their networks."""
    fed = tiny_federation()
    run = ft.simulate(
        ft.methods.FedGH(), mixed(fed), fed, rounds=1, held_out_clients=[0], folder=tmp_path / "run", **SETTINGS
    )
    described = [*run.info["clients"], *run.info["held_out_clients"]]
    assert [(client["name"], client["network"]) for client in described] == [
        ("1", "DeepNet"), ("2", "TinyNet"), ("3", "DeepNet"), ("0", "TinyNet")
    ]  # fmt: skip
    assert set(run.records[-1]["per_client"]["held_out_loss_trained"]) == {3}
    loaded = list(load_all_personal(tmp_path / "run", model=mixed(fed)))
    assert [type(model.network) for model in loaded] == [DeepNet, TinyNet, DeepNet, TinyNet]
    assert same(dict(loaded[0].network.state_dict()), run.personal(0))
    assert ft.load_personal(tmp_path / "run", client=0, model=mixed(fed))(fed.x[:2]).shape == (2, 3)


def test_held_out_client_is_evaluated_with_its_own_network() -> None:
    """With local training, it starts from the initial weights and trains for one round, whatever the others have."""
    fed, method = tiny_federation(), ft.methods.Local()
    options = SETTINGS | {"rounds": 1, "held_out_clients": [1]}
    run = ft.simulate(method, mixed(fed), fed, **options)
    deep = ft.simulate(method, DeepNet, fed, **options)
    assert same(run.personal(3), deep.personal(3))
    name = "held_out_loss_trained"
    assert run.records[0]["per_client"][name] == deep.records[0]["per_client"][name]


def test_method_that_exchanges_models_rejects_different_architectures() -> None:
    fed = tiny_federation()
    for name, kind in METHODS.items():
        if not kind.mixed_architectures:
            text = error_message(lambda kind=kind: ft.simulate(kind(), mixed(fed), fed, rounds=1))  # type: ignore[misc]
            assert "the same network for all clients" in text, name
            assert all(METHODS[other].class_title() in text for other in MIXED)


def test_networks_and_settings_that_do_not_fit_together_are_rejected() -> None:
    fed, method = tiny_federation(), ft.methods.FedProto()
    wide = ft.client_models([TinyNet, WideNet], fed)
    assert "'prototypes/rows.values', which is (3, 5)" in error_message(lambda: ft.simulate(method, wide, fed))
    assert ft.simulate(ft.methods.Local(), wide, fed, rounds=1, **SETTINGS).records
    initial = TinyNet().state_dict()
    text = error_message(lambda: ft.simulate(method, mixed(fed), fed, initial_weights=initial))
    assert "initial_weights" in text
    fewer = mixed(tiny_federation((4, 5, 6)))
    assert "4 clients, but networks are given for 3" in error_message(lambda: ft.simulate(method, fewer, fed))
    assert "The settings of a deployment have one network" in error_message(
        lambda: make_deployment({"network": ["mlp", "logistic"]})
    )
