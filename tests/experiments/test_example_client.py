"""`ft.example_client` gives the client that a simulation would train."""

import pytest
import torch

import fedtailor as ft
from conftest import error_message


@pytest.mark.parametrize("client", [0, 2])
def test_example_client_trains_as_in_a_simulation(client: int) -> None:
    fed = ft.load("digits", clients=3, seed=5)
    model, method = ft.network("mlp", fed), ft.methods.FedAvg()
    ctx, params = ft.example_client(model, fed, client, batch_size=16, seed=7)
    _, upload = method.train(ctx, {}, {"params": params})
    run = ft.simulate(method, model, fed, rounds=1, batch_size=16, seed=7, engine="sequential", device="cpu")
    for name, expected in run.personal(client).items():
        assert torch.allclose(upload["params"][name], expected, atol=1e-6)


def test_example_client_that_does_not_exist_raises() -> None:
    assert "numbered 0 to 3" in error_message(lambda: ft.example_client(client=4))
