"""Clients as arrays: `ClientArrays`, what the readers of users' data return, and `join_arrays`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedtailor.data.client_samples import ClientSamples, from_blocks
from fedtailor.data.conversion import targets_of, to_inputs
from fedtailor.data.samples import COMMON_TEST_SET, check_lengths, join_samples
from fedtailor.data.splits.owners import client_names
from fedtailor.errors import DataError

Arrays = tuple[Any, Any, Any, Any]  # x_train, y_train, x_test, y_test


@dataclass(frozen=True)
class ClientArrays:
    """The clients that a reader found, as `Federation.from_arrays` takes them."""

    clients: Sequence[Arrays]
    names: Sequence[str]
    class_names: tuple[str, ...] | None = None  # None: the labels are numbers, or text that has not been encoded

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Federation.from_arrays` after the clients."""
        return {"names": self.names} | ({} if self.class_names is None else {"class_names": self.class_names})


def join_arrays(
    clients: Sequence[Arrays], names: Sequence[str] | None, common_test: tuple[Any, Any] | None
) -> ClientSamples:
    """Return the samples of all clients after checking that they agree; `Federation.from_arrays` explains them.

    >>> join_arrays([([[0.5]], ["cat"], [[0.7]], ["dog"])], ["ann"], None).class_names
    ('cat', 'dog')
    """
    labels = client_names(names, len(clients))
    for name, arrays in zip(labels, clients, strict=True):
        if len(arrays) != 4:
            raise DataError(f"Client {name} must be (x_train, y_train, x_test, y_test), got {len(arrays)} arrays.")
    common = [] if common_test is None else [tuple(common_test)]
    if any(len(arrays) != 2 for arrays in common):
        raise DataError(f"{COMMON_TEST_SET} must be (x, y), got {len(common[0])} arrays.")
    owners = [f"Client {name}" for name in labels for _ in ("train", "test")] + [COMMON_TEST_SET for _ in common]
    pairs = [pair for arrays in clients for pair in (arrays[:2], arrays[2:])] + common
    xs = [to_inputs(x, f"{owner}'s") for owner, (x, _) in zip(owners, pairs, strict=True)]
    ys, class_names = targets_of([y for _, y in pairs], owners)
    for owner, own_x, own_y in zip(owners, xs, ys, strict=True):
        check_lengths(own_x, own_y, f"{owner}'s")
    return from_blocks(join_samples(xs, owners, "inputs"), ys, owners, labels, class_names)
