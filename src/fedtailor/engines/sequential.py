"""One client after another with plain autograd: the reference for every other engine, and the one to debug with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from fedtailor.batch import Common
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.samples import Samples
from fedtailor.trees import Tree, flatten, map_leaves, stack, take


@dataclass(frozen=True, eq=False)
class Sequential:
    """The sequential engine."""

    common: Common
    samples: Samples  # positions of every client's training samples, on the device

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """function(local, *trees) for one client after another."""
        results: list[Tree] = []
        for position, client in enumerate(clients):
            # in memory of their own, as they lie on the machine of a real client: bits may depend on that
            own = [map_leaves(torch.Tensor.clone, take(tree, position)) for tree in trees]
            before = versions(own)
            results.append(function(self._view(client, round), *own))
            check_untouched(before, versions(own), client)
            check_alike(results[0], results[-1], clients[0], client)
        return stack(results)

    def _view(self, client: int, round: int) -> LocalView:
        samples = self.samples[client]
        index, size = (torch.tensor(number, device=samples.device) for number in (client, len(samples)))
        return LocalView(self.common, round, index, size, samples)


class Touched(Refused):
    """Work that changed what all clients share: what others do after it cannot be trusted."""


def versions(trees: Sequence[Tree]) -> list[tuple[str, int]]:
    """How often every tensor was changed in place."""
    return [(path, leaf._version) for tree in trees for path, leaf in flatten(tree).items()]


def check_untouched(before: list[tuple[str, int]], after: list[tuple[str, int]], client: int) -> None:
    changed = [path for (path, old), (_, new) in zip(before, after, strict=True) if old != new]
    if changed:
        what = f"Client {client}'s work changed '{changed[0]}' in place"
        raise Touched(f"{what}, which others share; return new tensors.")


def check_alike(first: Tree, other: Tree, client: int, another: int) -> None:
    """All clients of a round return the same names, with tensors of the same shapes and dtypes."""
    left, right = flatten(first), flatten(other)
    for path, what in product(sorted(left.keys() | right.keys()), ("shape", "dtype")):
        kinds = [getattr(tree.get(path), what, "no tensor") for tree in (left, right)]
        if kinds[0] != kinds[1] or kinds[0] == "no tensor":
            shown = [tuple(kind) if isinstance(kind, torch.Size) else kind for kind in kinds]
            raise Refused(
                f"'{path}' is {shown[0]} for client {client} and {shown[1]} for client {another}; within a round all "
                "clients return tensors of the same names, shapes and dtypes."
            )
