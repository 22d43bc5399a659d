"""Named tensors, nested: every state and every message. A small vocabulary that keeps methods short.

Trees are matched by name, never by position. A stacked tree carries clients on the leading axis of every tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.errors import Refused

Params = dict[str, Tensor]  # parameter name -> tensor
Tree = dict[str, Any]  # name -> Tensor, Rows or Tree
Outline = dict[str, Any]  # a tree without its tensors, as JSON can hold it: name -> None (a tensor), "rows" or Outline


class Rows(NamedTuple):
    """A table of which not every client has every row, such as one prototype a class.

    Its shape is constant; absent rows are neither sent nor counted, and arrive as zeros.

    >>> Rows(torch.ones(3, 2), torch.tensor([True, False, True])).values.shape
    torch.Size([3, 2])
    """

    values: Tensor  # [rows, ...]
    present: Tensor  # [rows], bool


def map_leaves(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the tensors of the same name in every tree.

    >>> map_leaves(torch.neg, {"a": torch.tensor(1.0)})
    {'a': tensor(-1.)}
    """
    first, *others = trees
    for other in others:
        if other.keys() != first.keys():
            raise ValueError(f"trees do not match: {sorted(first)} against {sorted(other)}")
    return {name: _map(function, [tree[name] for tree in trees]) for name in first}


