"""Folders of runs from hostile hands: damaged, or with lies under right seals."""

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

from fedtailor.experiment import make
from fedtailor.files import checksum
from fedtailor.packing import pack, unpack
from fedtailor.toml import to_toml
from fedtailor.trees import Rows
from mutations import ODD, PROGRAMS, damage
from odd_files import lying_safetensors

SETTINGS = {
    "rounds": 2, "checkpoint_every": 1, "engine": "sequential", "device": "cpu",
    "method": "ditto", "network": "logistic", "data": {"clients": 2, "alpha": 1.0},
}  # fmt: skip
TENSORS: list[Any] = [
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 3), torch.zeros(2, 0, 5), torch.zeros(3, dtype=torch.float64),
    torch.full((3, 16), torch.nan), torch.ones(3, 16, dtype=torch.int8), torch.tensor([True]), torch.tensor([0, 0]),
    torch.tensor([-1, 10**12]), Rows(torch.ones(2, 2), torch.tensor([True, False])), {}, {"a": torch.ones(1)},
]  # fmt: skip
INDEX = "checkpoint.json"
Change = tuple[int, Any, bool]  # which file, what happens to it, whether the seals are put right


@cache
def whole_run(finished: bool) -> dict[str, bytes]:
    """What is in the folder of a small run, or of one that was stopped after the first of its two rounds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        make(SETTINGS).run(folder=folder)
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
    late = ("personal", "checkpoints/000002")
    return {name: data for name, data in files.items() if finished or not name.startswith(late)}


def changes() -> SearchStrategy[Change]:
    lies = st.tuples(st.integers(0, 9999), st.sampled_from(ODD).map(deepcopy))
    return st.tuples(st.integers(0, 99), st.one_of(lies, lies, PROGRAMS, lying_safetensors()), st.booleans())


@contextmanager
def changed(files: dict[str, bytes], change: Change, folder: Path) -> Iterator[Path]:
    """The folder of a run with one change in it."""
    which, what, seal = change
    name = sorted(files)[which % len(files)]
    now = dict(files)
    if isinstance(what, bytes):
        now[name] = damage(files[name], what) if len(what) <= 24 else what
    elif what[0] % 11 == 0:
        del now[name]
    elif files[name]:
        now[name] = _lie(name, files[name], *what)
    if seal:
        now |= _sealed(now)
    _write(now, folder)
    yield folder
    _write(files, folder)


def _write(files: dict[str, bytes], folder: Path) -> None:
    """Make a folder hold these files and no others."""
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name in there - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        path = folder / name
        if name not in there or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _lie(name: str, data: bytes, pick: int, value: Any) -> bytes:
    """The same file, well formed, with another value in one place, or none."""
    if name.endswith(".safetensors"):
        tree = unpack(data)
        _put(tree, pick, TENSORS[pick % len(TENSORS)])
        return pack(tree)
    if name.endswith(".toml"):
        settings = tomllib.loads(data.decode())
        _put(settings, pick, value)
        return to_toml(settings).encode("utf-8", "surrogatepass")
    seal = data.splitlines()[-1] + b"\n" if name.endswith(INDEX) else b""
    parts = data.splitlines() if name.endswith(".jsonl") else [data.removesuffix(seal)]
    lines = [json.loads(part) for part in parts]
    _put(lines, pick, value)
    return "".join(json.dumps(line, default=str) + "\n" for line in lines).encode() + seal


def _put(tree: Any, pick: int, value: Any) -> None:
    """Another value in one of the places of nested dicts and lists, or none."""
    places = list(_places(tree))
    table, key = places[pick % len(places)]
    if pick % 7 == 0:
        del table[key]
    else:
        table[key] = value


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def _sealed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Indices that vouch for what is there, as whoever writes a folder can make them."""
    made = {}
    for name in [name for name in files if name.endswith(INDEX)]:
        text = files[name].removesuffix(b"\n").rpartition(b"\n")[0]
        try:
            index = json.loads(text)
            for other, entry in index["files"].items():
                content = files[name.replace(INDEX, other)]
                entry |= {"bytes": len(content), "sha256": checksum(content)}
            for other in index["note"]["sealed"]:
                index["note"]["sealed"][other] = checksum(files[other])
            lines = index["note"]["lines"]
            lines["sha256"] = checksum(files["rounds.jsonl"][: lines["bytes"]])
            text = json.dumps(index).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # the change was here: only its own seal is put right
        made[name] = text + f"\n{checksum(text)}\n".encode()
    return made
