"""One client to try the hooks of a method on, without a simulation."""

import torch

from fedtailor.core.client_context import ClientContext
from fedtailor.core.model import ModelLike, as_model
from fedtailor.core.trees import Params
from fedtailor.data.datasets import load
from fedtailor.data.federation import Federation
from fedtailor.errors import DataError
from fedtailor.networks import network
from fedtailor.training.client_update import initial_model, make_shared_context
from fedtailor.training.config import TrainingConfig
from fedtailor.training.preflight import find_dropout_calls


def example_client(
    model: ModelLike | None = None,
    fed: Federation | None = None,
    client: int = 0,
    *,
    batch_size: int = 64,
    seed: int = 0,
) -> tuple[ClientContext, Params]:
    """Return the context of one client in round 1 and the initial parameters, to call a method's hooks by hand.

    By default, the client is one of four with a part of the data set digits, and the model is a logistic regression.

    >>> import fedtailor as ft
    >>> ctx, params = ft.example_client()
    >>> state, upload = ft.methods.FedAvg().train(ctx, {}, {"params": params})
    >>> list(upload["params"])
    ['head.weight', 'head.bias']
    """
    fed = load("digits", clients=4) if fed is None else fed
    if not 0 <= client < fed.num_clients:
        raise DataError(f"There is no client {client}; clients are numbered 0 to {fed.num_clients - 1}.")
    config = TrainingConfig(batch_size=batch_size, seed=seed, device="cpu")
    chosen, params = initial_model(network("logistic", fed) if model is None else as_model(model), config)
    sizes = torch.tensor([len(own) for own in fed.train])
    shared = find_dropout_calls(make_shared_context(config, chosen, fed, sizes, config.num_rounds, 1.0), params)
    return ClientContext(shared, 1, torch.tensor(client), sizes[client], fed.train[client]), params
