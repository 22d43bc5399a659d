"""Deployed clients: messages to them over Flower, and validation of their replies."""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from flwr.app import RecordDict

from fedtailor.core.method import Setup
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, repeat, stack, take
from fedtailor.deploy.dummy_client import dummy_upload
from fedtailor.deploy.messages import DivergedError, to_record
from fedtailor.deploy.server.mailbox import NoReplyError, SentMessages
from fedtailor.deploy.server.membership import Member, Membership, read_reply
from fedtailor.deploy.server.outliers import find_outliers, update_norms
from fedtailor.deploy.server.suspension import active_clients, count_problems
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, deployment_digest
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.records import GLOBAL, TRAIN, Values, update_values
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.serialization import packed_size
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_failures import (
    ClientFailure,
    Signature,
    describe_difference,
    find_non_finite,
    tree_signature,
)
from fedtailor.training.client_update import make_shared_context
from fedtailor.training.clients import Evaluation
from fedtailor.training.participation import sample_clients
from fedtailor.training.preflight import choose_num_threads, measure_step_cost
from fedtailor.training.round_state import ClientResults, RoundState, drop_rows
from fedtailor.training.server import Server
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_LARGEST = torch.finfo(torch.float32).max  # of a score that has no maximum, so that means over clients are finite
_ROUNDING = 1e-6  # by which a score may exceed its range
_SLACK_BYTES = 2**16  # for names and outline, which another version on the client may write differently


