"""Networks for sequences of tokens, which are integers; token 0 is padding at the end of a sequence."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import torch
from torch import Tensor, nn

from fedtailor.core.fields import Constraint, FractionBelow1, PositiveInt, check_fields
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DataError
from fedtailor.networks.layers import MAX_LAYERS, MAX_WIDTH, Shape

_TOKEN_DTYPES = (torch.int32, torch.int64)
_Vocabulary = Annotated[int, Constraint(f"from 2 to {MAX_WIDTH}", lambda value: 2 <= value <= MAX_WIDTH)]
_Width = Annotated[PositiveInt, Constraint(f"at most {MAX_WIDTH}", lambda value: value <= MAX_WIDTH)]
_Layers = Annotated[PositiveInt, Constraint(f"at most {MAX_LAYERS}", lambda value: value <= MAX_LAYERS)]
Tokens = TypeVar("Tokens", bound="TokenNetwork")


@dataclass(frozen=True)
class TokenNetwork:
    """The settings that networks for sequences of tokens share."""

    vocabulary: Annotated[_Vocabulary | None, "number of tokens; none: the largest token of the data plus 1"] = None
    embedding: Annotated[_Width, "width of the vector that represents a token"] = 64

    def __post_init__(self) -> None:
        check_fields(self, "network.")

    def fit(self: Tokens, fed: Federation) -> Tokens:
        """Return the settings with the vocabulary of the data; raise an error if the inputs are not its tokens."""
        name, x = type(self).__name__.lower(), fed.x
        if isinstance(x, dict) or x.dtype not in _TOKEN_DTYPES or x.ndim != 2:
            got = "several parts" if isinstance(x, dict) else f"{x.dtype} of shape {tuple(x.shape[1:])}"
            is_narrow = not isinstance(x, dict) and x.ndim == 2 and not x.is_floating_point()
            fix = "convert them to int64 if they are tokens" if is_narrow else "use another network"
            raise ConfigError(f"{name} needs tokens, int64 of shape (length,), got {got}; {fix}.")
        if bool((negative := (x < 0).any(1)).any()):
            raise DataError(f"{fed.find_owner(negative)} has negative tokens; tokens must be 0 (padding) or above.")
        if self.vocabulary is None:
            return replace(self, vocabulary=max(2, int(x.max()) + 1))
        if bool((unknown := (x >= self.vocabulary).any(1)).any()):
            owner, largest = fed.find_owner(unknown), int(x.max())
            raise DataError(f"{owner} has tokens up to {largest}; set network.vocabulary to at least {largest + 1}.")
        return self

    def make_embedding(self) -> nn.Embedding:
        """Return the embedding of the tokens; padding is the zero vector."""
        if self.vocabulary is None:
            raise ConfigError("The number of tokens is unknown; set network.vocabulary.")
        return nn.Embedding(self.vocabulary, self.embedding, padding_idx=0)


@dataclass(frozen=True)
class LSTM(TokenNetwork):
    """A token embedding and an LSTM; the head sees the state after the last token."""

    hidden: Annotated[_Width, "width of the state"] = 128
    layers: Annotated[_Layers, "number of recurrent layers"] = 1
    dropout: Annotated[FractionBelow1, "after each recurrent layer"] = 0.0

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _LSTMClassifier(self, outputs)


class _LSTMClassifier(nn.Module):
    def __init__(self, spec: LSTM, outputs: int) -> None:
        super().__init__()
        self.embedding = spec.make_embedding()
        between = spec.dropout if spec.layers > 1 else 0.0
        self.lstm = nn.LSTM(spec.embedding, spec.hidden, spec.layers, dropout=between, batch_first=True)
        self.dropout, self.head = nn.Dropout(spec.dropout), nn.Linear(spec.hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.lstm(self.embedding(tokens))[0]  # [samples, length, width]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = ((tokens != 0) * positions).amax(1)
        state = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        return self.head(self.dropout(state))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Transformer(TokenNetwork):
    """Embeddings of tokens and positions, then encoder layers; the head sees the mean over all tokens but padding."""

    heads: Annotated[PositiveInt, "attention heads; must divide the width of the embedding"] = 4
    hidden: Annotated[_Width, "width of the feed-forward layers"] = 128
    layers: Annotated[_Layers, "number of encoder layers"] = 2
    dropout: Annotated[FractionBelow1, "in attention and feed-forward layers"] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding % self.heads:
            raise ConfigError(f"network.heads must divide the embedding's width {self.embedding}, got {self.heads}.")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _TransformerClassifier(self, shape[0], outputs)


class _TransformerClassifier(nn.Module):
    def __init__(self, spec: Transformer, length: int, outputs: int) -> None:
        super().__init__()
        self.embedding, self.positions = spec.make_embedding(), nn.Embedding(length, spec.embedding)
        layer = nn.TransformerEncoderLayer(
            spec.embedding, spec.heads, spec.hidden, spec.dropout, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(spec.embedding)
        self.encoder = nn.TransformerEncoder(layer, spec.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(spec.embedding, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != 0
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        is_masked = ~is_token & (positions > 0)  # attention needs at least one key, also in an empty sequence
        x = self.encoder(self.embedding(tokens) + self.positions(positions), src_key_padding_mask=is_masked)
        weights = is_token.to(x.dtype)[:, :, None]
        return self.head((x * weights).sum(1) / weights.sum(1).clamp(min=1))  # type: ignore[no-any-return]
