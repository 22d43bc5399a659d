"""Make Flower and the reverse proxy accept exactly the keys of the enrolled clients."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.control_pb2 import (
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
)
from flwr.proto.node_pb2 import NodeInfo

from fedtailor.deploy.server.control import call_flower, list_nodes
from fedtailor.deploy.server.operator_folder import EnrolledClient, enroll, enrolled_clients
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.errors import FedTailorError

_ONLINE, _UNREGISTERED = "online", "unregistered"


def register_clients(
    folder: Path, proxy: Proxy, registered: Mapping[str, EnrolledClient], say: Callable[[str], None]
) -> dict[str, EnrolledClient]:
    """Make Flower and the proxy accept exactly the enrolled clients, and return these."""
    try:
        clients = enrolled_clients(folder)
        if clients == registered and not any(client.next_key for client in clients.values()):
            return clients
        nodes = {node.public_key: node for node in list_nodes(folder)}
        clients = {name: _use_new_key(folder, name, client, nodes, say) for name, client in clients.items()}
        here = {name: client for name, client in clients.items() if not client.left}
        # a client with a new key may use both keys until it has used the new one
        keys = {name: list(filter(None, (client.public_key, client.next_key))) for name, client in here.items()}
        proxy.allow_only({name: "\n".join(texts) for name, texts in keys.items()})
        for name, client in here.items():
            key = _encode_key(client.public_key)
            node = nodes.get(key)
            if node is not None and node.status == _UNREGISTERED:
                say(f"'{name}' has left before and its key is revoked; enroll it under another name.")
            elif node is None or node.node_id != client.node_id:
                clients[name] = _register_client(folder, name, key, node)
                say(f"'{name}' can connect.")
            if client.next_key and (key := _encode_key(client.next_key)) not in nodes:
                call_flower(
                    folder, "register-node", RegisterNodeRequest(public_key=key, name=name), RegisterNodeResponse
                )
                say(f"'{name}' can connect with its new key.")
        accepted = {_encode_key(text) for texts in keys.values() for text in texts}
        for node in nodes.values():
            if node.public_key not in accepted and node.status != _UNREGISTERED:
                revoked = UnregisterNodeRequest(node_id=node.node_id)
                call_flower(folder, "unregister-node", revoked, UnregisterNodeResponse)
                say(f"The old key of '{node.name}' is revoked." if node.name in here else f"'{node.name}' has left.")
        return clients
    except FedTailorError as error:
        say(str(error))
        return dict(registered)


def _use_new_key(
    folder: Path, name: str, client: EnrolledClient, nodes: Mapping[bytes, NodeInfo], say: Callable[[str], None]
) -> EnrolledClient:
    """Return the client; if it has connected with its new key, that one replaces the old one from now on."""
    node = nodes.get(_encode_key(client.next_key)) if client.next_key else None
    if client.next_key is None or node is None or node.status != _ONLINE:
        return client
    updated = replace(client, public_key=client.next_key, node_id=node.node_id, next_key=None)
    enroll(folder, {name: updated})
    say(f"'{name}' uses its new key.")
    return updated


def _register_client(folder: Path, name: str, key: bytes, node: NodeInfo | None) -> EnrolledClient:
    """Register a client's key with Flower, unless a crash prevented only the next step: saving its node ID."""
    if node is None:
        request = RegisterNodeRequest(public_key=key, name=name)
        node_id = call_flower(folder, "register-node", request, RegisterNodeResponse).node_id
    else:
        node_id = node.node_id
    updated = replace(enrolled_clients(folder)[name], node_id=node_id)
    enroll(folder, {name: updated})
    return updated


def _encode_key(public_key: str) -> bytes:
    """Return a public key as Flower stores it."""
    return load_ssh_public_key(public_key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