@dataclass(eq=False)
class FlowerClients:
    """The clients of a run on other machines; every upload is validated before use."""

    membership: Membership
    model: Model
    params: Params
    run: str  # ID of the run, under which clients save their state
    on_join: Callable[[], None]  # called after clients have joined
    last_counted: dict[int, int] = field(default_factory=dict)  # client -> its last round that counts
    _selected: list[int] = field(default_factory=list)  # clients of the round
    _norms: dict[int, dict[str, float]] = field(default_factory=dict)  # of the uploads of the round, see `update_norms`
    _expected: dict[tuple[Signature, int, bool], Tree] = field(default_factory=dict)  # see `_expected_upload`

    @property
    def deployment(self) -> Deployment:
        return self.membership.deployment

    @property
    def members(self) -> list[Member]:
        return self.membership.members

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def sizes(self) -> dict[str, list[int]]:
        return {part: [getattr(m, part) for m in self.members] for part in ("train", "validation", "test")}

    @property
    def min_clients(self) -> int:
        return self.membership.min_clients

    @cached_property
    def threads(self) -> int:
        """The number of torch threads that a simulation of this run would use; results may depend on it."""
        fed, rounds = self.deployment.dummy_federation(), self.deployment.num_rounds
        shared = make_shared_context(self.deployment, self.model, fed, self.setup().sizes, rounds, 1.0)
        return choose_num_threads(measure_step_cost(self.model.eval_mode, self.params, shared))

    def setup(self) -> Setup:
        """Return the setup of the current members."""
        sizes = next(iter(self.params.values())).new_tensor(self.sizes["train"], dtype=torch.int64)
        return Setup(self.model, self.params, len(sizes), sizes, self.deployment.num_rounds, self.deployment.seed)

    def close(self) -> None:
        """Do nothing: the clients are processes of their own."""

    def select(self, server: Server, number: int, attempt: int) -> tuple[list[int], dict[int, str]]:
        """Let clients join, wait until enough members are online, and sample the clients of a round from them."""
        deployment = self.deployment
        self._add_newcomers(server)
        online = self.membership.wait_for_members()
        participation = 1.0 if server.method.trains_every_round else deployment.participation
        clients = sample_clients(online, len(self.members), participation, number, deployment.seed)
        selected = [self.members[client].name for client in clients]
        self._selected, self._norms = clients, {}
        self.membership.write_status("running", attempt=attempt + 1, selected=selected)
        return clients, {}

    def _add_newcomers(self, server: Server) -> None:
        """Add the clients that are online and not yet part of the run, and grow the server's state."""
        membership, before = self.membership, list(self.members)
        joining = {"joined": server.rounds_done, "joining": secrets.token_hex(4)}
        newcomers = [replace(member, **joining) for member in membership.query_candidates()]  # type: ignore[arg-type]
        if not newcomers:
            return
        try:
            membership.members = [*before, *newcomers]
            server.grow(self.setup())
        except FedTailorError as error:  # some methods need all clients from the start
            membership.members = before
            membership.reject({member.name: str(error) for member in newcomers})
            return
        self.__dict__.pop("threads", None)  # the batch size depends on the members
        self.on_join()
        log.info("Joined: %s.", ", ".join(member.name for member in newcomers))

    def train(self, round_state: RoundState, number: int, clients: list[int], sent: Tree) -> ClientResults | None:
        """Send the messages to the clients and return the valid uploads that arrive before the deadline."""
        messages = {client: take(sent, position) for position, client in enumerate(clients)}
        pending = self._send(
            "train", {c: (self._fields(c, number), message) for c, message in messages.items()}, number
        )
        expected = self._expected_upload(number, repeat(messages[clients[0]], 1))  # computed while the clients train
        uploads: dict[int, Tree] = {}
        max_bytes = packed_size(expected) + _SLACK_BYTES
        for client, reply in self._replies(pending, max_bytes):
            try:
                fields, upload = self._read_reply(client, reply, number, max_bytes)
                if changes := self.members[client].find_changes(fields.get("samples")):
                    round_state.warnings[client] = changes
                self._norms[client] = self._check_upload(client, upload, messages[client], expected, number)
                uploads[client] = upload
            except FedTailorError as error:
                round_state.failures[client] = ClientFailure(str(error), diverged=isinstance(error, DivergedError))
                self.membership.report_problem(client, str(error))
            except NoReplyError as error:
                round_state.missed[client] = str(error)
                self.membership.report_problem(client, str(error))
        for client in uploads.keys() - set(self._active()):  # it was suspended after its upload arrived
            del uploads[client], self._norms[client]
            round_state.missed[client] = "it was suspended or has left"
        replied = uploads.keys() | round_state.failures.keys() | round_state.missed.keys()
        round_state.missed |= {client: "late" for client in clients if client not in replied}
        self._judge(round_state)
        delivered = [client for client in clients if client in uploads]
        if not delivered:
            return None
        absent = round_state.missed.keys() | round_state.failures.keys()
        encoded = stack([uploads[client] for client in delivered])
        return ClientResults(delivered, drop_rows(absent, clients, sent), encoded)

    def _active(self) -> list[int]:
        active = active_clients(self.membership.folder)
        return [client for client, member in enumerate(self.members) if member.name in active]

    def _judge(self, round_state: RoundState) -> None:
        """Warn of outliers, and suspend clients with too many problems in a row, once all selected clients are done."""
        problems = round_state.missed | {client: failure.reason for client, failure in round_state.failures.items()}
        if not set(self._selected) <= self._norms.keys() | problems.keys():
            return  # the clients of this method train one after another
        outliers, deployment = find_outliers(self._norms, self.deployment.outlier_factor), self.deployment
        round_state.warnings |= outliers
        by_name = {self.members[client].name: why for client, why in (outliers | problems).items()}
        selected = [self.members[client].name for client in self._selected]
        limits = deployment.suspend_after, deployment.min_clients
        count_problems(self.membership.folder, selected, by_name, *limits)

    def _expected_upload(self, number: int, sent: Tree) -> Tree:
        """Return an upload with the structure that a client must send after this message.

        By the contract of methods, the structure depends only on the structure of the message, the number of clients,
        and whether this is round 1, so a dummy client computes it only if one of these is new.
        """
        key = tree_signature(sent), len(self.members), number == 1
        if key not in self._expected:
            self._expected[key] = dummy_upload(
                self.deployment, self.model, self.params, self.setup().sizes, number, sent
            )
        return self._expected[key]

    def commit(self, round_state: RoundState, number: int) -> None:
        """Remember whose work counts, so that the other clients continue from their state before this round."""
        self.last_counted |= dict.fromkeys(round_state.clients, number)
        absent = round_state.missed | {c: failure.reason for c, failure in round_state.failures.items()}
        self.membership.rounds_done = number
        self.membership.not_counted = {self.members[client].name: reason for client, reason in absent.items()}
        for name, reason in self.membership.not_counted.items():
            log.warning("Round %d: %s does not count: %s.", number, name, reason.rstrip("."))
        self._warn(number, round_state.warnings)
        self.membership.warnings = {self.members[client].name: why for client, why in round_state.warnings.items()}

    def _warn(self, number: int, warnings: Mapping[int, str]) -> None:
        for client, reason in warnings.items():
            log.warning("Round %d: %s is suspicious: %s.", number, self.members[client].name, reason)

    def evaluate(self, server: Server, clients: Sequence[int], outdated: Set[int], is_last: bool) -> Evaluation:
        """Let clients evaluate both moments on their own data, as far as they are online.

        After the last round, the server waits for clients that did not reply, because there is no later evaluation.
        """
        warnings: dict[int, str] = {}
        values, missing = self._evaluate(server, clients, is_last, warnings)
        for _ in range(self.deployment.retry if is_last else 0):
            self.membership.wait_for_return(missing)
            if missing:
                more, missing = self._evaluate(server, list(missing), is_last, warnings)
                update_values(values, more)
        for client, reason in missing.items():
            log.warning("%s is not evaluated: %s.", self.members[client].name, reason.rstrip("."))
        self._warn(server.rounds_done, warnings)
        self.membership.warnings |= {self.members[client].name: why for client, why in warnings.items()}
        values = {name: dict(sorted(by_client.items())) for name, by_client in values.items()}
        return Evaluation(values, warnings=warnings)

    def _evaluate(
        self, server: Server, clients: Sequence[int], is_last: bool, warnings: dict[int, str]
    ) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the values by their names in the record, and the clients that did not reply with the reason."""
        online, following = self.membership.online(), server.rounds_done + 1
        available = [client for client in clients if client in online]
        values: dict[str, Values] = {}
        missing = {client: "late" if client in available else "it is offline" for client in clients}
        # Messages are computed for one client at a time, as in a simulation, because results may depend on that.
        messages = {
            client: (
                self._fields(client, following) | {"last": is_last},
                take(server.serve(server.state, [client], following), 0),
            )
            for client in available
        }
        for client, reply in self._replies(self._send("evaluate", messages, following)):
            try:
                fields, _ = self._read_reply(client, reply, following, 0)
                for name, value in _read_scores(fields, self._score_ranges).items():
                    values.setdefault(name, {})[client] = value
                if changes := self.members[client].find_changes(fields.get("samples")):
                    warnings[client] = changes
                del missing[client]
            except (FedTailorError, NoReplyError) as error:
                missing[client] = str(error)
        return values, missing

    def snapshot(self) -> tuple[dict[str, ClientStates], dict[str, Any]]:
        """Return no states, which stay with the clients, and what the server knows about the clients."""
        members = [asdict(member) for member in self.members]
        remote = {"run": self.run, "members": members, "last_counted": self.last_counted}
        remote |= {"digest": deployment_digest(self.deployment)}
        return {"states": ClientStates({})}, {"chunk_size": None, "remote": remote}

    @property
    def _score_ranges(self) -> dict[str, tuple[float, float]]:
        """The names of the values that a client may report, each with the smallest and largest valid value."""
        metrics = {name: (metric.minimum, metric.maximum) for name, metric in self.model.metrics.items()}
        metrics["loss"] = -math.inf, math.inf
        train = {f"{TRAIN}{name}": found for name, found in metrics.items()} if self.deployment.evaluate_train else {}
        personal = {"validation": metrics[self.model.score]} | metrics | train
        ranges = {f"{name}_{moment}": found for name, found in personal.items() for moment in MOMENTS}
        if self.deployment.evaluate_global:
            ranges |= {f"{GLOBAL}{name}_received": found for name, found in metrics.items()}
        return {"loss": metrics["loss"]} | ranges

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
            "sizes": self.sizes["train"],
            "participation": participation,
            "last_counted": self.last_counted.get(client, 0),
            "joined": self.members[client].joined,
            "joining": self.members[client].joining,
            "keep": self.deployment.keep_checkpoints,
        }

    def _send(self, kind: str, messages: Mapping[int, tuple[dict[str, Any], Tree]], number: int) -> SentMessages:
        contents = {self.members[client].name: to_record(*message) for client, message in messages.items()}
        return self.membership.mailbox.send(kind, contents, self.deployment.deadline, str(number))

    def _replies(self, sent: SentMessages, max_bytes: int = 0) -> Iterator[tuple[int, RecordDict | NoReplyError]]:
        indices = {member.name: client for client, member in enumerate(self.members)}
        for name, reply in self.membership.mailbox.replies(sent, max_bytes):
            yield indices[name], reply

    def _read_reply(
        self, client: int, reply: RecordDict | NoReplyError, number: int, max_bytes: int
    ) -> tuple[dict[str, Any], Tree]:
        """Return the fields and the tree of a reply if it is from this client and for this round."""
        fields, tree = read_reply(reply, self.members[client].name, max_bytes)
        if fields.get("run") != self.run or fields.get("round") != number:
            raise DeployError("its reply is for another round")
        return fields, tree

    def _check_upload(self, client: int, upload: Tree, message: Tree, expected: Tree, number: int) -> dict[str, float]:
        """Return the norms of an upload; raise an error unless it has the expected structure and is finite."""
        stacked, sent, channel = repeat(upload, 1), repeat(message, 1), self.deployment.channel
        signature, wanted = tree_signature({"upload": stacked}), tree_signature({"upload": expected})
        if signature != wanted:
            raise DeployError(describe_difference(signature, wanted, reference="expected"))
        if (path := channel.find_mismatch(stacked, sent)) is not None:
            raise DeployError(f"its upload '{path}' cannot be decoded")
        decoded = mask_absent_rows(channel.decode(stacked, sent, [client], number, secrets.token_bytes(32)))
        for failure in find_non_finite([client], {"upload": decoded}).values():
            raise DivergedError(failure.reason)
        return update_norms(decoded, sent)


def _read_scores(fields: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the scores that a client reports; NaN where it has none. One invalid score would spoil all means."""
    scores = fields.get("scores")
    if not isinstance(scores, dict) or not scores.keys() <= ranges.keys():
        raise DeployError("it does not report the expected scores")
    if not all(value is None or isinstance(value, (int, float)) for value in scores.values()):
        raise DeployError("its scores contain non-numeric values")
    for name, value in scores.items():
        minimum, maximum = (max(-_LARGEST, min(bound, _LARGEST)) for bound in ranges[name])
        if value is not None and not minimum - _ROUNDING <= value <= maximum + _ROUNDING:
            raise DeployError(f"its {name} is not between {minimum:g} and {maximum:g}")
    return {name: float("nan") if value is None else float(value) for name, value in scores.items()}
