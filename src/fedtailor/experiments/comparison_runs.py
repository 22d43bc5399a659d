"""The runs of a comparison as tasks, in this process or in others."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from fedtailor.core.client_models import AnyModel
from fedtailor.core.method import Method
from fedtailor.data.federation import Federation
from fedtailor.errors import RunError
from fedtailor.experiments.resume import load_or_continue
from fedtailor.progress import OnRoundEnd, ProgressDisplay, Silent
from fedtailor.runs.files import folder_lock
from fedtailor.runs.reader import is_finished, is_run_folder, load_run
from fedtailor.runs.run import Run
from fedtailor.tasks.task import Runner, Task
from fedtailor.training.config import TrainingConfig
from fedtailor.training.interactive import is_interactive
from fedtailor.training.simulate import describe_run, train

log = logging.getLogger("fedtailor")
_DATA_PREFIX = ".data-"  # of hidden folders with the samples that several processes map


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison."""

    name: str  # of its folder
    label: str  # for people
    method: Method
    model: AnyModel
    fed: Federation
    config: TrainingConfig

    def describe(self) -> dict[str, Any]:
        """Return the settings as the run folder stores them."""
        return describe_run(self.config, self.method, self.model, self.fed)

    def run(self, folder: Path | None, on_round_end: OnRoundEnd | None) -> Run:
        """Train, continue the run in the folder, or load it if it is finished."""
        path = None if folder is None else folder / self.name
        if path is None or not is_run_folder(path):
            return train(self.config, self.method, self.model, self.fed, on_round_end, path)
        return load_or_continue(path, method=self.method, model=self.model, fed=self.fed, on_round_end=on_round_end)


@dataclass(frozen=True)
class StoredFederation:
    """A federation whose inputs are in a file. Processes that open it share the memory of the inputs."""

    path: Path
    fields: Mapping[str, Any]  # the other fields of the federation

    @classmethod
    def save(cls, fed: Federation, folder: Path) -> "StoredFederation":
        """Write the inputs to the folder, unless they are in a file or the folder contains them for another split."""
        path = Path(str(fed.settings.get("file"))).absolute()
        if not fed.is_mapped or not path.is_file():
            path = folder / f"{fed.sample_hash()}.safetensors"
            if not path.exists():
                fed.save(path)
        in_file = ("x", "y", "stored", "refit")
        return cls(path, {name: value for name, value in vars(fed).items() if name not in in_file})

    def open(self) -> Federation:
        """Return the federation."""
        return replace(Federation.from_file(self.path), **self.fields)


def run_all(
    runs: Sequence[ComparisonRun], folder: Path | None, runner: Runner, progress: bool, failures: dict[str, str]
) -> list[Run]:
    """Run tasks; store the message of a run that fails, and continue with the others."""
    found, first_error = dict[int, Run](), None
    display = ProgressDisplay(len(runs), None if progress else Silent())
    try:
        with _tasks(runs, folder, runner) as tasks, display, closing(runner.run(tasks, display)) as outcomes:
            for position, outcome in outcomes:
                one = runs[position]
                if outcome.failure is None:
                    found[position] = outcome.value or load_finished(_path(folder, one))
                else:
                    failures[one.name] = outcome.failure
                    first_error = first_error or outcome.error
    except KeyboardInterrupt:
        if not (found and is_interactive()):  # a script ends here
            raise
        log.warning("The comparison was interrupted; the result contains %d of %d runs.", len(found), len(runs))
        others = [one.name for position, one in enumerate(runs) if position not in found]
        failures |= {name: "the comparison was interrupted." for name in others if name not in failures}
    if not found:
        raise RunError(f"No run succeeded: {next(iter(failures.values()))}") from first_error
    return [found[position] for position in sorted(found)]


def load_finished(path: Path) -> Run:
    """Return a run that a task has finished, perhaps on another machine."""
    if not is_finished(path):
        raise RunError(f"The run '{path}' is finished on another machine; use a folder that all nodes share.")
    return load_run(path)


@contextmanager
def _tasks(runs: Sequence[ComparisonRun], folder: Path | None, runner: Runner) -> Iterator[list[Task]]:
    """Yield one task per run. Tasks of other processes open the federation in a file, which is removed afterward."""
    if runner.is_this_process or folder is None:
        yield [Task(one.label, one.config.num_rounds, partial(one.run, folder)) for one in runs]
        return
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned_data(folder)
    with TemporaryDirectory(prefix=_DATA_PREFIX, dir=folder) as data, folder_lock(Path(data)):
        stored = {id(one.fed): StoredFederation.save(one.fed, Path(data).absolute()) for one in runs}
        yield [
            Task(
                one.label,
                one.config.num_rounds,
                partial(_run_stored, vars(one) | {"fed": None}, stored[id(one.fed)], folder.absolute()),
            )
            for one in runs
        ]


def _remove_abandoned_data(folder: Path) -> None:
    """Remove the data of commands that were killed; the data of a command that runs are locked."""
    for data in folder.glob(f"{_DATA_PREFIX}*"):
        with suppress(RunError), folder_lock(data):
            rmtree(data, ignore_errors=True)


def _run_stored(fields: Mapping[str, Any], fed: StoredFederation, folder: Path, on_round_end: OnRoundEnd) -> None:
    """Run in another process; the folder has the result."""
    ComparisonRun(**{**fields, "fed": fed.open()}).run(folder, on_round_end)


def _path(folder: Path | None, run: ComparisonRun) -> Path:
    assert folder is not None, "only tasks in this process return a run"
    return folder / run.name
