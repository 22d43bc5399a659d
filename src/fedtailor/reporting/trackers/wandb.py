"""Sends runs to Weights & Biases with its Python client, or writes them to its offline files for `wandb sync`.

The id of a run in W&B is its key, and the steps are its rounds.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # must be set before the import

import wandb
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord  # type: ignore[attr-defined]
from wandb.sdk.internal.datastore import DataStore

from fedtailor.core.code_reference import short_name
from fedtailor.errors import ConfigError, FedTailorError, RunError, reason
from fedtailor.reporting.trackers.points import Point, RunInfo
from fedtailor.runs.files import folder_lock, remove_folder, write_errors

MODES = ("online", "offline")
_HISTOGRAM_BINS = 30
_POLL_SECONDS, _MAX_POLLS = 0.01, 3000
_MAX_TAG_LENGTH = 64  # W&B's limit
# Only what `track` logs is recorded: no source code, Git state, console output, host, or system metrics.
_SETTINGS: Mapping[str, Any] = {
    "console": "off", "silent": True, "disable_code": True, "save_code": False, "disable_git": True,
    "disable_job_creation": True, "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True,
    "x_save_requirements": False, "host": "", "program": "",
}  # fmt: skip


class Wandb:
    """A project in W&B, "PROJECT" or "ENTITY/PROJECT"; offline, the files in a folder."""

    def __init__(self, project: str, mode: str | None) -> None:
        entity, _, self._project = project.rpartition("/")
        self._entity = entity or None
        self._mode = mode or os.environ.get("WANDB_MODE") or MODES[0]
        if self._mode not in MODES:
            raise ConfigError(f"The mode of W&B must be online or offline, got '{self._mode}'.")
        self._root = Path(os.environ.get("WANDB_DIR") or ".")

    def open(self, info: RunInfo) -> "WandbSession":
        """Open the run in W&B."""
        options = {
            "project": self._project, "entity": self._entity, "id": info.key, "name": info.name, "mode": self._mode,
            "dir": str(self._root), "config": _config(info), "tags": _tags(info), "reinit": "create_new",
            "resume": "allow" if self._mode == "online" else None,
        }  # fmt: skip
        return WandbSession(options, self._root)


class WandbSession:
    """Sends one run to W&B.

    Online, W&B resumes the run after its last step. Offline, it cannot append to a run, and of several folders of one
    run, `wandb sync` keeps only the data of the last one. So a call with new data writes the whole run to a new folder
    and then removes the earlier one.
    """

    def __init__(self, options: Mapping[str, Any], root: Path) -> None:
        self._options, self._resources = options, ExitStack()
        self._run: wandb.Run | None = None
        self._is_online, key, folder = options["mode"] == "online", options["id"], root / "wandb"
        self.where = f"W&B's project '{options['project']}'" + ("" if self._is_online else f" in '{folder}'")
        self._earlier = list[Path]()  # folders that the new one replaces
        self._pending = list[tuple[int, dict[str, Any]]]()
        lock = folder / f"fedtailor-{key}"
        with write_errors(f"W&B's folder '{folder}' cannot be written"):
            lock.mkdir(parents=True, exist_ok=True)
        self._resources.enter_context(folder_lock(lock))  # prevents two processes from sending the same rounds
        try:
            self._last_round, self._summary = self._resume() if self._is_online else self._read(folder, key)
        except BaseException:
            self.close()
            raise
        self._last_pending = self._last_round if self._is_online else 0

    def add(self, points: Sequence[Point]) -> bool:
        """Send the new points, all points of a round in one step; values of the finished run go to the summary."""
        rounds: dict[int, dict[str, Any]] = {}
        for point in points:
            if not point.is_final and point.round > self._last_pending:
                rounds.setdefault(point.round, {"_timestamp": point.time})[point.name] = _value(point)
        final = {point.name: _value(point) for point in points if point.is_final}
        self._pending += sorted(rounds.items())
        self._last_pending = max([self._last_pending, *rounds])
        is_new = self._last_pending > self._last_round or bool(final.keys() - self._summary)
        if is_new:
            self._send(final)
        return is_new

    def flush(self) -> None:
        """Do nothing: the client sends or writes data in the background."""

    def finish(self, time: float) -> bool:
        """Return False: the summary was added before, and W&B has no other mark of a finished run."""
        return False

    def close(self) -> None:
        """Wait until all data is sent or written, and unlock the run."""
        with self._resources, _wandb_errors(self._is_online):
            run, self._run = self._run, None
            if run is not None:
                run.finish()
                if not self._is_online:
                    _wait_until_written(Path(run.settings.sync_file))
                for folder in self._earlier:
                    remove_folder(folder)

    def _send(self, final: Mapping[str, Any]) -> None:
        with _wandb_errors(self._is_online):
            run = self._open_run()
            for number, values in self._pending:
                run.log(values, step=number, commit=True)
            if final:
                run.summary.update(dict(final))
        self._pending, self._last_round, self._summary = [], self._last_pending, self._summary | set(final)

    def _open_run(self) -> wandb.Run:
        """Return the run in W&B; offline, it is created by the first new data, so that other calls leave no folder."""
        if self._run is None:
            self._run = wandb.init(**self._options, settings=wandb.Settings(**_SETTINGS))
        return self._run

    def _resume(self) -> tuple[int, set[str]]:
        """Return the last round in W&B and the names in the run's summary."""
        with _wandb_errors(self._is_online):
            run = self._open_run()
            return (run.starting_step - 1, set(run.summary.keys())) if run.resumed else (0, set())

    def _read(self, folder: Path, key: str) -> tuple[int, set[str]]:
        """Return the last round in the run's offline folder of this project, and the names in its summary.

        An interrupted call can leave several folders, of which none is complete.
        """
        files = {path: list(offline_records(path)) for path in folder.glob(f"offline-run-*-{key}*/run-{key}.wandb")}
        project = (self._options["project"], self._options["entity"] or "")
        own = {path: found for path, found in files.items() if project in _projects(found)}
        self._earlier = [path.parent for path in own]
        records = next(iter(own.values())) if len(own) == 1 else []
        rounds = [record.history.step.num for record in records if record.HasField("history")]
        names = {item.key or "/".join(item.nested_key) for record in records for item in record.summary.update}
        return max(rounds, default=0), names


