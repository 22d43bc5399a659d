"""A federation's run from its first round to its last, or from its last checkpoint on."""

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedtailor.checkpoint import Checkpoint
from fedtailor.deploy.folder import enrolled, write_status
from fedtailor.deploy.post import Post
from fedtailor.deploy.remote import Member, Remote, TooFew, ask_to_join
from fedtailor.deploy.settings import Deployment, digest, read_deployment
from fedtailor.errors import Refused
from fedtailor.evaluation import add_means, last_trained
from fedtailor.files import locked, write
from fedtailor.lines import Record, extend, join
from fedtailor.machine import repeatable
from fedtailor.record import FEDERATED, RunWriter, elsewhere, holds_run, is_finished, latest, read_records
from fedtailor.run import FORMAT, Run
from fedtailor.schedule import draw
from fedtailor.store import ClientStore
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_LOOK = 1.0  # seconds between looks for who is there
_AGAIN = 120.0  # seconds before one that was refused, or did not answer, is asked again to join
_SEALED = ("experiment.toml", "start.safetensors")  # run.json changes when a client joins


def conduct(folder: Path, post: Post) -> None:
    """Carry the federation of a folder to its end; all that is needed to go on is on the disk after every round."""
    deployment = replace(read_deployment(folder), device="cpu")
    run = folder / "run"
    run.mkdir(exist_ok=True)
    with locked(run):
        conductor = Conductor(folder, deployment, post)
        try:
            conductor.go()
        except Exception as error:
            conductor.tell("stopped", why=str(error) if isinstance(error, Refused) else f"{type(error).__name__}")
            raise


