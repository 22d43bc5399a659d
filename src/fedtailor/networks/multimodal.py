"""FedAPM's networks for inputs with several parts: one encoder per modality, and attention that fuses their steps.

A sample is a dict of parts. A sequence `text` may have a part `text_length` with its number of steps; the steps after
that are padding, which does not change the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from fedtailor.core.fields import FractionBelow1, check_fields
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DataError
from fedtailor.networks.layers import Shape, Width, check_pooled_channels, sequential

_SCORE_WIDTH, _CLASSIFIER_WIDTH = 512, 64  # of the hidden layers of the fusion and of the classifier
_MASKED = -1e5  # score of padding
_LENGTH_DTYPES = (torch.int16, torch.int32, torch.int64)  # bytes would be scaled to numbers from 0 to 1
_LENGTH = "_length"
Fitted = TypeVar("Fitted", bound="MultimodalNetwork")


@dataclass(frozen=True)
class MultimodalNetwork:
    """The settings that networks for inputs with several parts share."""

    hidden: Annotated[Width, "d, width of the vectors that are fused"] = 128
    heads: Annotated[Width, "h, weighted sums over time in the fusion"] = 6
    dropout: Annotated[FractionBelow1, "after each hidden layer"] = 0.1
    modalities: ClassVar[Mapping[str, int]]  # name of a part -> axes of one sample: 1 (a vector) or 2 (a sequence)

    def __post_init__(self) -> None:
        check_fields(self, "network.")

    @classmethod
    def accepts(cls, x: Any) -> bool:
        """Return whether inputs have the parts of this network, and no others than the lengths of its sequences."""
        sequences = [name for name, axes in cls.modalities.items() if axes == 2]
        return isinstance(x, dict) and {*cls.modalities} <= {*x} <= {*cls.modalities, *(n + _LENGTH for n in sequences)}

    def fit(self: Fitted, fed: Federation) -> Fitted:
        """Return the settings; raise an error if the inputs are not those of the network."""
        needs = " and ".join(self.modalities)
        if not self.accepts(fed.x):
            got = ", ".join(fed.x) if isinstance(fed.x, dict) else "a single part"
            raise ConfigError(f"{_name(self)} needs inputs with the parts {needs}, got {got}; use another network.")
        for name, axes in self.modalities.items():
            part = fed.x[name]
            if not part.is_floating_point() or part.ndim != axes + 1:
                need = "float32 of shape (steps, numbers)" if axes == 2 else "float32 of shape (numbers,)"
                got = f"{str(part.dtype).removeprefix('torch.')} of shape {tuple(part.shape[1:])}"
                raise ConfigError(f"{_name(self)} needs {name} as {need}, got {got}.")
            if name + _LENGTH in fed.x:
                _check_lengths(fed, name)
        return self

    def classifier(self, encoders: Mapping[str, nn.Module], outputs: int) -> nn.Module:
        """Return the network with these encoders."""
        return _FusedClassifier(encoders, self, outputs)


def _name(spec: MultimodalNetwork) -> str:
    """Return the name of a network from that of its class: image_text for ImageText."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(spec).__name__).lstrip("_")


def _check_lengths(fed: Federation, name: str) -> None:
    """Raise an error unless the lengths of a sequence are integers from 0 to its number of steps."""
    lengths, steps = fed.x[name + _LENGTH], fed.x[name].shape[1]
    if lengths.dtype not in _LENGTH_DTYPES or lengths.ndim != 1:
        got = f"{str(lengths.dtype).removeprefix('torch.')} of shape {tuple(lengths.shape[1:])}"
        raise ConfigError(f"{name}{_LENGTH} must be one int64 per sample, got {got}.")
    if bool((wrong := (lengths < 0) | (lengths > steps)).any()):
        owner = fed.find_owner(wrong)
        raise DataError(f"{owner} has a {name}{_LENGTH} outside of 0 to {steps}, the number of steps of {name}.")


@dataclass(frozen=True)
class ImageText(MultimodalNetwork):
    """A vector of image features and a GRU over text features, fused by attention."""

    hidden: Annotated[Width, "d, width of the vectors that are fused (128 in the authors' code)"] = 64
    heads: Annotated[Width, "h, weighted sums over time in the fusion (6 in the authors' code)"] = 4
    image_layers: Annotated[Literal[1, 2], "linear layers of the image (2 in the authors' code)"] = 1
    modalities: ClassVar[Mapping[str, int]] = {"image": 1, "text": 2}
    parts: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("input", "split_input"), ("image", "text"))
    inputs: ClassVar[str] = "image (numbers,), text (steps, numbers), text_length"
    used_by: ClassVar[str] = "FedAPM (CrisisMMD)"

    def build(self, shape: Mapping[str, Shape], outputs: int) -> nn.Module:
        (image,), (_, text) = shape["image"], shape["text"]
        encoders = {
            "image": _ImageEncoder(image, self.hidden, self.image_layers, self.dropout),
            "text": _SequenceEncoder(text, (), self.hidden, self.dropout),
        }
        return self.classifier(encoders, outputs)


