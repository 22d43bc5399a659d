"""Clients that never train: the others are not affected, and each is evaluated as a client that joins late."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import MEASURED, TinyNet, all_same, error_message, same, tiny_federation
from fedtailor.export.personal_model import load_all_personal
from fedtailor.training.held_out import split_clients
from support.simulation import simulate

HELD_OUT = [1, 3]  # clients of the tiny federation


def others(run: ft.Run) -> list[dict[str, Any]]:
    """Return the records without measured times and without held-out clients."""
    records = []
    for record in run.records:
        kept = {n: v for n, v in record.items() if not n.startswith(("seconds", "held_out_"))}
        tables = {n: table for n, table in record["per_client"].items() if not n.startswith("held_out_")}
        records.append(kept | {"per_client": tables})
    return records


@pytest.mark.parametrize(
    "method",
    [ft.methods.FedAvg(), ft.methods.FedPer(), ft.methods.FedAPA(), ft.methods.PFedHN()],
    ids=lambda method: type(method).__name__,
)
def test_held_out_clients_never_change_the_others_in_batches(method: ft.Method, net: nn.Module) -> None:
    """The server and the training clients have the bits of a run on the federation without the held-out clients."""
    settings: dict[str, Any] = {"rounds": 3, "batch_size": 2, "participation": 0.7, "validation": 0.2}
    settings |= {"dtype": torch.float64, "engine": "vectorized"}
    fed = tiny_federation((9, 4, 7, 5, 6))
    run = ft.simulate(method, net, fed, held_out_clients=HELD_OUT, **settings)
    alone = ft.simulate(method, net, fed.select([0, 2, 4]), **settings)
    assert same(run.server, alone.server) and others(run) == others(alone)
    assert run.info["clients"] == alone.info["clients"] and run.num_clients == 3
    for client in range(3):
        assert same(run.client(client), alone.client(client))
        assert all(same(run.personal(client, m), alone.personal(client, m)) for m in ("received", "trained"))
    plain, without = (each.summary()["trained"]["last"] for each in (run, alone))
    assert {**plain, "metrics": {n: plain["metrics"][n] for n in without["metrics"]}} == without


def accuracy(state: Any, client: int) -> float:
    """Compute the accuracy of a model on a client's test samples without the library."""
    fed, net = tiny_federation(), TinyNet().double()
    net.load_state_dict(state)
    return float((net(fed.x[fed.test[client]]).argmax(1) == fed.y[fed.test[client]]).double().mean())


def test_held_out_client_joins_with_global_model_and_trains_one_round(net: nn.Module) -> None:
    """With FedAvg and one batch per epoch, a held-out client takes two gradient steps from the global model."""
    run = simulate(net, ft.methods.FedAvg(lr=0.5, epochs=2), batch_size=64, held_out_clients=HELD_OUT)
    last, fed = run.records[-1], tiny_federation()
    assert list(run.held_out_clients) == [2, 3]
    assert [client["name"] for client in run.info["held_out_clients"]] == ["1", "3"]
    for number, client in zip(run.held_out_clients, HELD_OUT, strict=True):
        received, twin = run.personal(number, "received"), TinyNet().double()
        assert same(received, run.server["params"])
        twin.load_state_dict(received)
        for _ in range(2):
            loss = nn.functional.cross_entropy(twin(fed.x[fed.train[client]]), fed.y[fed.train[client]])
            for p, grad in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True):
                p.data -= 0.5 * grad
        assert same(run.personal(number), twin.state_dict(), 1e-12)
        for moment in ("received", "trained"):
            expected = accuracy(run.personal(number, moment), client)
            assert last["per_client"][f"held_out_accuracy_{moment}"][number] == expected
    values = last["per_client"]["held_out_accuracy_trained"]
    assert last["held_out_accuracy_trained"] == pytest.approx(np.mean(list(values.values())))  # 5 test samples each
    summary = run.summary()["trained"]["last"]
    assert summary["metrics"]["held_out_accuracy"] == {
        "clients": 2,
        "weighted": last["held_out_accuracy_trained"],
        "mean": last["held_out_accuracy_trained_mean"],
    }
    assert summary["clients"] == 2 and set(run.scores("trained")) == {0, 1}
    assert "is held out" in error_message(lambda: run.client(2)) and "There is no client 4" in error_message(
        lambda: run.personal(4)
    )


