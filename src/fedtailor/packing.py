"""Trees as bytes: every tensor that goes to a disk or over a wire.

The format is safetensors, which holds numbers and nothing that could be run, with the tree's outline as metadata. Who
reads such bytes need not trust who wrote them: nothing larger than the bytes themselves is ever made of them.
"""

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedtailor.errors import Refused
from fedtailor.trees import Outline, Params, Tree, flatten, map_leaves, outline, unflatten
from fedtailor.untrusted import is_printable, quoted

_DEEPEST = 32  # subtrees within subtrees; a method has three or four
_LONGEST = 1000  # letters of a tensor's name, with those of its subtrees


def pack(tree: Tree) -> bytes:
    """A tree as bytes that any reader of safetensors understands; `unpack` undoes it to the last bit.

    >>> import torch
    >>> unpack(pack({"a": {}, "b": torch.ones(2)}))
    {'a': {}, 'b': tensor([1., 1.])}
    """
    flat = {name: leaf.detach().cpu().contiguous() for name, leaf in flatten(tree).items()}
    return save(_apart(flat), metadata={"outline": json.dumps(outline(tree))})


def packed_size(tree: Tree) -> int:
    """At most so many bytes has the tree when it is packed.

    >>> import torch
    >>> len(pack({"a": torch.ones(2)})) <= packed_size({"a": torch.ones(2)})
    True
    """
    flat = flatten(tree)
    header = pack(map_leaves(lambda leaf: leaf.flatten()[:0], tree))  # but for shapes and places, which are numbers
    numbers = sum(20 * (leaf.ndim + 2) for leaf in flat.values())
    return len(header) + numbers + sum(leaf.numel() * leaf.element_size() for leaf in flat.values())


def unpack(data: bytes, most: int | None = None) -> Tree:
    """The tree in these bytes, from whoever they are: at most `most` of them, else they are refused.

    >>> unpack(b"anything")
    Traceback (most recent call last):
    fedtailor.errors.Refused: These bytes hold no tensors: their header is cut off.
    """
    if most is not None and len(data) > most:
        raise Refused(f"These are {len(data)} bytes, more than the {most} that may be expected.")
    shape, flat = _outline_in(data), unpack_flat(data)
    names = set(_paths(shape, ""))
    if names != flat.keys():
        odd = quoted(min(names ^ flat.keys()), 80)
        raise Refused(f"These bytes hold no tree: their outline and their tensors differ at '{odd}'.")
    if any(len(name) > _LONGEST or not is_printable(name) for name in names):
        raise Refused("These bytes hold no tree: a name in it is too long, or cannot be printed.")
    return unflatten(flat, shape)


def unpack_flat(data: bytes) -> Params:
    """The tensors in the bytes of any safetensors file, by name.

    >>> import torch
    >>> unpack_flat(pack({"a": {"b": torch.ones(1)}}))
    {'a/b': tensor([1.])}
    """
    _header(data)
    try:
        return {name: leaf.clone() for name, leaf in load(data).items()}  # in memory of torch's own, aligned
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        why = str(error).splitlines()[0].rstrip(".")[:200] if str(error) else type(error).__name__
        raise Refused(f"These bytes hold no tensors: {why}.") from error


def _apart(flat: Params) -> Params:
    """The same tensors without two that share memory, which the format refuses."""
    seen: set[int] = set()
    apart = {}
    for name, leaf in flat.items():
        place = leaf.untyped_storage().data_ptr()
        apart[name] = leaf.clone() if place in seen else leaf
        seen.add(place)
    return apart


def _header(data: bytes) -> dict[str, Any]:
    """The JSON in front of the tensors."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Refused("These bytes hold no tensors: their header is cut off.")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise Refused("These bytes hold no tensors: their header is not JSON.") from error
    if not isinstance(header, dict):
        raise Refused("These bytes hold no tensors: their header is not a table.")
    return header


def _outline_in(data: bytes) -> Outline:
    metadata = _header(data).get("__metadata__")
    text = metadata.get("outline") if isinstance(metadata, dict) else None
    try:
        shape = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        shape = None
    if not isinstance(shape, dict) or not _is_outline(shape, _DEEPEST):
        raise Refused("These bytes hold no tree: they have tensors without an outline.")
    return shape


def _is_outline(shape: Any, deepest: int) -> bool:
    if isinstance(shape, dict):
        return deepest > 0 and all(_is_outline(child, deepest - 1) for child in shape.values())
    return shape is None or shape == "rows"


def _paths(shape: Outline, prefix: str) -> list[str]:
    found: list[str] = []
    for name, kind in shape.items():
        path = f"{prefix}{name}"
        rows = [f"{path}/rows.values", f"{path}/rows.present"]
        found += _paths(kind, f"{path}/") if isinstance(kind, dict) else rows if kind == "rows" else [path]
    return found
