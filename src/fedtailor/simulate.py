"""Train a method on a federation, on this machine."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedtailor.channel import Channel
from fedtailor.engines import Way
from fedtailor.errors import Refused
from fedtailor.evaluation import evaluate_round
from fedtailor.federation import Federation
from fedtailor.fingerprint import fingerprint
from fedtailor.keeper import Keeper
from fedtailor.lines import Lines, Record
from fedtailor.machine import repeatable
from fedtailor.method import Method
from fedtailor.model import Model, as_model
from fedtailor.rounds import Rounds
from fedtailor.run import FORMAT, Run
from fedtailor.schedule import Participation, make_schedule
from fedtailor.settings import Settings
from fedtailor.toml import to_toml
from fedtailor.unreliable import Unreliable
from fedtailor.version import VERSION

if TYPE_CHECKING:
    from fedtailor.record import RunWriter

Plan = list[list[int]]  # the clients that are asked, round by round


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
    checkpoint_every: int | None = None,
    initial: Mapping[str, Tensor] | None = None,
) -> Run:
    """Train a method on a federation, on this machine.

    `rounds` is 20, or the length of the schedule. `participation` is the share of clients in a round, or a range from
    which a share is drawn; `schedule` lists the clients of every round instead. `validation` is the share of a client's
    training data that is held out to choose a round by. `engine` is how clients are run: "auto" (the fastest of the
    others here), "vectorized" (with at most `chunk` at once), "pool" or "sequential". `evaluate` is "all",
    "participants" or a number of clients. `unreliable` says how often clients are away, late or break off, `channel`
    what happens to uploads on their way, `max_failures` which share of a round's clients may fail before the run stops.
    `record` is called with the dict of every round. `folder` is where the run is kept on disk, a folder of its own,
    with a checkpoint after every `checkpoint_every` rounds (by default so many that it costs less than a twentieth of
    the time), from which `ft.resume(folder)` goes on. `initial` is a state_dict to start from.

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
        checkpoint_every=_whole(checkpoint_every),
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
    loop, run, plan = prepare(settings, method, model, fed, initial, None, folder)
    if folder is None:
        return go(loop, run, plan, settings, record)
    from fedtailor.record import new_run  # needs safetensors, which a run in memory does not

    with new_run(folder, settings.checkpoint_every, run, loop.model.state_dict(loop.params)) as writer:
        return go(loop, run, plan, settings, record, writer)


def prepare(
    settings: Settings,
    method: Method,
    model: Model,
    fed: Federation,
    initial: Mapping[str, Tensor] | None,
    way: Way | None,
    folder: Path | None,
) -> tuple[Rounds, Run, Plan]:
    """All as it stands before round 1: the loop, the run it will become, and who takes part when."""
    _check_kinds(method, fed)
    settings.channel.check(method)
    share = settings.participation
    plan = make_schedule(fed.num_clients, settings.rounds, share, settings.seed, settings.schedule, settings.unreliable)
    loop = Rounds.build(settings, method, model, fed, plan, initial, way)
    marks = {} if folder is None else {"fingerprint": fingerprint(describe(method), type(method), model, fed)}
    run = Run(
        experiment=describe_run(settings, method, model, fed),
        info={"format": FORMAT, "fedtailor": VERSION, **loop.info(fed), **marks},
        records=Lines(),
        server=loop.server,
        get_client=lambda client: loop.states.one(client),
        get_personal=loop.personal_state_dict,
        folder=folder,
    )
    return loop, run, plan


def describe_run(settings: Settings, method: Method, model: Model, fed: Federation) -> dict[str, Any]:
    """All that was asked for, by name, just as a run's file says it."""
    data = dict(fed.settings) or {"name": "own data"}
    parts = {"method": describe(method), "network": dict(model.description), "data": data}
    return tomllib.loads(to_toml(describe_settings(settings) | parts))


def describe_settings(settings: Settings) -> dict[str, Any]:
    """What was asked for apart from method, network and data, by name."""
    named = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    parts = {name: dict(vars(part)) for name, part in named.items() if isinstance(part, (Unreliable, Channel))}
    return named | parts | {"rounds": settings.length}


def go(
    loop: Rounds,
    run: Run,
    plan: Plan,
    settings: Settings,
    record: Callable[[Record], None] | None = None,
    writer: "RunWriter | None" = None,
) -> Run:
    """The rounds that are left."""
    keeper = None if writer is None else Keeper(writer, loop, run)
    run.records = lines = Lines(run.records)
    with nullcontext() if keeper is None else keeper:
        for number in range(len(lines) + 1, len(plan) + 1):
            line = _round(loop, plan, number, settings)
            line = line if writer is None else writer.add(line)
            lines.append(line)
            if record is not None:
                record(line)
            if keeper is not None:
                keeper.after_round()
    run.server = loop.server
    if writer is not None:
        writer.finish(run)
    return run


def _round(loop: Rounds, plan: Plan, number: int, settings: Settings) -> Record:
    clients, last = plan[number - 1], number == len(plan)
    with repeatable(loop.way.threads):
        missed = settings.unreliable.missed(clients, loop.train.sizes, number, settings.seed)
        line = loop.round(number, clients, missed)
        if last or number % settings.evaluate_every == 0:
            line = evaluate_round(loop, line, settings.evaluate, last)
    return line


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


def _dtype_name(dtype: torch.dtype) -> Literal["float32", "float64"]:
    if dtype == torch.float32:
        return "float32"
    if dtype == torch.float64:
        return "float64"
    raise Refused(f"dtype must be torch.float32 or torch.float64, not {dtype}.")
