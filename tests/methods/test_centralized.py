"""Centralized training, the reference on pooled data."""

from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import same, tiny_federation
from fedtailor.data.federation import Federation
from fedtailor.experiments.deployment import make_deployment
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer


def pool(fed: Federation) -> Federation:
    """Return one client with the training data of all clients."""
    train, test = torch.cat(fed.train), torch.cat(fed.test)
    return Federation(fed.x, fed.y, (train,), (test,), ("all",), fed.classes)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_centralized_equals_training_of_one_client_with_all_data(engine: str, net: nn.Module) -> None:
    """The batches are larger than any single client, and neither participation nor unreliable clients matter."""
    fed = tiny_federation()
    settings: dict[str, Any] = {"rounds": 3, "batch_size": 12, "dtype": torch.float64, "engine": engine}
    alone = ft.simulate(ft.methods.Local(lr=0.2), net, pool(fed), **settings)
    run = ft.simulate(
        ft.methods.Centralized(lr=0.2), net, fed, participation=0.5, unreliable=ft.Unreliable(dropout=0.5),
        channel=ft.Channel(quantize="int8"), **settings,
    )  # fmt: skip
    for client in range(fed.num_clients):
        assert same(run.personal(client, "received"), alone.personal(0), 1e-12)
    assert run.total("bytes_up") == run.total("bytes_down") == 0
    assert [client["train"] for client in run.info["clients"]] == [len(own) for own in fed.train]
    summary, single = run.summarize("received"), alone.summarize("trained")
    assert summary is not None and single is not None
    assert summary["weighted"] == pytest.approx(single["weighted"])  # over the test samples of all clients
    assert summary["clients"] == sum(len(own) > 0 for own in fed.test)
    assert run.records[-1]["loss"] == pytest.approx(alone.records[-1]["loss"])  # over all training samples


def test_centralized_takes_the_steps_of_all_clients(net: nn.Module) -> None:
    """With the steps of one client, the reference would see a fraction of the samples that the clients see together."""
    fed, settings = tiny_federation(), {"rounds": 2, "batch_size": 2, "dtype": torch.float64}
    run = ft.simulate(ft.methods.Centralized(steps=3), net, fed, **settings)  # type: ignore[arg-type]
    alone = ft.simulate(ft.methods.Local(steps=3 * fed.num_clients), net, pool(fed), **settings)  # type: ignore[arg-type]
    assert same(run.personal(0, "received"), alone.personal(0), 1e-12)


def test_centralized_never_trains_on_validation_data(net: nn.Module) -> None:
    """Validation samples of each client are held out before the data are pooled."""
    fed, config = tiny_federation(sizes=(8, 6, 4)), TrainingConfig(rounds=1, validation=0.5)
    clients = make_trainer(config, ft.methods.Centralized(), ft.wrap(net), fed)[0].clients
    pooled = set(clients.training_samples[0].tolist())
    held_out = {sample for client in range(3) for sample in clients.samples["validation"][client].tolist()}
    assert held_out and pooled == set(torch.cat(fed.train).tolist()) - held_out


def test_centralized_cannot_be_deployed() -> None:
    with pytest.raises(ft.ConfigError, match="needs all data in one place"):
        make_deployment({"method": "centralized"})
