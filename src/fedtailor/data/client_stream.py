"""Read the samples of one client after another, and keep only their targets in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fedtailor.core.model import Inputs
from fedtailor.data.client_samples import ClientSamples, from_blocks
from fedtailor.data.conversion import targets_of, to_inputs
from fedtailor.data.samples import COMMON_TEST_SET, check_lengths
from fedtailor.data.splits.owners import client_names
from fedtailor.errors import DataError


@dataclass(frozen=True, eq=False)
class ClientStream:
    """Clients whose inputs are read once, by `inputs`; names, owners, and targets are known after that."""

    clients: Iterable[tuple[str, Any, Any, Any, Any]]  # name, x_train, y_train, x_test, y_test
    common_test: tuple[Any, Any] | None = None
    names: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)  # of each block of inputs
    targets: list[Any] = field(default_factory=list)  # of each block

    def inputs(self) -> Iterator[tuple[str, Inputs]]:
        """Yield owner and inputs of one block after another: training and test samples of each client, then the common
        test set."""
        for owner, x, y in self._blocks():
            inputs, ((targets,), _) = to_inputs(x, f"{owner}'s"), targets_of([y], [owner])
            check_lengths(inputs, targets, f"{owner}'s")
            self.owners.append(owner)
            self.targets.append(y)
            yield owner, inputs

    def samples(self, x: Inputs) -> ClientSamples:
        """Return the samples of all clients; `x` contains all blocks of inputs."""
        ys, class_names = targets_of(self.targets, self.owners)
        return from_blocks(x, ys, self.owners, client_names(self.names, len(self.names)), class_names)

    def _blocks(self) -> Iterator[tuple[str, Any, Any]]:
        for name, *arrays in self.clients:
            if len(arrays) != 4:
                expected = "(name, x_train, y_train, x_test, y_test)"
                raise DataError(f"Client {name} must be {expected}, got {len(arrays) + 1} values.")
            self.names.append(str(name))
            for side in (0, 2):
                yield f"Client {name}", arrays[side], arrays[side + 1]
        if self.common_test is not None:
            yield (COMMON_TEST_SET, *self.common_test)
