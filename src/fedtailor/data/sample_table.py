"""`SampleTable`: all samples of a data set, before they are split into clients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.y)
