"""Networks for sequences of tokens, which are integers, or of vectors, which are tokens that are embedded already.

Token 0, or a vector of zeros, is padding at the end of a sequence.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.core.fields import Constraint, FractionBelow1, PositiveInt, check_fields
from fedtailor.core.memory_limits import check_memory
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DataError
from fedtailor.networks.layers import MAX_WIDTH, LayerCount, Shape, Width

_TOKEN_DTYPES = (torch.int32, torch.int64)
_Vocabulary = Annotated[int, Constraint(f"from 2 to {MAX_WIDTH}", lambda value: 2 <= value <= MAX_WIDTH)]
Tokens = TypeVar("Tokens", bound="TokenNetwork")


@dataclass(frozen=True)
class TokenNetwork:
    """The settings that networks for sequences of tokens share."""

    vocabulary: Annotated[_Vocabulary | None, "number of tokens; none: the largest token of the data plus 1"] = None
    embedding: Annotated[Width, "width of the vector that represents a token, unless data or file determine it"] = 64
    pretrained: Annotated[str | None, "a .npy file with one row per token: the embedding, which is not trained"] = None
    inputs: ClassVar[str] = "tokens, int64 of shape (length,), or vectors, float32 of shape (length, width)"

    def __post_init__(self) -> None:
        check_fields(self, "network.")

    def fit(self: Tokens, fed: Federation) -> Tokens:
        """Return the settings with the vocabulary of the data; raise an error if the inputs are not its tokens.

        If the inputs are vectors, there is no vocabulary, and `embedding` is their width.
        """
        name, x = type(self).__name__.lower(), fed.x
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3:
            if self.pretrained is not None:
                raise ConfigError("network.pretrained is for tokens, but the samples are vectors; leave it out.")
            return replace(self, vocabulary=None, embedding=x.shape[2])
        if isinstance(x, dict) or x.dtype not in _TOKEN_DTYPES or x.ndim != 2:
            got = "several parts" if isinstance(x, dict) else f"{x.dtype} of shape {tuple(x.shape[1:])}"
            is_narrow = not isinstance(x, dict) and x.ndim == 2 and not x.is_floating_point()
            fix = "convert them to int64 if they are tokens" if is_narrow else "use another network"
            raise ConfigError(f"{name} needs {self.inputs}, got {got}; {fix}.")
        if bool((negative := (x < 0).any(1)).any()):
            raise DataError(f"{fed.find_owner(negative)} has negative tokens; tokens must be 0 (padding) or above.")
        known = self._with_pretrained_sizes()
        if known.vocabulary is None:
            return replace(known, vocabulary=max(2, int(x.max()) + 1))
        if bool((unknown := (x >= known.vocabulary).any(1)).any()):
            owner, largest = fed.find_owner(unknown), int(x.max())
            setting = "network.vocabulary to" if self.pretrained is None else "network.pretrained to a file with"
            raise DataError(f"{owner} has tokens up to {largest}; set {setting} at least {largest + 1}.")
        return known

    def _with_pretrained_sizes(self: Tokens) -> Tokens:
        """Return the settings with the sizes of the pretrained embedding, if there is one."""
        if self.pretrained is None:
            return self
        rows, width = _map_matrix(self.pretrained).shape
        if self.vocabulary not in (None, rows):
            raise ConfigError(f"network.vocabulary is {self.vocabulary}, but '{self.pretrained}' has {rows} rows.")
        return replace(self, vocabulary=rows, embedding=width)

    def make_embedding(self, shape: Shape) -> nn.Module:
        """Return the embedding for inputs of this shape; padding is the zero vector."""
        if len(shape) == 2:
            return nn.Identity()
        if self.pretrained is not None:
            matrix = torch.tensor(_map_matrix(self.pretrained), dtype=torch.float32, device="cpu")
            matrix[0] = 0
            frozen: nn.Module = nn.Embedding.from_pretrained(matrix, padding_idx=0)  # type: ignore[no-untyped-call]
            return frozen
        if self.vocabulary is None:
            raise ConfigError("The number of tokens is unknown; set network.vocabulary.")
        return nn.Embedding(self.vocabulary, self.embedding, padding_idx=0)


def _map_matrix(file: str) -> NDArray[np.floating[Any]]:
    """Map a matrix of floats in a .npy file into memory; no code in it is executed."""
    wrong = f"network.pretrained '{file}' must be a .npy file of floats with one row per token"
    try:
        check_memory(Path(file).stat().st_size, f"'{file}'")
        matrix = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"network.pretrained '{file}' cannot be read: {error.strerror}.") from error
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError) as error:
        raise ConfigError(f"{wrong}; write it with numpy.save.") from error
    if not isinstance(matrix, np.ndarray) or matrix.dtype.kind != "f" or matrix.ndim != 2 or len(matrix) < 2:
        raise ConfigError(f"{wrong}; write it with numpy.save.")
    if not np.isfinite(matrix).all():
        raise ConfigError(f"network.pretrained '{file}' has values that are infinite or NaN; replace them.")
    return matrix


def _is_token(x: Tensor) -> Tensor:
    """Return which positions of tokens, or of vectors, are not padding: [samples, length]."""
    return x != 0 if x.ndim == 2 else (x != 0).any(2)


@dataclass(frozen=True)
class LSTM(TokenNetwork):
    """A token embedding and an LSTM; the head sees the state after the last token."""

    hidden: Annotated[Width, "width of the state"] = 128
    layers: Annotated[LayerCount, "number of recurrent layers"] = 1
    dropout: Annotated[FractionBelow1, "after each recurrent layer"] = 0.0
    linear: Annotated[Width | None, "width of a linear layer without activation before the head; none: no layer"] = None
    skip_padding: Annotated[bool, "false: the head sees the state after the whole sequence, padding included"] = True
    used_by: ClassVar[str] = "with other settings, Self-FL (Sent140), LEAF (Shakespeare)"

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _LSTMClassifier(self, shape, outputs)


class _LSTMClassifier(nn.Module):
    def __init__(self, spec: LSTM, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.embedding, self.skip_padding = spec.make_embedding(shape), spec.skip_padding
        between = spec.dropout if spec.layers > 1 else 0.0
        self.lstm = nn.LSTM(spec.embedding, spec.hidden, spec.layers, dropout=between, batch_first=True)
        self.dropout = nn.Dropout(spec.dropout)
        self.linear = None if spec.linear is None else nn.Linear(spec.hidden, spec.linear)
        self.head = nn.Linear(spec.linear or spec.hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.lstm(self.embedding(tokens))[0]  # [samples, length, width]
        state = self.dropout(self._last_state(states, tokens))
        return self.head(state if self.linear is None else self.linear(state))  # type: ignore[no-any-return]

    def _last_state(self, states: Tensor, tokens: Tensor) -> Tensor:
        if not self.skip_padding:
            return states[:, -1]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = (_is_token(tokens) * positions).amax(1)
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


@dataclass(frozen=True)
class Transformer(TokenNetwork):
    """Embeddings of tokens and positions, then encoder layers; the head sees the mean over all tokens but padding."""

    heads: Annotated[PositiveInt, "attention heads; must divide the width of the embedding"] = 4
    hidden: Annotated[Width, "width of the feed-forward layers"] = 128
    layers: Annotated[LayerCount, "number of encoder layers"] = 2
    dropout: Annotated[FractionBelow1, "in attention and feed-forward layers"] = 0.1
    used_by: ClassVar[str] = "no paper, but any texts"

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        if self.embedding % self.heads:
            raise ConfigError(f"network.heads must divide the embedding's width {self.embedding}, got {self.heads}.")
        return _TransformerClassifier(self, shape, outputs)


class _TransformerClassifier(nn.Module):
    def __init__(self, spec: Transformer, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.embedding, self.positions = spec.make_embedding(shape), nn.Embedding(shape[0], spec.embedding)
        layer = nn.TransformerEncoderLayer(
            spec.embedding, spec.heads, spec.hidden, spec.dropout, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(spec.embedding)
        self.encoder = nn.TransformerEncoder(layer, spec.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(spec.embedding, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = _is_token(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        is_masked = ~is_token & (positions > 0)  # attention needs at least one key, also in an empty sequence
        x = self.encoder(self.embedding(tokens) + self.positions(positions), src_key_padding_mask=is_masked)
        weights = is_token.to(x.dtype)[:, :, None]
        return self.head((x * weights).sum(1) / weights.sum(1).clamp(min=1))  # type: ignore[no-any-return]
