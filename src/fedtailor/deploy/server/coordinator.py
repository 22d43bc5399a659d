"""Coordinate the run of a federation: rounds, newcomers, evaluations, checkpoints, and the status."""

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedtailor.core.system import deterministic
from fedtailor.deploy.server.flower_server import FlowerServer, Member, TooFewClientsError, query_candidates
from fedtailor.deploy.server.mailbox import Mailbox
from fedtailor.deploy.server.operator_folder import enrolled_clients, write_status
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, deployment_digest, read_deployment
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.files import folder_lock, write_atomic
from fedtailor.runs.reader import (
    FLOWER_ENGINE,
    is_finished,
    is_run_folder,
    latest_checkpoint,
    raise_remote_client,
    read_records,
)
from fedtailor.runs.records import Record, merge_disjoint, update_values
from fedtailor.runs.run import FORMAT, Run
from fedtailor.runs.writer import RunWriter
from fedtailor.training.evaluation import add_means, last_trained
from fedtailor.training.participation import sample_clients
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_POLL_INTERVAL = 1.0  # seconds between checks for online clients
_RETRY_INTERVAL = 120.0  # seconds before a client that was rejected, or did not reply, is queried again
_CHECKSUMMED = ("experiment.toml", "start.safetensors")  # not run.json, which changes when a client joins


def coordinate(folder: Path, mailbox: Mailbox) -> None:
    """Run the federation of an operator's folder to its end; the state after every round is saved for resuming."""
    deployment = replace(read_deployment(folder), device="cpu")
    run = folder / "run"
    run.mkdir(exist_ok=True)
    with folder_lock(run):
        coordinator = Coordinator(folder, deployment, mailbox)
        try:
            coordinator.run()
        except Exception as error:
            reason = str(error) if isinstance(error, FedTailorError) else type(error).__name__
            coordinator.write_status("stopped", reason=reason)
            raise


