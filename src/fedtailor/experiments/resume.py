"""Resume a run from its folder: rebuild method, network, and data, then continue training."""

import logging
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.core.client_models import BY_CLIENT, AnyModelLike, as_any_model
from fedtailor.core.code_reference import PARTS, is_reference
from fedtailor.core.method import Method
from fedtailor.data.datasets import DATASETS
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DamagedRunError, RunError
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.experiments.own_code import PYTHON_ARGUMENTS, CodeConsent, rename_part
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
    method: Method | str | None = None,
    model: AnyModelLike | str | None = None,
    fed: Federation | str | None = None,
    on_round_end: Callable[[Record], None] | None = None,
    progress: bool = False,
    allow_code: bool = False,
    engine: str | None = None,
    actors: int | None = None,
    ray_address: str | None = None,
) -> Run:
    """Return the finished run of a folder: load it if it is complete, otherwise train its remaining rounds.

    The result has the same bits as if the run had never stopped. Pass again what is your own (a method, a network, or
    arrays): the object, or the name of its code, such as method="my_module:MyMethod". It must be what the run was
    started with. With `allow_code`, all code that the folder names is imported. `on_round_end`, `progress`, and Ctrl-C
    are those of `ft.simulate`. Another `engine`, another number of `actors`, or another Ray cluster may continue the
    run; then its last digits may differ.

    >>> resume("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    folder = Path(path)

    def start(on_round_end: Callable[[Record], None] | None) -> Run:
        return load_or_continue(
            folder, method=method, model=model, fed=fed, on_round_end=on_round_end, allow_code=allow_code,
            engine=engine, actors=actors, ray_address=ray_address,
        )  # fmt: skip

    return run_interactively(start, on_round_end, progress, folder.name, planned_rounds(folder))


def load_or_continue(
    folder: Path,
    *,
    method: Method | str | None = None,
    model: AnyModelLike | str | None = None,
    fed: Federation | str | None = None,
    on_round_end: Callable[[Record], None] | None = None,
    allow_code: bool = False,
    engine: str | None = None,
    actors: int | None = None,
    ray_address: str | None = None,
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
        given = {"method": method, "network": model, "data": fed}
        experiment = _experiment(folder, given, allow_code)
        fed = fed if isinstance(fed, Federation) else experiment.load()
        model = experiment.model(fed) if model is None or isinstance(model, str) else as_any_model(model)
        config = _with_engine(experiment, engine, actors, ray_address)
        is_other = (config.engine, config.actors) != (experiment.engine, experiment.actors)
        return continue_run(folder, config, experiment.method, model, fed, checkpoint, on_round_end, is_other)


def _with_engine(experiment: Experiment, engine: str | None, actors: int | None, ray_address: str | None) -> Experiment:
    """Return the experiment with another engine, number of actors, or cluster."""
    given = {"engine": engine, "actors": actors, "ray_address": ray_address}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if engine not in (None, experiment.engine):  # settings of the other engine do not apply
        changes = {"actors": None, "actor_engine": None, "ray_address": None, "chunk_size": None} | changes
    return replace(experiment, **changes)


def run_or_continue(
    experiment: Experiment,
    folder: Path,
    load: Callable[[], Federation] | None = None,
    on_round_end: Callable[[Record], None] | None = None,
) -> Run:
    """Run an experiment in a folder, or continue it if it was started there. Data are not loaded for a finished run;
    `load` returns them if the caller has them."""
    load = load or experiment.load
    if not is_run_folder(folder):
        return experiment.run(load(), on_round_end=on_round_end, folder=folder)
    fed = None if is_finished(folder) else load()
    model = None if fed is None else experiment.model(fed)
    return load_or_continue(folder, method=experiment.method, model=model, fed=fed, on_round_end=on_round_end)


def _no_run(folder: Path) -> str:
    """Return why a folder cannot be resumed; it may contain runs, such as a folder passed to --out."""
    inside = sorted(found.parent for found in folder.glob("*/experiment.toml"))
    if not inside:
        return f"There is no run in '{folder}'."
    unfinished = next((run for run in inside if not is_finished(run)), None)
    if unfinished is None:
        return f"All runs in the folder '{folder}' are finished."
    return f"'{folder}' is a folder of runs with an unfinished run inside; {resume_hint(unfinished)}"


def _experiment(folder: Path, given: Mapping[str, Any], allow_code: bool) -> Experiment:
    """Return the experiment that a folder describes; the given parts, objects or names of code, take precedence."""
    named = {part: value for part, value in given.items() if isinstance(value, str)}
    objects = {part: value for part, value in given.items() if value is not None and part not in named}
    settings = {name: value for name, value in read_settings(folder).items() if name not in objects}
    settings |= {part: rename_part(part, settings[part], name) for part, name in named.items()}
    known: dict[str, Collection[str]] = {"method": METHODS, "network": [*NETWORKS, BY_CLIENT], "data": DATASETS}
    for part in PARTS:
        name = str(_innermost(settings[part]).get("name")) if part in settings else ""
        if part in settings and name not in known[part] and not is_reference(name):
            again = f"pass it again: ft.resume(path, {PYTHON_ARGUMENTS[part]}=...)"
            raise ConfigError(f"The run's {part} '{name}' is not built in; {again}.")
    command = f"if you trust it, run: fedtailor resume {shlex.quote(str(folder))} --allow-code"
    how = f"{command}, or pass it in Python: ft.resume(path, method=..., model=..., fed=...)"
    experiment = make_experiment(settings, CodeConsent(frozenset(named.values()), allow_code, how))
    return replace(experiment, method=objects["method"]) if "method" in objects else experiment


def _innermost(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the method that a wrapper method wraps."""
    inner = part.get("inner")
    return _innermost(inner) if isinstance(inner, Mapping) else part
