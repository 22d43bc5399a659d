"""Write a run into a folder that can be read without this library.

experiment.toml         the settings
run.json                the environment, the clients, and fingerprints of data, model, and method
start.safetensors       the initial weights, an ordinary state_dict
rounds.jsonl            one line per round
arrays/0007.safetensors ...   method metrics of round 7 that are too large for a line
checkpoints/000040/ ... the server state and all client states; the last few checkpoints, see `checkpoint.py`
personal/trained/000.safetensors ...   each client's personal model, an ordinary state_dict; also personal/received/.
                        Written last, with their checksums in models.json: a run that has this file is finished
lock                    held by the process that works on the run
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedtailor.core.trees import Params, Tree
from fedtailor.core.untrusted_input import MAX_SETTINGS_BYTES
from fedtailor.errors import RunError
from fedtailor.runs import checkpoint
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.client_states import StoredTrees
from fedtailor.runs.files import (
    TEMPORARY_SUFFIX,
    atomic_folder,
    checksum,
    folder_lock,
    sync_folder,
    write_and_sync,
    write_atomic,
    write_errors,
)
from fedtailor.runs.reader import (
    CHECKSUMMED_FILES,
    MODELS_FILE,
    check_same_experiment,
    is_finished,
    is_run_folder,
    model_file,
)
from fedtailor.runs.records import Record, nan_to_none
from fedtailor.runs.run import MOMENTS, Run, all_clients, arrays_file, resume_hint
from fedtailor.runs.serialization import pack
from fedtailor.runs.toml import to_toml

_CHECKPOINT_INTERVAL = 20  # minimum time between checkpoints, as a multiple of the time the last one took
_EARLY_FILES = {"run.json", "start.safetensors", "rounds.jsonl", "lock"}  # files of a run killed while it started
_WRITE_ERRORS = (OSError, SafetensorError)


class RunWriter:
    """Writes a run into its folder, round by round."""

    def __init__(
        self,
        folder: Path,
        every: int | None,
        checksummed: Sequence[str] = CHECKSUMMED_FILES,
        keep: int = checkpoint.KEPT_CHECKPOINTS,
    ) -> None:
        self._folder, self._every, self._checksummed = folder, every, checksummed  # the latter are never changed
        self._keep = keep  # number of checkpoints
        self._size, self._hash = 0, sha256()  # of rounds.jsonl so far
        self._saved_round = 0  # of the last checkpoint
        self._save_seconds, self._saved_at = 0.0, time.monotonic()

    def start(self, run: Run, initial_weights: Params) -> None:
        """Write what is known before round 1. The experiment is last, because its file marks a run folder."""
        experiment = to_toml(run.experiment).encode()
        if len(experiment) > MAX_SETTINGS_BYTES:  # it could be written, but not read
            raise RunError("The schedule or the trace is too long to be saved with the run; run without a folder.")
        with write_errors(f"The folder '{self._folder}' cannot be written", "", _WRITE_ERRORS):
            write_atomic(self._folder / "run.json", (json.dumps(run.info, indent=1) + "\n").encode())
            write_atomic(self._folder / "start.safetensors", pack(initial_weights))
            write_atomic(self._folder / "rounds.jsonl", b"")
            write_atomic(self._folder / "experiment.toml", experiment)

    def append(self, record: Record) -> Record:
        """Append a record; large arrays are written to a file, and the returned record refers to it."""
        what = f"Round {record['round']} cannot be written to '{self._folder}'"
        with write_errors(what, self._hint(), _WRITE_ERRORS):
            record = self._without_arrays(record)
            line = (json.dumps(nan_to_none(record), allow_nan=False) + "\n").encode()
            with (self._folder / "rounds.jsonl").open("r+b") as file:
                file.seek(self._size)  # remove an incomplete line if an earlier write failed
                file.truncate()
                write_and_sync(file, line)
        self._size += len(line)
        self._hash.update(line)
        return record

    def is_checkpoint_due(self, number: int) -> bool:
        """Return whether a checkpoint should be saved after this round."""
        if self._every is not None:
            return number % self._every == 0
        return time.monotonic() - self._saved_at > _CHECKPOINT_INTERVAL * self._save_seconds

    def save(self, number: int, server: Tree, stores: Mapping[str, StoredTrees], metadata: Mapping[str, Any]) -> None:
        """Save the checkpoint of a round, unless it exists."""
        if number == self._saved_round:
            return
        started = time.monotonic()
        records = {"bytes": self._size, "sha256": self._hash.hexdigest()}
        what = f"The checkpoint of round {number} cannot be written to '{self._folder}'"
        with write_errors(what, self._hint(), _WRITE_ERRORS):
            checksums = {name: checksum((self._folder / name).read_bytes()) for name in self._checksummed}
            saved = {**metadata, "records": records, "checksums": checksums}
            checkpoint.save(self._folder, number, server, stores, saved, self._keep)
        self._saved_round, self._saved_at = number, time.monotonic()
        self._save_seconds = self._saved_at - started

    def continue_from(self, found: Checkpoint) -> None:
        """Continue after a checkpoint; later records are overwritten."""
        self._saved_round, self._size = found.round, found.metadata["records"]["bytes"]
        self._hash = sha256((self._folder / "rounds.jsonl").read_bytes()[: self._size])

    def restart(self) -> None:
        """Start again from round 1, because the run has no checkpoint yet; all records are overwritten."""
        self._saved_round, self._size, self._hash = 0, 0, sha256()

    def finish(self, run: Run, clients: Sequence[int] | None = None) -> None:
        """Write the personal models of these clients, by default of all clients, including held-out ones."""
        with (
            write_errors(f"The models cannot be written to '{self._folder}'", self._hint(), _WRITE_ERRORS),
            atomic_folder(self._folder / "personal") as temporary,
        ):
            checksums = {}
            for moment in MOMENTS:
                (temporary / moment).mkdir()
                for client in range(len(all_clients(run.info))) if clients is None else clients:
                    data, name = pack(run.personal(client, moment)), model_file(client, moment)
                    checksums[name] = checksum(data)
                    with (temporary / name).open("wb") as file:
                        write_and_sync(file, data)
                sync_folder(temporary / moment)
            with (temporary / MODELS_FILE).open("wb") as file:
                write_and_sync(file, (json.dumps(checksums, indent=1) + "\n").encode())

    def _without_arrays(self, record: Record) -> Record:
        large = {name: value for name, value in record["method_metrics"].items() if isinstance(value, Tensor)}
        if not large:
            return record
        file = arrays_file(record["round"])
        (self._folder / "arrays").mkdir(exist_ok=True)
        write_atomic(self._folder / file, data := pack(large))
        reference = {"file": file, "sha256": checksum(data)}
        references = {name: reference | {"shape": list(value.shape)} for name, value in large.items()}
        return record | {"method_metrics": record["method_metrics"] | references}

    def _hint(self) -> str:
        saved = f"rounds up to {self._saved_round} are saved" if self._saved_round else "no round is saved yet"
        return f"; {saved}. Fix the problem and {resume_hint(self._folder)}"


@contextmanager
def create_run(folder: Path, every: int | None, run: Run, initial_weights: Params) -> Iterator[RunWriter]:
    """Create and lock the folder of a new run. Only files of the same run without a checkpoint are overwritten."""
    with write_errors(f"The folder '{folder}' cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, run)  # first without a lock file, which must not be left in another folder
    with folder_lock(folder):
        _check_free(folder, run)  # again, now that no other process can change it
        writer = RunWriter(folder, every)
        writer.start(run, initial_weights)
        yield writer


def _check_free(folder: Path, run: Run) -> None:
    """Raise an error unless a folder is empty, or contains the same run without a checkpoint."""
    if is_run_folder(folder):
        check_same_experiment(folder, run.experiment)
        if is_finished(folder):
            raise RunError(f"The folder '{folder}' contains this run, finished; load it, or use a new folder.")
        if checkpoint.checkpoint_folders(folder):
            raise RunError(f"The folder '{folder}' contains this run, unfinished; {resume_hint(folder)}.")
        return
    names = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY_SUFFIX)}
    if names and not {"lock"} <= names <= _EARLY_FILES:
        raise RunError(f"The folder '{folder}' is not empty; use a new folder.")


def unused_folder(parent: Path, name: str) -> Path:
    """Return a path with this name that does not exist; a number is added if necessary."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(parent / free for free in names if not (parent / free).exists())
