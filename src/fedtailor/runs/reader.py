"""Read runs from their folders, and compare the files with their checksums."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fedtailor.core.trees import Params
from fedtailor.core.untrusted_input import read_toml, sanitize
from fedtailor.errors import DamagedRunError, FedTailorError, RunError, reason
from fedtailor.runs import checkpoint
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.files import checksum, read_bytes
from fedtailor.runs.records import Record, Records, restore_record, validate_record
from fedtailor.runs.run import (
    FORMAT,
    MOMENTS,
    Run,
    all_clients,
    architecture_of,
    client_counts,
    is_complete,
    resume_hint,
)
from fedtailor.runs.serialization import unpack_flat
from fedtailor.runs.toml import to_toml

FLOWER_ENGINE = "flower"  # the engine of deployed runs, whose clients store their states and models themselves
MODELS_FILE = "models.json"  # file names and checksums of all personal models
_INFO_TYPES: dict[str, Any] = {  # required fields of run.json
    "method_title": str, "clients": list, "engine": str, "threads": int, "chunk_size": int | None, "device": str,
    "torch": str, "score": str, "higher_is_better": bool, "ranked_by": str, "initial_weights": str,
    "fingerprint": dict,
}  # fmt: skip
_MAX_CODE_PARTS, _MAX_CODE_NAME = 32, 1000  # of a run's own code: parts, and characters of a name
CHECKSUMMED_FILES = ("experiment.toml", "run.json", "start.safetensors")


def load_run(path: str | Path) -> Run:
    """Return the finished run in a folder.

    >>> load_run("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    folder = Path(path)
    experiment, info = read_settings(folder), read_info(folder)
    if not is_finished(folder):
        raise RunError(f"The run in '{folder}' is not finished; {resume_hint(folder)}.")
    found, problems = latest_checkpoint(folder)
    records = read_records(folder, found) if found is not None else []
    if found is None or problems or not is_complete(experiment, records):
        why = problems[0] if problems else f"The last checkpoint of the run in '{folder}' is missing."
        raise DamagedRunError(f"{why.rstrip('.')}; to repair the run, {resume_hint(folder)}.")
    for name in ("environment_changes", "engine_changes"):
        if found.metadata.get(name):
            info[name] = found.metadata[name]
    with read_errors(folder):
        server = found.server()
    if info["engine"] == FLOWER_ENGINE:
        return Run(experiment, info, Records(records), server, raise_remote_client, raise_remote_client, folder)
    return Run(
        experiment,
        info,
        Records(records),
        server=server,
        get_client=lambda client: found.client_state(client, architecture_of(info, client)),
        get_personal=lambda client, moment: read_model(folder, model_file(client, moment)),
        folder=folder,
    )


def raise_remote_client(client: int, moment: str = "") -> NoReturn:
    """Raise the error for the state or model of a deployed client, which is not in the run folder."""
    raise RunError(f"The state and the model of client {client} are on the client's machine, not in this folder.")


def check_models(folder: Path) -> None:
    """Raise an error if a personal model of a finished run does not match its checksum."""
    for name, expected in _model_checksums(folder).items():
        _read_model_bytes(folder, name, expected)


def read_model(folder: Path, name: str) -> Params:
    """Return the tensors of a personal model, which must match its checksum."""
    return unpack_flat(_read_model_bytes(folder, name, _model_checksums(folder).get(name)))


def model_file(client: int, moment: str) -> str:
    """Return the path of a personal model inside `personal/`."""
    return f"{moment}/{client:03d}.safetensors"


def _model_checksums(folder: Path) -> dict[str, str]:
    with read_errors(folder):
        return dict(json.loads(read_text_file(folder / "personal" / MODELS_FILE)))


def _read_model_bytes(folder: Path, name: str, expected: str | None) -> bytes:
    with read_errors(folder):
        data = read_bytes(folder / "personal" / Path(name).parent.name / Path(name).name)
    if checksum(data) != expected:
        raise DamagedRunError(
            f"'personal/{name}' in '{folder}' does not match its checksum; to repair the run, {resume_hint(folder)}."
        )
    return data


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder contains a run, finished or not."""
    return (folder / "experiment.toml").is_file()


def planned_rounds(folder: Path) -> int | None:
    """Return the number of rounds that a run folder's settings name; None if they cannot be read.

    >>> planned_rounds(Path("nowhere")) is None
    True
    """
    try:
        return int(read_settings(folder)["rounds"])
    except FedTailorError:
        return None


def check_same_experiment(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Raise an error if a folder contains the run of another experiment."""
    with read_errors(folder):
        if read_text_file(folder / "experiment.toml") != to_toml(experiment):
            raise RunError(f"The folder '{folder}' contains another run, which is never overwritten; use a new folder.")


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder is finished: its personal models are written last."""
    return (folder / "personal" / MODELS_FILE).is_file()


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder."""
    if not is_run_folder(folder):
        raise RunError(f"There is no run in '{folder}'.")
    settings = read_toml(folder / "experiment.toml", "The experiment")
    with read_errors(folder):
        parts = [settings[part] for part in ("method", "network", "data")]
        if not all(isinstance(part, dict) and isinstance(part["name"], str) for part in parts):
            raise ValueError("experiment.toml does not name a method, a network, and data")
        if not all(type(settings[name]) is int for name in ("rounds", "seed", *({"patience"} & settings.keys()))):
            raise ValueError("rounds, seed, and patience in experiment.toml must be integers")
        if not isinstance(settings["channel"], dict):
            raise ValueError("experiment.toml has no channel")
    return settings


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of run.json: the machine, the clients, and the format, which this version must support."""
    with read_errors(folder):
        info = json.loads(read_text_file(folder / "run.json"))
        written, version = info.get("format", 0), info.get("fedtailor", "(an earlier version)")
        if type(written) is not int or not isinstance(version, str):
            raise ValueError("run.json does not name the format of the run")
        if written != FORMAT:
            writer = f"FedTailor {sanitize(version, 40)} in format {sanitize(str(written), 20)}"
            fix = f"this version reads format {FORMAT}; open it with that version"
            raise RunError(f"The run in '{folder}' was written by {writer}, and {fix}.")
        for name, types in _INFO_TYPES.items():
            if not isinstance(info[name], types) or (isinstance(info[name], bool) and types is not bool):
                raise ValueError(f"run.json has an invalid value for '{name}'")
        if info["ranked_by"] not in MOMENTS:
            raise ValueError("run.json has an invalid value for 'ranked_by'")
        clients = all_clients(info)
        sizes = [client[part] for client in clients for part in ("train", "validation", "test")]
        sizes += [size for client in clients for size in client.get("classes") or ()] + [info.get("common_test", 0)]
        if not all(type(size) is int and 0 <= size < 2**53 for size in sizes):
            raise ValueError("run.json has invalid sample counts")
        architectures = [client.get("architecture", 0) for client in clients]
        if not all(type(number) is int and number >= 0 for number in architectures):
            raise ValueError("run.json has an invalid number of an architecture")
        if not info["clients"] or not all(isinstance(client["name"], str) for client in clients):
            raise ValueError("run.json does not name the clients")
        if not _is_code(info.get("code", {})):
            raise ValueError("run.json has an invalid value for 'code'")
    return dict(info)


def _is_code(found: Any) -> bool:
    """Return whether this is a description of users' own code, as by `describe_code`."""
    parts: list[Any] = list(found.values()) if isinstance(found, dict) else [None]
    if len(parts) > _MAX_CODE_PARTS or not all(isinstance(part, dict) for part in parts):
        return False
    names = [text for part in parts for text in (part["module"], part["qualname"], part["sha256"] or "")]
    return all(isinstance(text, str) and len(text) <= _MAX_CODE_NAME for text in names)


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that matches the folder's other files, and error messages for newer ones."""

    def check(found: Checkpoint) -> None:
        with read_errors(folder):
            for name, expected in found.metadata["checksums"].items():
                if name in CHECKSUMMED_FILES and checksum(read_bytes(folder / name)) != expected:
                    raise DamagedRunError(f"'{name}' in '{folder}' does not match its checksum.")
        read_records(folder, found)

    return checkpoint.latest(folder, check)


def read_records(folder: Path, found: Checkpoint) -> list[Record]:
    """Return the records of all rounds up to a checkpoint."""
    with read_errors(folder):
        data = read_bytes(folder / "rounds.jsonl")[: found.metadata["records"]["bytes"]]
        if checksum(data) != found.metadata["records"]["sha256"]:
            raise DamagedRunError(f"'rounds.jsonl' in '{folder}' does not match its checksum.")
        counts = client_counts(read_info(folder))
        records = [validate_record(json.loads(line), n, *counts) for n, line in enumerate(data.splitlines(), start=1)]
        if len(records) != found.round:
            raise ValueError(f"rounds.jsonl has {len(records)} rounds, but the checkpoint is of round {found.round}")
        return [restore_record(record) for record in records]


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Turn any error from reading a run's files into a DamagedRunError that names the folder."""
    try:
        yield
    except FedTailorError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedRunError(f"The run in '{folder}' cannot be read: {reason(error)}.") from error


def read_text_file(path: Path) -> str:
    """Return a file's content as UTF-8 text; the limits of `read_bytes` apply."""
    return read_bytes(path).decode()


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among these paths, or one level below them, each once.

    >>> find_run_folders([Path("nowhere")])
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        folders = [path] if is_run_folder(path) else sorted(sub.parent for sub in path.glob("*/experiment.toml"))
        if not folders:
            raise RunError(f"There is no run in '{path}'.")
        found |= {folder.resolve(): folder for folder in folders}
    return list(found.values())


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """Return the finished runs in or below these paths, and the folders of unfinished runs."""
    found = find_run_folders(paths)
    return [load_run(path) for path in found if is_finished(path)], [path for path in found if not is_finished(path)]