def _map(function: Callable[..., Any], nodes: Sequence[Any]) -> Any:
    if isinstance(nodes[0], dict):
        return map_leaves(function, *nodes)
    if isinstance(nodes[0], Rows):
        return Rows(*(function(*parts) for parts in zip(*nodes, strict=True)))
    return function(*nodes)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor | Rows]]:
    """Every leaf with its path, names joined by "/"."""
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from leaves(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


def add(a: Tree, b: Tree) -> Tree:
    """a + b, tensor by tensor.

    >>> add({"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(3)}
    """
    return map_leaves(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a − b, tensor by tensor.

    >>> sub({"w": torch.tensor(3)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    return map_leaves(torch.sub, a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """Every tensor times one number.

    >>> scale({"w": torch.tensor(3.0)}, 2)
    {'w': tensor(6.)}
    """
    return map_leaves(lambda leaf: leaf * (factor.to(leaf.dtype) if isinstance(factor, Tensor) else factor), tree)


def zeros_like(tree: Tree) -> Tree:
    """A tree of the same names and shapes, all zero.

    >>> zeros_like({"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product over all entries of all tensors.

    >>> dot({"a": torch.ones(3)}, {"a": torch.ones(3)})
    tensor(3.)
    """
    products = [leaf.sum() for _, leaf in leaves(map_leaves(torch.mul, a, b)) if isinstance(leaf, Tensor)]
    return torch.stack(products).sum()


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """‖a − b‖² over all entries of all tensors.

    >>> squared_distance({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    tensor(3.)
    """
    difference = sub(a, b)
    return dot(difference, difference)


def select(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """`yes` where the condition (one bool) holds, else `no`.

    >>> select(torch.tensor(True), {"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    return map_leaves(lambda a, b: torch.where(condition, a, b), yes, no)


def repeat(tree: Tree, count: int) -> Tree:
    """The same tree for each of `count` clients, stacked without copying.

    >>> repeat({"w": torch.tensor([1, 2])}, 3)["w"].shape
    torch.Size([3, 2])
    """
    return map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree a client in, one stacked tree out.

    >>> stack([{"w": torch.tensor(1)}, {"w": torch.tensor(2)}])
    {'w': tensor([1, 2])}
    """
    return map_leaves(once(lambda *parts: torch.stack(parts)), *trees)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which computes once for tensors that stand in several places of a tree, as an upload does that
    is also the client's model.

    >>> tensor = torch.ones(2)
    >>> twice = map_leaves(once(torch.clone), {"a": tensor, "b": tensor})
    >>> twice["a"] is twice["b"]
    True
    """
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}  # with the tensors, so that their ids stay theirs

    def remember(*parts: Any) -> Any:
        key = tuple(id(part) for part in parts)
        if key not in known:
            known[key] = (parts, function(*parts))
        return known[key][1]

    return remember


def take(stacked: Tree, position: int | Tensor) -> Tree:
    """The tree at a position of a stacked tree, or the stacked trees at several.

    >>> take({"w": torch.tensor([5, 6])}, 1)
    {'w': tensor(6)}
    """
    return map_leaves(lambda leaf: leaf[position], stacked)


def mean(stacked: Tree, weights: Tensor | None = None) -> Tree:
    """The mean over clients, weighted where weights are given (any positive scale).

    >>> mean({"a": torch.tensor([1.0, 4.0])}, torch.tensor([2, 1]))
    {'a': tensor(2.)}
    """
    if weights is None:
        return map_leaves(lambda leaf: leaf.mean(0), stacked)
    shares = weights.double() / weights.double().sum()
    return map_leaves(lambda leaf: torch.tensordot(shares.to(leaf), leaf, dims=1), stacked)


def combine(weights: Tensor, stacked: Tree) -> Tree:
    """Every row of weights makes one tree of the stacked ones: Σ_j weights[i, j] · tree_j, stacked over i.

    >>> combine(torch.tensor([[0.5, 0.5]]), {"a": torch.tensor([1.0, 3.0])})
    {'a': tensor([2.])}
    """
    return map_leaves(lambda leaf: torch.tensordot(weights.to(leaf.dtype), leaf, dims=1), stacked)


def dots(a: Tree, b: Tree) -> Tensor:
    """The inner products of all pairs of two stacked trees: [clients of a, clients of b].

    >>> dots({"a": torch.tensor([[1.0, 2.0]])}, {"a": torch.tensor([[1.0, 1.0], [0.0, 3.0]])})
    tensor([[3., 6.]])
    """
    products = map_leaves(lambda x, y: x.flatten(1) @ y.flatten(1).T, a, b)
    return torch.stack([leaf for _, leaf in leaves(products) if isinstance(leaf, Tensor)]).sum(0)


def squared_norms(stacked: Tree) -> Tensor:
    """‖tree_i‖² of every stacked tree.

    >>> squared_norms({"a": torch.tensor([[3.0, 4.0], [0.0, 1.0]])})
    tensor([25.,  1.])
    """
    squares = [leaf.square().flatten(1).sum(1) for _, leaf in leaves(stacked) if isinstance(leaf, Tensor)]
    return torch.stack(squares).sum(0)


def put(stacked: Tree, positions: Tensor, rows: Tree) -> Tree:
    """The stacked trees with those at some positions replaced; the old ones are left as they were.

    >>> put({"a": torch.tensor([1.0, 2.0])}, torch.tensor([1]), {"a": torch.tensor([5.0])})
    {'a': tensor([1., 5.])}
    """
    return map_leaves(lambda leaf, row: leaf.index_copy(0, positions, row), stacked, rows)


def grown(old: Tree, fresh: Tree) -> Tree:
    """A tree with room for more: as `fresh`, with `old` in the leading corner of every tensor, bit by bit.

    >>> grown({"a": torch.tensor([1, 2])}, {"a": torch.tensor([0, 0, 9])})
    {'a': tensor([1, 2, 9])}
    """
    wide: Tree = _grow("", old, fresh)
    return wide


def _grow(path: str, old: Any, fresh: Any) -> Any:
    if isinstance(old, dict) and isinstance(fresh, dict):
        if odd := sorted(old.keys() ^ fresh.keys()):
            raise Refused(f"'{path}{odd[0]}' is in one of two states only: with room for more, all names must stay.")
        return {name: _grow(f"{path}{name}/", node, fresh[name]) for name, node in old.items()}
    if isinstance(old, Rows) and isinstance(fresh, Rows):
        return Rows(*(_grow(path, *parts) for parts in zip(old, fresh, strict=True)))
    if not isinstance(old, Tensor) or not isinstance(fresh, Tensor) or old.dtype != fresh.dtype:
        raise Refused(f"'{path[:-1]}' changed its kind: with room for more, a state may only grow.")
    if old.ndim != fresh.ndim or any(less > more for less, more in zip(old.shape, fresh.shape, strict=True)):
        shapes = f"{tuple(old.shape)} and cannot become {tuple(fresh.shape)}"
        raise Refused(f"'{path[:-1]}' is {shapes}: with room for more, a state may only grow.")
    if old.shape == fresh.shape:
        return old
    whole = fresh.clone(memory_format=torch.contiguous_format)  # it may be one row, repeated without copying
    whole[tuple(slice(size) for size in old.shape)] = old
    return whole


def flatten(tree: Tree) -> Params:
    """A flat dict of tensors with "/" between names, for files; `unflatten` undoes it."""
    flat: Params = {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, Rows):
            flat |= {f"{path}/rows.values": leaf.values, f"{path}/rows.present": leaf.present}
        else:
            flat[path] = leaf
    return flat


def outline(tree: Tree) -> Outline:
    """The names of a tree in their order, which a flat file does not keep, nor that a subtree is empty.

    >>> outline({"b": {}, "a": {"w": torch.ones(2)}})
    {'b': {}, 'a': {'w': None}}
    """
    kinds = {name: "rows" if isinstance(node, Rows) else None for name, node in tree.items()}
    return {name: outline(node) if isinstance(node, dict) else kinds[name] for name, node in tree.items()}


def unflatten(flat: Params, shape: Outline | None = None) -> Tree:
    """The tree that `flatten` took apart; with its outline, in the same order and with what is empty.

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