@dataclass(frozen=True)
class _ConvolutionalNetwork(MultimodalNetwork):
    channels: Annotated[tuple[int, ...], "channels of the convolutions, each of which halves the number of steps"] = (
        32, 64, 128,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooled_channels(self.channels)

    def encoder(self, name: str, shape: Mapping[str, Shape]) -> nn.Module:
        """Return convolutions and a GRU for a sequence."""
        steps, width = shape[name]
        if steps < (least := 2 ** len(self.channels)):
            raise ConfigError(f"{_name(self)} needs at least {least} steps of {name}, got {steps}; use fewer channels.")
        return _SequenceEncoder(width, tuple(self.channels), self.hidden, self.dropout)


@dataclass(frozen=True)
class Activity(_ConvolutionalNetwork):
    """Convolutions and a GRU over each of two motion sensors, fused by attention."""

    modalities: ClassVar[Mapping[str, int]] = {"accelerometer": 2, "gyroscope": 2}
    parts: ClassVar[dict[str, tuple[str, ...]]] = {
        "split_input": ("accelerometer.conv",),
        "input": ("accelerometer.conv", "gyroscope.conv"),  # personal in the authors' code
    }
    inputs: ClassVar[str] = "accelerometer (steps, 3), gyroscope (steps, 3)"
    used_by: ClassVar[str] = "FedAPM (KU-HAR); also for HAPT"

    def build(self, shape: Mapping[str, Shape], outputs: int) -> nn.Module:
        return self.classifier({name: self.encoder(name, shape) for name in self.modalities}, outputs)


@dataclass(frozen=True)
class AudioVideo(_ConvolutionalNetwork):
    """Convolutions and a GRU over audio, and a GRU over features of video frames, fused by attention."""

    modalities: ClassVar[Mapping[str, int]] = {"audio": 2, "video": 2}
    parts: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("input", "split_input"), ("audio", "video"))
    inputs: ClassVar[str] = "audio (steps, numbers), audio_length, video (steps, numbers), video_length"
    used_by: ClassVar[str] = "FedAPM (CREMA-D)"

    def build(self, shape: Mapping[str, Shape], outputs: int) -> nn.Module:
        video = _SequenceEncoder(shape["video"][1], (), self.hidden, self.dropout)
        return self.classifier({"audio": self.encoder("audio", shape), "video": video}, outputs)


class _ImageEncoder(nn.Module):
    """One or two linear layers; the result is a sequence of one step."""

    def __init__(self, inputs: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.relu, self.dropout = nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)
        self.fc2 = nn.Linear(width, width) if layers == 2 else nn.Identity()

    def forward(self, x: Tensor, length: None) -> tuple[Tensor, Tensor]:
        steps = self.fc2(self.dropout(self.relu(self.fc1(x))))[:, None]
        return steps, _valid_steps(steps, None)


class _SequenceEncoder(nn.Module):
    """Convolutions over time, if there are any, and a GRU."""

    def __init__(self, inputs: int, channels: Shape, width: int, dropout: float) -> None:
        super().__init__()
        self.conv, self.pooling = _convolutions(inputs, channels, dropout), 2 ** len(channels)
        self.gru = nn.GRU(channels[-1] if channels else inputs, width, batch_first=True)

    def forward(self, x: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state after each step, and whether none of the steps that it pools is padding."""
        valid = _valid_steps(x, length)
        x = x.masked_fill(~valid[:, :, None], 0.0)  # a convolution also sees the steps after the last one
        steps = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))[0]
        return steps, valid[:, self.pooling - 1 :: self.pooling]  # the lengths, divided by the pooling and rounded down


def _convolutions(inputs: int, channels: Shape, dropout: float) -> nn.Module:
    """Return convolutions over time with kernels of 5 steps; each one is followed by max-pooling over 2 steps."""
    layers: dict[str, nn.Module] = {}
    for number, width in enumerate(channels, start=1):
        layers |= {
            f"conv{number}": nn.Conv1d(inputs, width, 5, padding=2), f"relu{number}": nn.ReLU(),
            f"pool{number}": nn.MaxPool1d(2), f"dropout{number}": nn.Dropout(dropout),
        }  # fmt: skip
        inputs = width
    return sequential(**layers)


def _valid_steps(x: Tensor, length: Tensor | None) -> Tensor:
    """Return which steps are not padding: [samples, steps]."""
    if length is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return torch.arange(x.shape[1], device=x.device) < length[:, None]


class _Fusion(nn.Module):
    """Joins sequences in time; each head is a weighted sum of all steps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(width, _SCORE_WIDTH), nn.Linear(_SCORE_WIDTH, heads)

    def forward(self, steps: Tensor, valid: Tensor) -> Tensor:
        scores = self.scores(torch.tanh(self.hidden(steps)))  # [samples, steps, heads]
        weights = scores.masked_fill(~valid[:, :, None], _MASKED).softmax(1)
        sums: Tensor = weights.transpose(1, 2) @ steps  # [samples, heads, width]
        return sums.flatten(1)


class _FusedClassifier(nn.Module):
    def __init__(self, encoders: Mapping[str, nn.Module], spec: MultimodalNetwork, outputs: int) -> None:
        super().__init__()
        self.modalities = tuple(encoders)
        for name, encoder in encoders.items():
            self.add_module(name, encoder)
        self.fusion = _Fusion(spec.hidden, spec.heads)
        self.fc1, self.relu = nn.Linear(spec.heads * spec.hidden, _CLASSIFIER_WIDTH), nn.ReLU()
        self.dropout, self.head = nn.Dropout(spec.dropout), nn.Linear(_CLASSIFIER_WIDTH, outputs)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        encoded = [self.get_submodule(name)(x[name], x.get(name + _LENGTH)) for name in self.modalities]
        steps, valid = (torch.cat(parts, 1) for parts in zip(*encoded, strict=True))
        return self.head(self.dropout(self.relu(self.fc1(self.fusion(steps, valid)))))  # type: ignore[no-any-return]
