"""Drift: the distance of a round's models from their mean, and from what their clients received."""

from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import FEDERATED, tiny_federation
from fedtailor.methods import METHODS
from support.simulation import simulate


def test_drift_of_three_clients_is_that_of_their_models(net: nn.Module) -> None:
    """Clients 0 to 2 train from the initial model in the only round."""
    run = simulate(net, schedule=[[0, 1, 2]], measure_drift=True)
    start, record = net.state_dict(), run.records[0]
    models = [run.personal(client) for client in range(3)]
    flat = torch.stack([torch.cat([leaf.flatten() for leaf in own.values()]) for own in models])
    from_mean = (flat - flat.mean(0)).square().sum(1).sqrt().tolist()
    from_start = [sum(float((own[name] - start[name]).norm()) for name in start) for own in models]
    assert record["per_client"]["model_drift"] == pytest.approx(dict(enumerate(from_mean)))
    assert record["per_client"]["shared_drift"] == pytest.approx(dict(enumerate(from_start)))
    assert record["model_drift_mean"] == pytest.approx(sum(from_mean) / 3) and record["model_drift_mean"] > 0
    assert record["shared_drift_mean"] == pytest.approx(sum(from_start) / 3)


def test_one_client_has_no_drift_from_the_mean_but_from_what_it_received(net: nn.Module) -> None:
    run = simulate(net, schedule=[[1], [2]], measure_drift=True)
    assert [record["per_client"]["model_drift"] for record in run.records] == [{1: 0.0}, {2: 0.0}]
    assert all(record["shared_drift_mean"] > 0 for record in run.records)


def test_shared_drift_covers_received_layers_only(net: nn.Module) -> None:
    run = simulate(net, ft.methods.FedPer(), schedule=[[0, 1]], measure_drift=True)
    start = net.state_dict()
    for client, value in run.records[0]["per_client"]["shared_drift"].items():
        own = run.personal(client)
        assert value == pytest.approx(sum(float((own[n] - start[n]).norm()) for n in ("fc.weight", "fc.bias")))
    local = simulate(net, ft.methods.Local(), measure_drift=True).records[-1]  # its clients receive nothing
    assert local["model_drift_mean"] > 0 and "shared_drift" not in local["per_client"]


def test_drift_ignores_running_statistics() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model = ft.wrap(net, head="2")
    fed, method = tiny_federation((8, 8)), ft.methods.FedAvg(lr=1e-30)  # weights stay; statistics are recomputed
    settings: dict[str, Any] = {"rounds": 1, "dtype": torch.float64, "measure_drift": True}
    run = ft.simulate(method, model, fed, **settings)
    assert not torch.equal(run.personal(0)["1.running_mean"], run.personal(1)["1.running_mean"])
    assert run.records[0]["model_drift_mean"] == pytest.approx(0, abs=1e-20)


def test_clients_of_a_sequential_method_are_compared_over_the_whole_round(net: nn.Module) -> None:
    method = ft.methods.FedAPA(variant="code")
    run = simulate(net, method, schedule=[[0, 1, 2]], measure_drift=True)
    assert method.sequential_clients and run.records[0]["per_client"]["model_drift"].keys() == {0, 1, 2}
    assert run.records[0]["model_drift_mean"] > 0


def test_clients_with_different_networks_are_compared_with_those_of_the_same_network(net: nn.Module) -> None:
    other = ft.wrap(nn.Sequential(nn.Linear(4, 3)).double(), head="0")
    model = ft.client_models(lambda client: other if client == 3 else net, tiny_federation())
    run = ft.simulate(ft.methods.Local(), model, tiny_federation(), rounds=1, dtype=torch.float64, measure_drift=True)
    drift = run.records[0]["per_client"]["model_drift"]
    assert drift[3] == 0 and all(drift[client] > 0 for client in range(3))


@pytest.mark.parametrize("name", FEDERATED)
def test_drift_is_recorded_for_every_method_and_equal_on_both_engines(name: str, net: nn.Module) -> None:
    runs = [
        simulate(net, METHODS[name](), rounds=1, engine=e, measure_drift=True) for e in ("sequential", "vectorized")
    ]
    first, second = (run.records[0]["per_client"] for run in runs)
    assert set(first["model_drift"]) == set(runs[0].records[0]["clients"])
    for kind in {"model_drift", "shared_drift"} & first.keys():
        assert second[kind] == pytest.approx(first[kind], rel=1e-6, abs=1e-9)
