"""What the reverse proxy forwards."""

import json
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from conftest import error_message
from fedtailor.deploy.keys import renew_server_certificate
from fedtailor.deploy.server.operator_folder import enrolled_clients
from fedtailor.deploy.server.proxy.listener import bind, run_proxy
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.deploy.server.proxy.refusals import find_refusal
from support.federation_processes import wait_until
from support.proxied_superlink import FLEET, LIMITS, FakeSuperLink, SigningClient, prepare, proxy_before, serve_fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("proxy") / "operator", ["a", "b"])


@pytest.fixture
def proxied(folder: Path) -> Iterator[tuple[FakeSuperLink, SigningClient]]:
    fake = FakeSuperLink()
    with serve_fake(fake, folder) as port, proxy_before(port, folder) as client:
        yield fake, client


def test_proxy_forwards_request_and_returns_response(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied
    fake.response = os.urandom(1_500_000)
    sent = os.urandom(2_000_000)
    assert client.post(FLEET + "push-object", sent) == (200, fake.response)
    assert fake.requests == [("/v1/fleet/push-object", sent)]


_OTHER_PATHS = """
/v1/control/start-run /v1/control/list-nodes /v1/runtime/acquire-task /docs /health /
/v1/fleet/../control/start-run /v1/fleet/%2e%2e/control/start-run /v1/fleet/..%2fcontrol%2fstart-run
/v1/fleet//pull-messages //v1/fleet/pull-messages /v1/fleet/pull-messages/ /v1/fleet/pull-messages?x
/v1/fleet/pull%2dmessages /V1/fleet/pull-messages /v1/fleet/ /v1/fleet/pull-messages;x
https://localhost/v1/control/start-run /v1/fleet/pull-messages%00
"""


def test_proxy_rejects_all_paths_but_the_fleet_interface(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied
    assert {path: client.post(path)[0] for path in _OTHER_PATHS.split()} == dict.fromkeys(_OTHER_PATHS.split(), 404)
    assert fake.requests == []


def test_proxy_rejects_unusual_requests(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied
    path = FLEET + "pull-messages"
    assert [client.post(path, method=method)[0] for method in ("GET", "PUT", "DELETE", "OPTIONS")] == [405] * 4
    assert client.post(path, overrides={"connection": "upgrade", "upgrade": "websocket"})[0] == 411
    connection = client.connect()
    connection.request("POST", path, iter([b"a", b"b"]), client.sign())  # chunked, without a length
    assert connection.getresponse().status == 411
    assert client.post(path, overrides={"more": "x" * 20_000})[0] == 431
    assert fake.requests == []


def test_proxy_rejects_requests_that_no_allowed_client_signed(
    proxied: tuple[FakeSuperLink, SigningClient], folder: Path
) -> None:
    fake, client = proxied
    path = FLEET + "pull-messages"
    stranger = SigningClient(folder, client.port, folder.parent / "b" / "bundle" / "key")
    status, content = stranger.post(path)
    assert status == 412 and "does not know this client's key" in json.loads(content)["detail"]
    other_signature = {"flwr-signature": stranger.sign()["flwr-signature"]}
    assert "not signed with its key" in json.loads(client.post(path, overrides=other_signature)[1])["detail"]
    for hours in (-1, 1):
        content = client.post(path, overrides=client.sign(timedelta(hours=hours)))[1]
        detail = json.loads(content)["detail"]
        assert "clock of 'a'" in detail and f"{hours * 3600:+,}"[:4] in detail
    assert [client.post(path, overrides={"flwr-timestamp": time})[0] for time in ("", "now", "9" * 400)] == [412] * 3
    assert fake.requests == []


def test_proxy_limits_upload_per_message(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied
    chunk = bytes(2_000_000)
    assert client.post(FLEET + "push-object", bytes(LIMITS.body_bytes + 1))[0] == 413
    assert [client.post(FLEET + "push-object", chunk)[0] for _ in range(3)] == [200, 200, 413]
    assert client.post(FLEET + "pull-messages")[0] == 200  # no message for the client: an empty response
    assert client.post(FLEET + "push-object", chunk)[0] == 413
    fake.response = b"a message"
    assert client.post(FLEET + "pull-messages")[0] == 200
    assert client.post(FLEET + "push-object", chunk)[0] == 200
    assert sum(len(body) for _, body in fake.requests) == 3 * len(chunk)


def test_proxy_tells_the_run_which_reply_it_refused(proxied: tuple[FakeSuperLink, SigningClient], folder: Path) -> None:
    _, client = proxied

    def reply(message_id: str, source: int = 5) -> int:
        metadata = Metadata(src_node_id=source, reply_to_message_id=message_id)
        request = PushMessagesRequest(node=Node(node_id=5), messages_list=[Message(metadata=metadata)])
        return client.post(FLEET + "push-messages", request.SerializeToString())[0]

    assert reply("first") == 200 and find_refusal(folder, "a", "first") is None
    assert client.post(FLEET + "push-object", bytes(LIMITS.body_bytes + 1))[0] == 413
    assert "at most 3,000,000 are allowed" in str(find_refusal(folder, "a", "first"))
    assert reply("second") == 200 and find_refusal(folder, "a", "second") is None
    assert [client.post(FLEET + "push-object", bytes(2_000_000))[0] for _ in range(3)] == [200, 200, 413]
    assert find_refusal(folder, "a", "second") == "'a' sends more than 5,000,000 bytes in reply to one message"
    assert reply("third", source=6) == 400
    assert find_refusal(folder, "a", "third") == "'a' replies in another client's name"
    assert find_refusal(folder, "b", "third") is None and find_refusal(folder, "a", "second") is None


def test_proxy_keeps_connection_open_after_rejected_upload(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    """Flower's client would treat a closed connection as a network error and send everything again."""
    _, client = proxied
    connection = client.connect()
    for _ in range(2):
        connection.request("POST", FLEET + "push-object", bytes(8 * LIMITS.body_bytes), client.sign())
        response = connection.getresponse()
        assert response.status == 413 and b"'a'" in response.read()


def test_proxy_rejects_replies_in_another_clients_name(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied

    def replies(node: int, source: int) -> bytes:
        message = Message(metadata=Metadata(src_node_id=source))
        return bytes(PushMessagesRequest(node=Node(node_id=node), messages_list=[message]).SerializeToString())

    assert client.post(FLEET + "push-messages", replies(5, 6))[0] == 400
    assert client.post(FLEET + "push-messages", b"\xff\xff")[0] == 400
    assert fake.requests == []
    assert client.post(FLEET + "push-messages", replies(5, 5)) == (200, b"")
    assert fake.requests == [("/v1/fleet/push-messages", replies(5, 5))]


def test_proxy_without_superlink_responds_502_and_does_not_count_upload(folder: Path) -> None:
    with serve_fake(FakeSuperLink(), folder) as port:
        pass
    with proxy_before(port, folder) as client:
        statuses = [client.post(FLEET + "push-object", bytes(2_000_000))[0] for _ in range(4)]
    assert statuses == [502] * 4  # which Flower's client treats as temporary


def test_proxy_rejects_invalid_public_key() -> None:
    proxy = Proxy("127.0.0.1:1", ssl.create_default_context())
    assert "'a'" in error_message(lambda: proxy.allow_only({"a": "ssh-rsa what"}))


def test_bind_rejects_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in error_message(lambda: bind("localhost", port))
    with bind("localhost", port) as ours, pytest.raises(ConnectionRefusedError):  # before the proxy listens
        socket.create_connection(ours.getsockname())


def test_proxy_accepts_both_keys_of_a_client(folder: Path) -> None:
    fake, keys = FakeSuperLink(), folder / "keys"
    with serve_fake(fake, folder) as port, bind("localhost", 0) as listener:
        proxy = Proxy(f"127.0.0.1:{port}", ssl.create_default_context(cafile=keys / "authority.crt"))
        clients = enrolled_clients(folder)
        proxy.allow_only({"a": f"{clients['a'].public_key}\n{clients['b'].public_key}"})
        with run_proxy(proxy, listener, keys / "server.crt", keys / "server.key"):
            for name in ("a", "b"):
                key = folder.parent / name / "bundle" / "key"
                client = SigningClient(folder, int(listener.getsockname()[1]), key)
                assert client.post(FLEET + "pull-messages")[0] == 200


def test_proxy_uses_renewed_certificate_without_restart(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "operator", ["a"])
    with serve_fake(FakeSuperLink(), folder) as port, proxy_before(port, folder) as client:

        def serial() -> str:
            with closing(client.connect()) as connection:
                connection.connect()
                return str(connection.sock.getpeercert()["serialNumber"])  # type: ignore[index]

        before = serial()
        assert serial() == before
        renew_server_certificate(folder)
        wait_until(lambda: serial() != before, "the proxy uses the new certificate")
        assert client.post(FLEET + "pull-messages")[0] == 200
