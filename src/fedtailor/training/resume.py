"""Resume a run from its last checkpoint."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedtailor.core.client_models import AnyModel
from fedtailor.core.code_reference import describe_code
from fedtailor.core.method import Method
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, RunError
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.reader import latest_checkpoint, read_info, read_records, read_settings
from fedtailor.runs.records import Record
from fedtailor.runs.run import Run
from fedtailor.runs.serialization import load_tensors
from fedtailor.runs.writer import RunWriter
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import RAY, EngineChoice
from fedtailor.training.fingerprint import fingerprint
from fedtailor.training.held_out import split_clients
from fedtailor.training.recovery import released_clients, train_with_recovery
from fedtailor.training.simulate import describe_method, describe_run, make_trainer

log = logging.getLogger("fedtailor")


def continue_run(
    folder: Path,
    config: TrainingConfig,
    method: Method,
    model: AnyModel,
    fed: Federation,
    checkpoint: Checkpoint | None,
    on_round_end: Callable[[Record], None] | None = None,
    other_engine: bool = False,
    save_models: bool = True,
) -> Run:
    """Train the remaining rounds of the run in `folder`, starting from a checkpoint, or from round 1 if it is None.

    The result is bit-identical to that of an uninterrupted run, unless `config` has another engine or number of actors
    than the run was started with (`other_engine`); then it differs by rounding. Raises `ConfigError` unless method,
    model, and data are the ones with which the run was started. The caller must hold the lock of the folder. Without
    `save_models`, the personal models are not written.
    """
    info = read_info(folder)
    clients = split_clients(fed, config.held_out_clients, config.seed)
    _check_fingerprint(info["fingerprint"], fingerprint(describe_method(method), type(method), model, *clients))
    _warn_of_changed_code(info, describe_code(describe_run(config, method, model, fed)))
    if config.device == "auto" and config.engine != RAY and not other_engine:
        config = replace(config, device=_original_device(info))
    initial_weights = load_tensors(folder / "start.safetensors")
    engine_choice = None
    if not other_engine:
        engine_choice = EngineChoice(info.get("actor_engine", info["engine"]), info["threads"], info["chunk_size"])
        config = replace(config, actors=info["actors"]) if config.engine == RAY else config
    trainer, _ = make_trainer(config, method, model, fed, initial_weights, engine_choice, folder)
    with released_clients(trainer):
        run, engine = trainer.run, _describe_engine(trainer.run.info)
        run.experiment, run.info = read_settings(folder), info
        writer = RunWriter(folder, config.checkpoint_every)
        if checkpoint is None:
            writer.start(run, initial_weights)
        else:
            run.records = read_records(folder, checkpoint)
            run.info = info | _environment_changes(info, checkpoint) | _engine_changes(info, engine, checkpoint)
            trainer.server.restore(checkpoint.server(), checkpoint.round, run.records)
            trainer.clients.restore(trainer.server, checkpoint)
            writer.continue_from(checkpoint)
        train_with_recovery(trainer, writer, on_round_end)
        writer.finish(run, None if save_models else [])
    return run


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if none was written yet."""
    checkpoint, problems = latest_checkpoint(folder)
    for problem in problems:
        log.warning(problem)
    if problems and checkpoint is None:
        raise RunError(f"No checkpoint in '{folder}' can be used; start the run again in another folder.")
    return checkpoint


def _check_fingerprint(expected: Mapping[str, str], actual: Mapping[str, str]) -> None:
    for part in ("method", "model", "data"):
        if expected.get(part) != actual[part]:
            raise ConfigError(f"The {part} differs from the one this run was started with; pass the same {part}.")


def _warn_of_changed_code(info: Mapping[str, Any], now: Mapping[str, Mapping[str, str | None]]) -> None:
    """Log a warning if the source of the user's own code changed; bugs may be fixed before a run is resumed."""
    changed = list[str]()
    for part, found in now.items():
        before = info.get("code", {}).get(part, {}).get("sha256")
        if None not in (before, found["sha256"]) and before != found["sha256"]:
            changed.append(f"{found['module']}:{found['qualname']}")
    if changed:
        log.warning("The source of %s changed since the run was started.", ", ".join(dict.fromkeys(changed)))


def _describe_engine(info: Mapping[str, Any]) -> str:
    """Return the engine of a run and its number of actors.

    >>> _describe_engine({"engine": "ray", "actors": 2}), _describe_engine({"engine": "pool"})
    ('ray with 2 actors', 'pool')
    """
    return f"{info['engine']} with {info['actors']} actors" if "actors" in info else str(info["engine"])


def _engine_changes(info: Mapping[str, Any], engine: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `run.json` records about other engines, after which the last digits may differ."""
    before = list(checkpoint.metadata.get("engine_changes", []))
    if engine == (before[-1][1] if before else _describe_engine(info)):
        return {"engine_changes": before} if before else {}
    return {"engine_changes": [*before, [checkpoint.round, engine]]}


def _original_device(info: Mapping[str, Any]) -> str:
    """Return the device on which a run with device="auto" was started."""
    if info["device"] in ("cpu", "mps"):
        return str(info["device"])
    if not torch.cuda.is_available():
        raise ConfigError(f"The run was started on {info['device']}; resume it on a machine with a GPU.")
    return "cuda"


def _environment_changes(info: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `run.json` records about changes of the device or torch version, after which bits may differ."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and info["device"] != "cpu" else info["device"]
    before = list(checkpoint.metadata.get("environment_changes", []))
    if [torch.__version__, device] == [info["torch"], info["device"]]:
        return {"environment_changes": before} if before else {}
    log.warning("The run was started on %s with torch %s; the last digits may differ.", info["device"], info["torch"])
    return {"environment_changes": [*before, [checkpoint.round, torch.__version__, device]]}
