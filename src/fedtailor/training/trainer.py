"""The trainer: it runs the rounds of a method, with simulated or deployed clients.

for every round:
    select the clients of the round           (Clients.select)
    send, train, receive                      (train_round)
    evaluate the personal models, if due      (Clients.evaluate)
    stop early, if validation says so         (EarlyStopping)
    append the round's record to the run      (Run.records and rounds.jsonl)
    write a checkpoint, if due                (CheckpointManager)
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from fedtailor.core.system import deterministic, peak_memory, reset_peak_memory, synchronize
from fedtailor.runs.records import Record, Records, merge_disjoint, to_plain
from fedtailor.runs.run import Run
from fedtailor.runs.summaries import plain_mean
from fedtailor.training.channel.payload import count_bytes
from fedtailor.training.checkpointing import CheckpointManager
from fedtailor.training.client_failures import (
    ClientFailure,
    TooFewClientsError,
    check_failure_rate,
    check_finite,
    divergence_advice,
)
from fedtailor.training.clients import Clients
from fedtailor.training.config import TrainingConfig
from fedtailor.training.drift import MODEL_DRIFT, SHARED_DRIFT
from fedtailor.training.early_stopping import EarlyStopping
from fedtailor.training.evaluation import TrainedValues, add_evaluation, evaluated_clients
from fedtailor.training.round_state import RoundState, drop_rows, remaining_clients
from fedtailor.training.server import Server

if TYPE_CHECKING:
    from fedtailor.runs.writer import RunWriter

log = logging.getLogger("fedtailor")
C = TypeVar("C", bound=Clients)


@dataclass(eq=False, kw_only=True)
class Trainer(Generic[C]):
    """Trains the remaining rounds of a run. `ft.simulate`, `ft.resume`, and the deployed server use it."""

    config: TrainingConfig
    server: Server
    clients: C
    run: Run
    retry: int = 0  # times that a round is repeated if too few clients deliver

    def train(
        self,
        writer: "RunWriter | None" = None,
        on_round_end: Callable[[Record], None] | None = None,
        defer_signals: bool = True,
    ) -> Run:
        """Train the rounds for which the run has no record yet, and return the run.

        With a `writer`, records and checkpoints are saved. `defer_signals` lets a round finish before Ctrl-C stops it.
        """
        self.run.records = records = Records(self.run.records)
        checkpointing = CheckpointManager(writer, self.server, self.clients, self.run, defer_signals)
        with closing(self.clients), checkpointing as checkpoints:
            for number in range(len(records) + 1, self.config.num_rounds + 1):
                if self.run.stopped_early:
                    break
                record = self.run_round(number)
                record = writer.append(record) if writer else record
                records.append(record)
                if on_round_end is not None:
                    on_round_end(record)
                checkpoints.after_round()
        self.run.server = self.server.state
        return self.run

    def run_round(self, number: int) -> Record:
        """Train round `number`, evaluate it if an evaluation is due, and return its record."""
        is_last, device = number == self.config.num_rounds, self.server.sizes.device
        reset_peak_memory(device)
        record = self._train_with_retries(number)
        self._trained_values.add_participants(record["clients"])
        if is_last or number % self.config.evaluate_every == 0:
            try:
                with deterministic(self.clients.threads):
                    record = self._evaluate(record, is_last)
            except KeyboardInterrupt:  # the round is finished, so the run keeps it without an evaluation
                self.run.records = Records([*self.run.records, record])
                raise
        stops = self._early_stopping.add(record) and not is_last
        return record | peak_memory(device) | ({"stopped_early": True} if stops else {})

    def _train_with_retries(self, number: int) -> Record:
        for attempt in range(self.retry + 1):
            clients, missed = self.clients.select(self.server, number, attempt)
            try:
                with deterministic(self.clients.threads):
                    return self.train_round(number, clients, missed)
            except TooFewClientsError as error:
                log.warning(str(error))
                problem = error
        raise problem

    @torch.no_grad()
    def train_round(self, number: int, clients: Sequence[int], missed: Mapping[int, str] | None = None) -> Record:
        """Train one round with these clients and return its record.

        Clients in `missed` (client -> reason), and clients that fail, receive the message but contribute nothing;
        their state is unchanged. If the round raises an error, the server and all client states stay as they were.

        The clients form one cohort, which trains on the same server state. If the method sets `sequential_clients`,
        each client is a cohort by itself and receives the server state that the previous client left.
        """
        started = time.perf_counter()
        round_state = RoundState(self.server.state, missed=dict(missed or {}))
        sequential = self.server.method.sequential_clients
        for cohort in [[client] for client in clients] if sequential else [list(clients)]:
            self._run_cohort(round_state, number, cohort)
        self._check_round(round_state, number, clients)
        self.server.commit(round_state)
        self.clients.commit(round_state, number)
        synchronize(self.server.sizes.device)
        return self._make_record(round_state, number, time.perf_counter() - started - round_state.metrics_seconds)

    def _run_cohort(self, round_state: RoundState, number: int, cohort: list[int]) -> None:
        """Send messages to a cohort, train its clients, and update the server state with their uploads."""
        if not cohort:
            return
        sent = self.server.send(round_state.server, cohort, number)  # also to clients that miss the round
        round_state.bytes_down |= zip(cohort, count_bytes(sent, len(cohort)), strict=True)
        cohort, sent = remaining_clients(round_state.missed, cohort), drop_rows(round_state.missed, cohort, sent)
        results = self.clients.train(round_state, number, cohort, sent) if cohort else None
        if results is not None:
            self.server.receive(round_state, number, results)

    def _check_round(self, round_state: RoundState, number: int, clients: Sequence[int]) -> None:
        """Raise an error if too few clients delivered, too many failed, or the new server state is not finite."""
        delivered, advice = len(round_state.clients), self._advice(round_state.failures)
        if delivered < min(self.clients.min_clients, len(clients)):
            reasons = {c: failure.reason for c, failure in round_state.failures.items()} | round_state.missed
            listed = "; ".join(f"{self.clients.names[c]}: {reason}" for c, reason in list(reasons.items())[:5])
            hint = f"; {advice}" if advice else ""
            message = f"In round {number}, {delivered} of {len(clients)} clients delivered ({listed}){hint}."
            raise TooFewClientsError(message)
        selected = len(clients) - len(round_state.missed)
        check_failure_rate(round_state.failures, selected, self.config.max_failures, number, advice)
        here = {"round": number, "per_client": round_state.client_metrics}
        check_finite(
            round_state.server, number, lambda: divergence_advice([*self.run.records, here], self.clients.names)
        )

    def _advice(self, failures: Mapping[int, ClientFailure]) -> str | None:
        """Return advice if several clients diverged, which is rarely the fault of each."""
        diverged = sum(failure.diverged for failure in failures.values())
        return divergence_advice(self.run.records, self.clients.names) if diverged > 1 else None

    def _evaluate(self, record: Record, is_last: bool) -> Record:
        started, config = time.perf_counter(), self.config
        clients = evaluated_clients(config.evaluate, self.server.num_clients, record["clients"], config.seed)
        found = self.clients.evaluate(self.server, clients, self._trained_values.outdated, is_last)
        values = self._trained_values.complete(found.values, clients)
        record = add_evaluation(record, found, values, self.clients.sizes, self.server.method)
        if found.warnings:
            record["warnings"] = found.warnings | record.get("warnings", {})
        return record | {"seconds_evaluating": time.perf_counter() - started}

    @cached_property
    def _early_stopping(self) -> EarlyStopping:
        model, moment = self.server.model, self.server.method.ranking_moment
        found = EarlyStopping(f"validation_{moment}", model.higher_is_better, self.config.patience)
        return found.restore(self.run.records)

    @cached_property
    def _trained_values(self) -> TrainedValues:
        return TrainedValues.from_records(self.run.records)

    def _make_record(self, round_state: RoundState, number: int, seconds: float) -> Record:
        """Return the record of a round; the evaluation fills in the fields that are None here."""
        counts_bytes = not self.server.method.pools_data  # centralized training sends no models
        bytes_up, bytes_down = (round_state.bytes_up, round_state.bytes_down) if counts_bytes else ({}, {})
        return {
            "round": number,
            "clients": round_state.clients,
            "missed": round_state.missed,
            "failed": {client: failure.reason for client, failure in round_state.failures.items()},
            **({"warnings": round_state.warnings} if round_state.warnings else {}),
            "bytes_up": sum(bytes_up.values()),
            "bytes_down": sum(bytes_down.values()),
            "seconds": seconds,
            **dict.fromkeys(["loss", "loss_mean"]),
            **{
                f"{name}_{moment}{kind}": None
                for name in ("loss", *self.server.model.metrics)
                for moment in ("received", "trained")
                for kind in ("", "_mean")
            },
            **self.server.privacy_spent(),
            **{
                f"{name}_mean": plain_mean(round_state.client_metrics[name])
                for name in (MODEL_DRIFT, SHARED_DRIFT)
                if self.config.measure_drift and name in round_state.client_metrics
            },
            "method_metrics": {name: to_plain(value) for name, value in round_state.method_metrics.items()},
            "per_client": merge_disjoint({"bytes_up": bytes_up, "bytes_down": bytes_down}, round_state.client_metrics),
        }
