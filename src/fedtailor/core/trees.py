"""Trees, nested dicts of tensors, and functions on them, also as `ft.trees`. States, messages, and uploads are trees.

Trees are matched by name, never by position. A stacked tree has clients on the leading axis of every tensor.

| on one tree | on stacked trees, for the server |
|---|---|
| `add`, `sub`, `scale`, `zeros_like`, `select` | these too; also `put` (replace the rows of some clients) |
| `dot`, `squared_distance` | `dots` (all pairs of clients), `squared_norms` (one per client) |
| `repeat`, `stack` (make a stacked tree) | `take` (some clients), `mean` (one tree), `combine` (one mixture per row) |
| `map_leaves`, `leaves` (anything else) | `map_leaves`, `leaves` |
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.core.system import to_float64
from fedtailor.errors import ConfigError

Params = dict[str, Tensor]  # parameter name -> tensor
Tree = dict[str, Any]  # name -> Tensor, Rows, or Tree
Outline = dict[str, Any]  # structure of a tree, for JSON: name -> None (a tensor), "rows", or Outline


class Rows(NamedTuple):
    """A table in which rows may be absent, such as one prototype per class for a client without some classes.

    The shape is constant. Absent rows are not sent, do not count toward the bytes, and arrive as zeros. In a stacked
    tree, `values` and `present` have a leading axis of clients, so a mean over the clients that have a row is:

    >>> rows = Rows(torch.tensor([[[1.0], [5.0]], [[3.0], [0.0]]]), torch.tensor([[True, True], [True, False]]))
    >>> rows.values.sum(0) / rows.present.sum(0).clamp(min=1)[:, None]
    tensor([[2.],
            [5.]])
    """

    values: Tensor  # [rows, ...]
    present: Tensor  # [rows], bool


def map_leaves(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the tensors with the same name in all trees.

    >>> map_leaves(torch.neg, {"a": torch.tensor(1.0)})
    {'a': tensor(-1.)}
    """
    first, *others = trees
    if not others:
        return {n: function(node) if isinstance(node, Tensor) else _map(function, [node]) for n, node in first.items()}
    for other in others:
        if other.keys() != first.keys():
            raise ValueError(f"trees do not match: {sorted(first)} and {sorted(other)}")
    return {name: _map(function, [tree[name] for tree in trees]) for name in first}


