"""Named networks: those of the papers, and two for sequences of tokens. Each one is a frozen dataclass of settings that
builds a module whose last layer is `head`."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedtailor.core.model import Model, wrap
from fedtailor.core.system import total_memory
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.networks.convolutional import CNN, LeNet5
from fedtailor.networks.layers import Network
from fedtailor.networks.linear import MLP, Logistic
from fedtailor.networks.resnet import ResNet9, ResNet20
from fedtailor.networks.sequence import LSTM, TokenNetwork, Transformer

_COPIES = 8  # float32 copies of the weights in training: skeletons, parameters, gradients, and saved states


def network(name: str, fed: Federation, **settings: Any) -> Model:
    """Return a named network for the inputs and classes of a federation; the run's seed sets its initial weights.

    >>> import fedtailor as ft
    >>> ft.network("mlp", ft.load("digits"), hidden=(32,)).head
    'head'
    """
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    kind = NETWORKS[name]
    for setting in settings:
        if setting not in (known := [f.name for f in fields(kind)]):
            raise unknown_name(f"field of the network {name}", setting, known)
    if fed.shape is None:
        raise ConfigError("Named networks take one tensor as input; for several inputs, use ft.wrap with your module.")
    outputs = fed.classes if fed.classes is not None else fed.y[:1].numel()
    spec = fit_network(kind(**settings), fed)
    build = partial(spec.build, fed.shape, outputs)
    with torch.random.fork_rng(devices=[]):
        _check_memory(build, name)
        model = wrap(build(), loss="classification" if fed.classes is not None else "regression")
    return replace(model, build=build, description={"name": name, **vars(spec)}, parts=getattr(kind, "parts", {}))


def fit_network(spec: Network, fed: Federation) -> Network:
    """Return the settings completed from the data: the vocabulary of networks for tokens.

    >>> x, y = torch.tensor([[1, 7], [3, 0]]), torch.tensor([0, 1])
    >>> fit_network(LSTM(), Federation.from_arrays([(x, y, x, y)])).vocabulary
    8
    """
    return spec.fit(fed) if isinstance(spec, TokenNetwork) else spec


def _check_memory(build: Callable[[], nn.Module], name: str) -> None:
    """Raise `ConfigError` if the network is too large for this machine, before it is allocated."""
    try:
        with torch.device("meta"):  # allocates no memory
            parameters = sum(p.numel() for p in build().parameters())
    except RuntimeError as error:  # the number of elements overflows
        raise ConfigError(f"The network {name} has layers with too many parameters; use narrower layers.") from error
    limit = total_memory(torch.device("cpu")) // (4 * _COPIES)
    if parameters > limit:
        allowed = f"this machine has memory for about {limit:,}; use narrower layers"
        raise ConfigError(f"The network {name} has {parameters:,} parameters for this data, but {allowed}.")


NETWORKS: dict[str, type[Network]] = {
    "logistic": Logistic,
    "mlp": MLP,
    "lenet5": LeNet5,
    "cnn": CNN,
    "resnet9": ResNet9,
    "resnet20": ResNet20,
    "lstm": LSTM,
    "transformer": Transformer,
}
