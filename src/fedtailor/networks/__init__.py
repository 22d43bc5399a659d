"""Named networks: those of the papers, and two for sequences. Each one is a frozen dataclass of settings that builds a
module whose last layer is `head`."""

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
from fedtailor.networks.layers import Network, Shape
from fedtailor.networks.linear import MLP, Logistic
from fedtailor.networks.multimodal import Activity, AudioVideo, ImageText, MultimodalNetwork
from fedtailor.networks.resnet import ResNet9, ResNet18, ResNet20
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
    if fed.shape is None and not issubclass(kind, MultimodalNetwork):
        fitting = " or ".join([*multimodal_networks(fed), "ft.wrap with your module"])
        raise ConfigError(f"{name} takes one tensor as input; for the parts {', '.join(fed.x)}, use {fitting}.")
    spec = fit_network(kind(**settings), fed)
    build = partial(spec.build, _input_shape(fed), fed.num_outputs)
    with torch.random.fork_rng(devices=[]):
        _check_memory(build, name)
        model = wrap(build(), loss=fed.task)
    return replace(model, build=build, description={"name": name, **vars(spec)}, parts=getattr(spec, "parts", {}))


def fit_network(spec: Network, fed: Federation) -> Network:
    """Return the settings completed from the data: the vocabulary of networks for tokens. Raise an error if networks
    for tokens or for several inputs do not fit the data.

    >>> x, y = torch.tensor([[1, 7], [3, 0]]), torch.tensor([0, 1])
    >>> fit_network(LSTM(), Federation.from_arrays([(x, y, x, y)])).vocabulary
    8
    """
    return spec.fit(fed) if isinstance(spec, TokenNetwork | MultimodalNetwork) else spec


def multimodal_networks(fed: Federation) -> list[str]:
    """Return the names of the networks for inputs with the parts of a federation.

    >>> x, y = {"accelerometer": torch.zeros(2, 64, 3), "gyroscope": torch.zeros(2, 64, 3)}, torch.tensor([0, 1])
    >>> multimodal_networks(Federation.from_arrays([(x, y, x, y)]))
    ['activity']
    """
    return [name for name, kind in NETWORKS.items() if issubclass(kind, MultimodalNetwork) and kind.accepts(fed.x)]


def describe_network(kind: type[Network]) -> str:
    """Return what a network is, what inputs it takes, and which papers use it.

    >>> describe_network(Logistic).partition("Inputs")[0]
    'A linear layer: multinomial logistic regression, linear regression, or, for survival times, a Cox model. '
    """
    about = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return f"{about} Inputs: {kind.inputs}. Used by: {kind.used_by}."


def _input_shape(fed: Federation) -> Shape | dict[str, Shape]:
    """Return the shape of one sample, or of each of its parts."""
    return fed.shape if fed.shape is not None else {name: tuple(part.shape[1:]) for name, part in fed.x.items()}


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
    "resnet18": ResNet18,
    "resnet20": ResNet20,
    "lstm": LSTM,
    "transformer": Transformer,
    "image_text": ImageText,
    "activity": Activity,
    "audio_video": AudioVideo,
}
