"""A federation in one process: Flower's messages and apps, and a grid that delivers messages immediately."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from fedtailor.data.federation import Federation
from fedtailor.deploy.app_bundle import build_app
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.client.worker_process import answer
from fedtailor.deploy.executor import unwrap, wrap
from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.selftest import save_client_data
from fedtailor.deploy.server.coordinator import coordinate
from fedtailor.deploy.server.mailbox import Mailbox
from fedtailor.deploy.server.operator_folder import enroll, enrolled_clients
from fedtailor.experiments.deployment import make_deployment, write_deployment

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
    1,
    1,
    1,
)  # Flower sets these in the processes that it starts
APP = sha256(build_app()).hexdigest()
Tamper = Callable[[str, Message, Message], Message | None]


@dataclass
class Grid:
    """A grid that delivers a message when it is pushed; `tamper` may change or drop a client's reply."""

    folders: Mapping[int, Path]  # node ID -> the client's folder
    tamper: Tamper = lambda name, message, reply: reply
    offline: set[str] = field(default_factory=set)
    replies: dict[str, Message] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return [node_id for node_id, folder in self.folders.items() if folder.name not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        message_ids = []
        for message in messages:
            metadata = message.metadata
            metadata.__dict__["_message_id"] = message_id = f"message-{len(self.messages)}"
            folder = self.folders[metadata.dst_node_id]
            content = wrap(*answer(folder, APP, metadata.message_type, *unwrap(message.content)))
            reply = self.tamper(folder.name, message, Message(content, reply_to=message))
            self.messages.append(message)
            if reply is not None:
                self.messages.append(reply)
                self.replies[message_id] = reply
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(message_id) for message_id in message_ids if message_id in self.replies]


@dataclass
class Clock:
    """A clock that advances only in `sleep`."""

    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


@dataclass
class InProcessFederation:
    """An operator's folder, its clients' folders, and the grid between them."""

    folder: Path
    client_folders: dict[str, Path]
    grid: Grid

    def run(self) -> float:
        """Run to the end, and return the seconds for which the server waited."""
        clock = Clock()
        coordinate(self.folder, Mailbox(self.grid, self.folder, clock.sleep, clock.read))  # type: ignore[arg-type]
        return clock.now


def federate(folder: Path, fed: Federation, settings: Mapping[str, Any]) -> InProcessFederation:
    """Create a federation of enrolled clients, each with a folder that contains its data."""
    assert fed.shape is not None
    inputs: dict[str, Any] = {"shape": list(fed.shape), "classes": fed.classes or 0}
    inputs |= {"survival": True, "targets": 2} if fed.survival else {}
    deployment = make_deployment({"deadline": 60, "retry": 0, "inputs": inputs, **settings})
    operator = folder / "operator"
    write_deployment(operator, deployment)
    folders = enroll_in_process(operator, fed, fed.names)
    clients = enrolled_clients(operator)
    grid = Grid({client.node_id: folders[name] for name, client in clients.items() if client.node_id})
    return InProcessFederation(operator, folders, grid)


def enroll_in_process(operator: Path, fed: Federation, names: Iterable[str]) -> dict[str, Path]:
    """Enroll clients, give them node IDs as Flower would, and return their folders."""
    names, before = list(names), len(enrolled_clients(operator))
    make_keys(operator, names)
    clients = enrolled_clients(operator)
    enroll(operator, {name: replace(clients[name], node_id=100 + before + i) for i, name in enumerate(names)})
    return {name: _create_client_folder(operator, name, fed) for name in names}


def _create_client_folder(operator: Path, name: str, fed: Federation) -> Path:
    client = fed.names.index(name)
    folder = operator.parent / name
    open_bundle(operator / "bundles" / f"{name}.tar", folder / "bundle")
    save_client_data(folder / "data.npz", fed, client)
    ClientFolder.create(folder, folder / "data.npz", device="cpu")
    return folder
