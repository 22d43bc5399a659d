"""Clients with different architectures: their numbers and initial weights, and whether a method supports them."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedtailor.core.client_models import AnyModel, ClientModels
from fedtailor.core.method import Method, Setup
from fedtailor.core.trees import flatten
from fedtailor.errors import ConfigError
from fedtailor.training.config import TrainingConfig
from fedtailor.training.held_out import split_numbers


def renumber(model: AnyModel, num_clients: int, config: TrainingConfig) -> AnyModel:
    """Return the networks in the order in which a run numbers the clients: those that are held out come last."""
    if not isinstance(model, ClientModels):
        return model
    if (given := len(model.of_client)) != num_clients:
        raise ConfigError(f"The data has {num_clients} clients, but networks are given for {given}; give one for each.")
    training, held_out = split_numbers(num_clients, config.held_out_clients, config.seed)
    return model.select([*training, *held_out])


def check_supports_architectures(method: Method) -> None:
    """Raise `ConfigError` unless the clients of a method may have different architectures."""
    if not method.mixed_architectures:
        problem = "needs the same network for all clients, because it exchanges models or their bodies"
        known = "Local training, FedProto, FedGH, and LG-FedAvg support different ones"
        raise ConfigError(f"{method.display_name} {problem}; {known}.")


def check_same_exchange(method: Method, setups: Sequence[Setup]) -> None:
    """Raise `ConfigError` unless the server state, and so what is exchanged, is the same for all architectures."""
    if len(setups) == 1:
        return
    states = [flatten(method.init_server(setup)) for setup in setups]
    for number, state in enumerate(states[1:], start=1):
        for path in sorted(state.keys() | states[0].keys()):
            shapes = [tuple(found[path].shape) if path in found else "absent" for found in (states[0], state)]
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{method.display_name} exchanges '{path}', which is {shapes[0]} for the first network and "
                    f"{shapes[1]} for network {number + 1}; give all networks heads of the same name and size."
                )


def weights_of(initial_weights: Mapping[str, Tensor] | None, architecture: int | None) -> Mapping[str, Tensor] | None:
    """Return the initial weights of an architecture, from those of all architectures; None: there is only one.

    >>> weights_of({"0/w": 1, "1/w": 2}, 1), weights_of({"w": 3}, None)
    ({'w': 2}, {'w': 3})
    """
    if initial_weights is None or architecture is None:
        return initial_weights
    prefix = f"{architecture}/"
    return {n.removeprefix(prefix): value for n, value in initial_weights.items() if n.startswith(prefix)}
