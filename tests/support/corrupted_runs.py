"""Corrupted run folders: with damaged files, or with invalid values and valid checksums."""

import json
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedtailor.core.trees import Rows
from fedtailor.experiments.experiment import make_experiment
from fedtailor.runs.files import checksum
from fedtailor.runs.serialization import pack, unpack
from fedtailor.runs.toml import to_toml
from support.corrupted_files import malformed_safetensors
from support.mutations import ODD, PROGRAMS, damage

SETTINGS = {
    "rounds": 2, "checkpoint_every": 1, "engine": "sequential", "device": "cpu",
    "method": "ditto", "network": "logistic", "data": {"clients": 3, "alpha": 1.0, "common_test": 0.1},
    "held_out_clients": [1],
}  # fmt: skip
TENSORS: list[Any] = [
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 3), torch.zeros(2, 0, 5), torch.zeros(3, dtype=torch.float64),
    torch.full((3, 16), torch.nan), torch.ones(3, 16, dtype=torch.int8), torch.tensor([True]), torch.tensor([0, 0]),
    torch.tensor([-1, 10**12]), Rows(torch.ones(2, 2), torch.tensor([True, False])), {}, {"a": torch.ones(1)},
]  # fmt: skip
INDEX = "checkpoint.json"
Change = tuple[int, Any, bool]  # index of the file, the change, whether the checksums are updated


@cache
def run_files(finished: bool) -> dict[str, bytes]:
    """Return the files of a small finished run, or of one that was stopped after the first of two rounds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        make_experiment(SETTINGS).run(folder=folder)
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
    late = ("personal", "checkpoints/000002")
    return {name: data for name, data in files.items() if finished or not name.startswith(late)}


def changes(update_checksums: bool) -> SearchStrategy[Change]:
    """Return a strategy that generates changes to a run folder, also with valid checksums if `update_checksums`."""
    replacements = st.tuples(st.integers(0, 9999), st.sampled_from(ODD).map(deepcopy))
    edits = st.one_of(replacements, replacements, PROGRAMS, malformed_safetensors())
    return st.tuples(st.integers(0, 99), edits, st.booleans() if update_checksums else st.just(False))


@contextmanager
def changed_run(files: dict[str, bytes], change: Change, folder: Path) -> Iterator[Path]:
    """Write a run with one change into a folder, and restore it afterwards."""
    index, what, update_checksums = change
    name = sorted(files)[index % len(files)]
    current = dict(files)
    if isinstance(what, bytes):
        current[name] = damage(files[name], what) if len(what) <= 24 else what
    elif what[0] % 11 == 0:
        del current[name]
    elif files[name]:
        current[name] = _with_value(name, files[name], *what)
    if update_checksums:
        current |= _with_checksums(current)
    _write(current, folder)
    yield folder
    _write(files, folder)


def _write(files: dict[str, bytes], folder: Path) -> None:
    """Make a folder contain these files and no others."""
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name in present - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        path = folder / name
        if name not in present or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _with_value(name: str, data: bytes, pick: int, value: Any) -> bytes:
    """Return a well-formed file in which one value is replaced or deleted."""
    if name.endswith(".safetensors"):
        tree = unpack(data)
        _put(tree, pick, TENSORS[pick % len(TENSORS)])
        return pack(tree)
    if name.endswith(".toml"):
        settings = tomllib.loads(data.decode())
        _put(settings, pick, value)
        return to_toml(settings).encode("utf-8", "surrogatepass")
    last_line = data.splitlines()[-1] + b"\n" if name.endswith(INDEX) else b""  # the checksum
    parts = data.splitlines() if name.endswith(".jsonl") else [data.removesuffix(last_line)]
    lines = [json.loads(part) for part in parts]
    _put(lines, pick, value)
    return "".join(json.dumps(line, default=str) + "\n" for line in lines).encode() + last_line


def _put(tree: Any, pick: int, value: Any) -> None:
    """Replace or delete one entry of nested dicts and lists."""
    entries = list(_entries(tree))
    table, key = entries[pick % len(entries)]
    if pick % 7 == 0:
        del table[key]
    else:
        table[key] = value


def _entries(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _entries(node[key])


def _with_checksums(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return checkpoint indices whose checksums match the files."""
    updated = {}
    for name in [name for name in files if name.endswith(INDEX)]:
        text = files[name].removesuffix(b"\n").rpartition(b"\n")[0]
        try:
            index = json.loads(text)
            for other, entry in index["files"].items():
                content = files[name.replace(INDEX, other)]
                entry |= {"bytes": len(content), "sha256": checksum(content)}
            for other in index["metadata"]["checksums"]:
                index["metadata"]["checksums"][other] = checksum(files[other])
            records = index["metadata"]["records"]
            records["sha256"] = checksum(files["rounds.jsonl"][: records["bytes"]])
            text = json.dumps(index).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # the index itself was changed: only its own checksum is updated
        updated[name] = text + f"\n{checksum(text)}\n".encode()
    return updated
