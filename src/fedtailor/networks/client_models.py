"""Networks of different architectures for the clients of a federation."""

from collections.abc import Callable, Sequence

from fedtailor.core.client_models import ClientModels, assign_in_turn, group_by_architecture
from fedtailor.core.model import ModelLike, as_model
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError


def client_models(models: Sequence[ModelLike] | Callable[[int], ModelLike], fed: Federation) -> ClientModels:
    """Return networks of different architectures for the clients of a federation.

    `models` is a list of networks, which the clients take in turn, or a function of the client's number that returns
    its network. Clients whose networks are the same form one architecture and start with the same weights. If the
    function makes a new module in each call, its weights are drawn from the run's seed. Only methods that exchange no
    bodies of networks support different architectures: local training, FedProto, FedGH, and LG-FedAvg.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> models = ft.client_models(lambda client: ft.network("mlp", fed, hidden=(32, 16) if client else (16,)), fed)
    >>> models.of_client
    (0, 1, 1, 1)
    """
    if callable(models):
        return group_by_architecture(models, fed.num_clients)
    if not isinstance(models, Sequence) or isinstance(models, str) or not models:
        raise ConfigError(f"models must be a list of networks, or a function of a client's number, got {models!r}.")
    found = tuple(as_model(model) for model in models)
    return ClientModels(found, assign_in_turn(len(found), fed.num_clients))
