"""Run the federation of an operator's folder: start or resume its run, and train it to its end."""

import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from fedtailor.deploy.server.flower_clients import FlowerClients
from fedtailor.deploy.server.mailbox import Mailbox
from fedtailor.deploy.server.membership import Member, Membership
from fedtailor.deploy.server.round_totals import add_round
from fedtailor.deploy.server.state.disk import describe_full_disk, is_disk_full
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import deployment_digest, read_operator_deployment
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.environment import describe_environment
from fedtailor.runs.files import wait_for_lock, write_atomic
from fedtailor.runs.reader import FLOWER_ENGINE, is_finished, is_run_folder, raise_remote_client, read_records
from fedtailor.runs.run import FORMAT, Run
from fedtailor.runs.writer import RunWriter
from fedtailor.training.client_failures import TooFewClientsError
from fedtailor.training.client_update import initial_model
from fedtailor.training.resume import newest_checkpoint
from fedtailor.training.server import Server
from fedtailor.training.simulation import model_info
from fedtailor.training.trainer import Trainer
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_CHECKSUMMED = ("experiment.toml", "start.safetensors")  # not run.json, which changes when a client joins


def coordinate(folder: Path, mailbox: Mailbox) -> None:
    """Run the federation of an operator's folder to its end; the state after every round is saved for resuming."""
    membership = Membership(folder, replace(read_operator_deployment(folder), device="cpu"), mailbox)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    with (run / "lock").open("ab") as lock:
        wait_for_lock(lock)  # a run that was stopped a moment ago may still be ending
        try:
            _Coordinator(run, membership).train()
        except Exception as error:
            with suppress(OSError):  # on a full disk, the server writes the reason
                membership.write_status("stopped", reason=_reason(error, folder), temporary=_is_temporary(error))
            raise
        membership.write_status("finished")


def _is_temporary(error: Exception) -> bool:
    """Return whether the run may succeed if the server restarts it: clients come back, or a disk has space again."""
    unknown = not isinstance(error, FedTailorError)
    return unknown or isinstance(error, TooFewClientsError) or isinstance(error.__cause__, OSError)


def _reason(error: Exception, folder: Path) -> str:
    """Return why the run stops. The text of unexpected errors may quote data, so it contains only their type."""
    if is_disk_full(error):
        return f"{describe_full_disk(folder)}; free some space, then run: fedtailor deploy resume {folder}"
    return str(error) if isinstance(error, FedTailorError) else type(error).__name__


@dataclass
class _Coordinator:
    """One run of a federation, from its first round or its last checkpoint to its last round."""

    folder: Path  # of the run
    membership: Membership

    def train(self) -> None:
        """Start the run, or resume it from its last checkpoint."""
        if is_finished(self.folder):
            raise DeployError(f"The run in '{self.folder}' is finished; start another one in a new folder.")
        checkpoint = newest_checkpoint(self.folder) if is_run_folder(self.folder) else None
        writer = RunWriter(self.folder, 1, _CHECKSUMMED, self.membership.deployment.keep_checkpoints)
        trainer = self._start(writer) if checkpoint is None else self._resume(writer, checkpoint)
        # A checkpoint is saved after every round, so a signal may stop the run at any moment.
        writer.finish(trainer.train(writer, self._count, defer_signals=False), clients=[])

    def _count(self, record: Mapping[str, Any]) -> None:
        self.membership.totals = add_round(self.membership.totals, record)

    def _start(self, writer: RunWriter) -> Trainer[FlowerClients]:
        self.membership.wait_for_start()
        trainer = self._make_trainer(secrets.token_hex(8))
        writer.start(trainer.run, trainer.server.model.state_dict(trainer.clients.params))
        return trainer

    def _resume(self, writer: RunWriter, checkpoint: Checkpoint) -> Trainer[FlowerClients]:
        saved, membership = checkpoint.metadata["remote"], self.membership
        if saved["digest"] != deployment_digest(membership.deployment):
            raise DeployError(
                f"deployment.toml in '{membership.folder}' has changed since this run started; "
                "restore the old settings."
            )
        membership.members = [Member(**member) for member in saved["members"]]
        membership.rounds_done = checkpoint.round
        trainer = self._make_trainer(saved["run"])
        trainer.clients.on_join()
        trainer.run.records = read_records(self.folder, checkpoint)
        membership.totals = reduce(add_round, trainer.run.records, dict[str, Any]())
        trainer.server.restore(checkpoint.server(), checkpoint.round, trainer.run.records)
        trainer.clients.last_counted = {int(client): number for client, number in saved["last_counted"].items()}
        writer.continue_from(checkpoint)
        return trainer

    def _make_trainer(self, run_id: str) -> Trainer[FlowerClients]:
        deployment = self.membership.deployment
        model, params = initial_model(deployment.model(), deployment)

        def write_info() -> None:
            run.info = self._info(server, clients)
            write_atomic(self.folder / "run.json", (json.dumps(run.info, indent=1) + "\n").encode())

        clients = FlowerClients(self.membership, model, params, run_id, on_join=write_info)
        server = Server.build(
            deployment.method,
            clients.setup(),
            deployment.channel,
            # The same noise must never be added to two different uploads, so every round has a new seed.
            lambda: secrets.token_bytes(32),
            deployment.robust,
        )
        experiment = deployment.describe() | {"data": {"name": "federation"}}
        info = self._info(server, clients)
        run = Run(experiment, info, [], server.state, raise_remote_client, raise_remote_client, self.folder)
        return Trainer(config=deployment, server=server, clients=clients, run=run, retry=deployment.retry)

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return describe_environment(torch.device("cpu"))

    def _info(self, server: Server, clients: FlowerClients) -> dict[str, Any]:
        return model_info(server, [server.model]) | {
            "format": FORMAT,
            "fedtailor": VERSION,
            "environment": self._environment,
            "engine": FLOWER_ENGINE,
            "engine_reason": "The clients are deployed on Flower.",
            "chunk_size": None,
            "device": "cpu",
            "threads": 1,
            "clients": [asdict(member) | {"classes": None} for member in clients.members],
            "fingerprint": {},
            "run": clients.run,
        }
