"""Train a method on a federation, on this machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedtailor.channel import Channel
from fedtailor.errors import Refused
from fedtailor.evaluation import evaluate_round
from fedtailor.federation import Federation
from fedtailor.lines import Record
from fedtailor.machine import repeatable
from fedtailor.method import Method
from fedtailor.model import Model, as_model
from fedtailor.rounds import Rounds
from fedtailor.run import Run
from fedtailor.schedule import Participation, make_schedule
from fedtailor.settings import Settings
from fedtailor.unreliable import Unreliable

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
    chunk: int | None = None,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    validation: float = 0.0,
    evaluate_every: int = 1,
    evaluate: Any = "all",
    unreliable: Unreliable | None = None,
    channel: Channel | None = None,
    max_failures: float = 0.5,
    record: Callable[[Record], None] | None = None,
    folder: str | Path | None = None,
    initial: Mapping[str, Tensor] | None = None,
) -> Run:
    """Train a method on a federation, on this machine.

    `rounds` is 20, or the length of the schedule. `participation` is the share of clients in a round, or a range from
    which a share is drawn; `schedule` lists the clients of every round instead. `validation` is the share of a client's
    training data that is held out to choose a round by. `engine` is how clients are run: "auto" (the fastest of the
    others here), "vectorized" (with at most `chunk` at once), "pool" or "sequential". `evaluate` is "all",
    "participants" or a number of clients. `record` is called with the dict of every round; `folder` is where the run is
    kept on disk, a folder of its own; `initial` is a state_dict to start from.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> len(ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2).records)
    2
    """
    settings = Settings(
        rounds=_whole(rounds),
        batch_size=_whole(batch_size),
        participation=participation,
        engine=engine,
        chunk=_whole(chunk),
        device=str(device),
        dtype=_dtype_name(dtype),
        seed=_whole(seed),
        schedule=None if schedule is None else [_clients(clients) for clients in schedule],
        validation=validation,
        evaluate_every=_whole(evaluate_every),
        evaluate=_whole(evaluate),
        max_failures=max_failures,
        unreliable=unreliable or Unreliable(),
        channel=channel or Channel(),
    )
    return carry_out(settings, method, as_model(model), fed, record, None if folder is None else Path(folder), initial)


def carry_out(
    settings: Settings,
    method: Method,
    model: Model,
    fed: Federation,
    record: Callable[[Record], None] | None = None,
    folder: Path | None = None,
    initial: Mapping[str, Tensor] | None = None,
) -> Run:
    """The same with the settings in one piece."""
    _check_kinds(method, fed)
    settings.channel.check(method)
    plan = make_schedule(
        fed.num_clients,
        settings.rounds,
        settings.participation,
        settings.seed,
        settings.schedule,
        settings.unreliable,
    )
    loop = Rounds.build(settings, method, model, fed, plan, initial)
    run = Run(
        experiment={
            **{name: _plain(getattr(settings, name)) for name in Settings.__dataclass_fields__},
            "rounds": len(plan),
            "method": describe(method),
            "network": dict(model.description),
            "data": dict(fed.settings) or {"name": "own data"},
        },
        info=loop.info(fed),
        records=[],
        server=loop.server,
        get_client=loop.states.one,
        get_personal=loop.personal_state_dict,
        folder=folder,
    )
    writer = None if folder is None else _writer(folder, run)
    for number, clients in enumerate(plan, start=1):
        with repeatable(loop.way.threads):
            missed = settings.unreliable.missed(clients, loop.train.sizes, number, settings.seed)
            line, last = loop.round(number, clients, missed), number == len(plan)
            if last or number % settings.evaluate_every == 0:
                line = evaluate_round(loop, line, settings.evaluate, last)
        if writer is not None:
            line = writer.add(line)
        run.records.append(line)
        if record is not None:
            record(line)
    run.server = loop.server
    if writer is not None:
        writer.finish(run)
    return run


def _clients(clients: Any) -> list[Any]:
    if not isinstance(clients, Iterable) or isinstance(clients, str):
        raise Refused(f"A schedule lists the clients of every round, such as [[0, 1], [2]], not {clients!r}.")
    return list(clients)


def _whole(value: Any) -> Any:
    """Whole numbers of numpy and torch as Python's."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_kinds(method: Method, fed: Federation) -> None:
    if not isinstance(method, Method):
        raise Refused(f"A method is an instance such as ft.methods.FedAvg(lr=0.1), not {method!r}.")
    parameters = type(method).__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise Refused(f"Write @dataclass(frozen=True) above the class {type(method).__name__}.")
    if not isinstance(fed, Federation):
        raise Refused("The clients' data are an ft.Federation: ft.load(...), or ft.Federation.from_arrays(...).")


def describe(method: Method) -> dict[str, Any]:
    """Its name and fields; a method inside a method is described the same way."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    plain = {name: describe(value) if isinstance(value, Method) else value for name, value in values.items()}
    return {"name": type(method).__name__.lower()} | plain


def _plain(value: Any) -> Any:
    """A part of the settings with its fields by name."""
    return dict(vars(value)) if isinstance(value, (Unreliable, Channel)) else value


def _dtype_name(dtype: torch.dtype) -> Literal["float32", "float64"]:
    if dtype == torch.float32:
        return "float32"
    if dtype == torch.float64:
        return "float64"
    raise Refused(f"dtype must be torch.float32 or torch.float64, not {dtype}.")


def _writer(folder: Path, run: Run) -> "RunWriter":
    from fedtailor.record import RunWriter  # needs safetensors, which a run in memory does not

    return RunWriter(folder, run)
