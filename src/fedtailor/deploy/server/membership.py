"""The members of a deployed run: which clients take part, which may not join, and the status of the run."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedtailor.core.trees import Tree
from fedtailor.core.untrusted_input import sanitize
from fedtailor.deploy.messages import DivergedError, from_record, to_record
from fedtailor.deploy.server.mailbox import Mailbox, NoReplyError
from fedtailor.deploy.server.operator_folder import read_status, write_status
from fedtailor.deploy.server.suspension import active_clients
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, deployment_digest
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_POLL_INTERVAL = 1.0  # seconds between checks for online clients
_RETRY_INTERVAL = 120.0  # seconds before a client that was rejected, or did not reply, is queried again
_QUERY_TIMEOUT = 120.0  # seconds to reply to a query, which involves no training
_MAX_SAMPLES = 2**40
_PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Member:
    """A client that takes part in the run; its position in the list of members is its index."""

    name: str
    train: int
    validation: int
    test: int
    joined: int = 0  # number of rounds before it joined
    joining: str = ""  # of a client that joined late: after a rollback, it joins again with another one

    def find_changes(self, samples: Any) -> str | None:
        """Return how the numbers of samples in a reply differ from those with which the client joined, or None."""
        if not isinstance(samples, dict) or samples.keys() != set(_PARTS):
            raise DeployError("its reply does not contain its numbers of samples")
        changes = [(part, samples[part], getattr(self, part)) for part in _PARTS]
        changed = [f"{now} {part} samples instead of {before}" for part, now, before in changes if now != before]
        return f"it now has {', '.join(changed)}" if changed else None


@dataclass(eq=False)
class Membership:
    """The members of a run, and the clients that were rejected."""

    folder: Path  # of the operator
    deployment: Deployment
    mailbox: Mailbox
    members: list[Member] = field(default_factory=list)
    rounds_done: int = 0
    totals: dict[str, Any] = field(default_factory=dict)  # see `add_round`
    not_counted: dict[str, str] = field(default_factory=dict)  # clients whose last round did not count -> reason
    warnings: dict[str, str] = field(default_factory=dict)  # clients that were suspicious in the last round -> reason
    _rejected: dict[str, str] = field(default_factory=dict)  # clients that may not join -> reason
    _rejected_at: dict[str, float] = field(default_factory=dict)

    @property
    def min_clients(self) -> int:
        """The number of clients that a round needs."""
        num_clients = len(active_clients(self.folder))
        return min(self.deployment.min_clients or num_clients, max(num_clients, 1))

    def online(self) -> list[int]:
        """Return the members that are online."""
        names = set(self.mailbox.online())
        return [client for client, member in enumerate(self.members) if member.name in names]

    def wait_for_start(self) -> None:
        """Wait until enough clients can join, and make them the members; the order of their arrival does not matter."""
        while len(self.members) < self.min_clients:
            self._report_waiting(self.mailbox.online())
            if len(self._candidates()) >= self.min_clients:
                self.members = self.query_candidates()
            if len(self.members) < self.min_clients:
                self.members = []
                self.mailbox.sleep(_POLL_INTERVAL)

    def wait_for_members(self) -> list[int]:
        """Wait until enough members are online, and return them."""
        while len(online := self.online()) < min(self.min_clients, len(self.members)):
            self._report_waiting([self.members[client].name for client in online])
            self.mailbox.sleep(_POLL_INTERVAL)
        return online

    def wait_for_return(self, missing: Mapping[int, str]) -> None:
        """Wait up to the deadline for missing members to come back, unless they have left or are suspended."""
        awaited = {self.members[client].name for client in missing} & set(active_clients(self.folder))
        deadline = self.mailbox.clock() + self.deployment.deadline
        while not awaited <= set(self.mailbox.online()) and self.mailbox.clock() < deadline:
            self.write_status("waiting", reason=f"for the last evaluation of {', '.join(sorted(awaited))}")
            self.mailbox.sleep(_POLL_INTERVAL)

    def query_candidates(self) -> list[Member]:
        """Query the clients that want to join; return those that can, and reject the others."""
        candidates = self._candidates()
        self._rejected = {name: reason for name, reason in self._rejected.items() if name in self._rejected_at}
        while candidates:
            found, rejected = self._query(candidates)
            self.reject(rejected)
            if not rejected:
                return [found[name] for name in candidates]
            candidates = [name for name in candidates if name in found]  # their indices change, so query them again
        return []

    def reject(self, rejected: Mapping[str, str]) -> None:
        """Remember clients that cannot join, with the reason."""
        self._rejected |= rejected
        self._rejected_at |= dict.fromkeys(rejected, self.mailbox.clock())
        for name, reason in rejected.items():
            log.warning("%s cannot join: %s.", name, reason.rstrip("."))

    def write_status(self, state: str, **fields: Any) -> None:
        """Write the status of the run, for `fedtailor deploy status`."""
        names = [member.name for member in self.members]
        progress = {"round": self.rounds_done, "rounds": self.deployment.num_rounds, "members": names}
        progress |= {"pid": os.getpid(), **self.totals}
        progress |= {"rejected": self._rejected, "last_round": self.not_counted, "warnings": self.warnings}
        write_status(self.folder, {"state": state, "at": time.time(), **progress, **fields})

    def report_problem(self, client: int, reason: str) -> None:
        """Show in the status that a client's work in this round does not count, before the round ends."""
        status = read_status(self.folder)
        problems = status.get("this_round", {}) | {self.members[client].name: reason}
        write_status(self.folder, status | {"this_round": problems})

    def _candidates(self) -> list[str]:
        """Return the clients that are online and not members.

        A rejected client becomes a candidate again only after a while or when it reconnects. Otherwise, the others
        would wait for its reply in every round.
        """
        online, now = self.mailbox.online(), self.mailbox.clock()
        self._rejected_at = {n: at for n, at in self._rejected_at.items() if n in online and now < at + _RETRY_INTERVAL}
        excluded = {member.name for member in self.members} | self._rejected_at.keys()
        return [name for name in online if name not in excluded]

    def _query(self, names: Sequence[str]) -> tuple[dict[str, Member], dict[str, str]]:
        """Query clients; return those that can join by name, and those that cannot with the reason."""
        first = len(self.members)
        contents = {name: to_record({"index": first + place}) for place, name in enumerate(names)}
        found, rejected = dict[str, Member](), dict.fromkeys(names, "it did not reply")
        for name, reply in self.mailbox.replies(self.mailbox.send("query", contents, _QUERY_TIMEOUT)):
            try:
                found[name] = _read_member(name, reply, deployment_digest(self.deployment))
                del rejected[name]
            except (FedTailorError, NoReplyError) as error:
                rejected[name] = str(error)
        return found, rejected

    def _report_waiting(self, online: Sequence[str]) -> None:
        rejected = "".join(f"; {name} cannot join: {reason.rstrip('.')}" for name, reason in self._rejected.items())
        reason = f"for {self.min_clients} clients; online: {', '.join(online) or 'none'}{rejected}"
        self.write_status("waiting", reason=reason)


