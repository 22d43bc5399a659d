"""A federation: clients, each with its own training and test data.

All samples lie in one place; a client is two lists of positions. So data go to a device once, and keep the dtype they
came in until a batch is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def class_counts(self, client: int) -> list[int] | None:
        """How many training samples of each class a client has."""
        if self.classes is None:
            return None
        return torch.bincount(self.y[self.train[client]], minlength=self.classes).tolist()

    def owner(self, marked: Tensor) -> str:
        """The name of the first client that has one of the marked samples."""
        owned = (torch.cat(pair) for pair in zip(self.train, self.test, strict=True))
        return next((name for name, own in zip(self.names, owned, strict=True) if bool(marked[own].any())), "?")

    def preparation(self, dtype: torch.dtype, device: torch.device) -> Callable[[Inputs], Inputs]:
        """From samples as they are kept to what a model takes: bytes become numbers from 0 to 1, floats the dtype of
        the run, whole numbers (tokens, lengths) stay; then the channels' mean and deviation are taken off."""
        centre = _channels(self.mean, self.shape, dtype, device)
        spread = _channels(self.deviation, self.shape, dtype, device)

        def prepare_part(part: Tensor) -> Tensor:
            if part.dtype == torch.uint8:
                part = part.to(dtype) / 255
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
        """One (x_train, y_train, x_test, y_test) a client, numpy or torch; x may be a dict of arrays.

        >>> x, y = np.zeros((4, 3)), np.array([0, 1, 0, 1])
        >>> Federation.from_arrays([(x, y, x, y)]).num_clients
        1
        """
        if not clients:
            raise Refused("A federation needs at least one client.")
        labels = tuple(names or (str(i) for i in range(len(clients))))
        xs, ys, start = [], [], 0
        train: list[Tensor] = []
        test: list[Tensor] = []
        for name, (x_train, y_train, x_test, y_test) in zip(labels, clients, strict=True):
            for x, y, positions in [(x_train, y_train, train), (x_test, y_test, test)]:
                x, y = _tensors(x), _targets(y)
                if _length(x, name) != len(y):
                    raise Refused(f"Client {name} has {_length(x, name)} inputs but {len(y)} targets.")
                xs.append(x)
                ys.append(y)
                positions.append(torch.arange(start, start + len(y)))
                start += len(y)
        y = _join(ys, labels)
        return cls(_join(xs, labels), y, tuple(train), tuple(test), labels, _classes(y, classes), **extra)

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
        x, y = _tensors(x), _targets(y)
        parts = [hold_out(y.numpy(), own, test, (seed, client)) for client, own in enumerate(owned)]
        train, held = (tuple(torch.from_numpy(part[side]) for part in parts) for side in (0, 1))
        labels = tuple(names or (str(i) for i in range(len(parts))))
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
        size = len(dataset)  # type: ignore[arg-type]
        if len(owners) != size:
            raise Refused(f"The data set has {size} samples but {len(owners)} owners were given.")
        pairs = [dataset[i] for i in range(size)]
        names, owned = by_owner(owners)
        x = _collate([pair[0] for pair in pairs])
        y = torch.stack([torch.as_tensor(pair[1]) for pair in pairs])
        return cls.from_owners(x, y, owned, names=names, test=test, seed=seed)

    @classmethod
    def from_folder(cls, folder: str | Path, *, test: float = 0.25, seed: int = 0) -> "Federation":
        """One .npz or one folder of images for every client; see `fedtailor.data.folder`."""
        from fedtailor.data.folder import read_folder

        return read_folder(Path(folder), test=test, seed=seed)


def _tensors(x: Any) -> Inputs:
    return {str(k): torch.as_tensor(v) for k, v in x.items()} if isinstance(x, Mapping) else torch.as_tensor(x)


def _targets(y: Any) -> Tensor:
    targets: Tensor = torch.as_tensor(y)
    return targets if targets.is_floating_point() else targets.long()


def _collate(xs: Sequence[Any]) -> Inputs:
    if isinstance(xs[0], Mapping):
        return {name: torch.stack([torch.as_tensor(x[name]) for x in xs]) for name in xs[0]}
    return torch.stack([torch.as_tensor(x) for x in xs])


def _length(x: Inputs, name: str) -> int:
    if not isinstance(x, dict):
        return len(x)
    lengths = {len(part) for part in x.values()}
    if len(lengths) != 1:
        raise Refused(f"Client {name}'s inputs have parts of different lengths: {sorted(lengths)}.")
    return lengths.pop()


def _join(parts: Sequence[Inputs], names: Sequence[str]) -> Any:
    """All clients' arrays in one; they must agree in everything but their number of samples."""
    if isinstance(parts[0], dict):
        for position, part in enumerate(parts):
            if not isinstance(part, dict) or part.keys() != parts[0].keys():
                raise Refused(f"Client {names[position // 2]}'s inputs have other parts than client {names[0]}'s.")
        return {name: _join([part[name] for part in parts], names) for name in parts[0]}
    filled = next((part for part in parts if len(part)), parts[0])
    for position, part in enumerate(parts):
        if len(part) and (part.shape[1:] != filled.shape[1:] or part.dtype != filled.dtype):
            kinds = [f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape[1:])}" for p in (part, filled)]
            raise Refused(f"Client {names[position // 2]}'s samples are {kinds[0]}, others' are {kinds[1]}.")
    return torch.cat([part for part in parts if len(part)] or [filled])


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
    for name, train, test in zip(fed.names, fed.train, fed.test, strict=True):
        if not len(train):
            raise Refused(f"Client {name} has no training data; leave it out or give it some.")
        if not len(test):
            raise Refused(f"Client {name} has no test data; give it some, or let a share of its data be held out.")
    for kind, part in [("inputs", p) for p in (fed.x.values() if isinstance(fed.x, dict) else [fed.x])] + [
        ("targets", fed.y)
    ]:
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            bad = ~torch.isfinite(part.flatten(1) if part.ndim > 1 else part[:, None]).all(1)
            raise Refused(f"Client {fed.owner(bad)} has NaN or infinity in its {kind}; remove those samples.")
    if fed.classes is not None:
        bad = (fed.y < 0) | (fed.y >= fed.classes)
        if bool(bad.any()):
            label = int(fed.y[bad][0])
            raise Refused(f"Client {fed.owner(bad)} has the label {label}, outside 0 to {fed.classes - 1}.")
