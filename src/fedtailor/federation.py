"""A federation: clients, each with its own training and test data.

All samples lie in one place; a client is two lists of positions. So data go to a device once, and keep the dtype they
came in until a batch is made.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.partition import Indices, by_owner, hold_out
from fedtailor.errors import Refused
from fedtailor.model import Inputs


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients and their data. `classes` is None where targets are not classes."""

    x: Inputs
    y: Tensor
    train: tuple[Tensor, ...]  # positions of every client's training samples
    test: tuple[Tensor, ...]
    names: tuple[str, ...]
    classes: int | None
    mean: tuple[float, ...] | None = None  # per channel, taken off when a batch is made
    deviation: tuple[float, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # how it was made, for the record

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_clients(self) -> int:
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one input, None where inputs have several parts."""
        return None if isinstance(self.x, dict) else tuple(self.x.shape[1:])

    def class_counts(self, positions: Tensor) -> list[int] | None:
        """How many of these samples are of each class."""
        return None if self.classes is None else torch.bincount(self.y[positions], minlength=self.classes).tolist()

    def owner(self, marked: Tensor) -> str:
        """The name of the first client that has one of the marked samples."""
        owned = (torch.cat(pair) for pair in zip(self.train, self.test, strict=True))
        return next((name for name, own in zip(self.names, owned, strict=True) if bool(marked[own].any())), "?")

    def preparation(self, dtype: torch.dtype, device: torch.device) -> Callable[[Inputs], Inputs]:
        """From samples as they are kept to what a model takes: bytes become numbers from 0 to 1, floats the dtype of
        the run, whole numbers (tokens, lengths) stay; then the channels' mean and deviation are taken off."""
        white = torch.tensor(255, dtype=dtype, device=device)  # a tensor of that dtype: the quotient has it at once
        centre = _channels(self.mean, self.shape, dtype, device)
        spread = _channels(self.deviation, self.shape, dtype, device)

        def prepare_part(part: Tensor) -> Tensor:
            if part.dtype == torch.uint8:
                part = part / white
            elif part.is_floating_point():
                part = part.to(dtype)
            part = part if centre is None else part - centre
            return part if spread is None else part / spread

        return lambda x: {n: prepare_part(p) for n, p in x.items()} if isinstance(x, dict) else prepare_part(x)

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[tuple[Any, Any, Any, Any]],
        *,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        **extra: Any,
    ) -> "Federation":
        """One (x_train, y_train, x_test, y_test) a client, numpy or torch; x may be a dict of arrays. Whole numbers as
        targets are classes, floats are not. Bytes are pictures: training sees them as numbers from 0 to 1.

        >>> x, y = np.zeros((4, 3)), np.array([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)]).num_clients
        1
        """
        labels = _names(names, len(clients))
        xs, ys = [], []
        for name, arrays in zip(labels, clients, strict=True):
            if len(arrays) != 4:
                raise Refused(f"Client {name} must be (x_train, y_train, x_test, y_test), not {len(arrays)} arrays.")
            for x, y in (arrays[:2], arrays[2:]):
                xs.append(_tensors(x, f"Client {name}'s"))
                ys.append(_targets(y, f"Client {name}'s"))
                _check_lengths(xs[-1], ys[-1], f"Client {name}'s")
        owners = [name for name in labels for _ in ("train", "test")]
        x, y = _join(xs, owners, "inputs"), _join(ys, owners, "targets")
        positions = torch.split(torch.arange(len(y)), [len(part) for part in ys])
        return cls(x, y, positions[::2], positions[1::2], labels, _classes(y, classes), **extra)

    @classmethod
    def from_owners(
        cls,
        x: Any,
        y: Any,
        owned: Sequence[Indices],
        *,
        names: Sequence[str] | None = None,
        test: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        **extra: Any,
    ) -> "Federation":
        """Samples and, for every client, which are its own; `test` is the share it is tested on."""
        if not 0 < test < 1:
            raise Refused(f"test must be a share between 0 and 1, not {test}.")
        labels = _names(names, len(owned))
        x, y = _tensors(x, "The"), _targets(y, "The")
        _check_lengths(x, y, "The")
        owned = [np.asarray(own, dtype=np.int64) for own in owned]
        _check_owned(owned, labels, len(y))
        parts = [hold_out(y.numpy(), own, test, (seed, client)) for client, own in enumerate(owned)]
        train, held = (tuple(torch.from_numpy(part[side]) for part in parts) for side in (0, 1))
        return cls(x, y, train, held, labels, _classes(y, classes), **extra)

    @classmethod
    def from_dataset(
        cls, dataset: torch.utils.data.Dataset[Any], owners: Sequence[Any], *, test: float = 0.25, seed: int = 0
    ) -> "Federation":
        """Any torch Dataset of (x, y) and the owner of every sample; each distinct owner is a client.

        >>> data = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> Federation.from_dataset(data, ["ann", "ann", "bob", "bob"]).names
        ('ann', 'bob')
        """
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise Refused("The data set must have a length and samples by number; read a stream into arrays first.")
        size = len(dataset)
        if len(owners) != size:
            raise Refused(f"The data set has {size} samples but {len(owners)} owners were given.")
        names, owned = by_owner(owners)
        owner_of = np.repeat(np.array(names, dtype=object), [len(own) for own in owned])
        owner_of = owner_of[np.argsort(np.concatenate(owned))].tolist()  # from the owners' order to the data set's
        xs, ys = zip(*(_pair(dataset[i], owner) for i, owner in enumerate(owner_of)), strict=True)
        x, y = _join(xs, owner_of, "inputs"), _join(ys, owner_of, "targets")
        return cls.from_owners(x, y, owned, names=names, test=test, seed=seed)

    @classmethod
    def from_folder(cls, folder: str | Path, *, test: float = 0.25, seed: int = 0) -> "Federation":
        """One .npz or one folder of images for every client; see `fedtailor.data.folder`."""
        from fedtailor.data.folder import read_folder

        return read_folder(Path(folder), test=test, seed=seed)


