"""Reader of torch data sets: every sample is read once."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from fedtailor.core.model import Inputs
from fedtailor.data.conversion import targets_of, to_inputs
from fedtailor.data.samples import join_samples
from fedtailor.data.splits.owners import samples_by_client
from fedtailor.errors import DataError

log = logging.getLogger("fedtailor")
_READ_TWICE = 16  # samples of a data set that are read twice to detect random transforms


def read_dataset(dataset: Dataset[Any], owners: Sequence[Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the samples and their owners as arguments of `Federation.from_owners`.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    >>> found = read_dataset(data, ["ann", "ann", "bob", "bob"], None)
    >>> found["names"], found["y"]
    (['ann', 'bob'], tensor([0, 1, 0, 1]))
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "The data set must have a length and indexed samples; read an iterable data set into arrays first."
        )
    known, owned = samples_by_client(owners, len(dataset))
    names = known if names is None else names
    owner_of = {int(sample): name for name, own in zip(names, owned, strict=True) for sample in own}
    clients = [f"Client {owner_of.get(sample, '?')}" for sample in range(len(dataset))]
    pairs = [_as_pair(dataset[sample], client) for sample, client in enumerate(clients)]
    inputs = [to_inputs(x, f"{client}'s") for (x, _), client in zip(pairs, clients, strict=True)]
    _warn_if_random(dataset, inputs)
    targets, class_names = targets_of([y for _, y in pairs], clients)
    x = join_samples([_with_sample_axis(part) for part in inputs], clients, "inputs")
    y = join_samples([target[None] for target in targets], clients, "targets")
    return {"x": x, "y": y, "owners": owned, "names": names, "class_names": class_names}


def _as_pair(sample: Any, client: str) -> tuple[Any, Any]:
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise DataError(f"{client}'s samples must be pairs (x, y); wrap the data set in one that returns pairs.")
    return sample[0], sample[1]


def _with_sample_axis(x: Inputs) -> Inputs:
    return {name: part[None] for name, part in x.items()} if isinstance(x, dict) else x[None]


def _warn_if_random(dataset: Dataset[Any], first: Sequence[Inputs]) -> None:
    """Log a warning if a data set returns other inputs when it is read again, as with random transforms."""
    for index, before in enumerate(first[:_READ_TWICE]):
        after = to_inputs(dataset[index][0], "The")
        pairs = [(before[n], after[n]) for n in before] if isinstance(before, dict) else [(before, after)]
        if not all(torch.equal(one, other) for one, other in pairs):
            log.warning(
                "The data set returns different inputs each time it is read (random transforms), but a federation "
                "reads every sample once, so all rounds train on the same inputs; remove the random transforms."
            )
            return
