"""Resume a run from its folder: rebuild method, network, and data, then continue training."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.core.method import Method
from fedtailor.core.model import ModelLike, as_model
from fedtailor.data.datasets import known_data
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DamagedRunError, RunError
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.files import folder_lock
from fedtailor.runs.reader import (
    FLOWER_ENGINE,
    check_models,
    is_finished,
    is_run_folder,
    load_run,
    planned_rounds,
    read_info,
    read_settings,
)
from fedtailor.runs.records import Record
from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.interactive import run_interactively
from fedtailor.training.resume import continue_run, newest_checkpoint

log = logging.getLogger("fedtailor")


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    model: ModelLike | None = None,
    fed: Federation | None = None,
    on_round_end: Callable[[Record], None] | None = None,
    progress: bool = False,
) -> Run:
    """Return the finished run of a folder: load it if it is complete, otherwise train its remaining rounds.

    The result has the same bits as if the run had never stopped. Pass again what a folder cannot describe (a method, a
    network, or arrays of your own); it must be what the run was started with. `on_round_end`, `progress`, and Ctrl-C
    are those of `ft.simulate`.

    >>> resume("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    folder = Path(path)

    def start(on_round_end: Callable[[Record], None] | None) -> Run:
        return load_or_continue(folder, method=method, model=model, fed=fed, on_round_end=on_round_end)

    return run_interactively(start, on_round_end, progress, folder.name, planned_rounds(folder))


def load_or_continue(
    folder: Path,
    *,
    method: Method | None = None,
    model: ModelLike | None = None,
    fed: Federation | None = None,
    on_round_end: Callable[[Record], None] | None = None,
) -> Run:
    """Return the finished run of a folder, like `resume`; an interruption always raises `Interrupted`."""
    if not is_run_folder(folder):
        raise RunError(_no_run(folder))
    info = read_info(folder)
    if is_finished(folder):
        try:
            check_models(folder)
            return load_run(folder)
        except DamagedRunError as damage:
            log.warning("%s The run continues from its last valid checkpoint.", damage)
    if info["engine"] == FLOWER_ENGINE:
        raise ConfigError(f"This run has deployed clients; resume it with: fedtailor deploy resume {folder.parent}.")
    with folder_lock(folder):
        checkpoint = newest_checkpoint(folder)  # first: it compares the folder's files with their checksums
        experiment = _experiment(read_settings(folder), method, model, fed)
        fed = fed or experiment.load()
        model = experiment.model(fed) if model is None else as_model(model)
        return continue_run(folder, experiment, experiment.method, model, fed, checkpoint, on_round_end)


def _no_run(folder: Path) -> str:
    """Return why a folder cannot be resumed; it may contain runs, such as a folder passed to --out."""
    inside = sorted(found.parent for found in folder.glob("*/experiment.toml"))
    if not inside:
        return f"There is no run in '{folder}'."
    unfinished = next((run for run in inside if not is_finished(run)), None)
    if unfinished is None:
        return f"All runs in the folder '{folder}' are finished."
    return f"'{folder}' is a folder of runs with an unfinished run inside; {resume_hint(unfinished)}"


def _experiment(
    settings: dict[str, Any], method: Method | None, model: ModelLike | None, fed: Federation | None
) -> Experiment:
    """Return the experiment that a folder describes; arguments take precedence."""
    given = {"method": method, "network": model, "data": fed}
    known = {
        "method": ("method", [*METHODS]),
        "network": ("model", [*NETWORKS]),
        "data": ("fed", known_data()),
    }
    for part, (argument, names) in known.items():
        name = _innermost(settings[part]).get("name")
        if given[part] is None and name not in names:
            again = f"pass it again: ft.resume(path, {argument}=...)"
            raise ConfigError(f"The run's {part} '{name}' is not built in; {again}.")
    experiment = make_experiment({name: value for name, value in settings.items() if given.get(name) is None})
    return experiment if method is None else replace(experiment, method=method)


def _innermost(part: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the method that a wrapper method wraps."""
    inner = part.get("inner")
    return _innermost(inner) if isinstance(inner, dict) else part
