"""Tests of the server of a run."""

from torch import nn

import fedtailor as ft
from conftest import same, tiny_federation
from fedtailor.methods import FedAvg
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer


def test_restored_server_continues_with_the_next_round(net: nn.Module) -> None:
    """The number of rounds and the clients' uploads, which determine the privacy spent, are those before the stop."""
    config = TrainingConfig(dtype="float64", engine="sequential", schedule=[[0, 1], [1, 2], [0, 1]])
    trained, restored = (make_trainer(config, FedAvg(), ft.wrap(net), tiny_federation())[0] for _ in range(2))
    records = [trained.run_round(1), trained.run_round(2)]
    restored.server.restore(trained.server.state, 2, records)
    assert restored.server.rounds_done == trained.server.rounds_done == 2
    assert restored.server.upload_counts == trained.server.upload_counts == {0: 1, 1: 2, 2: 1}
    assert same(restored.server.state, trained.server.state)
