"""Train one client after another with plain autograd: the reference for all other engines, and for debugging."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.precision import training_precision
from fedtailor.core.trees import Tree, flatten, map_leaves, stack, take
from fedtailor.errors import ConfigError
from fedtailor.training.engines.staging import stage
from fedtailor.training.sample_index import SampleIndex


@dataclass(frozen=True, eq=False)
class Sequential:
    """The sequential engine: one client after another."""

    shared: SharedContext
    samples: SampleIndex  # positions of every client's training samples, on the device

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """Call function(ctx, *trees) for one client after another and stack the results."""
        results: list[Tree] = []
        with training_precision(self.shared.model.precision):
            for position, client in enumerate(clients):
                # Copies have the memory layout of a deployed client's tensors, on which bits may depend.
                client_trees = [map_leaves(torch.Tensor.clone, take(tree, position)) for tree in trees]
                before = tensor_versions(client_trees)
                results.append(function(self._context(client, round), *client_trees))
                check_not_mutated(before, tensor_versions(client_trees), client)
                check_same_structure(results[0], results[-1], clients[0], client)
        return stack(results)

    def _context(self, client: int, round: int) -> ClientContext:
        shared, staged, (number,) = stage(self.shared, self.samples, [client])
        samples = staged[number]
        index, size = (torch.tensor(value, device=samples.device) for value in (client, len(samples)))
        return ClientContext(shared, round, index, size, samples)


class InPlaceMutationError(ConfigError):
    """A client modified a tensor in place that other clients may share, so their results cannot be trusted."""


def tensor_versions(trees: Sequence[Tree]) -> list[tuple[str, int]]:
    """Return how often every tensor was modified in place, by its path."""
    return [(path, leaf._version) for tree in trees for path, leaf in flatten(tree).items()]


def check_not_mutated(before: list[tuple[str, int]], after: list[tuple[str, int]], client: int) -> None:
    """Raise `InPlaceMutationError` if a tensor's version changed while a client's function ran."""
    changed = [path for (path, old), (_, new) in zip(before, after, strict=True) if old != new]
    if changed:
        raise InPlaceMutationError(
            f"Client {client} modified '{changed[0]}' in place, which other clients share; return new tensors."
        )


def check_same_structure(first: Tree, other: Tree, client: int, another: int) -> None:
    """Raise `ConfigError` unless two clients returned tensors of the same names, shapes, and dtypes."""
    left, right = flatten(first), flatten(other)
    for path, attribute in product(sorted(left.keys() | right.keys()), ("shape", "dtype")):
        values = [getattr(tree.get(path), attribute, "not a tensor") for tree in (left, right)]
        if values[0] != values[1] or values[0] == "not a tensor":
            shown = [tuple(value) if isinstance(value, torch.Size) else value for value in values]
            raise ConfigError(
                f"'{path}' is {shown[0]} for client {client} and {shown[1]} for client {another}; all clients of a "
                "round must return tensors of the same names, shapes, and dtypes."
            )
