"""The server of a deployed run: it sends messages over Flower and accepts only valid uploads."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import RecordDict

from fedtailor.core.method import Setup
from fedtailor.core.trees import Params, Tree, repeat, stack, take
from fedtailor.core.untrusted_input import sanitize
from fedtailor.deploy.dummy_client import dummy_upload
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.server.mailbox import Mailbox, NoReplyError, SentMessages
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, deployment_digest
from fedtailor.runs.records import Values
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.serialization import packed_size
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_failures import ClientFailure, describe_difference, find_non_finite, tree_signature
from fedtailor.training.client_update import initial_model, make_shared_context
from fedtailor.training.preflight import choose_num_threads, measure_step_cost
from fedtailor.training.round_state import RoundState, drop_rows
from fedtailor.training.server import ClientResults, Server
from fedtailor.version import VERSION

_SLACK_BYTES = 2**16  # for names and outline, which another version on the client may write differently
_QUERY_TIMEOUT = 120.0  # seconds to reply to a query, which involves no training
_MAX_SAMPLES = 2**40


@dataclass(frozen=True)
class Member:
    """A client that takes part in the run; its position in the list of members is its index."""

    name: str
    train: int
    validation: int
    test: int
    joined: int = 0  # number of rounds before it joined


class TooFewClientsError(DeployError):
    """A round does not count because fewer than `min_clients` clients delivered an upload."""


@dataclass(eq=False, kw_only=True)
class FlowerServer(Server):
    """The server of a run whose clients are on other machines; it validates every upload before use."""

    deployment: Deployment
    params: Params
    mailbox: Mailbox
    run: str  # ID of the run, under which clients save their state
    min_clients: int
    members: list[Member] = field(default_factory=list)
    last_counted: dict[int, int] = field(default_factory=dict)  # client -> its last round that counts

    @classmethod
    @torch.no_grad()
    def build(
        cls, deployment: Deployment, mailbox: Mailbox, run: str, min_clients: int, members: Sequence[Member]
    ) -> "FlowerServer":
        """Return the server of these clients before round 1."""
        model, params = initial_model(deployment.model(), deployment)
        setup = _setup(deployment, model, params, members)
        state = deployment.method.init_server(setup)
        return cls(
            method=deployment.method, model=model, sizes=setup.sizes, initial_state=state, state=state,
            noise_seed=secrets.token_bytes(32), channel=deployment.channel, max_failures=deployment.max_failures,
            deployment=deployment, params=params, mailbox=mailbox, run=run, min_clients=min_clients,
            members=list(members),
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """The number of torch threads that a simulation of this run would use; results may depend on it."""
        fed = self.deployment.inputs.dummy_federation()
        shared = make_shared_context(self.deployment, self.model, fed, self.sizes, self.deployment.num_rounds, 1.0)
        return choose_num_threads(measure_step_cost(self.model.eval_mode, self.params, shared))

    @torch.no_grad()
    def add_members(self, newcomers: Sequence[Member]) -> None:
        """Add clients that join after the start and grow the server's state."""
        members = [*self.members, *(replace(member, joined=self.rounds_done) for member in newcomers)]
        setup = _setup(self.deployment, self.model, self.params, members)
        self.state = self.method.grow_server(self.state, setup, len(self.members))
        self.initial_state, self.sizes, self.members = self.method.init_server(setup), setup.sizes, members

    def train_clients(
        self, round_state: RoundState, number: int, clients: list[int], sent: Tree
    ) -> ClientResults | None:
        messages = {client: take(sent, position) for position, client in enumerate(clients)}
        pending = self._send(
            "train", {c: (self._fields(c, number), message) for c, message in messages.items()}, number
        )
        expected = dummy_upload(  # computed while the clients train
            self.deployment, self.model, self.params, self.sizes, number, repeat(messages[clients[0]], 1)
        )
        uploads: dict[int, Tree] = {}
        max_bytes = packed_size(expected) + _SLACK_BYTES
        for client, reply in self._replies(pending, max_bytes):
            try:
                upload = self._read_reply(client, reply, number, max_bytes)[1]
                self._check_upload(client, upload, repeat(messages[client], 1), expected, number)
                uploads[client] = upload
            except FedTailorError as error:
                round_state.failures[client] = ClientFailure(str(error))
            except NoReplyError as error:
                round_state.missed[client] = str(error)
        replied = uploads.keys() | round_state.failures.keys() | round_state.missed.keys()
        round_state.missed |= {client: "late" for client in clients if client not in replied}
        delivered = [client for client in clients if client in uploads]
        if not delivered:
            return None
        self.noise_seed = secrets.token_bytes(32)  # the same noise must never be added to two different uploads
        absent = round_state.missed.keys() | round_state.failures.keys()
        return ClientResults(
            delivered, drop_rows(absent, clients, sent), stack([uploads[client] for client in delivered])
        )

    def check_round(self, round_state: RoundState, number: int, clients: Sequence[int]) -> None:
        if len(round_state.clients) < min(self.min_clients, len(clients)):
            reasons = {self.members[c].name: failure.reason for c, failure in round_state.failures.items()}
            reasons |= {self.members[c].name: reason for c, reason in round_state.missed.items()}
            listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
            raise TooFewClientsError(
                f"In round {number}, {len(round_state.clients)} of {len(clients)} clients delivered ({listed})."
            )
        super().check_round(round_state, number, clients)

    def commit(self, round_state: RoundState) -> None:
        super().commit(round_state)
        self.last_counted |= dict.fromkeys(round_state.clients, self.rounds_done)

    def evaluate(self, last: bool, clients: Sequence[int] | None = None) -> tuple[dict[str, Values], dict[int, str]]:
        """Evaluate both moments of all clients, or of `clients`, as far as they are online.

        Return the values by their names in the record, and the clients that did not reply with the reason.
        """
        online, following = set(self.mailbox.online()), self.rounds_done + 1
        wanted = range(len(self.members)) if clients is None else clients
        available = [client for client in wanted if self.members[client].name in online]
        values: dict[str, Values] = {}
        missing = {client: "it is offline" for client in wanted if client not in available}
        if not available:
            return values, missing
        messages = {
            client: (self._fields(client, following) | {"last": last}, self._serve(client, following))
            for client in available
        }
        missing |= dict.fromkeys(available, "late")
        for client, reply in self._replies(self._send("evaluate", messages, following)):
            try:
                fields, _ = self._read_reply(client, reply, following, 0)
                for name, value in _read_scores(fields, self._score_names).items():
                    values.setdefault(name, {})[client] = value
                del missing[client]
            except (FedTailorError, NoReplyError) as error:
                missing[client] = str(error)
        return values, missing

    @torch.no_grad()
    def _serve(self, client: int, number: int) -> Tree:
        """Return the message from which a client builds its `received` model.

        It is computed for one client at a time, as in a simulation, because results may depend on that.
        """
        return take(mask_absent_rows(self.method.serve(self.state, [client], number)), 0)

    @property
    def _score_names(self) -> set[str]:
        """The names of the values that a client may report."""
        names = ("loss", "validation", *self.model.metrics)
        return {"loss"} | {f"{name}_{moment}" for name in names for moment in MOMENTS}

    def _fields(self, client: int, number: int) -> dict[str, Any]:
        participation = self.deployment.participation
        if isinstance(participation, (tuple, list)):
            participation = sum(participation) / 2
        return {
            "name": self.members[client].name,
            "version": VERSION,
            "digest": deployment_digest(self.deployment),
            "run": self.run,
            "index": client,
            "round": number,
            "rounds": self.deployment.num_rounds,
            "sizes": self.sizes.tolist(),
            "participation": participation,
            "last_counted": self.last_counted.get(client, 0),
            "joined": self.members[client].joined,
        }

    def _send(self, kind: str, messages: Mapping[int, tuple[dict[str, Any], Tree]], number: int) -> SentMessages:
        contents = {self.members[client].name: to_record(*message) for client, message in messages.items()}
        return self.mailbox.send(kind, contents, self.deployment.deadline, str(number))

    def _replies(self, sent: SentMessages, max_bytes: int = 0) -> Iterator[tuple[int, RecordDict | NoReplyError]]:
        indices = {member.name: client for client, member in enumerate(self.members)}
        for name, reply in self.mailbox.replies(sent, max_bytes):
            yield indices[name], reply

    def _read_reply(
        self, client: int, reply: RecordDict | NoReplyError, number: int, max_bytes: int
    ) -> tuple[dict[str, Any], Tree]:
        """Return the fields and the tree of a reply if it is from this client and for this round."""
        fields, tree = read_reply(reply, self.members[client].name, max_bytes)
        if fields.get("run") != self.run or fields.get("round") != number:
            raise DeployError("its reply is for another round")
        return fields, tree

    def _check_upload(self, client: int, upload: Tree, sent: Tree, expected: Tree, number: int) -> None:
        """Raise an error unless the upload has the expected structure and can be decoded to finite values."""
        stacked = repeat(upload, 1)
        signature, wanted = tree_signature({"upload": stacked}), tree_signature({"upload": expected})
        if signature != wanted:
            raise DeployError(describe_difference(signature, wanted, reference="expected"))
        if (path := self.channel.find_mismatch(stacked, sent)) is not None:
            raise DeployError(f"its upload '{path}' cannot be decoded")
        decoded = self.channel.decode(stacked, sent, [client], number, self.noise_seed)
        for failure in find_non_finite([client], {"upload": mask_absent_rows(decoded)}).values():
            raise DeployError(failure.reason)


