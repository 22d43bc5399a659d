"""The format of the samples of a deployment's clients, which the server does not see."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedtailor.core.fields import Constraint, InnerFraction, PositiveInt, check_fields
from fedtailor.core.metrics import Task
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError

_DUMMY_SAMPLES = 4  # generated samples to determine what a client will send
_MAX_CLASSES = 10**6
_MAX_CLASS_NAME = 255  # characters, as of a folder's name

_Shape = Annotated[
    tuple[int, ...], Constraint("sizes above 0, such as 1,28,28", lambda shape: min(shape, default=0) > 0)
]
_Classes = Annotated[
    int, Constraint(f"between 2 and {_MAX_CLASSES}, or 0", lambda value: value == 0 or 2 <= value <= _MAX_CLASSES)
]


@dataclass(frozen=True)
class Inputs:
    """The format of all clients' samples; a client with another format is rejected before it joins."""

    shape: Annotated[_Shape, "of one sample"] = (1, 28, 28)
    classes: Annotated[_Classes, "number of classes; 0: targets are real numbers"] = 10
    targets: Annotated[PositiveInt, "real numbers per sample if there are no classes"] = 1
    survival: Annotated[bool, "targets are pairs (event, time); set classes to 0 and targets to 2"] = False
    class_names: Annotated[
        tuple[str, ...] | None, "names of the classes, in order, which the folders of clients' images have"
    ] = None
    tokens: Annotated[bool, "samples are tokens (integers), for a network of your own"] = False
    mean: Annotated[tuple[float, ...] | None, "per channel or pixel, subtracted from inputs"] = None
    std: Annotated[tuple[float, ...] | None, "per channel or pixel, inputs are divided by it"] = None
    test: Annotated[InnerFraction, "fraction of samples for testing, unless a client's file selects them"] = 0.25
    schema: Annotated[str | None, "checksum of the clients' schema of tables, which fedtailor tables agree prints"] = (
        None
    )

    def __post_init__(self) -> None:
        check_fields(self, "inputs.")
        if self.class_names is not None:
            self._check_class_names(self.class_names)
        if self.survival and (self.classes, self.targets) != (0, 2):
            raise ConfigError("Survival targets are (event, time); set inputs.classes to 0 and inputs.targets to 2.")

    def _check_class_names(self, names: tuple[str, ...]) -> None:
        if len(names) != self.classes or len(set(names)) != len(names):
            raise ConfigError(
                f"inputs.class_names must be {self.classes} different names, one per class, got {len(names)}."
            )
        if not all(0 < len(name) <= _MAX_CLASS_NAME for name in names):
            raise ConfigError(f"inputs.class_names must have 1 to {_MAX_CLASS_NAME} characters each.")

    @property
    def task(self) -> Task:
        """What the targets are for."""
        return "survival" if self.survival else "classification" if self.classes else "regression"

    def dummy_federation(self, seed: int, tokens: bool) -> Federation:
        """Return one client with a few random samples, to build a network and to determine what would be sent."""
        random, count = np.random.default_rng(seed), 2 * _DUMMY_SAMPLES
        x = random.uniform(size=(count, *self.shape)).astype(np.float32)
        x = x.round().astype(np.int64) if tokens else x  # 0 and 1 are valid tokens in every vocabulary
        targets = random.uniform(size=(count, self.targets)).astype(np.float32)
        targets[:, 0] = np.arange(count) % 2 if self.survival else targets[:, 0]
        y = np.arange(count) % self.classes if self.classes else targets
        half = (x[:_DUMMY_SAMPLES], y[:_DUMMY_SAMPLES], x[_DUMMY_SAMPLES:], y[_DUMMY_SAMPLES:])
        classes = self.classes or None
        return Federation.from_arrays(
            [half], classes=classes, survival=self.survival, mean=self.mean, std=self.std, class_names=self.class_names
        )
