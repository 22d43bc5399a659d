"""`FederationData`: the fields of a federation, what must hold for them, and what is computed from them.

All samples are in one tensor, and a client is two lists of indices. The data is therefore copied to a device once, and
it keeps its dtype until a batch is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.metrics import Task
from fedtailor.core.model import Inputs
from fedtailor.data.client_samples import SampleOwners
from fedtailor.data.federation_checks import check_class_names, check_finite, check_owners, check_targets
from fedtailor.data.normalization import Normalization, check_normalization, input_statistics, make_normalizer
from fedtailor.data.splits.resampling import redraw_splits
from fedtailor.data.stored_samples import StoredSamples, hash_samples
from fedtailor.data.survival_targets import strata_of
from fedtailor.data.tables.table_format import TableFormat
from fedtailor.errors import DataError

OWN_DATA = "own data"  # name of data without settings


@dataclass(frozen=True, eq=False)
class FederationData:
    """Clients and their data; `Federation` adds the constructors. `classes` is None if the targets are not classes."""

    x: Inputs
    y: Tensor
    train: tuple[Tensor, ...]  # indices of each client's training samples
    test: tuple[Tensor, ...]  # indices of each client's test samples
    names: tuple[str, ...]
    classes: int | None
    class_names: tuple[str, ...] | None = None  # if the labels were text
    mean: tuple[float, ...] | None = None  # per channel or pixel, subtracted when a batch is made
    std: tuple[float, ...] | None = None  # per channel or pixel, divided by after that
    settings: Mapping[str, Any] = field(default_factory=dict)  # how the federation was made, for the run folder
    common_test: Tensor | None = None  # indices of test samples that belong to no client, for all personal models
    survival: bool = False  # whether targets are (event, time), with event 1 if it was observed and 0 if censored
    stored: StoredSamples | None = None  # what is recorded about x and y if they are from a federation file
    refit: Callable[[Self], Self] | None = None  # repeats what `with_preprocessing` did after a resplit
    table: TableFormat | None = None  # how x was computed from the rows of a table, if it was

    def __post_init__(self) -> None:
        owners = self._owners
        is_known_finite = self.stored is not None and self.is_mapped and self.stored.is_finite
        check_normalization(self.mean, self.std, self.shape)
        check_class_names(self.class_names, self.classes)
        check_owners(owners, len(self.y))
        check_finite(self.x, self.y, owners, is_known_finite)
        check_targets(self.y, owners, self.classes, self.survival)

    def __repr__(self) -> str:
        parts = as_parts(self.x).items()
        inputs = [f"{name} {'×'.join(map(str, part.shape[1:])) or 'numbers'}".strip() for name, part in parts]
        train, test = (sum(map(len, split)) for split in (self.train, self.test))
        common = "" if self.common_test is None else f", {len(self.common_test):,} common test samples"
        clients = f"{self.num_clients:,} client{'' if self.num_clients == 1 else 's'}"
        targets = "numbers as targets" if self.classes is None else f"{self.classes:,} classes"
        if self.survival:
            targets = f"survival times with {int(self.y[:, 0].sum()):,} events as targets"
        samples = f"{train:,} training and {test:,} test samples"
        return f"Federation({clients}, {samples}{common}, {targets}, inputs {', '.join(inputs)})"

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    @property
    def task(self) -> Task:
        """What the targets are for: "classification", "regression", or "survival"."""
        return "survival" if self.survival else "regression" if self.classes is None else "classification"

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a network for these targets: the classes, the numbers per sample, or one risk."""
        return self.classes if self.classes is not None else 1 if self.survival else self.y[:1].numel()

    @property
    def strata(self) -> NDArray[Any]:
        """The targets by which splits are stratified: classes, or the events of survival times."""
        return strata_of(self.y, self.survival)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one sample's input; None if inputs have several parts."""
        return None if isinstance(self.x, dict) else tuple(self.x.shape[1:])

    @property
    def is_mapped(self) -> bool:
        """Whether the inputs are in a file that is mapped into memory; they are then read-only."""
        return self.stored is not None and self.stored.x is self.x and self.stored.y is self.y

    def sample_hash(self) -> str:
        """Return the SHA-256 of all samples; that of a federation file was recorded when the file was written."""
        return self.stored.sha256 if self.stored is not None and self.is_mapped else hash_samples(self.x, self.y)

    def class_counts(self, indices: Tensor) -> list[int] | None:
        """Return the number of these samples per class; None if the targets are not classes."""
        return None if self.classes is None else torch.bincount(self.y[indices], minlength=self.classes).tolist()

    def select(self, clients: Sequence[int]) -> Self:
        """Return the federation of these clients only, in this order; the common test set stays.

        >>> import fedtailor as ft
        >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
        >>> ft.Federation.from_arrays([(x, y, x, y)] * 3, names=["ann", "bob", "eve"]).select([2, 0]).names
        ('eve', 'ann')
        """
        train, test = (tuple(own[client] for client in clients) for own in (self.train, self.test))
        return replace(self, train=train, test=test, names=tuple(self.names[client] for client in clients))

    def with_normalization(self, kind: Normalization = "channel") -> Self:
        """Return the federation with another normalization; a batch then contains (x - mean) / std.

        - `channel`: the mean and standard deviation of each channel over the training samples of all clients.
        - `pixel`: those of each number of an input.
        - `half`: 0.5 and 0.5, so that bytes become numbers from -1 to 1.
        - `none`: inputs are not normalized; bytes become numbers from 0 to 1.

        `channel` and `pixel` are for simulations: they read the data of all clients, also of those that are held out
        later, and the result is the same for all of them. Clients of a real federation cannot compute it without
        sharing statistics of their data; there, use published values.

        >>> import fedtailor as ft
        >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1])
        >>> ft.Federation.from_arrays([(x, y, x, y), (x + 2, y, x, y)]).with_normalization().mean
        (2.0,)
        """
        settings = {**self.settings, "normalize": kind} if self.settings else {}  # as in `Data`
        if kind == "none":
            return replace(self, mean=None, std=None, settings=settings)
        if isinstance(self.x, dict) or not (self.x.dtype == torch.uint8 or self.x.is_floating_point()):
            raise DataError("with_normalization needs inputs with a single part of bytes or floats; omit it here.")
        if kind == "half":
            return replace(self, mean=(0.5,), std=(0.5,), settings=settings)

        def fit(fed: Self) -> Self:
            assert not isinstance(fed.x, dict)
            mean, std = input_statistics(fed.x, torch.cat(fed.train), kind)
            return replace(fed, mean=mean, std=std)

        return replace(self, settings=settings).with_preprocessing(fit)

    def with_preprocessing(self, fit: Callable[[Self], Self]) -> Self:
        """Return `fit(self)`; `resplit` then calls `fit` again with the new training samples.

        `fit` returns a federation whose inputs are transformed by statistics of its training samples. Preprocessing of
        your own data that is passed here never sees a test sample, however often the samples are split anew.

        >>> import fedtailor as ft
        >>> x, y = torch.arange(8.0)[:, None], torch.tensor([0, 1] * 4)
        >>> fed = ft.Federation.from_owners(x, y, ["ann"] * 8).with_preprocessing(
        ...     lambda fed: replace(fed, x=fed.x / fed.x[fed.train[0]].max())
        ... )
        >>> [float(new.x[new.train[0]].max()) for new in (fed, fed.resplit(0), fed.resplit(1))]
        [1.0, 1.0, 1.0]
        """

        def refit(new: Self) -> Self:
            before = replace(new, x=self.x, mean=self.mean, std=self.std, table=self.table, refit=None)
            return (before if self.refit is None else self.refit(new)).with_preprocessing(fit)

        return replace(fit(self), refit=refit)

    def resplit(self, repeat: int, folds: int | None = None) -> Self:
        """Return the federation in which every client's samples are split anew into training and test samples.

        Each `repeat` is another draw, stratified by class, by event, or by quantiles of numeric targets, with as many
        test samples as the client has now. Clients and their samples stay the same, and so does the common test set; a
        publisher's test samples are pooled with the client's training samples. With `folds`, the draws are those of
        cross-validation: `repeat` 0 to folds − 1 test each sample once, the next `folds` numbers are another
        cross-validation, and so on. Statistics of training samples that were used for preprocessing are computed anew.

        >>> import fedtailor as ft
        >>> fed = ft.Federation.from_owners(torch.zeros(8, 3), [0, 1] * 4, ["ann"] * 8)
        >>> [sorted(fed.y[fed.resplit(repeat).test[0]].tolist()) for repeat in range(3)]  # one of each class
        [[0, 1], [0, 1], [0, 1]]
        """
        train, test = redraw_splits(self.names, self.train, self.test, self.strata, repeat, folds)
        settings = {**(self.settings or {"name": OWN_DATA}), "repeat": repeat, "folds": folds}
        new = replace(self, train=train, test=test, settings=settings)
        return new if self.refit is None else self.refit(new)

    def find_owner(self, marked: Tensor) -> str:
        """Return who has the first marked sample, as the start of a sentence; `marked` is a mask over all samples."""
        return self._owners.find(marked)

    def make_preprocessing(self, dtype: torch.dtype, device: torch.device) -> Callable[[Inputs], Inputs]:
        """Return the function that converts stored samples to inputs of a model.

        It maps bytes to numbers from 0 to 1, converts floats to the dtype of the run, and leaves other integers
        (tokens, lengths) unchanged. Then it normalizes the channels or pixels by mean and standard deviation.
        """
        return make_normalizer(self.mean, self.std, self.shape, dtype, device)

    @property
    def _owners(self) -> SampleOwners:
        return SampleOwners(self.names, self.train, self.test, self.common_test)
