"""The channel for uploads: clipping, noise, sparsification, and quantization, independent of the method.

client:  change = upload - message  ->  clip  ->  noise  ->  top  ->  quantize
server:  dequantize  ->  (trusted: clip  ->  noise)  ->  message + change
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor

from fedtailor.core.fields import FractionAbove0, InnerFraction, NonNegative, Positive, check_fields
from fedtailor.core.method import Method
from fedtailor.core.trees import Rows, Tree, leaves
from fedtailor.core.updates import float_values, map_floats, map_pairs, norms, reference, restore, scale_rows, updates
from fedtailor.errors import ConfigError
from fedtailor.training.channel.privacy import NoiseSeed, epsilon, gaussian, require_accountant
from fedtailor.training.channel.quantization import (
    Format,
    decode_tensor,
    encode_tensor,
    is_encoded,
    is_valid_encoding,
)


@dataclass(frozen=True)
class Channel:
    """How uploads are clipped, noised, sparsified, and quantized. By default they are unchanged.

    Trees are stacked over clients on the leading axis, and each client is encoded independently of the others.

    >>> channel, sent, uploads = Channel(clip=1.0), {"w": torch.zeros(1, 2)}, {"w": torch.tensor([[3.0, 4.0]])}
    >>> channel.decode(channel.encode(uploads, sent, [0], round=1, seed=0), sent, [0], round=1, seed=0)["w"]
    tensor([[0.6000, 0.8000]])
    """

    clip: Annotated[Positive | None, "C, maximum L2 norm of an upload's change; none: unlimited"] = None
    noise: Annotated[
        NonNegative, "z, standard deviation of Gaussian noise in units of C, for differential privacy; 0: no noise"
    ] = 0.0
    delta: Annotated[InnerFraction, "δ, probability with which the ε in the record may not hold"] = 1e-5
    trusted: Annotated[
        bool, "true: the server adds noise z·C to the sum of a round; false: each client to its upload"
    ] = False
    top: Annotated[FractionAbove0, "fraction of each tensor that is sent, the largest changes; 1: all"] = 1.0
    quantize: Annotated[Format, "format of the values: none (unchanged), float16, or int8"] = "none"

    def __post_init__(self) -> None:
        check_fields(self, "channel.")
        if self.noise and self.clip is None:
            raise ConfigError("channel.noise is measured in units of channel.clip; set channel.clip too.")
        if self.trusted and not self.noise:
            raise ConfigError("channel.trusted has no effect without noise; set channel.noise too.")

    @property
    def is_identity(self) -> bool:
        """Whether uploads are unchanged."""
        return self.clip is None and self.top == 1 and self.quantize == "none"

    def check(self, method: Method) -> None:
        """Raise `ConfigError` if this channel cannot be used with a method."""
        if self.noise:
            require_accountant()
        if self.trusted and not method.uses_plain_mean:
            values = {f.name: getattr(method, f.name) for f in fields(method)}
            has_plain_mean = "weights" in values and type(method)(**values | {"weights": "uniform"}).uses_plain_mean
            fix = "set its weights to 'uniform'" if has_plain_mean else "set channel.trusted to false"
            raise ConfigError(
                f"With channel.trusted, only the unweighted mean of uploads is private, and {type(method).__name__} "
                f"uses uploads in another way; {fix}."
            )

    def encode(self, uploads: Tree, sent: Tree, clients: Sequence[int], round: int, seed: NoiseSeed) -> Tree:
        """Return what clients send for these stacked uploads, given the messages `sent` to them."""
        if self.is_identity:
            return uploads
        if self.noise:
            _check_can_be_private(uploads)
        changes = self._clip(updates(uploads, sent))
        if self.noise and not self.trusted:
            changes = _add_noise(changes, self.noise * self._max_norm, clients, round, seed)
        if self.top < 1:
            _check_can_be_sparsified(uploads, sent)
        return _visit(self._encode_leaf, changes, sent)

    def find_mismatch(self, encoded: Tree, sent: Tree) -> str | None:
        """Return the path of a tensor that `encode` cannot have written, or None.

        Untrusted uploads may have the right names and shapes but invalid positions.
        """
        invalid: list[str] = []

        def validate(path: str, node: Any, sent_leaf: Any) -> Any:
            before = float_values(sent_leaf)
            if is_encoded(node) and not is_valid_encoding(node, 0 if before is None else before[0].numel()):
                invalid.append(path)
            return node

        _visit(validate, encoded, sent)
        return invalid[0] if invalid else None

    def decode(self, encoded: Tree, sent: Tree, clients: Sequence[int], round: int, seed: NoiseSeed) -> Tree:
        """Return the uploads as the server receives them."""
        if self.is_identity:
            return encoded
        dtype = _float_dtype(sent)
        changes = _visit(lambda _, node, sent_leaf: _decode_leaf(node, sent_leaf, dtype), encoded, sent)
        if self.trusted:  # after decoding, because quantized noisy uploads would have a less private sum
            changes = self._clip(changes)
            changes = _add_noise(changes, self.noise * self._max_norm / sqrt(len(clients)), clients, round, seed)
        return _visit(_restore, changes, sent)

    def metrics(self, uploads: Tree, sent: Tree) -> Tree:
        """Return metrics for the record, which are never sent: with clipping, the norm of each change before it."""
        lengths = None if self.clip is None else norms(updates(uploads, sent))
        return {} if lengths is None else {"change_norm": lengths}

    def privacy_spent(self, max_uploads: int) -> dict[str, Any]:
        """Return the `epsilon` spent so far, for the record, if there is noise.

        It holds for the client with the most uploads, `max_uploads`, and hence for all clients.
        """
        return {"epsilon": epsilon(self.noise, max_uploads, self.delta)} if self.noise else {}

    @property
    def _max_norm(self) -> float:
        return float("inf") if self.clip is None else self.clip

    def _clip(self, changes: Tree) -> Tree:
        """Scale every client's change to a norm of at most C."""
        lengths = None if self.clip is None else norms(changes)
        return changes if lengths is None else scale_rows((self._max_norm / lengths).clamp(max=1), changes)

    def _encode_leaf(self, path: str, change: Any, sent: Any) -> Any:
        values = float_values(change)
        if values is None or not values.numel():
            return change
        return encode_tensor(change, self.top if reference(change, sent) is not None else 1.0, self.quantize)