def _value(point: Point) -> Any:
    if isinstance(point.value, np.ndarray):
        return wandb.Histogram(np_histogram=np.histogram(point.value, _HISTOGRAM_BINS))
    return float(point.value)


def _config(info: RunInfo) -> dict[str, Any]:
    """Return the settings, and method, versions, and device under `fedtailor`."""
    return {**info.experiment, "fedtailor": {name.removeprefix("fedtailor."): v for name, v in info.tags.items()}}


def _tags(info: RunInfo) -> list[str]:
    names = (short_name(info.tags[f"fedtailor.{part}"]) for part in ("method", "data", "network"))
    return [name[:_MAX_TAG_LENGTH] for name in dict.fromkeys(names) if name]


def _projects(records: Sequence[Any]) -> list[tuple[str, str]]:
    """Return project and entity of the run in an offline file; [] if the file does not contain the run."""
    return [(record.run.project, record.run.entity) for record in records if record.HasField("run")]


def _wait_until_written(path: Path) -> None:
    """Wait for the end of an offline file, which W&B writes in the background after a run is finished."""
    for _ in range(_MAX_POLLS):
        if any(record.HasField("exit") for record in offline_records(path)):
            return
        time.sleep(_POLL_SECONDS)
    raise RunError(f"W&B did not finish writing '{path}'; repeat the call.")


def offline_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file up to the first incomplete one."""
    store = DataStore()
    try:
        with write_errors(f"W&B's file '{path}' cannot be read"):
            store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            yield WandbRecord.FromString(data)
    except AssertionError:  # the process that wrote the file was killed
        return
    finally:
        store.close()


@contextmanager
def _wandb_errors(is_online: bool) -> Iterator[None]:
    """Raise errors of W&B's client as a `RunError` with one sentence."""
    try:
        yield
    except FedTailorError:
        raise
    except Exception as error:
        hint = "; log in with 'wandb login', or use --wandb-mode offline" if is_online else ""
        raise RunError(f"W&B cannot be used: {reason(error)}{hint}.") from error