class Conductor:
    """One run on its way."""

    def __init__(self, folder: Path, deployment: Deployment, post: Post) -> None:
        self._folder, self._deployment, self._post = folder, deployment, post
        self._run_folder = folder / "run"
        self._writer = RunWriter(self._run_folder, 1, _SEALED)
        self._lines: list[Record] = []
        self._refused: dict[str, str] = {}  # who may not join, and why
        self._turned: dict[str, float] = {}  # and since when
        self._last_round: dict[str, str] = {}  # what went wrong in it, client by client

    def go(self) -> None:
        """From where it stands."""
        if is_finished(self._run_folder):
            raise Refused(f"The run in '{self._run_folder}' is finished.")
        found = self._last_checkpoint()
        self._remote = self._begin() if found is None else self._restore(found)
        while len(self._lines) < self._deployment.length:
            self._let_join()
            with repeatable(self._remote.threads):
                self._advance(len(self._lines) + 1)
            self.tell("running")
        self._writer.finish(self._run(), clients=[])
        self.tell("finished")

    def _advance(self, number: int) -> None:
        """A round, its evaluation if one is due, its line and its checkpoint."""
        line, last = self._round(number), number == self._deployment.length
        self._last_round = {self._remote.members[c].name: why for c, why in (line["missed"] | line["failed"]).items()}
        for name, why in self._last_round.items():
            log.warning("Round %d: %s does not count: %s.", number, name, why)
        if last or number % self._deployment.evaluate_every == 0:
            line = self._evaluate(line, last)
        self._lines.append(self._writer.add(line))
        self._save()

    def tell(self, state: str, **more: Any) -> None:
        """What the run is doing, for whoever looks."""
        remote = getattr(self, "_remote", None)
        members = [] if remote is None else [member.name for member in remote.members]
        where = {"round": len(self._lines), "rounds": self._deployment.length, "members": members}
        where |= {"refused": self._refused, "last_round": self._last_round}
        write_status(self._folder, {"state": state, "at": time.time(), **where, **more})

    @property
    def _min_clients(self) -> int:
        everyone = sum(not about.left for about in enrolled(self._folder).values())
        return min(self._deployment.min_clients or everyone, max(everyone, 1))

    def _begin(self) -> Remote:
        """Wait until enough are there; who comes first has no other rights than who comes last."""
        members: list[Member] = []
        while len(members) < self._min_clients:
            self._wait_for(self._post.online())
            if len(self._newcomers([])) >= self._min_clients:
                members = self._ask_to_join([])
            if len(members) < self._min_clients:
                self._post.pause(_LOOK)
        self._name = secrets.token_hex(8)
        remote = Remote.build(self._deployment, self._post, self._name, self._min_clients, members)
        self._remote = remote
        self._writer.begin(self._run(), remote.model.state_dict(remote.params))
        return remote

    def _last_checkpoint(self) -> Checkpoint | None:
        if not holds_run(self._run_folder):
            return None
        found, complaints = latest(self._run_folder)
        for complaint in complaints:
            log.warning(complaint)
        if complaints and found is None:
            raise Refused(f"No checkpoint in '{self._run_folder}' can be used; begin anew in another folder.")
        return found

    def _restore(self, found: Checkpoint) -> Remote:
        kept = found.note["remote"]
        if kept["digest"] != digest(self._deployment):
            raise Refused(f"deployment.toml in '{self._folder}' is not what this run began with; bring that back.")
        members = [Member(**member) for member in kept["members"]]
        self._name = kept["run"]
        remote = Remote.build(self._deployment, self._post, self._name, self._min_clients, members)
        self._remote = remote
        self._write_info()
        self._lines = read_records(self._run_folder, found)
        remote.go_back(found.server()[0], found.round, self._lines)
        remote.counted = {int(client): number for client, number in kept["counted"].items()}
        self._writer.go_on(found)
        return remote

    def _let_join(self) -> None:
        """Clients that were not there before."""
        newcomers = self._ask_to_join(self._remote.members)
        if not newcomers:
            return
        try:
            self._remote.welcome(newcomers)
        except Refused as refusal:  # a method for which everyone must be there from the start
            self._turn_away({member.name: str(refusal) for member in newcomers})
            return
        self._write_info()
        log.info("Joined: %s.", ", ".join(member.name for member in newcomers))

    def _newcomers(self, members: Sequence[Member]) -> list[str]:
        """Who is there and not among the members. Who was turned away is asked again after a while, or when it has
        connected anew: nobody else must wait for it in every round."""
        online, now = self._post.online(), self._post.clock()
        self._turned = {name: at for name, at in self._turned.items() if name in online and now < at + _AGAIN}
        known = {member.name for member in members} | self._turned.keys()
        return [name for name in online if name not in known]

    def _ask_to_join(self, members: Sequence[Member]) -> list[Member]:
        names = self._newcomers(members)
        self._refused = {name: why for name, why in self._refused.items() if name in self._turned}
        newcomers, refused = ask_to_join(self._post, self._deployment, names, len(members))
        self._turn_away(refused)
        return newcomers

    def _turn_away(self, refused: Mapping[str, str]) -> None:
        self._refused |= refused
        self._turned |= dict.fromkeys(refused, self._post.clock())
        for name, why in refused.items():
            log.warning("%s may not join: %s.", name, why.rstrip("."))

    def _round(self, number: int) -> Record:
        """One round that counts, tried as often as the settings allow."""
        for attempt in range(self._deployment.retry + 1):
            clients = self._choose(number)
            self._remote.min_clients = self._min_clients
            self.tell("running", attempt=attempt + 1, asked=[self._remote.members[c].name for c in clients])
            try:
                return self._remote.round(number, clients)
            except TooFew as few:
                log.warning(str(few))
                problem = few
        raise problem

    def _choose(self, number: int) -> list[int]:
        """Who is asked: a draw among those who are there, once enough are."""
        while True:
            online = set(self._post.online())
            there = [client for client, member in enumerate(self._remote.members) if member.name in online]
            everyone, share = len(self._remote.members), self._deployment.participation
            if len(there) >= min(self._min_clients, everyone):
                return draw(there, everyone, share, number, self._deployment.seed)
            self._wait_for([self._remote.members[client].name for client in there])
            self._post.pause(_LOOK)

    def _wait_for(self, there: list[str]) -> None:
        refused = "".join(f"; {name} may not join: {why.rstrip('.')}" for name, why in self._refused.items())
        self.tell("waiting", why=f"for {self._min_clients} clients; there are {', '.join(there) or 'none'}{refused}")

    def _evaluate(self, line: Record, last: bool) -> Record:
        """Add what clients say of their own models; `trained` is of those of the round, as in a simulation."""
        began = time.perf_counter()
        values, missing = self._remote.evaluate(last)
        for _ in range(self._deployment.retry if last else 0):  # it is the last time that anybody asks
            self._wait_until_back(missing)
            if missing:
                more, missing = self._remote.evaluate(last, list(missing))
                extend(values, more)
        values = {name: dict(sorted(found.items())) for name, found in values.items()}
        for client, why in missing.items():
            log.warning("%s is not evaluated: %s.", self._remote.members[client].name, why)
        here = set(line["clients"])
        of_round = {
            name: {c: v for c, v in found.items() if c in here or name.endswith("_received")}
            for name, found in values.items()
        }
        sizes = {kind: [getattr(m, kind) for m in self._remote.members] for kind in ("train", "validation", "test")}
        line = add_means(line, of_round, sizes)
        if last:
            line["last_trained"] = last_trained(values)
        line["per_client"] = join(line["per_client"], of_round)
        return line | {"seconds_evaluating": time.perf_counter() - began}

    def _wait_until_back(self, missing: Mapping[int, str]) -> None:
        """Give clients time to come back, but for those who left for good."""
        left = {name for name, about in enrolled(self._folder).items() if about.left}
        awaited = {self._remote.members[client].name for client in missing} - left
        end = self._post.clock() + self._deployment.deadline
        while not awaited <= set(self._post.online()) and self._post.clock() < end:
            self.tell("waiting", why=f"for the last evaluation of {', '.join(sorted(awaited))}")
            self._post.pause(_LOOK)

    def _save(self) -> None:
        remote = self._remote
        members = [asdict(member) for member in remote.members]
        kept = {"run": self._name, "members": members, "counted": remote.counted}
        kept |= {"digest": digest(self._deployment)}
        note: dict[str, Any] = {"chunk": None, "continued": [], "remote": kept}
        self._writer.save(len(self._lines), remote.server, {"states": ClientStore({})}, note)

    def _write_info(self) -> None:
        write(self._run_folder / "run.json", (json.dumps(self._info(), indent=1) + "\n").encode())

    def _info(self) -> dict[str, Any]:
        remote = self._remote
        return {
            "format": FORMAT, "fedtailor": VERSION, "engine": FEDERATED, "engine_why": "Its clients are real.",
            "chunk": None, "device": "cpu", "threads": 1, "torch": torch.__version__,
            "parameters": sum(p.numel() for p in remote.model.module.parameters() if p.requires_grad),
            "score": remote.model.score, "higher_is_better": remote.model.higher_is_better,
            "layers": list(remote.model.layers()),
            "clients": [asdict(member) | {"classes": None} for member in remote.members],
            "fingerprint": {}, "run": self._name,
        }  # fmt: skip

    def _run(self) -> Run:
        experiment = self._deployment.describe() | {"data": {"name": "federation"}}
        return Run(experiment, self._info(), self._lines, self._remote.server, elsewhere, elsewhere)
