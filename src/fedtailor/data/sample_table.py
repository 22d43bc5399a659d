"""`SampleTable`: all samples of a data set, before they are split into clients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.survival_targets import strata_of
from fedtailor.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The samples of a data set, one per row, as its reader returns them.

    >>> SampleTable(np.zeros((2, 3)), np.array([0, 1]), classes=2).num_samples
    2
    """

    x: Array | dict[str, Array]  # inputs, or named parts of inputs: [samples, ...]
    y: Array  # targets: [samples, ...]
    classes: int | None  # None if the targets are not classes
    owner: NDArray[np.int64] | None = None  # natural client of each sample, an index into `owner_names`
    owner_names: tuple[str, ...] = ()
    is_test: NDArray[np.bool_] | None = None  # whether a sample is in the publisher's test set
    class_names: tuple[str, ...] | None = None
    vocabulary: tuple[str, ...] | None = None  # words of the tokens 1, 2, ..., if the inputs are tokens
    survival: bool = False  # whether targets are (event, time)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.y)

    @property
    def strata(self) -> Array:
        """The targets by which splits are stratified: classes, or the events of survival times."""
        return strata_of(torch.from_numpy(self.y), survival=True) if self.survival else self.y

    def check(self) -> None:
        """Raise `DataError` if the columns do not fit together."""
        inputs = list(self.x.values()) if isinstance(self.x, dict) else [self.x]
        columns = [column for column in (*inputs, self.y, self.owner, self.is_test) if column is not None]
        valid = self.num_samples > 0 and all(len(column) == self.num_samples for column in columns)
        valid &= all(column.dtype.kind in "biuf" for column in columns)
        if valid and self.classes is not None:
            valid &= self.y.ndim == 1 and self.y.dtype.kind in "iu" and 0 <= self.y.min() <= self.y.max() < self.classes
            valid &= self.class_names is None or len(self.class_names) == self.classes
        if valid and self.owner is not None:
            valid &= self.owner.dtype.kind in "iu" and 0 <= self.owner.min() <= self.owner.max() < len(self.owner_names)
        if not valid or (self.is_test is not None and self.is_test.dtype.kind != "b"):
            raise DataError("The columns of a table of samples must be numbers, one row per sample, with valid labels.")