def query_candidates(
    mailbox: Mailbox, deployment: Deployment, names: Sequence[str], num_members: int
) -> tuple[list[Member], dict[str, str]]:
    """Query clients that want to join; return those that can, and those that cannot with the reason."""
    candidates, rejected = list(names), dict[str, str]()
    while candidates:
        contents = {name: to_record({"index": num_members + place}) for place, name in enumerate(candidates)}
        found: dict[str, Member] = {}
        silent = dict.fromkeys(candidates, "it did not reply")
        for name, reply in mailbox.replies(mailbox.send("query", contents, _QUERY_TIMEOUT)):
            try:
                found[name] = _read_member(name, reply, deployment_digest(deployment))
            except (FedTailorError, NoReplyError) as error:
                rejected[name] = str(error)
            del silent[name]
        rejected |= silent
        if len(found) == len(candidates):
            return [found[name] for name in candidates], rejected
        candidates = [name for name in candidates if name in found]  # their indices change, so query them again
    return [], rejected


def read_reply(reply: RecordDict | NoReplyError, name: str, max_bytes: int) -> tuple[dict[str, Any], Tree]:
    """Return the fields and the tree of a client's reply; raise an error if it reports one or uses another name."""
    if isinstance(reply, NoReplyError):
        raise reply
    fields, tree = from_record(reply, max_bytes)
    if fields.get("name") != name:
        raise DeployError("it replied in another client's name")
    if (error := fields.get("error")) is not None:
        raise DeployError(f"it reported: {sanitize(str(error))}")
    return fields, tree


