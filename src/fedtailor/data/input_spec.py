"""`InputSpec`: the format of a model's inputs, without any data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.memory_limits import check_memory
from fedtailor.core.model import Inputs
from fedtailor.data.federation import Federation
from fedtailor.data.tables.table_format import TableFormat
from fedtailor.errors import DataError

SINGLE_INPUT = ""  # name of the part if inputs have a single part
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
_MAX_PARTS, _MAX_ELEMENTS, _MAX_CLASSES = 1000, 2**28, 10**6  # of a sample: parts, elements per part; classes
_MAX_NAME = 1000  # characters of a class's name


@dataclass(frozen=True)
class InputSpec:
    """The format of one sample and the normalization of its channels, as saved in run folders and exported files."""

    parts: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape of one sample)
    classes: int | None  # None: regression
    targets: int = 1  # values per sample in regression
    mean: tuple[float, ...] | None = None  # per channel or pixel, subtracted
    std: tuple[float, ...] | None = None  # per channel or pixel, divided by
    class_names: tuple[str, ...] | None = None  # if the labels were text
    survival: bool = False  # targets are (event, time), and the model has one output
    dtype_is_assumed: bool = False  # a deployed client's folder does not contain the dtype
    table: TableFormat | None = None  # how samples are computed from the rows of a table
    takes_rows: bool = False  # the model takes rows of the table, as an exported graph does, and encodes them itself

    def __post_init__(self) -> None:
        shapes = [shape for _, shape in self.parts.values()]
        statistics = [*(self.mean or ()), *(self.std or ())]
        valid = (
            0 < len(self.parts) <= _MAX_PARTS
            and all(kind in DTYPES for kind, _ in self.parts.values())
            and all(min(shape, default=1) > 0 and prod(shape) <= _MAX_ELEMENTS for shape in shapes)
            and (self.classes is None or 1 <= self.classes <= _MAX_CLASSES)
            and 1 <= self.targets <= _MAX_ELEMENTS
            and all(isfinite(value) for value in statistics)
            and (self.class_names is None or len(self.class_names) == self.classes)
            and all(len(name) <= _MAX_NAME for name in self.class_names or ())
            and self._fits_table()
        )
        if not valid:
            raise DataError("The input specification of a model is invalid: check its shapes, classes, and dtypes.")

    def _fits_table(self) -> bool:
        if self.table is None:
            return not self.takes_rows
        return self.shape == (len(self.table.columns if self.takes_rows else self.table.features),)

    @property
    def rows(self) -> "InputSpec":
        """The format of the rows of the table, one number per column, instead of their features."""
        assert self.table is not None
        return replace(self, parts={SINGLE_INPUT: ("float64", (len(self.table.columns),))}, takes_rows=True)

    @property
    def features(self) -> "InputSpec":
        """The format of the samples that the network takes."""
        if not self.takes_rows or self.table is None:
            return self
        return replace(self, parts={SINGLE_INPUT: ("float32", (len(self.table.features),))}, takes_rows=False)

    @classmethod
    def from_federation(cls, fed: Federation) -> "InputSpec":
        """Return the format of a federation's samples.

        >>> x, y = np.zeros((4, 3), np.uint8), np.array([0, 1, 0, 1])
        >>> InputSpec.from_federation(Federation.from_arrays([(x, y, x, y)])).parts
        {'': ('uint8', (3,))}
        """
        parts = fed.x if isinstance(fed.x, dict) else {SINGLE_INPUT: fed.x}
        kinds = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape[1:])) for name, part in parts.items()}
        return cls(
            kinds, fed.classes, max(1, fed.y[:1].numel()), fed.mean, fed.std, fed.class_names, fed.survival,
            table=fed.table,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the specification as plain JSON values.

        >>> InputSpec({"": ("uint8", (3,))}, classes=2).to_json()["parts"]
        {'': ['uint8', [3]]}
        """
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one sample; None if inputs have several parts."""
        return self.parts[SINGLE_INPUT][1] if SINGLE_INPUT in self.parts else None

    def random_samples(self, count: int, seed: int = 0) -> Inputs:
        """Return random samples of this format, so that exported files contain no client's data."""
        check_memory(count * sum(8 * prod(shape) for _, shape in self.parts.values()), "A model's inputs")
        random = np.random.default_rng(seed)
        samples = {name: _random_tensor(random, kind, (count, *shape)) for name, (kind, shape) in self.parts.items()}
        return samples.get(SINGLE_INPUT, samples)

    def dummy_federation(self) -> Federation:
        """Return one client with two random samples, to build networks and preprocessing."""
        x = self.random_samples(2)
        y = np.arange(2) % self.classes if self.classes is not None else np.zeros((2, self.targets), np.float32)
        extra: dict[str, Any] = {"classes": self.classes, "mean": self.mean, "std": self.std}
        extra |= {"class_names": self.class_names, "survival": self.survival}
        return Federation.from_arrays([(x, y, x, y)], **extra)


def _random_tensor(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Tensor:
    if "float" in kind:
        values = torch.from_numpy(random.uniform(size=shape))
    else:  # bytes are colors; of other integers, 0 and 1 are valid tokens in every vocabulary
        high, dtype = (256, np.uint8) if kind == "uint8" else (2, np.int64)
        values = torch.from_numpy(random.integers(0, high, shape, dtype))
    return values.to(getattr(torch, kind))
