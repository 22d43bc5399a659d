"""Networks of different architectures in the settings of an experiment."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedtailor.core.client_models import BY_CLIENT, ClientModels, assign_in_turn
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent
from fedtailor.experiments.own_parts import OwnNetwork, build_network, make_model
from fedtailor.experiments.parsing import parse_value
from fedtailor.networks.layers import Network


@dataclass(frozen=True)
class ClientNetworks:
    """Several networks, and the position of every client's network; without positions, clients take turns."""

    networks: tuple[Network | OwnNetwork, ...]
    clients: tuple[int, ...] | None = None

    def model(self, fed: Federation) -> ClientModels:
        """Return the clients' networks for a federation."""
        models = tuple(make_model(network, fed) for network in self.networks)
        return ClientModels(models, self.clients or assign_in_turn(len(models), fed.num_clients))


def build_networks(given: Any, consent: CodeConsent = NO_CONSENT) -> Network | OwnNetwork | ClientNetworks | None:
    """Return one network from its name and settings, or several from a list of such networks.

    A run folder stores several networks as a table with the name "by_client".

    >>> build_networks(["logistic", {"name": "mlp", "hidden": [32]}]).networks
    (Logistic(bias=True, intercept_head=False), MLP(hidden=(32,)))
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _build_all(given, None, consent)
    if not isinstance(given, dict) or given.get("name") != BY_CLIENT:
        return build_network(given, consent)
    settings = {name: value for name, value in given.items() if name != "name"}
    for name in settings:
        if name not in ("networks", "clients"):
            raise unknown_name(f"field of the network {BY_CLIENT}", name, ("networks", "clients"))
    clients = parse_value(tuple[int, ...] | None, settings.get("clients"), "network.clients")
    return _build_all(settings.get("networks"), clients, consent)


def _build_all(given: Any, clients: tuple[int, ...] | None, consent: CodeConsent) -> ClientNetworks:
    built = [build_network(one, consent) for one in given] if isinstance(given, Sequence) else []
    networks = tuple(one for one in built if one is not None)
    if not networks or len(networks) < len(built):
        raise ConfigError(f"Several networks are written as a list, such as mlp,logistic, got {reprlib.repr(given)}.")
    if clients is not None and not all(0 <= position < len(networks) for position in clients):
        raise ConfigError(f"network.clients must be positions from 0 to {len(networks) - 1} in network.networks.")
    return ClientNetworks(networks, clients)
