"""Updates: how the uploads of a round differ from the messages that their clients received, stacked over clients.

The change of a tensor that was not sent under the same name is the tensor itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.system import float64_on, to_float64
from fedtailor.core.trees import Rows, Tree, leaves, map_leaves

UPDATE_NORM, UPDATE_COSINE = "update_norm", "update_cosine"  # names in the record


def map_pairs(
    function: Callable[[str, Any, Any], Any],
    tree: Tree,
    other: Any,
    path: str = "",
    is_leaf: Callable[[Any], bool] = lambda node: False,
) -> Tree:
    """Map every leaf to function(path, leaf, node of the other tree at that path or None).

    >>> map_pairs(lambda path, leaf, sent: (path, sent is None), {"params": {"w": torch.ones(1)}}, {})
    {'params': {'w': ('params/w', True)}}
    """

    def visit(name: str, node: Any) -> Any:
        counterpart = other.get(name) if isinstance(other, dict) else None
        if isinstance(node, dict) and not is_leaf(node):
            return map_pairs(function, node, counterpart, f"{path}{name}/", is_leaf)
        return function(f"{path}{name}", node, counterpart)

    return {name: visit(name, node) for name, node in tree.items()}


def float_values(leaf: Any) -> Tensor | None:
    """Return the values of a floating-point leaf, or None for other leaves."""
    values = leaf.values if isinstance(leaf, Rows) else leaf
    return values if isinstance(values, Tensor) and values.is_floating_point() else None


def map_floats(function: Callable[[Tensor], Tensor], leaf: Tensor | Rows) -> Tensor | Rows:
    """Apply a function to a floating-point leaf; absent rows stay zero, and integers and booleans are unchanged."""
    values = float_values(leaf)
    if values is None:
        return leaf
    if not isinstance(leaf, Rows):
        return function(values)
    return Rows(torch.where(_as_wide(leaf.present, values), function(values), 0), leaf.present)


def reference(leaf: Tensor | Rows, sent: Any) -> Tensor | None:
    """Return what the client was sent under the same name, if it has the same type and shape."""
    values, before = float_values(leaf), float_values(sent)
    if values is None or before is None or isinstance(leaf, Rows) != isinstance(sent, Rows):
        return None
    return before if before.shape == values.shape else None


def change(path: str, leaf: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """Return upload - message, or the upload if it has no counterpart in the message."""
    before = reference(leaf, sent)
    return leaf if before is None else map_floats(lambda values: values - before, leaf)


def restore(path: str, changed: Tensor | Rows, sent: Any) -> Tensor | Rows:
    """Return message + change, the inverse of `change`."""
    before = reference(changed, sent)
    return changed if before is None else map_floats(lambda values: before + values, changed)


def updates(uploads: Tree, sent: Tree) -> Tree:
    """Return the changes of stacked uploads, given the messages `sent` to their clients.

    >>> updates({"w": torch.tensor([[3.0]]), "new": torch.tensor([[5.0]])}, {"w": torch.tensor([[1.0]])})
    {'w': tensor([[2.]]), 'new': tensor([[5.]])}
    """
    return map_pairs(change, uploads, sent)


def scale_rows(factors: Tensor, stacked: Tree) -> Tree:
    """Multiply the floating-point tensors of every client by its factor."""
    return map_pairs(lambda _, leaf, __: map_floats(lambda v: v * _as_wide(factors.to(v.dtype), v), leaf), stacked, {})


def choose_rows(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """Return the rows of `yes` for the clients for which the condition is true, and those of `no` for the others.

    >>> choose_rows(torch.tensor([True, False]), {"w": torch.tensor([1, 2])}, {"w": torch.tensor([3, 4])})
    {'w': tensor([1, 4])}
    """
    return map_leaves(lambda a, b: torch.where(_as_wide(condition, a), a, b), yes, no)


def norms(stacked: Tree, exact: bool = True) -> Tensor | None:
    """Return the L2 norm of every client over all its tensors in float64, or None without floating-point tensors.

    Norms that are not `exact` add up squares in the tensors' own precision, which takes a tenth of the time.

    >>> norms({"w": torch.tensor([[3.0, 4.0]])})
    tensor([5.], dtype=torch.float64)
    """
    tensors = [values for _, leaf in leaves(stacked) if (values := float_values(leaf)) is not None]
    flat = [values.reshape(len(values), -1) for values in tensors if values.numel()]
    if not flat:
        return None
    dtype = float64_on(flat[0].device) if exact else None
    found = torch.stack([to_float64(torch.linalg.vector_norm(part, dim=1, dtype=dtype)) for part in flat])
    if not bool(found.isfinite().all()):  # squares overflow, so divide by the largest value first
        return _norm_of_large(torch.stack([_norm_of_large(part) for part in flat], 1))
    total: Tensor = torch.linalg.vector_norm(found, dim=0)
    return total


def _norm_of_large(part: Tensor) -> Tensor:
    largest = to_float64(part.abs().amax(1)).clamp(min=torch.finfo(float64_on(part.device)).tiny)
    lengths: Tensor = largest * torch.linalg.vector_norm(to_float64(part) / largest[:, None], dim=1)
    return lengths


def update_metrics(uploads: Tree, sent: Tree) -> Tree:
    """Return metrics for the record: the norm of every client's update, and its cosine with the mean update.

    >>> found = update_metrics({"w": torch.tensor([[3.0, 0.0], [0.0, 3.0]])}, {"w": torch.zeros(2, 2)})
    >>> found["update_norm"].tolist(), [round(value, 4) for value in found["update_cosine"].tolist()]
    ([3.0, 3.0], [0.7071, 0.7071])
    """
    moved = updates(uploads, sent)
    lengths = norms(moved, exact=False)
    if lengths is None:
        return {}
    products, squares = torch.zeros_like(lengths), lengths.new_zeros(())
    for _, leaf in leaves(moved):
        values = float_values(leaf)
        if values is not None and values.numel():
            flat = values.reshape(len(values), -1)
            mean = flat.mean(0)
            products, squares = products + to_float64(flat @ mean), squares + to_float64(mean.dot(mean))
    tiny = torch.finfo(lengths.dtype).tiny
    return {UPDATE_NORM: lengths, UPDATE_COSINE: products / (lengths * squares.sqrt()).clamp(min=tiny)}


def _as_wide(per_client: Tensor, values: Tensor) -> Tensor:
    """Reshape one value per client, or per row of each client, for broadcasting with their values."""
    return per_client.reshape(per_client.shape + (1,) * (values.ndim - per_client.ndim))
