"""Rounds whose clients are real: the server's side. It knows what a client may send, and takes nothing else."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import RecordDict

from fedtailor.deploy.example import example_upload
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.post import Lost, Post, Sent
from fedtailor.deploy.settings import Deployment, digest
from fedtailor.errors import Refused
from fedtailor.faults import Failure, difference, kinds_of, not_finite
from fedtailor.lines import Values
from fedtailor.loop import Arrived, Loop
from fedtailor.method import Setup
from fedtailor.packing import packed_size
from fedtailor.run import MOMENTS
from fedtailor.trees import Params, Tree, repeat, stack, take
from fedtailor.trial import effort_of, useful_threads
from fedtailor.turn import Turn, without
from fedtailor.untrusted import quoted
from fedtailor.version import VERSION
from fedtailor.wire import deliver
from fedtailor.work import common_of, start_of

_SLACK = 2**16  # bytes of names and outline that a client's version may write otherwise
_ASKING = 120.0  # seconds to answer a question that takes no training
_LARGEST_SIZE = 2**40  # samples


@dataclass(frozen=True)
class Member:
    """A client that takes part in the run; its place in the list is its number."""

    name: str
    train: int
    validation: int
    test: int
    joined: int = 0  # how many rounds there were before it


class TooFew(Refused):
    """A round that does not count, for fewer than `min_clients` delivered."""


@dataclass(eq=False, kw_only=True)
class Remote(Loop):
    """A run whose clients are on machines of their own."""

    deployment: Deployment
    params: Params
    post: Post
    run: str  # its name, by which clients keep what belongs to it apart
    min_clients: int
    members: list[Member] = field(default_factory=list)
    counted: dict[int, int] = field(default_factory=dict)  # client -> the last round of it that counts

    @classmethod
    @torch.no_grad()
    def build(
        cls, deployment: Deployment, post: Post, run: str, min_clients: int, members: Sequence[Member]
    ) -> "Remote":
        """The server before round 1, among these clients."""
        model, params = start_of(deployment.model(), deployment)
        setup = _setup(deployment, model, params, members)
        server = deployment.method.init_server(setup)
        return cls(
            method=deployment.method, model=model, sizes=setup.sizes, start=server, server=server,
            noise_seed=secrets.token_bytes(32), channel=deployment.channel, max_failures=deployment.max_failures,
            deployment=deployment, params=params, post=post, run=run, min_clients=min_clients, members=list(members),
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """Of torch, as a simulation of the same would have them: bits may depend on that."""
        fed = self.deployment.inputs.examples()
        common = common_of(self.deployment, self.model, fed, self.sizes, self.deployment.length, 1.0)
        return useful_threads(effort_of(self.model.serving, self.params, common))

    @torch.no_grad()
    def welcome(self, newcomers: Sequence[Member]) -> None:
        """Make room for clients that join late."""
        members = [*self.members, *(replace(member, joined=self.done) for member in newcomers)]
        setup = _setup(self.deployment, self.model, self.params, members)
        self.server = self.method.welcome(self.server, setup, len(self.members))
        self.start, self.sizes, self.members = self.method.init_server(setup), setup.sizes, members

    def work(self, turn: Turn, number: int, clients: list[int], sent: Tree) -> Arrived | None:
        messages = {client: take(sent, position) for position, client in enumerate(clients)}
        on_their_way = self._send("train", {c: (self._words(c, number), own) for c, own in messages.items()}, number)
        usual = example_upload(
            self.deployment, self.model, self.params, self.sizes, number, repeat(messages[clients[0]], 1)
        )  # while they work
        uploads: dict[int, Tree] = {}
        most = packed_size(usual) + _SLACK
        for client, answer in self._answers(on_their_way, most):
            try:
                tree = self._read(client, answer, number, most)[1]
                uploads[client] = self._checked(client, tree, repeat(messages[client], 1), usual, number)
            except Refused as refusal:
                turn.failures[client] = Failure(str(refusal))
            except Lost as lost:
                turn.missed[client] = str(lost)
        heard = uploads.keys() | turn.failures.keys() | turn.missed.keys()
        turn.missed |= {client: "late" for client in clients if client not in heard}
        here = [client for client in clients if client in uploads]
        if not here:
            return None
        self.noise_seed = secrets.token_bytes(32)  # never twice the same noise on different uploads
        gone = turn.missed.keys() | turn.failures.keys()
        return Arrived(here, without(gone, clients, sent), stack([uploads[client] for client in here]))

    def check(self, turn: Turn, number: int, clients: Sequence[int]) -> None:
        if len(turn.clients) < min(self.min_clients, len(clients)):
            why = {self.members[c].name: failure.why for c, failure in turn.failures.items()}
            why |= {self.members[c].name: reason for c, reason in turn.missed.items()}
            said = "; ".join(f"{name}: {reason}" for name, reason in list(why.items())[:5])
            raise TooFew(f"In round {number} {len(turn.clients)} of {len(clients)} clients delivered ({said}).")
        super().check(turn, number, clients)

    def keep(self, turn: Turn) -> None:
        super().keep(turn)
        self.counted |= dict.fromkeys(turn.clients, self.done)

    def evaluate(self, last: bool, clients: Sequence[int] | None = None) -> tuple[dict[str, Values], dict[int, str]]:
        """Both moments of everyone, or of these clients, who is there, by their names in the record; and who did not
        answer, and why."""
        online, following = set(self.post.online()), self.done + 1
        wanted = range(len(self.members)) if clients is None else clients
        there = [client for client in wanted if self.members[client].name in online]
        values: dict[str, Values] = {}
        missing = {client: "it was not there" for client in wanted if client not in there}
        if not there:
            return values, missing
        words = {client: self._words(client, following) | {"last": last} for client in there}
        asked = {client: (words[client], self._served(client, following)) for client in there}
        missing |= dict.fromkeys(there, "late")
        for client, answer in self._answers(self._send("evaluate", asked, following)):
            try:
                for name, value in _scores(self._read(client, answer, following, 0)[0], self._names).items():
                    values.setdefault(name, {})[client] = value
                del missing[client]
            except (Refused, Lost) as problem:
                missing[client] = str(problem)
        return values, missing

    @torch.no_grad()
    def _served(self, client: int, number: int) -> Tree:
        """What one client gets to use; by itself, as a simulation makes its model, for bits may depend on that."""
        return take(deliver(self.method.serve(self.server, [client], number)), 0)

    @property
    def _names(self) -> set[str]:
        """Of the numbers that a client may report."""
        numbers = ("loss", "validation", *self.model.metrics)
        return {"loss"} | {f"{name}_{moment}" for name in numbers for moment in MOMENTS}

    def _words(self, client: int, number: int) -> dict[str, Any]:
        share = self.deployment.participation
        return {
            "name": self.members[client].name,
            "version": VERSION,
            "digest": digest(self.deployment),
            "run": self.run,
            "index": client,
            "round": number,
            "rounds": self.deployment.length,
            "sizes": self.sizes.tolist(),
            "participation": sum(share) / 2 if isinstance(share, (tuple, list)) else share,
            "counted": self.counted.get(client, 0),
            "joined": self.members[client].joined,
        }

    def _send(self, kind: str, messages: Mapping[int, tuple[dict[str, Any], Tree]], number: int) -> Sent:
        contents = {self.members[client].name: to_record(*message) for client, message in messages.items()}
        return self.post.send(kind, contents, self.deployment.deadline, str(number))

    def _answers(self, sent: Sent, most: int = 0) -> Iterator[tuple[int, RecordDict | Lost]]:
        numbers = {member.name: client for client, member in enumerate(self.members)}
        for name, answer in self.post.answers(sent, most):
            yield numbers[name], answer

    def _read(self, client: int, answer: RecordDict | Lost, number: int, most: int) -> tuple[dict[str, Any], Tree]:
        """An answer, if it is this client's to this round."""
        words, tree = read_answer(answer, self.members[client].name, most)
        if words.get("run") != self.run or words.get("round") != number:
            raise Refused("it answered another round")
        return words, tree

    def _checked(self, client: int, tree: Tree, sent: Tree, usual: Tree, number: int) -> Tree:
        """An upload, if it is what a client can have made of this message."""
        stacked = repeat(tree, 1)
        own, wanted = kinds_of({"upload": stacked}), kinds_of({"upload": usual})
        if own != wanted:
            raise Refused(difference(own, wanted).replace("others' is", "it must be"))
        if (path := self.channel.misfit(stacked, sent)) is not None:
            raise Refused(f"its upload '{path}' is coded in a way that cannot be read")
        decoded = self.channel.decode(stacked, sent, [client], number, self.noise_seed)
        for failure in not_finite([client], {"upload": deliver(decoded)}).values():
            raise Refused(failure.why)
        return tree