def _names(names: Sequence[str] | None, clients: int) -> tuple[str, ...]:
    if not clients:
        raise Refused("A federation needs at least one client.")
    labels = tuple(str(name) for name in (range(clients) if names is None else names))
    if len(labels) != clients:
        raise Refused(f"There are {clients} clients but {len(labels)} names.")
    name, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise Refused(f"{times} clients have the name {name}; give each one of its own.")
    return labels


def _tensor(values: Any, whose: str, kind: str) -> Tensor:
    """The same numbers in the same dtype; torch takes no negative strides, no foreign byte order, nothing read-only."""
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu()
        array = np.asarray(values)
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused(f"{whose} {kind} cannot be read as an array of numbers.") from error


def _tensors(x: Any, whose: str) -> Inputs:
    if isinstance(x, Mapping):
        return {str(name): _tensor(part, whose, f"inputs '{name}'") for name, part in x.items()}
    return _tensor(x, whose, "inputs")


def _targets(y: Any, whose: str) -> Tensor:
    targets = _tensor(y, whose, "targets")
    if targets.dtype == torch.bfloat16:
        return targets.float()  # numpy, which cuts the data, knows no bfloat16
    return targets if targets.is_floating_point() else targets.long()


def _pair(sample: Any, owner: str) -> tuple[Inputs, Tensor]:
    """One sample (x, y) of a data set, each with an axis of length 1 in front."""
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise Refused(f"Client {owner}'s samples must be pairs (x, y); wrap the data set in one that gives just these.")
    x, y = _tensors(sample[0], f"Client {owner}'s"), _targets(sample[1], f"Client {owner}'s")
    return {name: part[None] for name, part in x.items()} if isinstance(x, dict) else x[None], y[None]


