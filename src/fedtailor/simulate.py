"""Train a method on a federation, on this machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.method import Method
from fedtailor.model import Model, as_model
from fedtailor.rounds import Rounds
from fedtailor.run import Record, Run
from fedtailor.schedule import Participation, make_schedule

if TYPE_CHECKING:
    from fedtailor.record import RunWriter


def simulate(
    method: Method,
    model: Model | nn.Module,
    fed: Federation,
    *,
    rounds: int | None = None,
    batch_size: int = 64,
    participation: Participation = 1.0,
    engine: str = "auto",
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    validation: float = 0.0,
    evaluate_every: int = 1,
    evaluate: str | int = "all",
    record: Callable[[Record], None] | None = None,
    folder: str | Path | None = None,
    initial: Mapping[str, Tensor] | None = None,
) -> Run:
    """Train a method on a federation, on this machine.

    `rounds` is 20, or the length of the schedule. `participation` is the share of clients in a round, or a range from
    which a share is drawn; `schedule` lists the clients of every round instead. `validation` is the share of a client's
    training data that is held out to choose a round by. `evaluate` is "all", "participants" or a number of clients.
    `record` is called with the dict of every round; `folder` is where the run is kept, on disk.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> len(ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2).records)
    2
    """
    _check_settings(batch_size, seed, validation, evaluate_every, evaluate)
    plan = make_schedule(fed.num_clients, rounds, participation, seed, schedule)
    settings = {
        "rounds": len(plan), "batch_size": batch_size, "participation": participation, "engine": engine,
        "device": device, "dtype": str(dtype).removeprefix("torch."), "seed": seed, "schedule": schedule,
        "validation": validation, "evaluate_every": evaluate_every, "evaluate": evaluate,
    }  # fmt: skip
    model = as_model(model)
    loop = Rounds.build(
        method, model, fed, plan, _find_device(device), dtype, seed, batch_size, engine, validation, initial
    )
    description = {"method": _describe(method), "network": dict(model.description), "data": dict(fed.settings)}
    run = Run(
        experiment=settings | description,
        info=loop.info(fed),
        records=[],
        server=loop.server,
        get_client=loop.states.one,
        get_personal=loop.personal_state_dict,
    )
    writer = None if folder is None else _writer(Path(folder), run)
    for number, clients in enumerate(plan, start=1):
        line = loop.round(number, clients)
        if number % evaluate_every == 0 or number == len(plan):
            line = loop.evaluate(line, evaluate, last=number == len(plan))
        run.records.append(line)
        if writer is not None:
            writer.add(line)
        if record is not None:
            record(line)
    run.server = loop.server
    if writer is not None:
        writer.finish(run)
    return run


def _writer(folder: Path, run: Run) -> "RunWriter":
    from fedtailor.record import RunWriter  # needs safetensors, which a run in memory does not

    run.folder = folder
    return RunWriter(folder, run)


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"The device '{name}' is not to be had here; take 'auto' or 'cpu'.") from error
    return device


def _describe(method: Method) -> dict[str, Any]:
    return {"name": type(method).__name__.lower()} | {f.name: getattr(method, f.name) for f in fields(method)}


def _check_settings(batch_size: int, seed: int, validation: float, evaluate_every: int, evaluate: str | int) -> None:
    if batch_size < 1:
        raise Refused(f"batch_size must be at least 1, not {batch_size}.")
    if not 0 <= seed < 2**32:
        raise Refused(f"seed must be a whole number from 0 to 2³² − 1, not {seed}.")
    if not 0 <= validation < 1:
        raise Refused(f"validation must be a share from 0 to below 1, not {validation}.")
    if evaluate_every < 1:
        raise Refused(f"evaluate_every must be at least 1, not {evaluate_every}.")
    if evaluate not in ("all", "participants") and not (isinstance(evaluate, int) and evaluate >= 1):
        raise Refused(f"evaluate must be 'all', 'participants' or a number of clients, not {evaluate!r}.")
