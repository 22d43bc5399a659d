"""Checkpoints: all that a run needs to go on, in a folder that is whole or not there.

checkpoints/000040/checkpoint.json       the round, and size and SHA-256 of every file
                   server.safetensors    the server, and what a client keeps before its first round
                   states-000.safetensors ...    what clients keep, some clients a file
                   trained-000.safetensors ...   their own models as they last trained

The last two are kept. Nothing else changes from round to round: randomness is a function of the seed and the round.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.files import WRITING, checksum, new_folder, put, remove
from fedtailor.packing import pack, unpack
from fedtailor.store import ClientStore
from fedtailor.trees import Tree, flatten, map_leaves, take

_KEPT = 2
_SHARD = 2**26  # bytes of clients a file, so that saving takes little memory
_INDEX = "checkpoint.json"
_MOST_INDEX = 2**24  # bytes; an index has a line a file


class Damaged(Refused):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are all as they were written."""

    folder: Path
    round: int
    note: dict[str, Any]  # what the writer added: how far the record was, how the engine ran
    files: Mapping[str, Mapping[str, Any]]

    def server(self) -> tuple[Tree, Tree]:
        """The server, and what a client keeps before its first round."""
        tree = self._read("server.safetensors")
        if not all(isinstance(tree.get(part), dict) for part in ("server", "state")):
            raise Damaged(f"The checkpoint '{self.folder}' cannot be used: it has no server.")
        return tree["server"], tree["state"]

    def shards(self, kind: str) -> Iterator[tuple[list[int], Tree]]:
        """Clients and their stacked trees, "states" or "trained", file by file."""
        for name in sorted(name for name in self.files if name.startswith(f"{kind}-")):
            tree = self._read(name)
            with _using(self.folder):
                clients = _numbers(tree["clients"])
                if not all(leaf.ndim and len(leaf) == len(clients) for leaf in flatten(tree["trees"]).values()):
                    raise Damaged(f"'{name}' has not one tree a client")
            yield clients, tree["trees"]

    def one(self, client: int) -> Tree:
        """What one client keeps."""
        for clients, stacked in self.shards("states"):
            if client in clients:
                return map_leaves(torch.clone, take(stacked, clients.index(client)))
        return self.server()[1]

    def _read(self, name: str) -> Tree:
        with _using(self.folder):
            return unpack(_checked(self.folder / name, self.files[name]))


def save(folder: Path, round: int, server: Tree, stores: Mapping[str, ClientStore], note: Mapping[str, Any]) -> None:
    """Write the checkpoint after a round, then let older ones than the last two go."""
    files: dict[str, dict[str, Any]] = {}
    with new_folder(folder / "checkpoints" / f"{round:06d}") as beside:
        for name, data in _contents(server, stores):
            with (beside / name).open("wb") as file:
                put(file, data)
            files[name] = {"bytes": len(data), "sha256": checksum(data)}
        index = json.dumps({"round": round, "note": dict(note), "files": files}, indent=1)
        with (beside / _INDEX).open("wb") as file:
            put(file, f"{index}\n{checksum(index.encode())}\n".encode())
    # whatever is newer than what was just written was found damaged when the run was resumed
    older = [path for path in folders(folder) if int(path.name) <= round]
    for path in (*folders(folder), *(folder / "checkpoints").glob(f"*{WRITING}")):
        if path not in older[-_KEPT:]:
            remove(path)


def latest(folder: Path, check: Callable[[Checkpoint], object]) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and passes a further check, and what is wrong with newer ones."""
    complaints: list[str] = []
    for path in reversed(folders(folder)):
        try:
            found = _open(path)
            check(found)
            return found, complaints
        except Refused as refusal:
            complaints.append(str(refusal))
    return None, complaints


def folders(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first, be they good or not."""
    found = (folder / "checkpoints").glob("[0-9]" * 6 + "*")
    return sorted((path for path in found if path.name.isdecimal() and path.is_dir()), key=lambda path: int(path.name))


def _contents(server: Tree, stores: Mapping[str, ClientStore]) -> Iterator[tuple[str, bytes]]:
    yield "server.safetensors", pack({"server": server, "state": stores["states"].start})
    for kind, store in stores.items():
        clients = store.clients()
        files = min(len(clients), max(1, ceil(len(clients) * store.bytes_each / _SHARD)))
        for number in range(files):
            some = clients[number * len(clients) // files : (number + 1) * len(clients) // files]
            stacked = store.get(some, torch.device("cpu"))
            yield f"{kind}-{number:03d}.safetensors", pack({"clients": torch.tensor(some), "trees": stacked})


def _open(path: Path) -> Checkpoint:
    """The checkpoint in a folder, every file of it compared with what was written."""
    with _using(path):
        data = _read(path / _INDEX, _MOST_INDEX)
        text, _, seal = data.decode().removesuffix("\n").rpartition("\n")
        if checksum(text.encode()) != seal:
            raise Damaged(f"'{_INDEX}' is not as it was written")
        index = json.loads(text)
        found = Checkpoint(path, index["round"], index["note"], index["files"])
        if not isinstance(found.note.get("chunk"), int | None) or not isinstance(found.note.get("continued"), list):
            raise Damaged(f"'{_INDEX}' says something odd of how it ran")
        if any(Path(name).name != name for name in found.files) or found.round != int(path.name):
            raise Damaged(f"'{_INDEX}' speaks of other files")
        for name, wanted in found.files.items():
            _checked(path / name, wanted)
        return found


@contextmanager
def _using(path: Path) -> Iterator[None]:
    """Whatever is wrong with a checkpoint, as one sentence."""
    where = f"The checkpoint '{path}' cannot be used"
    try:
        yield
    except Refused as error:
        raise Damaged(f"{where}: {str(error).rstrip('.')}.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: '{_INDEX}' cannot be read.") from error


def _numbers(clients: Any) -> list[int]:
    if not isinstance(clients, Tensor) or clients.dtype != torch.int64 or clients.ndim != 1:
        raise Damaged("it does not say whose states these are")
    found: list[int] = clients.tolist()
    if not found or min(found) < 0 or len(set(found)) != len(found):
        raise Damaged("it does not say whose states these are")
    return found


def _checked(path: Path, wanted: Mapping[str, Any]) -> bytes:
    """A file's bytes, if they are those that were written."""
    try:
        data = _read(path, int(wanted["bytes"]))
    except OSError as error:
        raise Damaged(f"'{path.name}' cannot be read ({error.strerror})") from error
    if len(data) != wanted["bytes"] or checksum(data) != wanted["sha256"]:
        raise Damaged(f"'{path.name}' is not as it was written")
    return data


def _read(path: Path, most: int) -> bytes:
    """A file's bytes, if there are no more than may be expected."""
    size = path.stat().st_size
    if size > most or not path.is_file():
        raise Damaged(f"'{path.name}' is not as it was written")
    return path.read_bytes()
