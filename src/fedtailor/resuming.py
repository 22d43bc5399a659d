"""Go on with a run from its folder."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtailor.checkpoint import Checkpoint, Damaged
from fedtailor.data.datasets import DATASETS
from fedtailor.engines import Way
from fedtailor.errors import Refused
from fedtailor.experiment import Experiment, make
from fedtailor.federation import Federation
from fedtailor.files import locked
from fedtailor.fingerprint import fingerprint
from fedtailor.lines import Record
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.model import Model, as_model
from fedtailor.networks import NETWORKS
from fedtailor.record import (
    FEDERATED,
    RunWriter,
    check_models,
    holds_run,
    is_finished,
    latest,
    load_tensors,
    open_run,
    read_info,
    read_records,
    read_settings,
)
from fedtailor.run import Run
from fedtailor.simulate import describe, go, prepare

log = logging.getLogger("fedtailor")


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    model: Model | nn.Module | None = None,
    fed: Federation | None = None,
    record: Callable[[Record], None] | None = None,
) -> Run:
    """The finished run of a folder: loaded if it is complete, else taken up after its last checkpoint and carried to
    its end, with the same bits as if it had never stopped.

    What a folder cannot describe (a method, a network or arrays of your own) is given again, and refused unless it is
    what the run was begun with.

    >>> resume("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    folder = Path(path)
    if not holds_run(folder):
        raise Refused(f"There is no run in '{folder}'.")
    info = read_info(folder)
    if is_finished(folder):
        try:
            check_models(folder)
            return open_run(folder)
        except Damaged as damage:
            log.warning("%s Going on from what is good.", damage)
    if info["engine"] == FEDERATED:
        raise Refused(f"The clients of this run are real; go on with: fedtailor deploy resume {folder.parent}")
    with locked(folder):
        found = _newest(folder)
        settings = read_settings(folder)
        experiment = _experiment(settings, method, model, fed)
        if experiment.device == "auto":
            experiment = replace(experiment, device=_same_device(info))
        fed = fed or experiment.load()
        model = experiment.model(fed) if model is None else as_model(model)
        _check_same(info["fingerprint"], fingerprint(describe(experiment.method), type(experiment.method), model, fed))
        way = Way(info["engine"], info["threads"], info["chunk"])
        start = load_tensors(folder / "start.safetensors")
        loop, run, plan = prepare(experiment, experiment.method, model, fed, start, way, folder)
        run.experiment, run.info = settings, info
        writer = RunWriter(folder, experiment.checkpoint_every)
        if found is None:
            writer.begin(run, start)
        else:
            run.records = read_records(folder, found)
            run.info = info | _elsewhere(info, found)
            loop.restore(found, run.records)
            writer.go_on(found)
        return go(loop, run, plan, experiment, record, writer)


def _newest(folder: Path) -> Checkpoint | None:
    """The newest good checkpoint; None where none was written yet."""
    found, complaints = latest(folder)
    for complaint in complaints:
        log.warning(complaint)
    if complaints and found is None:
        raise Refused(f"No checkpoint in '{folder}' can be used; start the run anew in another folder.")
    return found


def _experiment(
    settings: dict[str, Any], method: Method | None, model: Model | nn.Module | None, fed: Federation | None
) -> Experiment:
    """The experiment in a folder; what is given stands for what it says."""
    given = {"method": method, "network": model, "data": fed}
    words = {"method": "method", "network": "model", "data": "fed"}
    known = {"method": [*METHODS], "network": [*NETWORKS], "data": [*DATASETS, "folder"]}
    for part, names in known.items():
        name = _innermost(settings[part]).get("name")
        if given[part] is None and name not in names:
            raise Refused(f"The run's {part} '{name}' is your own; give it again: ft.resume(path, {words[part]}=...).")
    experiment = make({name: value for name, value in settings.items() if given.get(name) is None})
    return experiment if method is None else replace(experiment, method=method)


def _innermost(part: dict[str, Any]) -> dict[str, Any]:
    """Of a method around a method, the one inside."""
    inner = part.get("inner")
    return _innermost(inner) if isinstance(inner, dict) else part


def _check_same(wanted: dict[str, str], found: dict[str, str]) -> None:
    for part, words in {"method": "method is", "model": "model is", "data": "data are"}.items():
        if wanted.get(part) != found[part]:
            raise Refused(f"The {words} not what this run was begun with; give the same again to resume it.")


def _same_device(info: dict[str, Any]) -> str:
    """Where the run was begun, which was to choose by itself."""
    if info["device"] != "cpu" and not torch.cuda.is_available():
        raise Refused(f"The run was begun on {info['device']}; resume it where there is a GPU.")
    return "cpu" if info["device"] == "cpu" else "cuda"


def _elsewhere(info: dict[str, Any], found: Checkpoint) -> dict[str, Any]:
    """What the record says of where a run goes on: something only where its bits may differ from there."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and info["device"] != "cpu" else info["device"]
    before = list(found.note.get("continued", []))
    if [torch.__version__, device] == [info["torch"], info["device"]]:
        return {"continued": before} if before else {}
    log.warning("The run began on %s with torch %s; last digits may differ.", info["device"], info["torch"])
    return {"continued": [*before, [found.round, torch.__version__, device]]}
