"""`ClientSamples`: what readers and splits return, and what a `Federation` is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.data.conversion import resolve_targets
from fedtailor.data.samples import COMMON_TEST_SET, join_samples


@dataclass(frozen=True, eq=False)
class SampleOwners:
    """Who owns which samples: indices of each client's training and test samples, and of the common test set."""

    names: tuple[str, ...]
    train: Sequence[Tensor]
    test: Sequence[Tensor]
    common_test: Tensor | None = None

    def mask(self, samples: int) -> Tensor:
        """Return which of all samples belong to a client or to the common test set.

        >>> SampleOwners(("ann",), [torch.tensor([0])], [torch.tensor([2])]).mask(4)
        tensor([ True, False,  True, False])
        """
        common = [] if self.common_test is None else [self.common_test]
        owned = torch.zeros(samples, dtype=torch.bool)
        owned[torch.cat([*self.train, *self.test, *common])] = True
        return owned

    def find(self, marked: Tensor) -> str:
        """Return who has the first marked sample, as the start of a sentence; `marked` is a mask over all samples.

        >>> SampleOwners(("ann",), [torch.tensor([0])], [torch.tensor([1])]).find(torch.tensor([False, True]))
        'Client ann'
        """
        owned = (torch.cat(pair) for pair in zip(self.train, self.test, strict=True))
        for name, own in zip(self.names, owned, strict=True):
            if bool(marked[own].any()):
                return f"Client {name}"
        is_common = self.common_test is not None and bool(marked[self.common_test].any())
        return COMMON_TEST_SET if is_common else "A sample of another client"


@dataclass(frozen=True, eq=False)
class ClientSamples:
    """All samples and their owners, before it is decided whether the targets are classes."""

    x: Inputs
    y: Tensor
    owners: SampleOwners
    class_names: tuple[str, ...] | None = None  # if the labels were text

    def resolve(self, classes: int | None, regression: bool | None, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a federation after deciding whether its targets are classes; `extra` are more fields.

        >>> owners = SampleOwners(("ann",), [torch.tensor([0])], [torch.tensor([1])])
        >>> ClientSamples(torch.zeros(2, 3), torch.tensor([0, 1]), owners).resolve(None, None, {})["classes"]
        2
        """
        own, y = self.owners, self.y
        rest = {"class_names": self.class_names, "common_test": own.common_test} | dict(extra)
        if classes is None and rest["class_names"] is not None:
            classes = len(rest["class_names"])
        if rest.get("survival"):
            y, regression = y if y.is_floating_point() else y.double(), True
        y, classes = resolve_targets(y, own.mask(len(y)), classes, regression)
        parts = {"x": self.x, "y": y, "train": tuple(own.train), "test": tuple(own.test)}
        return parts | {"names": own.names, "classes": classes} | rest


def from_blocks(
    x: Inputs, ys: Sequence[Tensor], owners: Sequence[str], names: tuple[str, ...], class_names: tuple[str, ...] | None
) -> ClientSamples:
    """Return samples that are in the order train, test, train, test, ..., and the common test set.

    `ys` contains the targets of each of these blocks, and `owners` names them in error messages.

    >>> ys = [torch.tensor([0, 1]), torch.tensor([1])]
    >>> from_blocks(torch.zeros(3, 2), ys, ["Client ann"] * 2, ("ann",), None).owners.test
    (tensor([2]),)
    """
    y = join_samples(ys, owners, "targets")
    indices = torch.split(torch.arange(len(y)), [len(part) for part in ys])
    train, test = indices[: 2 * len(names) : 2], indices[1 : 2 * len(names) : 2]
    common = indices[-1] if len(indices) > 2 * len(names) else None
    return ClientSamples(x, y, SampleOwners(names, train, test, common), class_names)
