"""A federation in one process: Flower's messages and apps, a grid that delivers them at once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedtailor.deploy.client_app import app
from fedtailor.deploy.conduct import conduct
from fedtailor.deploy.folder import enrol, enrolled
from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.post import Post
from fedtailor.deploy.settings import make_deployment, write_deployment
from fedtailor.deploy.site import Site
from fedtailor.deploy.trial import save_client
from fedtailor.federation import Federation

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a process that Flower starts
Tamper = Callable[[str, Message, Message], Message | None]


@dataclass
class Grid:
    """Delivers a message the moment it is pushed; `tamper` may change or lose what a client answers."""

    sites: Mapping[int, Path]
    monkeypatch: pytest.MonkeyPatch
    tamper: Tamper = lambda name, message, reply: reply
    away: set[str] = field(default_factory=set)
    replies: dict[str, Message] = field(default_factory=dict)
    crossed: list[Message] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return [node for node, site in self.sites.items() if site.name not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            metadata = message.metadata
            metadata.__dict__["_message_id"] = number = f"message-{len(self.crossed)}"
            site = self.sites[metadata.dst_node_id]
            self.monkeypatch.setenv("FEDTAILOR_SITE", str(site))
            context = Context(run_id=1, node_id=metadata.dst_node_id, node_config={}, state=RecordDict(), run_config={})
            reply = self.tamper(site.name, message, app(message, context))
            self.crossed.append(message)
            if reply is not None:
                self.crossed.append(reply)
                self.replies[number] = reply
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]


@dataclass
class Clock:
    """Time that passes only while somebody waits."""

    now: float = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


@dataclass
class Federated:
    """An operator's folder and its clients' folders."""

    folder: Path
    sites: dict[str, Path]
    grid: Grid

    def conduct(self) -> None:
        clock = Clock()
        conduct(self.folder, Post(self.grid, self.folder, clock.pass_by, clock.read))  # type: ignore[arg-type]


def federate(folder: Path, fed: Federation, settings: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Federated:
    """A federation of these clients, enrolled and with their data on their own disks."""
    assert fed.shape is not None
    inputs = {"shape": list(fed.shape), "classes": fed.classes or 0}
    deployment = make_deployment({"deadline": 60, "retry": 0, "inputs": inputs, **settings})
    operator = folder / "operator"
    write_deployment(operator, deployment)
    sites = join(operator, fed, fed.names)
    grid = Grid({about.node: sites[name] for name, about in enrolled(operator).items() if about.node}, monkeypatch)
    return Federated(operator, sites, grid)


def join(operator: Path, fed: Federation, names: Iterable[str]) -> dict[str, Path]:
    """Enrol clients; what Flower would do, give them numbers, is done here."""
    names, before = list(names), len(enrolled(operator))
    make_keys(operator, names)
    about = enrolled(operator)
    enrol(operator, {name: replace(about[name], node=100 + before + i) for i, name in enumerate(names)})
    return {name: _site(operator, name, fed) for name in names}


def _site(operator: Path, name: str, fed: Federation) -> Path:
    client = fed.names.index(name)
    site = operator.parent / name
    open_bundle(operator / "bundles" / f"{name}.tar", site / "bundle")
    save_client(site / "data.npz", fed, client)
    Site.begin(site, site / "data.npz", device="cpu")
    return site
