"""Checkpoints: everything that a run needs to resume, in a folder that is either complete or absent.

checkpoints/000040/checkpoint.json       the round, metadata, and the size and SHA-256 checksum of every file
                   server.safetensors    the server state, and the initial client state
                   states-000.safetensors ...    client states, several clients per file
                   trained-000.safetensors ...   personal models after each client's latest training
                   states.1-000.safetensors ...  the same for clients with the second architecture, if there are several

The last two checkpoints are kept, or as many as the writer asks for. Random generators need no state: all randomness is
a function of seed and round.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from fedtailor.core.trees import Tree, map_leaves, take
from fedtailor.errors import DamagedRunError, FedTailorError, reason
from fedtailor.runs.client_states import StoredTrees, group_name
from fedtailor.runs.files import TEMPORARY_SUFFIX, atomic_folder, checksum, remove_folder, write_and_sync
from fedtailor.runs.serialization import pack, unpack

KEPT_CHECKPOINTS = 2
_SHARD_BYTES = 2**26  # bytes of client states per file, so that saving needs little memory
_INDEX = "checkpoint.json"
_MAX_INDEX_BYTES = 2**24  # the index has a few lines per file


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files match their checksums."""

    folder: Path
    round: int
    metadata: dict[str, Any]  # what the writer added: the size of the record so far, the engine's chunk size, ...
    files: Mapping[str, Mapping[str, Any]]

    def server(self) -> Tree:
        """Return the server state."""
        server: Tree = self._read("server.safetensors")["server"]
        return server

    def shards(self, kind: str) -> Iterator[tuple[list[int], Tree]]:
        """Yield client numbers and their stacked trees, one file at a time; `kind` is "states" or "trained", or its
        `group_name`."""
        for name in sorted(name for name in self.files if name.startswith(f"{kind}-")):
            tree = self._read(name)
            yield tree["clients"].tolist(), tree["trees"]

    def client_state(self, client: int, architecture: int = 0) -> Tree:
        """Return the state of one client; its architecture is the number of its network."""
        for clients, stacked in self.shards(group_name("states", architecture)):
            if client in clients:
                return map_leaves(torch.clone, take(stacked, clients.index(client)))
        tree = self._read("server.safetensors")
        with _checkpoint_errors(self.folder):
            initial: Tree = tree[group_name("state", architecture)]
            return initial

    def _read(self, name: str) -> Tree:
        with _checkpoint_errors(self.folder):
            return unpack(_read_verified(self.folder / name, self.files[name]))


def save(
    folder: Path,
    round: int,
    server: Tree,
    stores: Mapping[str, StoredTrees],
    metadata: Mapping[str, Any],
    keep: int = KEPT_CHECKPOINTS,
) -> None:
    """Write the checkpoint of a round, then remove all but the last `keep` checkpoints."""
    files: dict[str, dict[str, Any]] = {}
    with atomic_folder(folder / "checkpoints" / f"{round:06d}") as temporary:
        for name, data in _contents(server, stores):
            with (temporary / name).open("wb") as file:
                write_and_sync(file, data)
            files[name] = {"bytes": len(data), "sha256": checksum(data)}
        index = json.dumps({"round": round, "metadata": dict(metadata), "files": files}, indent=1)
        with (temporary / _INDEX).open("wb") as file:
            write_and_sync(file, f"{index}\n{checksum(index.encode())}\n".encode())
    # any newer checkpoint was found damaged when the run was resumed
    valid = [path for path in checkpoint_folders(folder) if int(path.name) <= round]
    for path in (*checkpoint_folders(folder), *(folder / "checkpoints").glob(f"*{TEMPORARY_SUFFIX}")):
        if path not in valid[-keep:]:
            remove_folder(path)


def latest(folder: Path, check: Callable[[Checkpoint], object]) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint that passes `check`, and error messages for the newer ones."""
    problems: list[str] = []
    for path in reversed(checkpoint_folders(folder)):
        try:
            found = load(path)
            check(found)
            return found, problems
        except FedTailorError as error:
            problems.append(str(error))
    return None, problems


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return all checkpoint folders of a run, valid or not, oldest first."""
    found = (folder / "checkpoints").glob("[0-9]" * 6 + "*")
    return sorted((path for path in found if path.name.isdecimal() and path.is_dir()), key=lambda path: int(path.name))


def _contents(server: Tree, stores: Mapping[str, StoredTrees]) -> Iterator[tuple[str, bytes]]:
    initial = {kind.replace("states", "state"): s.initial for kind, s in stores.items() if kind.startswith("states")}
    yield "server.safetensors", pack({"server": server, **initial})
    for kind, store in stores.items():
        clients = store.clients()
        files = min(len(clients), max(1, ceil(len(clients) * store.bytes_per_client / _SHARD_BYTES)))
        for number in range(files):
            shard = clients[number * len(clients) // files : (number + 1) * len(clients) // files]
            stacked = store.get(shard, torch.device("cpu"))
            yield f"{kind}-{number:03d}.safetensors", pack({"clients": torch.tensor(shard), "trees": stacked})


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder after comparing every file with its checksum."""
    with _checkpoint_errors(path):
        data = _read_bounded(path / _INDEX, _MAX_INDEX_BYTES)
        text, _, expected = data.decode().removesuffix("\n").rpartition("\n")
        if checksum(text.encode()) != expected:
            raise DamagedRunError(f"'{_INDEX}' does not match its checksum")
        index = json.loads(text)
        found = Checkpoint(path, index["round"], index["metadata"], index["files"])
        if any(Path(name).name != name for name in found.files) or found.round != int(path.name):
            raise DamagedRunError(f"'{_INDEX}' describes another checkpoint")
        for name, expected_file in found.files.items():
            _read_verified(path / name, expected_file)
        return found


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn any error from reading a checkpoint into a DamagedRunError that names its folder."""
    where = f"The checkpoint '{path}' cannot be used"
    try:
        yield
    except FedTailorError as error:
        raise DamagedRunError(f"{where}: {reason(error)}.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRunError(f"{where}: '{_INDEX}' cannot be read.") from error


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    """Return a file's content after comparing its size and checksum with the index."""
    try:
        data = _read_bounded(path, int(expected["bytes"]))
    except OSError as error:
        raise DamagedRunError(f"'{path.name}' cannot be read ({error.strerror})") from error
    if len(data) != expected["bytes"] or checksum(data) != expected["sha256"]:
        raise DamagedRunError(f"'{path.name}' does not match its checksum")
    return data


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    size = path.stat().st_size
    if size > max_bytes or not path.is_file():
        raise DamagedRunError(f"'{path.name}' is larger than expected, or not a file")
    return path.read_bytes()
