"""Train a run whose clients may be lost with a process or a machine: continue from the last checkpoint.

A checkpoint is consistent over all clients, because it is written between rounds. Rounds after it are trained again,
and training is deterministic, so the run ends as if nothing had been lost. A run without a folder has no checkpoint and
starts again from round 1.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fedtailor.errors import RunError, reason
from fedtailor.runs.records import Record, Records
from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.clients import LostClientsError
from fedtailor.training.signals import Interrupted
from fedtailor.training.trainer import Trainer

if TYPE_CHECKING:
    from fedtailor.runs.writer import RunWriter

log = logging.getLogger("fedtailor")
_MAX_LOSSES = 3  # in a row, without a new round


@runtime_checkable
class RemoteClients(Protocol):
    """Clients in other processes, which may be lost and which are stopped at the end."""

    def restart(self) -> None:
        """Start all clients again, as before round 1."""

    def gather(self) -> None:
        """Move the states of all clients to this process, and stop the others."""

    def stop(self) -> None:
        """Stop the other processes; their states are lost."""


def train_with_recovery(
    trainer: Trainer[Any], writer: "RunWriter | None" = None, on_round_end: Callable[[Record], None] | None = None
) -> Run:
    """Train the remaining rounds of a run like `Trainer.train`, also if clients are lost.

    `on_round_end` is called once for every round, even if the round is trained again.
    """
    furthest, losses, lost = len(trainer.run.records), 0, False

    def report(record: Record) -> None:
        nonlocal furthest, losses
        if record["round"] > furthest:
            furthest, losses = record["round"], 0
            if on_round_end is not None:
                on_round_end(record)

    while True:
        try:
            trainer = _rewind(trainer, writer) if lost else trainer
            return _train_and_gather(trainer, writer, report)
        except LostClientsError as error:
            losses, lost = losses + 1, True
            if losses > _MAX_LOSSES:
                raise _final_error(f"{reason(error)}, {losses} times in round {furthest + 1}", trainer.run) from error
            log.warning("%s All actors are started again.", error)


@contextmanager
def released_clients(trainer: Trainer[Any]) -> Iterator[None]:
    """Stop the actors of a run after the body, if it has any."""
    try:
        yield
    finally:
        if isinstance(trainer.clients, RemoteClients):
            trainer.clients.stop()


def _train_and_gather(trainer: Trainer[Any], writer: "RunWriter | None", report: Callable[[Record], None]) -> Run:
    """Train, and move the states of all clients to this process, so that the run can be used afterwards."""
    clients = trainer.clients
    try:
        run = trainer.train(writer, report)
    except Interrupted as stop:
        if isinstance(clients, RemoteClients):
            if stop.immediately:  # the actors still train
                stop.run = None
            else:
                clients.gather()
        raise
    if isinstance(clients, RemoteClients):
        clients.gather()
    return run


def _rewind(trainer: Trainer[Any], writer: "RunWriter | None") -> Trainer[Any]:
    """Start all clients again and restore the run as of its last checkpoint, or as of its start."""
    run, server, clients = trainer.run, trainer.server, trainer.clients
    try:
        clients.restart()
    except LostClientsError:
        raise
    except RunError as error:
        raise _final_error(reason(error), run) from error
    checkpoint = None
    if writer is not None and run.folder is not None:
        from fedtailor.runs.reader import latest_checkpoint, read_records  # require safetensors

        checkpoint, _ = latest_checkpoint(run.folder)
        if checkpoint is not None:
            run.records = read_records(run.folder, checkpoint)
            server.restore(checkpoint.server(), checkpoint.round, run.records)
            clients.restore(server, checkpoint)
            writer.continue_from(checkpoint)
    if checkpoint is None:
        run.records = Records()
        server.restore(server.initial_state, 0, [])
        if writer is not None:
            writer.restart()
    log.warning("The run continues from round %d.", len(run.records) + 1)
    return replace(trainer)  # without what it had derived from records


def _final_error(problem: str, run: Run) -> RunError:
    hint = "" if run.folder is None else f"; {resume_hint(run.folder)}"
    return RunError(f"{problem}{hint}.")
