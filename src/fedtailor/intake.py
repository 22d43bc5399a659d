"""What a run's models take: samples as the data hold them, without the data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.model import Inputs
from fedtailor.room import check_room

ONE = ""  # the name of the only part of inputs that have one
KINDS = ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
_MOST_PARTS, _LARGEST, _MOST_CLASSES = 1000, 2**28, 10**6  # parts, numbers of a sample, classes


@dataclass(frozen=True)
class Intake:
    """What one sample is like, and how channels are normalised; as a run's folder and an exported file say it."""

    parts: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape of one sample)
    classes: int | None  # None: targets are numbers
    targets: int = 1  # numbers a sample, where there are no classes
    mean: tuple[float, ...] | None = None  # per channel, taken off
    deviation: tuple[float, ...] | None = None  # per channel, divided by
    guessed: bool = False  # the dtype: a real client's folder does not say it, and bytes are as good as floats

    def __post_init__(self) -> None:
        shapes = [shape for _, shape in self.parts.values()]
        numbers = [*(self.mean or ()), *(self.deviation or ())]
        holds = (
            0 < len(self.parts) <= _MOST_PARTS
            and all(kind in KINDS for kind, _ in self.parts.values())
            and all(min(shape, default=1) > 0 and prod(shape) <= _LARGEST for shape in shapes)
            and (self.classes is None or 1 <= self.classes <= _MOST_CLASSES)
            and 1 <= self.targets <= _LARGEST
            and all(isfinite(number) for number in numbers)
        )
        if not holds:
            raise Refused("What is said of a model's inputs cannot be: a size, a number of classes or a dtype is odd.")

    @classmethod
    def of(cls, fed: Federation) -> "Intake":
        """Of a federation's samples.

        >>> x, y = np.zeros((4, 3), np.uint8), np.array([0, 1, 0, 1])
        >>> Intake.of(Federation.from_arrays([(x, y, x, y)])).parts
        {'': ('uint8', (3,))}
        """
        parts = fed.x if isinstance(fed.x, dict) else {ONE: fed.x}
        kinds = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape[1:])) for name, part in parts.items()}
        return cls(kinds, fed.classes, max(1, fed.y[:1].numel()), fed.mean, fed.deviation)

    def plain(self) -> dict[str, Any]:
        """Just as JSON gives it back.

        >>> Intake({"": ("uint8", (3,))}, classes=2).plain()["parts"]
        {'': ['uint8', [3]]}
        """
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one sample; None where inputs have several parts."""
        return self.parts[ONE][1] if ONE in self.parts else None

    def examples(self, count: int, seed: int = 0) -> Inputs:
        """Samples that are made up: nothing of anybody's data is in a file that is made with them."""
        check_room(count * sum(8 * prod(shape) for _, shape in self.parts.values()), "A model's inputs")
        random = np.random.default_rng(seed)
        made = {name: _make_up(random, kind, (count, *shape)) for name, (kind, shape) in self.parts.items()}
        return made.get(ONE, made)

    def federation(self) -> Federation:
        """One client with two such samples, to build a network for and to prepare inputs by."""
        x, count = self.examples(2), np.arange(2)
        y = count % self.classes if self.classes is not None else np.zeros((2, self.targets), np.float32)
        extra: dict[str, Any] = {"classes": self.classes, "mean": self.mean, "deviation": self.deviation}
        return Federation.from_arrays([(x, y, x, y)], **extra)


def _make_up(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "uint8":
        return torch.from_numpy(random.integers(0, 256, shape, np.uint8))
    if "float" in kind:
        dtype: torch.dtype = getattr(torch, kind)
        return torch.from_numpy(random.uniform(size=shape)).to(dtype)
    return torch.from_numpy(random.integers(0, 2, shape)).to(getattr(torch, kind))  # every vocabulary has 0 and 1