def _visit(function: Callable[[str, Any, Any], Any], tree: Tree, other: Any) -> Tree:
    """Map every leaf, encoded or not, to function(path, leaf, node of the other tree at that path or None)."""
    return map_pairs(function, tree, other, is_leaf=is_encoded)


def _restore(path: str, changed: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """Return message + change; a variance that quantization made negative becomes 0."""
    after = restore(path, changed, sent)
    return map_floats(torch.relu, after) if after is not changed and _is_variance(path) else after


def _decode_leaf(node: Any, sent: Any, dtype: torch.dtype) -> Any:
    """Decode a leaf; a sparse one has the shape of its counterpart in the message."""
    if not is_encoded(node):
        return node
    before = float_values(sent)
    if before is None:
        return decode_tensor(node, torch.Size(), dtype)
    return decode_tensor(node, before.shape, before.dtype)


def _float_dtype(sent: Tree) -> torch.dtype:
    """Return the dtype of the floating-point tensors in a message."""
    dtypes = [values.dtype for _, leaf in leaves(sent) if (values := float_values(leaf)) is not None]
    return dtypes[0] if dtypes else torch.get_default_dtype()


def _add_noise(changes: Tree, std: float, clients: Sequence[int], round: int, seed: NoiseSeed) -> Tree:
    def add(path: str, leaf: Tensor, _: Any) -> Tensor:
        return leaf + std * gaussian(leaf, clients, path, round, seed)

    return _visit(add, changes, {})


def _is_variance(path: str) -> bool:
    """Whether a tensor is the running variance of a batch normalization layer, by PyTorch's name for it."""
    return path.rpartition("/")[2].rpartition(".")[2] == "running_var"


def _check_can_be_private(uploads: Tree) -> None:
    """Raise `ConfigError` if noise on floating-point values does not make the uploads private."""
    for path, leaf in leaves(uploads):
        if isinstance(leaf, Rows):
            reason = "the choice of present rows depends on the client's data"
        elif not leaf.is_floating_point():
            reason = "it contains integers or booleans"
        elif _is_variance(path):
            raise ConfigError(
                f"Noise would make the variance '{path}' negative; use a network without batch normalization "
                "(network.norm='group'), or FedBN, which does not upload it."
            )
        else:
            continue
        raise ConfigError(
            f"Noise cannot make '{path}' in the upload private because {reason}; use another method or no noise."
        )


def _check_can_be_sparsified(uploads: Tree, sent: Tree) -> None:
    """Raise `ConfigError` if no uploaded tensor has a counterpart in the message.

    Values that are not uploaded stay as they were sent; without a counterpart they would be lost.
    """
    sparse: list[str] = []

    def find(path: str, leaf: Any, sent_leaf: Any) -> Any:
        if not isinstance(leaf, Rows) and reference(leaf, sent_leaf) is not None:
            sparse.append(path)
        return leaf

    _visit(find, uploads, sent)
    if not sparse and any(True for _ in leaves(uploads)):
        raise ConfigError(
            "channel.top needs uploads that were also sent under the same name, and this method has none; use "
            "channel.quantize instead."
        )