def read_reply(reply: RecordDict | NoReplyError, name: str, max_bytes: int) -> tuple[dict[str, Any], Tree]:
    """Return the fields and the tree of a client's reply; raise an error if it reports one or uses another name."""
    if isinstance(reply, NoReplyError):
        raise reply
    fields, tree = from_record(reply, max_bytes)
    if fields.get("name") != name:
        raise DeployError("it replied in another client's name")
    if (error := fields.get("error")) is not None:
        kind = DivergedError if fields.get("diverged") is True else DeployError
        raise kind(f"it reported: {sanitize(str(error))}")
    return fields, tree


def _read_member(name: str, reply: RecordDict | NoReplyError, digest: str) -> Member:
    fields, _ = read_reply(reply, name, 0)
    if fields.get("digest") != digest:
        raise DeployError("its bundle has other training settings than the server; send it a new bundle")
    if fields.get("version") != VERSION:
        raise DeployError(f"its version of FedTailor differs from the server's, {VERSION}")
    sizes: dict[str, Any] = {part: fields.get(part) for part in _PARTS}
    if not all(type(size) is int and 0 <= size < _MAX_SAMPLES for size in sizes.values()) or not sizes["train"]:
        raise DeployError("its reply does not contain valid numbers of samples")
    return Member(name, **sizes)