class Coordinator:
    """The coordinator of one run, from its first round or its last checkpoint to its last round."""

    def __init__(self, folder: Path, deployment: Deployment, mailbox: Mailbox) -> None:
        self._folder, self._deployment, self._mailbox = folder, deployment, mailbox
        self._run_folder = folder / "run"
        self._writer = RunWriter(self._run_folder, 1, _CHECKSUMMED)
        self._records: list[Record] = []
        self._rejected: dict[str, str] = {}  # clients that may not join -> reason
        self._rejected_at: dict[str, float] = {}
        self._last_round: dict[str, str] = {}  # clients whose work did not count in the last round -> reason

    def run(self) -> None:
        """Start the run, or resume it from its last checkpoint."""
        if is_finished(self._run_folder):
            raise DeployError(f"The run in '{self._run_folder}' is finished; start another one in a new folder.")
        checkpoint = self._last_checkpoint()
        self._server = self._start() if checkpoint is None else self._resume(checkpoint)
        while len(self._records) < self._deployment.num_rounds:
            self._add_newcomers()
            with deterministic(self._server.threads):
                self._run_round(len(self._records) + 1)
            self.write_status("running")
        self._writer.finish(self._make_run(), clients=[])
        self.write_status("finished")

    def _run_round(self, number: int) -> None:
        """Train one round, evaluate it if an evaluation is due, and save its record and a checkpoint."""
        record, last = self._train(number), number == self._deployment.num_rounds
        absent = record["missed"] | record["failed"]
        self._last_round = {self._server.members[client].name: reason for client, reason in absent.items()}
        for name, reason in self._last_round.items():
            log.warning("Round %d: %s does not count: %s.", number, name, reason)
        if last or number % self._deployment.evaluate_every == 0:
            record = self._evaluate(record, last)
        self._records.append(self._writer.append(record))
        self._save()

    def write_status(self, state: str, **fields: Any) -> None:
        """Write the status of the run, for `fedtailor deploy status`."""
        server = getattr(self, "_server", None)
        members = [] if server is None else [member.name for member in server.members]
        progress = {"round": len(self._records), "rounds": self._deployment.num_rounds, "members": members}
        progress |= {"rejected": self._rejected, "last_round": self._last_round}
        write_status(self._folder, {"state": state, "at": time.time(), **progress, **fields})

    @property
    def _min_clients(self) -> int:
        num_clients = sum(not client.left for client in enrolled_clients(self._folder).values())
        return min(self._deployment.min_clients or num_clients, max(num_clients, 1))

    def _start(self) -> FlowerServer:
        """Wait for enough clients and start the run; the order in which they connect does not matter."""
        members: list[Member] = []
        while len(members) < self._min_clients:
            self._write_waiting(self._mailbox.online())
            if len(self._candidates([])) >= self._min_clients:
                members = self._query_candidates([])
            if len(members) < self._min_clients:
                self._mailbox.sleep(_POLL_INTERVAL)
        self._run_id = secrets.token_hex(8)
        server = FlowerServer.build(self._deployment, self._mailbox, self._run_id, self._min_clients, members)
        self._server = server
        self._writer.start(self._make_run(), server.model.state_dict(server.params))
        return server

    def _last_checkpoint(self) -> Checkpoint | None:
        if not is_run_folder(self._run_folder):
            return None
        checkpoint, problems = latest_checkpoint(self._run_folder)
        for problem in problems:
            log.warning(problem)
        if problems and checkpoint is None:
            raise DeployError(f"No checkpoint in '{self._run_folder}' can be read; start a new run in another folder.")
        return checkpoint

    def _resume(self, checkpoint: Checkpoint) -> FlowerServer:
        saved = checkpoint.metadata["remote"]
        if saved["digest"] != deployment_digest(self._deployment):
            raise DeployError(
                f"deployment.toml in '{self._folder}' has changed since this run started; restore the old settings."
            )
        members = [Member(**member) for member in saved["members"]]
        self._run_id = saved["run"]
        server = FlowerServer.build(self._deployment, self._mailbox, self._run_id, self._min_clients, members)
        self._server = server
        self._write_info()
        self._records = read_records(self._run_folder, checkpoint)
        server.restore_state(checkpoint.server()[0], checkpoint.round, self._records)
        server.last_counted = {int(client): number for client, number in saved["last_counted"].items()}
        self._writer.continue_from(checkpoint)
        return server

    def _add_newcomers(self) -> None:
        """Add the clients that are online and not yet part of the run."""
        newcomers = self._query_candidates(self._server.members)
        if not newcomers:
            return
        try:
            self._server.add_members(newcomers)
        except FedTailorError as error:  # some methods need all clients from the start
            self._reject({member.name: str(error) for member in newcomers})
            return
        self._write_info()
        log.info("Joined: %s.", ", ".join(member.name for member in newcomers))

    def _candidates(self, members: Sequence[Member]) -> list[str]:
        """Return the clients that are online and not members.

        A rejected client becomes a candidate again only after a while or when it reconnects. Otherwise, the others
        would wait for its reply in every round.
        """
        online, now = self._mailbox.online(), self._mailbox.clock()
        self._rejected_at = {n: at for n, at in self._rejected_at.items() if n in online and now < at + _RETRY_INTERVAL}
        excluded = {member.name for member in members} | self._rejected_at.keys()
        return [name for name in online if name not in excluded]

    def _query_candidates(self, members: Sequence[Member]) -> list[Member]:
        names = self._candidates(members)
        self._rejected = {name: reason for name, reason in self._rejected.items() if name in self._rejected_at}
        newcomers, rejected = query_candidates(self._mailbox, self._deployment, names, len(members))
        self._reject(rejected)
        return newcomers

    def _reject(self, rejected: Mapping[str, str]) -> None:
        self._rejected |= rejected
        self._rejected_at |= dict.fromkeys(rejected, self._mailbox.clock())
        for name, reason in rejected.items():
            log.warning("%s cannot join: %s.", name, reason.rstrip("."))

    def _train(self, number: int) -> Record:
        """Train one round; repeat it up to `retry` times if too few clients deliver."""
        for attempt in range(self._deployment.retry + 1):
            clients = self._select(number)
            self._server.min_clients = self._min_clients
            selected = [self._server.members[client].name for client in clients]
            self.write_status("running", attempt=attempt + 1, selected=selected)
            try:
                return self._server.train_round(number, clients)
            except TooFewClientsError as error:
                log.warning(str(error))
                problem = error
        raise problem

    def _select(self, number: int) -> list[int]:
        """Wait until enough members are online and sample the clients of a round from them."""
        members = self._server.members
        while True:
            names = set(self._mailbox.online())
            online = [client for client, member in enumerate(members) if member.name in names]
            if len(online) >= min(self._min_clients, len(members)):
                deployment = self._deployment
                return sample_clients(online, len(members), deployment.participation, number, deployment.seed)
            self._write_waiting([members[client].name for client in online])
            self._mailbox.sleep(_POLL_INTERVAL)

    def _write_waiting(self, online: list[str]) -> None:
        rejected = "".join(f"; {name} cannot join: {reason.rstrip('.')}" for name, reason in self._rejected.items())
        reason = f"for {self._min_clients} clients; online: {', '.join(online) or 'none'}{rejected}"
        self.write_status("waiting", reason=reason)

    def _evaluate(self, record: Record, last: bool) -> Record:
        """Add the clients' metrics to a record.

        As in a simulation, the metrics of trained models cover only the clients that delivered in this round.
        """
        started = time.perf_counter()
        values, missing = self._server.evaluate(last)
        for _ in range(self._deployment.retry if last else 0):  # there is no later evaluation
            self._wait_for_return(missing)
            if missing:
                more, missing = self._server.evaluate(last, list(missing))
                update_values(values, more)
        values = {name: dict(sorted(by_client.items())) for name, by_client in values.items()}
        for client, reason in missing.items():
            log.warning("%s is not evaluated: %s.", self._server.members[client].name, reason)
        delivered = set(record["clients"])
        round_values = {
            name: {c: v for c, v in by_client.items() if c in delivered or name.endswith("_received")}
            for name, by_client in values.items()
        }
        sizes = {part: [getattr(m, part) for m in self._server.members] for part in ("train", "validation", "test")}
        record = add_means(record, round_values, sizes)
        if last:
            record["last_trained"] = last_trained(values)
        record["per_client"] = merge_disjoint(record["per_client"], round_values)
        return record | {"seconds_evaluating": time.perf_counter() - started}

    def _wait_for_return(self, missing: Mapping[int, str]) -> None:
        """Wait up to the deadline for clients to come back, except for those that left."""
        left = {name for name, client in enrolled_clients(self._folder).items() if client.left}
        awaited = {self._server.members[client].name for client in missing} - left
        deadline = self._mailbox.clock() + self._deployment.deadline
        while not awaited <= set(self._mailbox.online()) and self._mailbox.clock() < deadline:
            self.write_status("waiting", reason=f"for the last evaluation of {', '.join(sorted(awaited))}")
            self._mailbox.sleep(_POLL_INTERVAL)

    def _save(self) -> None:
        server = self._server
        members = [asdict(member) for member in server.members]
        saved = {"run": self._run_id, "members": members, "last_counted": server.last_counted}
        saved |= {"digest": deployment_digest(self._deployment)}
        metadata: dict[str, Any] = {"chunk_size": None, "environment_changes": [], "remote": saved}
        self._writer.save(len(self._records), server.state, {"states": ClientStates({})}, metadata)

    def _write_info(self) -> None:
        write_atomic(self._run_folder / "run.json", (json.dumps(self._info(), indent=1) + "\n").encode())

    def _info(self) -> dict[str, Any]:
        model = self._server.model
        return {
            "format": FORMAT, "fedtailor": VERSION, "method_title": self._deployment.method.display_name,
            "engine": FLOWER_ENGINE, "engine_reason": "The clients are deployed on Flower.",
            "chunk_size": None, "device": "cpu", "threads": 1, "torch": torch.__version__,
            "parameters": sum(p.numel() for p in model.module.parameters() if p.requires_grad),
            "score": model.score, "higher_is_better": model.higher_is_better, "layers": list(model.layers()),
            "clients": [asdict(member) | {"classes": None} for member in self._server.members],
            "fingerprint": {}, "run": self._run_id,
        }  # fmt: skip

    def _make_run(self) -> Run:
        experiment = self._deployment.describe() | {"data": {"name": "federation"}}
        info, state = self._info(), self._server.state
        return Run(experiment, info, self._records, state, raise_remote_client, raise_remote_client)