def _read_member(name: str, reply: RecordDict | NoReplyError, digest: str) -> Member:
    fields, _ = read_reply(reply, name, 0)
    if fields.get("digest") != digest:
        raise DeployError("its bundle has other training settings than the server; send it a new bundle")
    if fields.get("version") != VERSION:
        raise DeployError(f"its version of FedTailor differs from the server's, {VERSION}")
    sizes: dict[str, Any] = {part: fields.get(part) for part in ("train", "validation", "test")}
    if not all(type(size) is int and 0 <= size < _MAX_SAMPLES for size in sizes.values()) or not sizes["train"]:
        raise DeployError("its reply does not contain valid numbers of samples")
    return Member(name, **sizes)


def _read_scores(fields: Mapping[str, Any], names: set[str]) -> dict[str, float]:
    scores = fields.get("scores")
    if not isinstance(scores, dict) or not scores.keys() <= names:
        raise DeployError("it does not report the expected scores")
    if not all(value is None or isinstance(value, (int, float)) for value in scores.values()):
        raise DeployError("its scores contain non-numeric values")
    return {name: float("nan") if value is None else float(value) for name, value in scores.items()}


def _setup(deployment: Deployment, model: Any, params: Params, members: Sequence[Member]) -> Setup:
    sizes = torch.tensor([member.train for member in members], device=next(iter(params.values())).device)
    return Setup(model, params, len(members), sizes, deployment.num_rounds, deployment.seed)
