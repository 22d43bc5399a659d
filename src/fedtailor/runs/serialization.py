"""Serialize trees for files and messages.

The format is safetensors, which contains no executable code, with the tree's outline as metadata. Reading untrusted
bytes is safe: nothing larger than the bytes themselves is allocated.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedtailor.core.trees import Outline, Params, Tree, flatten, map_leaves, unflatten
from fedtailor.core.trees import outline as tree_outline
from fedtailor.core.untrusted_input import is_printable, sanitize
from fedtailor.errors import DamagedRunError, RunError, reason
from fedtailor.runs.files import checksum, read_bytes

_MAX_DEPTH = 32  # of nested subtrees; methods use three or four levels
_MAX_NAME_LENGTH = 1000  # of a tensor's full name


def pack(tree: Tree) -> bytes:
    """Return a tree as bytes that any safetensors reader understands; `unpack` restores it exactly.

    >>> import torch
    >>> unpack(pack({"a": {}, "b": torch.ones(2)}))
    {'a': {}, 'b': tensor([1., 1.])}
    """
    flat = {name: leaf.detach().cpu().contiguous() for name, leaf in flatten(tree).items()}
    return save(_without_shared_memory(flat), metadata={"outline": json.dumps(tree_outline(tree))})


def packed_size(tree: Tree) -> int:
    """Return an upper bound of the size in bytes of the packed tree.

    >>> import torch
    >>> len(pack({"a": torch.ones(2)})) <= packed_size({"a": torch.ones(2)})
    True
    """
    flat = flatten(tree)
    header = pack(map_leaves(lambda leaf: leaf.flatten()[:0], tree))  # shapes and offsets excepted
    digits = sum(20 * (leaf.ndim + 2) for leaf in flat.values())
    return len(header) + digits + sum(leaf.numel() * leaf.element_size() for leaf in flat.values())


def unpack(data: bytes, max_bytes: int | None = None) -> Tree:
    """Return the tree in untrusted bytes; raise an error if there are more than `max_bytes`.

    >>> unpack(b"anything")
    Traceback (most recent call last):
    fedtailor.errors.RunError: The data contains no tensors: the header is truncated.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise RunError(f"The data has {len(data)} bytes; at most {max_bytes} are allowed.")
    outline, flat = _read_outline(data), unpack_flat(data)
    names = set(_paths(outline, ""))
    if names != flat.keys():
        name = sanitize(min(names ^ flat.keys()), 80)
        raise RunError(f"The data contains no tree: its outline and its tensors differ at '{name}'.")
    if any(len(name) > _MAX_NAME_LENGTH or not is_printable(name) for name in names):
        raise RunError("The data contains no tree: a name is too long or not printable.")
    return unflatten(flat, outline)


def unpack_flat(data: bytes) -> Params:
    """Return name -> tensor for the bytes of any safetensors file.

    >>> import torch
    >>> unpack_flat(pack({"a": {"b": torch.ones(1)}}))
    {'a/b': tensor([1.])}
    """
    _header(data)
    try:
        return {name: leaf.clone() for name, leaf in load(data).items()}  # in aligned memory that torch owns
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise RunError(f"The data contains no tensors: {reason(error)}.") from error


def _without_shared_memory(flat: Params) -> Params:
    """Clone tensors that share memory with others, which safetensors does not accept."""
    seen: set[int] = set()
    separate = {}
    for name, leaf in flat.items():
        address = leaf.untyped_storage().data_ptr()
        separate[name] = leaf.clone() if address in seen else leaf
        seen.add(address)
    return separate


def _header(data: bytes) -> dict[str, Any]:
    """Return the JSON that precedes the tensors."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise RunError("The data contains no tensors: the header is truncated.")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise RunError("The data contains no tensors: the header is not JSON.") from error
    if not isinstance(header, dict):
        raise RunError("The data contains no tensors: the header is not a JSON object.")
    return header


def _read_outline(data: bytes) -> Outline:
    metadata = _header(data).get("__metadata__")
    text = metadata.get("outline") if isinstance(metadata, dict) else None
    try:
        outline = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        outline = None
    if not isinstance(outline, dict) or not _is_outline(outline, _MAX_DEPTH):
        raise RunError("The data contains no tree: its tensors have no valid outline.")
    return outline


def _is_outline(outline: Any, max_depth: int) -> bool:
    if isinstance(outline, dict):
        return max_depth > 0 and all(_is_outline(child, max_depth - 1) for child in outline.values())
    return outline is None or outline == "rows"


def _paths(outline: Outline, prefix: str) -> list[str]:
    found: list[str] = []
    for name, kind in outline.items():
        path = f"{prefix}{name}"
        rows = [f"{path}/rows.values", f"{path}/rows.present"]
        found += _paths(kind, f"{path}/") if isinstance(kind, dict) else rows if kind == "rows" else [path]
    return found


def load_tensors(path: Path, expected: str | None = None) -> Params:
    """Return the tensors in a file of a run; raise an error if the file does not match its expected checksum."""
    try:
        data = read_bytes(path)
        if expected is not None and checksum(data) != expected:
            raise DamagedRunError("the file does not match its checksum.")
        return unpack_flat(data)
    except (OSError, ValueError) as error:
        raise RunError(f"The tensors in '{path}' cannot be read: {reason(error)}.") from error
