"""Tests of the clients of a simulation."""

from pathlib import Path

from torch import nn

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.methods import FedAvg
from fedtailor.runs import checkpoint
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines.vectorized import Vectorized
from fedtailor.training.simulate import make_trainer


def test_chunk_size_reduced_for_lack_of_memory_is_restored(net: nn.Module, tmp_path: Path) -> None:
    """Results may depend on the chunk size, so a resumed run uses the one that the engine had when it stopped."""
    config = TrainingConfig(rounds=2, engine="sequential")
    stopped, resumed = (make_trainer(config, FedAvg(), ft.wrap(net), tiny_federation())[0] for _ in range(2))
    for trainer, chunk_size in ((stopped, 2), (resumed, 4)):  # directly, because on several cores it runs in a pool
        clients = trainer.clients
        clients.engine = Vectorized(clients.shared, clients.samples["train"], chunk_size)
    stores, metadata = stopped.clients.snapshot()
    checkpoint.save(tmp_path, 1, stopped.server.state, stores, metadata)
    found, problems = checkpoint.latest(tmp_path, lambda _: None)
    assert found is not None and not problems
    resumed.clients.restore(resumed.server, found)
    assert resumed.clients.snapshot()[1]["chunk_size"] == 2