def _map(function: Callable[..., Any], nodes: Sequence[Any]) -> Any:
    if isinstance(nodes[0], Tensor):
        return function(*nodes)
    if isinstance(nodes[0], dict):
        return map_leaves(function, *nodes)
    if isinstance(nodes[0], Rows):
        return Rows(*(function(*parts) for parts in zip(*nodes, strict=True)))
    return function(*nodes)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor | Rows]]:
    """Yield (path, leaf) for every leaf; the path joins the names with "/".

    >>> [path for path, _ in leaves({"params": {"w": torch.ones(2)}, "step": torch.tensor(1)})]
    ['params/w', 'step']
    """
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from leaves(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b, tensor by tensor.

    >>> add({"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(3)}
    """
    return map_leaves(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a − b, tensor by tensor.

    >>> sub({"w": torch.tensor(3)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    return map_leaves(torch.sub, a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """Multiply every tensor by one number.

    >>> scale({"w": torch.tensor(3.0)}, 2)
    {'w': tensor(6.)}
    """
    return map_leaves(lambda leaf: leaf * (factor.to(leaf.dtype) if isinstance(factor, Tensor) else factor), tree)


def zeros_like(tree: Tree) -> Tree:
    """Return a tree of zeros with the same names and shapes.

    >>> zeros_like({"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product over all entries of all tensors.

    >>> dot({"a": torch.ones(3)}, {"a": torch.ones(3)})
    tensor(3.)
    """
    products = [leaf.sum() for _, leaf in leaves(map_leaves(torch.mul, a, b)) if isinstance(leaf, Tensor)]
    return torch.stack(products).sum()


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return ‖a − b‖² over all entries of all tensors.

    >>> squared_distance({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    tensor(3.)
    """
    difference = sub(a, b)
    return dot(difference, difference)


def select(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """Return `yes` if the condition (a scalar tensor) is true, else `no`.

    >>> select(torch.tensor(True), {"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    return map_leaves(lambda a, b: torch.where(condition, a, b), yes, no)


def repeat(tree: Tree, count: int) -> Tree:
    """Stack `count` copies of a tree without copying memory.

    >>> repeat({"w": torch.tensor([1, 2])}, 3)["w"].shape
    torch.Size([3, 2])
    """
    return map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack one tree per client into a stacked tree.

    >>> stack([{"w": torch.tensor(1)}, {"w": torch.tensor(2)}])
    {'w': tensor([1, 2])}
    """
    return map_leaves(cache_by_identity(lambda *parts: torch.stack(parts)), *trees)


def cache_by_identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs once per distinct tensor, even if a tensor occurs several times in a tree.

    >>> tensor = torch.ones(2)
    >>> twice = map_leaves(cache_by_identity(torch.clone), {"a": tensor, "b": tensor})
    >>> twice["a"] is twice["b"]
    True
    """
    results: dict[tuple[int, ...], tuple[Any, Any]] = {}  # holds the tensors, so that their ids are not reused

    def cached(*parts: Any) -> Any:
        key = tuple(id(part) for part in parts)
        if key not in results:
            results[key] = (parts, function(*parts))
        return results[key][1]

    return cached


def take(stacked: Tree, position: int | Tensor) -> Tree:
    """Return the tree at one position of a stacked tree, or the stacked trees at several positions.

    Positions count the rows of the tree. In `receive`, row i of `exchange.received` belongs to client
    `exchange.clients[i]`; a server state with one row per client is indexed by the clients' numbers.

    >>> stacked = {"w": torch.tensor([5, 6, 7])}
    >>> take(stacked, 1), take(stacked, torch.tensor([0, 2]))
    ({'w': tensor(6)}, {'w': tensor([5, 7])})
    """
    return map_leaves(lambda leaf: leaf[position], stacked)


def mean(stacked: Tree, weights: Tensor | None = None) -> Tree:
    """Return the mean over clients, weighted if weights are given; their scale does not matter.

    >>> mean({"a": torch.tensor([1.0, 4.0])}, torch.tensor([2, 1]))
    {'a': tensor(2.)}
    """
    if weights is None:
        return map_leaves(lambda leaf: leaf.mean(0), stacked)
    normalized = to_float64(weights) / to_float64(weights).sum()
    # rows that share memory are equal; a product would first copy them
    return map_leaves(
        lambda leaf: leaf[0] if leaf.stride(0) == 0 else torch.tensordot(normalized.to(leaf), leaf, dims=1), stacked
    )


def combine(weights: Tensor, stacked: Tree) -> Tree:
    """Return Σ_j weights[i, j] · tree_j, stacked over i: one linear combination per row of weights.

    A server that sends every client its own mixture of models returns this from `send`, with one row per client of the
    round and one column per model. The rows are not normalized.

    >>> combine(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), {"a": torch.tensor([1.0, 3.0])})
    {'a': tensor([2., 1.])}
    """
    return map_leaves(lambda leaf: torch.tensordot(weights.to(leaf.dtype), leaf, dims=1), stacked)


def dots(a: Tree, b: Tree) -> Tensor:
    """Return the inner products of all pairs of two stacked trees, [clients of a, clients of b].

    >>> dots({"a": torch.tensor([[1.0, 2.0]])}, {"a": torch.tensor([[1.0, 1.0], [0.0, 3.0]])})
    tensor([[3., 6.]])
    """
    products = map_leaves(lambda x, y: x.flatten(1) @ y.flatten(1).T, a, b)
    return torch.stack([leaf for _, leaf in leaves(products) if isinstance(leaf, Tensor)]).sum(0)


def squared_norms(stacked: Tree) -> Tensor:
    """Return ‖tree_i‖² for each client of a stacked tree.

    >>> squared_norms({"a": torch.tensor([[3.0, 4.0], [0.0, 1.0]])})
    tensor([25.,  1.])
    """
    squares = [leaf.square().flatten(1).sum(1) for _, leaf in leaves(stacked) if isinstance(leaf, Tensor)]
    return torch.stack(squares).sum(0)


def put(stacked: Tree, positions: Tensor, rows: Tree) -> Tree:
    """Return a copy of a stacked tree with the rows at some positions replaced.

    >>> put({"a": torch.tensor([1.0, 2.0])}, torch.tensor([1]), {"a": torch.tensor([5.0])})
    {'a': tensor([1., 5.])}
    """
    return map_leaves(lambda leaf, row: leaf.index_copy(0, positions, row), stacked, rows)


def grow(old: Tree, fresh: Tree) -> Tree:
    """Extend a tree to the shapes of `fresh`: copy `old` into the leading corner of every tensor.

    >>> grow({"a": torch.tensor([1, 2])}, {"a": torch.tensor([0, 0, 9])})
    {'a': tensor([1, 2, 9])}
    """
    extended: Tree = _grow("", old, fresh)
    return extended


def _grow(path: str, old: Any, fresh: Any) -> Any:
    if isinstance(old, dict) and isinstance(fresh, dict):
        if odd := sorted(old.keys() ^ fresh.keys()):
            raise ConfigError(f"'{path}{odd[0]}' is in one of two states only; a state that grows must keep its names.")
        return {name: _grow(f"{path}{name}/", node, fresh[name]) for name, node in old.items()}
    if isinstance(old, Rows) and isinstance(fresh, Rows):
        return Rows(*(_grow(path, *parts) for parts in zip(old, fresh, strict=True)))
    if not isinstance(old, Tensor) or not isinstance(fresh, Tensor) or old.dtype != fresh.dtype:
        raise ConfigError(f"'{path[:-1]}' changed its type or dtype; a state that grows must keep both.")
    if old.ndim != fresh.ndim or any(before > after for before, after in zip(old.shape, fresh.shape, strict=True)):
        shapes = f"the shape {tuple(old.shape)} and cannot grow to {tuple(fresh.shape)}"
        raise ConfigError(f"'{path[:-1]}' has {shapes}; no dimension may shrink.")
    if old.shape == fresh.shape:
        return old
    extended = fresh.clone(memory_format=torch.contiguous_format)  # `repeat` makes tensors with overlapping memory
    extended[tuple(slice(size) for size in old.shape)] = old
    return extended


def flatten(tree: Tree) -> Params:
    """Return a flat dict of tensors with "/" between names, for files; `unflatten` is the inverse.

    >>> flatten({"params": {"w": torch.tensor(1)}})
    {'params/w': tensor(1)}
    """
    flat: Params = {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, Rows):
            flat |= {f"{path}/rows.values": leaf.values, f"{path}/rows.present": leaf.present}
        else:
            flat[path] = leaf
    return flat


def outline(tree: Tree) -> Outline:
    """Return the structure of a tree; unlike a flat file, it keeps the order of names and empty subtrees.

    >>> outline({"b": {}, "a": {"w": torch.ones(2)}})
    {'b': {}, 'a': {'w': None}}
    """
    kinds = {name: "rows" if isinstance(node, Rows) else None for name, node in tree.items()}
    return {name: outline(node) if isinstance(node, dict) else kinds[name] for name, node in tree.items()}


def unflatten(flat: Params, shape: Outline | None = None) -> Tree:
    """Rebuild the tree that `flatten` flattened; with its outline, also the order of names and empty subtrees.

    >>> unflatten({"a/b": torch.tensor(1)})
    {'a': {'b': tensor(1)}}
    """
    if shape is not None:
        return _fill(shape, flat, "")
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return _restore_rows(tree)


def _fill(shape: Outline, flat: Params, prefix: str) -> Tree:
    def fill(name: str, kind: Any) -> Any:
        path = f"{prefix}{name}"
        if isinstance(kind, dict):
            return _fill(kind, flat, f"{path}/")
        return Rows(flat[f"{path}/rows.values"], flat[f"{path}/rows.present"]) if kind == "rows" else flat[path]

    return {name: fill(name, kind) for name, kind in shape.items()}


def _restore_rows(tree: Tree) -> Tree:
    def restore(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node.keys() == {"rows.values", "rows.present"}:
            return Rows(node["rows.values"], node["rows.present"])
        return {name: restore(child) for name, child in node.items()}

    return {name: restore(node) for name, node in tree.items()}