def ask_to_join(
    post: Post, deployment: Deployment, names: Sequence[str], before: int
) -> tuple[list[Member], dict[str, str]]:
    """Of these clients, those who can join `before` others; and who cannot, and why."""
    candidates, refused = list(names), dict[str, str]()
    while candidates:
        contents = {name: to_record({"index": before + place}) for place, name in enumerate(candidates)}
        found: dict[str, Member] = {}
        silent = dict.fromkeys(candidates, "it did not answer")
        for name, answer in post.answers(post.send("query", contents, _ASKING)):
            try:
                found[name] = _member(name, answer, digest(deployment))
            except (Refused, Lost) as problem:
                refused[name] = str(problem)
            del silent[name]
        refused |= silent
        if len(found) == len(candidates):
            return [found[name] for name in candidates], refused
        candidates = [name for name in candidates if name in found]  # their numbers changed: ask again
    return [], refused


def read_answer(answer: RecordDict | Lost, name: str, most: int) -> tuple[dict[str, Any], Tree]:
    """What a client answered, if it speaks for itself and did not refuse."""
    if isinstance(answer, Lost):
        raise answer
    words, tree = from_record(answer, most)
    if words.get("name") != name:
        raise Refused("it answered in another client's name")
    if (why := words.get("refused")) is not None:
        raise Refused(f"it refused: {quoted(str(why))}")
    return words, tree


def _member(name: str, answer: RecordDict | Lost, wanted: str) -> Member:
    words, _ = read_answer(answer, name, 0)
    if words.get("digest") != wanted:
        raise Refused("its bundle is for another method, network or data; give it a new one")
    if words.get("version") != VERSION:
        raise Refused(f"it has another version of FedTailor than the server, which has {VERSION}")
    sizes: dict[str, Any] = {kind: words.get(kind) for kind in ("train", "validation", "test")}
    if not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in sizes.values()) or not sizes["train"]:
        raise Refused("it does not say how many samples it has")
    return Member(name, **sizes)


def _scores(words: Mapping[str, Any], known: set[str]) -> dict[str, float]:
    found = words.get("scores")
    if not isinstance(found, dict) or not found.keys() <= known:
        raise Refused("it does not report what was asked")
    if not all(value is None or isinstance(value, (int, float)) for value in found.values()):
        raise Refused("it reports something else than numbers")
    return {name: float("nan") if value is None else float(value) for name, value in found.items()}


def _setup(deployment: Deployment, model: Any, params: Params, members: Sequence[Member]) -> Setup:
    sizes = torch.tensor([member.train for member in members], device=next(iter(params.values())).device)
    return Setup(model, params, len(members), sizes, deployment.length, deployment.seed)
