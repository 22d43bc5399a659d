"""What must hold for the samples and targets of a federation; each check raises `DataError`."""

from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.model import Inputs
from fedtailor.data.client_samples import SampleOwners
from fedtailor.data.samples import COMMON_TEST_SET
from fedtailor.data.stored_samples import non_finite_samples
from fedtailor.data.survival_targets import invalid_targets
from fedtailor.errors import DataError


def check_class_names(class_names: tuple[str, ...] | None, classes: int | None) -> None:
    """Raise an error unless there is one name per class, or none at all."""
    if class_names is not None and len(class_names) != classes:
        raise DataError(f"There are {len(class_names)} names of classes, but classes is {classes}.")


def check_owners(owners: SampleOwners, samples: int) -> None:
    """Raise an error if a client has no training data, or if the common test set is empty or has clients' samples."""
    for name, own in zip(owners.names, owners.train, strict=True):
        if not len(own):
            raise DataError(f"Client {name} has no training data; add some or remove the client.")
    if (common := owners.common_test) is None:
        return
    owned = SampleOwners(owners.names, owners.train, owners.test).mask(samples)
    if not len(common) or bool(owned[common].any()):
        problem = "contains samples of a client" if len(common) else "has no samples"
        raise DataError(f"{COMMON_TEST_SET} {problem}; give it samples that belong to no client.")


def check_finite(x: Inputs, y: Tensor, owners: SampleOwners, is_known: bool) -> None:
    """Raise an error if a sample has NaN or infinity; `is_known` says that the inputs have been checked before."""
    owned = owners.mask(len(y))
    inputs = [] if is_known else list(as_parts(x).values())
    for kind, part in [*(("inputs", part) for part in inputs), ("targets", y)]:
        bad = owned & non_finite_samples(part)
        if bool(bad.any()):
            raise DataError(f"{owners.find(bad)} has NaN or infinity in its {kind}; remove those samples.")


def check_targets(y: Tensor, owners: SampleOwners, classes: int | None, survival: bool) -> None:
    """Raise an error for invalid survival times, and for labels that are no class.

    >>> import torch
    >>> owners = SampleOwners(("ann",), [torch.tensor([0, 1])], [torch.tensor([2])])
    >>> check_targets(torch.tensor([0, 1, 2]), owners, classes=2, survival=False)
    Traceback (most recent call last):
    fedtailor.errors.DataError: Client ann has the label 2; labels must be from 0 to 1.
    """
    owned = owners.mask(len(y))
    if survival:
        bad = owned & invalid_targets(y)
        if bool(bad.any()):
            expected = "pairs (event, time) with event 0 or 1 and a time of at least 0"
            raise DataError(f"{owners.find(bad)} has invalid survival targets; they must be {expected}.")
    if classes is not None:
        bad = owned & ((y < 0) | (y >= classes))
        if bool(bad.any()):
            first = bad & (bad.cumsum(0) == 1)  # so that the label is the one of this client
            raise DataError(
                f"{owners.find(first)} has the label {int(y[first])}; labels must be from 0 to {classes - 1}."
            )