def test_held_out_client_of_fedapa_joins_with_mean_of_the_others(net: nn.Module) -> None:
    """Its body is the mean of the bodies that the clients trained last, and its head is the initial one."""
    run = simulate(net, ft.methods.FedAPA(), held_out_clients=[3])
    received, trained = run.personal(3, "received"), [run.personal(client) for client in range(3)]
    for name, leaf in net.state_dict().items():
        expected = leaf if name.startswith("head") else torch.stack([own[name] for own in trained]).mean(0)
        assert torch.allclose(received[name], expected, rtol=0, atol=1e-12)


def test_held_out_client_with_local_training_starts_from_initial_model(net: nn.Module) -> None:
    run = simulate(net, ft.methods.Local(), held_out_clients=[0])
    assert same(run.personal(3, "received"), net.state_dict()) and not same(run.personal(3), net.state_dict())


def test_held_out_models_are_saved_and_resumed_run_has_same_bits(net: nn.Module, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"held_out_clients": 2, "method": ft.methods.FedAPA(), "engine": "sequential"}
    expected = simulate(net, folder=tmp_path / "whole", **settings)

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(net, folder=tmp_path / "stopped", checkpoint_every=1, on_round_end=stop, **settings)
    run = ft.resume(tmp_path / "stopped", model=TinyNet().double(), fed=tiny_federation())
    loaded = ft.load_run(tmp_path / "stopped")
    keep = [n for n in expected.records[-1] if not n.startswith(MEASURED)]
    for record in (run.records[-1], loaded.records[-1]):
        assert {n: record[n] for n in keep} == {n: expected.records[-1][n] for n in keep}
    for moment in ("received", "trained"):
        every = [[each.personal(client, moment) for client in range(4)] for each in (expected, run, loaded)]
        assert all_same(every[0], every[1]) and all_same(every[0], every[2])
    exported = ft.load_personal(tmp_path / "stopped", client=3, model=net)
    assert exported is not None and len([*load_all_personal(tmp_path / "stopped", model=net)]) == 4
    other = tiny_federation(seed=1)
    (tmp_path / "stopped" / "personal" / "models.json").unlink()
    assert "data differs" in error_message(lambda: ft.resume(tmp_path / "stopped", model=net, fed=other))


@pytest.mark.parametrize(("setting", "count"), [(3, 3), (0.5, 5), (0.01, 1), ([7, 2], 2), (np.int64(2), 2)])
def test_held_out_clients_are_a_number_a_fraction_or_a_list(setting: Any, count: int, net: nn.Module) -> None:
    fed = tiny_federation((3,) * 10)
    runs = [ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, seed=s, held_out_clients=setting) for s in (0, 0, 1)]
    names = [[client["name"] for client in run.info["held_out_clients"]] for run in runs]
    assert len(names[0]) == count and names[0] == names[1]
    assert (names[0] == names[2]) == isinstance(setting, list)  # drawn from the seed unless listed
    assert {*names[0], *(client["name"] for client in runs[0].info["clients"])} == set(fed.names)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (4, "leaves none of the 4 clients"),
        (0.9, "leaves none of the 4 clients"),
        ([0, 1, 2, 3], "leaves none of the 4 clients"),
        (0, "a number of clients, a fraction"),
        (1.0, "a number of clients, a fraction"),
        (True, "a number of clients, a fraction"),
        ("two", "a number of clients, a fraction"),
        ([], "list clients by different numbers from 0 to 3"),
        ([4], "list clients by different numbers from 0 to 3"),
        ([1, 1], "list clients by different numbers from 0 to 3"),
    ],
)
def test_invalid_held_out_clients_raise(setting: Any, words: str, net: nn.Module) -> None:
    assert words in error_message(lambda: simulate(net, held_out_clients=setting))


def test_held_out_clients_of_a_method_that_nobody_can_join_raise_before_training(net: nn.Module) -> None:
    """The cluster of a new client is unknown."""
    method = ft.methods.SelfFL(clusters=(0, 0, 1))
    assert "cluster" in error_message(lambda: simulate(net, method, held_out_clients=[3]))


def test_split_clients_keeps_order_and_samples() -> None:
    fed = tiny_federation()
    training, held_out = split_clients(fed, [2, 0], seed=0)
    assert held_out is not None and training.names == ("1", "3") and held_out.names == ("0", "2")
    assert torch.equal(training.train[1], fed.train[3]) and torch.equal(held_out.test[0], fed.test[0])