def _check_lengths(x: Inputs, y: Tensor, whose: str) -> None:
    inputs = {f"inputs '{name}'": part for name, part in x.items()} if isinstance(x, dict) else {"inputs": x}
    if not inputs:
        raise Refused(f"{whose} inputs have no parts.")
    for kind, part in [("targets", y), *inputs.items()]:
        if not part.ndim:
            raise Refused(f"{whose} {kind} are a single number; give an array with one row a sample.")
        if len(part) != len(y):
            raise Refused(f"{whose} {kind} are {len(part)}, but there are {len(y)} targets.")


def _check_owned(owned: Sequence[Indices], names: Sequence[str], samples: int) -> None:
    for name, own in zip(names, owned, strict=True):
        if len(own) and (own.min() < 0 or own.max() >= samples):
            raise Refused(f"Client {name} owns samples that are not there; there are 0 to {samples - 1}.")
    owners = np.bincount(np.concatenate(owned), minlength=1)
    if owners.max() > 1:
        raise Refused(f"Sample {owners.argmax()} is owned twice; every sample belongs to one client.")


def _join(parts: Sequence[Inputs], owners: Sequence[str], kind: str) -> Any:
    """All arrays in one; they must agree in everything but their number of samples."""
    for owner, part in zip(owners, parts, strict=True):
        if _part_names(part) != _part_names(parts[0]):
            raise Refused(f"Client {owner}'s inputs have other parts than client {owners[0]}'s.")
    if isinstance(parts[0], dict):
        return {name: _join([part[name] for part in parts], owners, f"{kind} '{name}'") for name in parts[0]}
    filled = next((part for part in parts if len(part)), parts[0])
    for owner, part in zip(owners, parts, strict=True):
        if len(part) and (part.shape[1:] != filled.shape[1:] or part.dtype != filled.dtype):
            kinds = [f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape[1:])}" for p in (part, filled)]
            raise Refused(f"Client {owner}'s {kind} are {kinds[0]}, others' are {kinds[1]}.")
    return torch.cat([part for part in parts if len(part)] or [filled])


def _part_names(x: Inputs) -> set[str] | None:
    return set(x) if isinstance(x, dict) else None


def _classes(y: Tensor, classes: int | None) -> int | None:
    if y.is_floating_point() or y.ndim != 1:
        return None
    return classes if classes is not None else int(y.max()) + 1 if len(y) else 0


def _channels(
    values: tuple[float, ...] | None, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if values is None or shape is None:
        return None
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *[1] * (len(shape) - 1))


def _check(fed: Federation) -> None:
    for values in (fed.mean, fed.deviation):
        if values is not None and (fed.shape is None or len(values) not in {1, *fed.shape[:1]}):
            raise Refused(f"mean and deviation are one number for a channel of inputs in one part, not {len(values)}.")
    for name, train, test in zip(fed.names, fed.train, fed.test, strict=True):
        for own, use in ((train, "training"), (test, "test")):
            if not len(own):
                hint = "give it some (two samples in all will do) or leave it out"
                raise Refused(f"Client {name} has no {use} data; {hint}.")
    owned = torch.zeros(len(fed.y), dtype=torch.bool)
    owned[torch.cat(fed.train + fed.test)] = True
    inputs = fed.x.values() if isinstance(fed.x, dict) else [fed.x]
    for kind, part in [*(("inputs", part) for part in inputs), ("targets", fed.y)]:
        if not part.is_floating_point():
            continue
        bad = owned & ~torch.isfinite(part.flatten(1) if part.ndim > 1 else part[:, None]).all(1)
        if bool(bad.any()):
            raise Refused(f"Client {fed.owner(bad)} has NaN or infinity in its {kind}; remove those samples.")
    if fed.classes is not None:
        bad = owned & ((fed.y < 0) | (fed.y >= fed.classes))
        if bool(bad.any()):
            first = bad & (bad.cumsum(0) == 1)  # so that label and client belong together
            label = int(fed.y[first])
            raise Refused(f"Client {fed.owner(first)} has the label {label}, outside 0 to {fed.classes - 1}.")
