"""A run on disk: a folder that readers understand without this library.

experiment.toml         what was asked for
run.json                where it ran, who the clients are, and marks by which data, model and method are known again
start.safetensors       the common start, an ordinary state_dict
rounds.jsonl            one line a round
arrays/0007.safetensors ...   what is too large for a line of it: a monitor's arrays of round 7
checkpoints/000040/ ... the server and what every client keeps; the last two, see `checkpoint.py`
personal/trained/000.safetensors ...   every client's own model, an ordinary state_dict; also personal/received/.
                        Written last, with their sums in models.json: a run that has these is finished
lock                    held by the process that works on the run
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedtailor import checkpoint
from fedtailor.checkpoint import Checkpoint, Damaged
from fedtailor.engines import ENGINES
from fedtailor.errors import Refused
from fedtailor.files import WRITING, checksum, locked, new_folder, put, sync_folder, write, writing
from fedtailor.lines import Lines, Record, check_line, restore, without_nan
from fedtailor.machine import total_memory
from fedtailor.packing import pack, unpack_flat
from fedtailor.run import FORMAT, MOMENTS, Run, arrays_file, go_on_with
from fedtailor.store import ClientStore
from fedtailor.toml import to_toml
from fedtailor.trees import Params, Tree
from fedtailor.untrusted import LARGEST, quoted, read_toml

FEDERATED = "flower"  # the engine of runs whose clients are real, and keep their states and models themselves
_COST = 20  # a checkpoint is due when this many times as long has passed as the last one took
_MODELS = "models.json"  # names and sums of everyone's models
_INFO: dict[str, Any] = {  # what run.json must say, and how
    "clients": list, "engine": str, "threads": int, "chunk": int | None, "device": str, "torch": str, "score": str,
    "higher_is_better": bool, "fingerprint": dict,
}  # fmt: skip
_THREADS = 1024  # the most with which a run is resumed: a process that cannot make them all is ended by torch
_SEALED = ("experiment.toml", "run.json", "start.safetensors")
_OWN = {"run.json", "start.safetensors", "rounds.jsonl", "lock"}  # what a run killed while it began may leave
_AGAINST = (OSError, SafetensorError)  # what may go wrong with files of tensors


class RunWriter:
    """Writes a run into a folder of its own, round by round."""

    def __init__(self, folder: Path, every: int | None, sealed: Sequence[str] = _SEALED) -> None:
        self._folder, self._every, self._sealed = folder, every, sealed  # sealed: files that never change
        self._size, self._sum = 0, sha256()  # of the record so far
        self._saved = 0  # the round of the last checkpoint
        self._took, self._at = 0.0, time.monotonic()

    def begin(self, run: Run, start: Params) -> None:
        """What is known before round 1. The experiment comes last: a folder that has it holds a run."""
        experiment = to_toml(run.experiment).encode()
        if len(experiment) > LARGEST:  # else it could be written, but not read
            raise Refused("The schedule or the trace is too long to be kept with the run; run it without a folder.")
        with writing(f"The folder '{self._folder}' cannot be written", "", _AGAINST):
            write(self._folder / "run.json", (json.dumps(run.info, indent=1) + "\n").encode())
            write(self._folder / "start.safetensors", pack(start))
            write(self._folder / "rounds.jsonl", b"")
            write(self._folder / "experiment.toml", experiment)

    def add(self, record: Record) -> Record:
        """Append a round; its large arrays go to a file, and the record that is returned names that."""
        with writing(f"Round {record['round']} cannot be written to '{self._folder}'", self._hint(), _AGAINST):
            record = self._without_arrays(record)
            line = (json.dumps(without_nan(record), allow_nan=False) + "\n").encode()
            with (self._folder / "rounds.jsonl").open("r+b") as lines:
                lines.seek(self._size)  # where the last whole line ends, should one before this have failed
                lines.truncate()
                put(lines, line)
        self._size += len(line)
        self._sum.update(line)
        return record

    def is_due(self, number: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self._every is not None:
            return number % self._every == 0
        return time.monotonic() - self._at > _COST * self._took

    def save(self, number: int, server: Tree, stores: Mapping[str, ClientStore], note: Mapping[str, Any]) -> None:
        """The checkpoint after a round, unless it is there."""
        if number == self._saved:
            return
        began = time.monotonic()
        lines = {"bytes": self._size, "sha256": self._sum.hexdigest()}
        with writing(f"The checkpoint of round {number} cannot be written to '{self._folder}'", self._hint(), _AGAINST):
            sealed = {name: checksum((self._folder / name).read_bytes()) for name in self._sealed}
            checkpoint.save(self._folder, number, server, stores, {**note, "lines": lines, "sealed": sealed})
        self._saved, self._at = number, time.monotonic()
        self._took = self._at - began

    def go_on(self, found: Checkpoint) -> None:
        """Continue after a checkpoint; what the record has beyond it comes again."""
        self._saved, self._size = found.round, found.note["lines"]["bytes"]
        self._sum = sha256((self._folder / "rounds.jsonl").read_bytes()[: self._size])

    def finish(self, run: Run, clients: Sequence[int] | None = None) -> None:
        """Keep these clients' models, by default everyone's."""
        with (
            writing(f"The models cannot be written to '{self._folder}'", self._hint(), _AGAINST),
            new_folder(self._folder / "personal") as beside,
        ):
            sums = {}
            for moment in MOMENTS:
                (beside / moment).mkdir()
                for client in range(run.num_clients) if clients is None else clients:
                    data, name = pack(run.personal(client, moment)), _model_file(client, moment)
                    sums[name] = checksum(data)
                    with (beside / name).open("wb") as file:
                        put(file, data)
                sync_folder(beside / moment)
            with (beside / _MODELS).open("wb") as file:
                put(file, (json.dumps(sums, indent=1) + "\n").encode())

    def _without_arrays(self, record: Record) -> Record:
        large = {name: value for name, value in record["monitor"].items() if isinstance(value, Tensor)}
        if not large:
            return record
        file = arrays_file(record["round"])
        (self._folder / "arrays").mkdir(exist_ok=True)
        write(self._folder / file, data := pack(large))
        about = {"file": file, "sha256": checksum(data)}
        named = {name: about | {"shape": list(value.shape)} for name, value in large.items()}
        return record | {"monitor": record["monitor"] | named}

    def _hint(self) -> str:
        there = f"all up to round {self._saved} is kept" if self._saved else "nothing was kept yet"
        return f"; {there}, mend it and {go_on_with(self._folder)}"


@contextmanager
def new_run(folder: Path, every: int | None, run: Run, start: Params) -> Iterator[RunWriter]:
    """A folder for a run of its own, while it is written. A run that was killed before its first checkpoint gives way
    to the same run; nothing else does."""
    with writing(f"The folder '{folder}' cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, run)  # before a lock is left in what is not ours
    with locked(folder):
        _check_free(folder, run)  # again, for now nobody else changes it
        writer = RunWriter(folder, every)
        writer.begin(run, start)
        yield writer


def _check_free(folder: Path, run: Run) -> None:
    """Refuse a folder that holds anything but what the same run left that was killed before its first checkpoint."""
    if holds_run(folder):
        check_same(folder, run.experiment)
        if is_finished(folder):
            raise Refused(f"The folder '{folder}' holds this run, finished; open it, or name a new one.")
        if checkpoint.folders(folder):
            raise Refused(f"The folder '{folder}' holds this run, unfinished; {go_on_with(folder)}.")
        return
    names = {path.name for path in folder.iterdir() if not path.name.endswith(WRITING)}
    if names and not {"lock"} <= names <= _OWN:
        raise Refused(f"The folder '{folder}' is not empty; runs never overwrite each other, name a new one.")


def open_run(path: str | Path) -> Run:
    """A finished run from its folder.

    >>> open_run("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    folder = Path(path)
    experiment, info = read_settings(folder), read_info(folder)
    if not is_finished(folder):
        raise Refused(f"The run in '{folder}' is not finished; {go_on_with(folder)}.")
    found, complaints = latest(folder)
    if found is None or complaints or found.round != experiment.get("rounds"):
        why = complaints[0] if complaints else f"The run in '{folder}' has lost its last checkpoint."
        raise Damaged(f"{why.rstrip('.')}; mend the run, {go_on_with(folder)}.")
    records = read_records(folder, found)
    if found.note.get("continued"):
        info["continued"] = found.note["continued"]
    with _reading(folder):
        server = found.server()[0]
    if info["engine"] == FEDERATED:
        return Run(experiment, info, Lines(records), server, elsewhere, elsewhere, folder)
    return Run(
        experiment,
        info,
        Lines(records),
        server=server,
        get_client=found.one,
        get_personal=lambda client, moment: _read_model(folder, _model_file(client, moment)),
        folder=folder,
    )


def elsewhere(client: int, moment: str = "") -> NoReturn:
    """What a real client keeps cannot be asked for here."""
    raise Refused(f"Client {client} is a real one: what it keeps, and its model, are on its own disk.")


def check_models(folder: Path) -> None:
    """Refuse a finished run with a model that is not as it was written."""
    for name, seal in _models(folder).items():
        _model(folder, name, seal)


def _read_model(folder: Path, name: str) -> Params:
    return unpack_flat(_model(folder, name, _models(folder).get(name)))


def _model_file(client: int, moment: str) -> str:
    return f"{moment}/{client:03d}.safetensors"


def _models(folder: Path) -> dict[str, str]:
    """The files of everyone's models and their sums."""
    with _reading(folder):
        return dict(json.loads(_read_text(folder / "personal" / _MODELS)))


def _model(folder: Path, name: str, seal: str | None) -> bytes:
    with _reading(folder):
        data = _read_bytes(folder / "personal" / Path(name).parent.name / Path(name).name)
    if checksum(data) != seal:
        raise Damaged(f"'personal/{name}' in '{folder}' is not as it was written; mend the run, {go_on_with(folder)}.")
    return data


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's, finished or not."""
    return (folder / "experiment.toml").is_file()


def check_same(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Refuse a folder that holds the run of another experiment."""
    with _reading(folder):
        if _read_text(folder / "experiment.toml") != to_toml(experiment):
            raise Refused(f"The folder '{folder}' holds another run; runs never overwrite each other, name a new one.")


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds all it should."""
    return (folder / "personal" / _MODELS).is_file()


def read_settings(folder: Path) -> dict[str, Any]:
    """What was asked for."""
    if not holds_run(folder):
        raise Refused(f"There is no run in '{folder}'.")
    settings = read_toml(folder / "experiment.toml", "The experiment")
    with _reading(folder):
        parts = [settings[part] for part in ("method", "network", "data")]
        if not all(isinstance(part, dict) and isinstance(part["name"], str) for part in parts):
            raise ValueError("experiment.toml names no method, network or data")
        if not all(type(settings[name]) is int for name in ("rounds", "seed")):
            raise ValueError("experiment.toml has no whole number of rounds, or no seed")
        if not isinstance(settings["channel"], dict):
            raise ValueError("experiment.toml has no channel")
    return settings


def read_info(folder: Path) -> dict[str, Any]:
    """Where the run ran and who its clients are, if this version can read it."""
    with _reading(folder):
        info = json.loads(_read_text(folder / "run.json"))
        written, by = info.get("format", 0), info.get("fedtailor", "an earlier version")
        if type(written) is not int or not isinstance(by, str):
            raise ValueError("run.json does not say in which format the run is")
        if written != FORMAT:
            theirs = f"FedTailor {quoted(by, 40)} in format {quoted(str(written), 20)}"
            here = f"this version reads format {FORMAT}; open it with that version"
            raise Refused(f"The run in '{folder}' was written by {theirs}, and {here}.")
        for name, kinds in _INFO.items():
            if not isinstance(info[name], kinds) or (isinstance(info[name], bool) and kinds is not bool):
                raise ValueError(f"run.json says something odd of '{name}'")
        sizes = [client[part] for client in info["clients"] for part in ("train", "validation", "test")]
        sizes += [size for client in info["clients"] for size in client.get("classes") or ()]
        if not all(type(size) is int and 0 <= size < 2**53 for size in sizes):
            raise ValueError("run.json does not say how many samples clients have")
        if not info["clients"] or not all(isinstance(client["name"], str) for client in info["clients"]):
            raise ValueError("run.json names no clients")
        if info["engine"] not in (*ENGINES, FEDERATED) or not 1 <= info["threads"] <= _THREADS:
            raise ValueError("run.json names no engine, or threads that no machine has")
    return dict(info)


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint with which all of a run's folder fits together, and what is wrong with newer ones."""

    def check(found: Checkpoint) -> None:
        with _reading(folder):
            for name, seal in found.note["sealed"].items():
                if name in _SEALED and checksum(_read_bytes(folder / name)) != seal:
                    raise Damaged(f"'{name}' in '{folder}' is not as it was written.")
        read_records(folder, found)

    return checkpoint.latest(folder, check)


def read_records(folder: Path, found: Checkpoint) -> list[Record]:
    """The record up to a checkpoint."""
    with _reading(folder):
        data = _read_bytes(folder / "rounds.jsonl")[: found.note["lines"]["bytes"]]
        if checksum(data) != found.note["lines"]["sha256"]:
            raise Damaged(f"'rounds.jsonl' in '{folder}' is not as it was written.")
        clients = len(read_info(folder)["clients"])
        lines = [check_line(json.loads(line), n, clients) for n, line in enumerate(data.splitlines(), start=1)]
        if len(lines) != found.round:
            raise ValueError("rounds.jsonl has another number of rounds than its checkpoint")
        return [restore(line) for line in lines]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Whatever is wrong with a folder's files, as one sentence."""
    try:
        yield
    except Refused:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = str(error).splitlines()[0].rstrip(".")[:200] if str(error) else type(error).__name__
        raise Damaged(f"The run in '{folder}' cannot be read: {why}.") from error


def _read_bytes(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size > total_memory(torch.device("cpu")) // 4:
        raise ValueError(f"'{path.name}' is no file of a size that can be read")
    return path.read_bytes()


def _read_text(path: Path) -> str:
    return _read_bytes(path).decode()


def free_folder(parent: Path, name: str) -> Path:
    """A path of that name that is not there yet: a number is added where it is."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(parent / free for free in names if not (parent / free).exists())


def load_tensors(path: Path, seal: str | None = None) -> Params:
    """The tensors in a file of a run, if they are those that were written."""
    try:
        data = _read_bytes(path)
        if seal is not None and checksum(data) != seal:
            raise Damaged("they are not as they were written.")
        return unpack_flat(data)
    except (OSError, ValueError) as error:
        raise Refused(f"The tensors in '{path}' cannot be read: {str(error).rstrip('.')}.") from error
