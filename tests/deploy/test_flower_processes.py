"""Flower's processes: the reverse proxy, subprocesses, and the SuperNode's output."""

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node, NodeInfo
from starlette.types import Receive, Scope, Send

from conftest import error_message, tiny_federation
from fedtailor.deploy import client_app
from fedtailor.deploy.client import supernode, worker_process
from fedtailor.deploy.client.client_folder import worker_file
from fedtailor.deploy.keys import Bundle, make_keys, open_bundle, renew_client_key, renew_server_certificate
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.server import registration, superlink
from fedtailor.deploy.server.operator_folder import EnrolledClient, enrolled_clients, mark_as_left
from fedtailor.deploy.server.proxy import Limits, Proxy, bind, run_proxy
from fedtailor.deploy.subprocesses import (
    Subprocess,
    find_processes,
    flower_environment,
    keep_running,
    skip_repeats,
    stop_all,
)
from fedtailor.experiments.deployment import Deployment, write_deployment
from fedtailor.runs.files import folder_lock
from support.federation_processes import TIMEOUT, free_port, wait_until
from support.flower_in_process import federate

_LIMITS = Limits(body_bytes=3_000_000, upload_bytes=5_000_000)
_FLEET = "/v1/fleet/"


def prepare(folder: Path, clients: list[str]) -> Path:
    """Create an operator's folder with a free port, and the clients' folders next to it."""
    write_deployment(folder, Deployment(address=f"localhost:{free_port()}"))
    for tar in make_keys(folder, clients):
        open_bundle(tar, folder.parent / tar.stem / "bundle")
    return folder


# ---- the reverse proxy


class FakeSuperLink:
    """Records forwarded requests and responds with `response`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.response = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.requests.append((scope["path"], body))
        headers = [(b"content-type", b"application/x-protobuf"), (b"content-length", str(len(self.response)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.response})


class SigningClient:
    """An HTTP client that signs its requests with a key."""

    def __init__(self, folder: Path, port: int, key: Path) -> None:
        self._tls = ssl.create_default_context(cafile=folder / "keys" / "authority.crt")
        self.port = port
        private = load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, EllipticCurvePrivateKey)
        self._private = private

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self._tls, timeout=20)

    def sign(self, offset: timedelta = timedelta(0)) -> dict[str, str]:
        encoded = self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        now = (datetime.now(UTC) + offset).isoformat()
        signature = self._private.sign(now.encode(), ECDSA(SHA256()))
        headers = {"flwr-public-key": b64encode(encoded).decode(), "flwr-timestamp": now}
        return {**headers, "flwr-signature": b64encode(signature).decode(), "content-type": "application/x-protobuf"}

    def post(
        self, path: str, body: bytes = b"", method: str = "POST", overrides: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request(method, path, body, {**self.sign(), **(overrides or {})})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("proxy") / "operator", ["a", "b"])


@contextmanager
def serve_fake(fake: FakeSuperLink, folder: Path) -> Iterator[int]:
    """Serve a fake SuperLink on this machine and yield its port."""
    keys, listener = folder / "keys", socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        fake,
        ws="none",
        lifespan="off",
        log_config=None,
        ssl_certfile=keys / "server.crt",
        ssl_keyfile=keys / "server.key",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield int(listener.getsockname()[1])
    server.should_exit = True
    thread.join()


@contextmanager
def proxy_before(superlink: int, folder: Path, limits: Limits = _LIMITS) -> Iterator[SigningClient]:
    """Run a proxy to a port that allows the client a, but not b, and yield a."""
    keys = folder / "keys"
    proxy = Proxy(f"127.0.0.1:{superlink}", ssl.create_default_context(cafile=keys / "authority.crt"), limits)
    proxy.allow_only({"a": enrolled_clients(folder)["a"].public_key})
    with bind("localhost", 0) as listener, run_proxy(proxy, listener, keys / "server.crt", keys / "server.key"):
        yield SigningClient(folder, int(listener.getsockname()[1]), folder.parent / "a" / "bundle" / "key")


@pytest.fixture
def proxied(folder: Path) -> Iterator[tuple[FakeSuperLink, SigningClient]]:
    fake = FakeSuperLink()
    with serve_fake(fake, folder) as port, proxy_before(port, folder) as client:
        yield fake, client


def test_proxy_forwards_request_and_returns_response(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied
    fake.response = os.urandom(1_500_000)
    sent = os.urandom(2_000_000)
    assert client.post(_FLEET + "push-object", sent) == (200, fake.response)
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
    path = _FLEET + "pull-messages"
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
    path = _FLEET + "pull-messages"
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
    assert client.post(_FLEET + "push-object", bytes(_LIMITS.body_bytes + 1))[0] == 413
    assert [client.post(_FLEET + "push-object", chunk)[0] for _ in range(3)] == [200, 200, 413]
    assert client.post(_FLEET + "pull-messages")[0] == 200  # no message for the client: an empty response
    assert client.post(_FLEET + "push-object", chunk)[0] == 413
    fake.response = b"a message"
    assert client.post(_FLEET + "pull-messages")[0] == 200
    assert client.post(_FLEET + "push-object", chunk)[0] == 200
    assert sum(len(body) for _, body in fake.requests) == 3 * len(chunk)


def test_proxy_keeps_connection_open_after_rejected_upload(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    """Flower's client would treat a closed connection as a network error and send everything again."""
    _, client = proxied
    connection = client.connect()
    for _ in range(2):
        connection.request("POST", _FLEET + "push-object", bytes(8 * _LIMITS.body_bytes), client.sign())
        response = connection.getresponse()
        assert response.status == 413 and b"'a'" in response.read()


def test_proxy_rejects_replies_in_another_clients_name(proxied: tuple[FakeSuperLink, SigningClient]) -> None:
    fake, client = proxied

    def replies(node: int, source: int) -> bytes:
        message = Message(metadata=Metadata(src_node_id=source))
        return bytes(PushMessagesRequest(node=Node(node_id=node), messages_list=[message]).SerializeToString())

    assert client.post(_FLEET + "push-messages", replies(5, 6))[0] == 400
    assert client.post(_FLEET + "push-messages", b"\xff\xff")[0] == 400
    assert fake.requests == []
    assert client.post(_FLEET + "push-messages", replies(5, 5)) == (200, b"")
    assert fake.requests == [("/v1/fleet/push-messages", replies(5, 5))]


def test_proxy_without_superlink_responds_502_and_does_not_count_upload(folder: Path) -> None:
    with serve_fake(FakeSuperLink(), folder) as port:
        pass
    with proxy_before(port, folder) as client:
        statuses = [client.post(_FLEET + "push-object", bytes(2_000_000))[0] for _ in range(4)]
    assert statuses == [502] * 4  # which Flower's client treats as temporary


def test_proxy_closes_idle_and_excess_connections(folder: Path) -> None:
    fake, limits = FakeSuperLink(), replace(_LIMITS, idle_timeout=1.0, connections=2)
    with serve_fake(fake, folder) as port, proxy_before(port, folder, limits) as client:
        silent = client.connect()
        silent.connect()
        assert silent.sock.recv(1) == b""
        slow = client.connect()
        slow.request("POST", _FLEET + "push-object", b"", {**client.sign(), "content-length": "100"})
        assert slow.getresponse().status == 408
        many = [client.connect() for _ in range(3)]
        for connection in many:
            connection.connect()
        with pytest.raises(OSError):
            many[-1].request("POST", _FLEET + "pull-messages", b"", client.sign())
            many[-1].getresponse()
    assert fake.requests == []


def test_proxy_rejects_invalid_public_key() -> None:
    proxy = Proxy("127.0.0.1:1", ssl.create_default_context())
    assert "'a'" in error_message(lambda: proxy.allow_only({"a": "ssh-rsa what"}))


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
                assert client.post(_FLEET + "pull-messages")[0] == 200


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
        assert client.post(_FLEET + "pull-messages")[0] == 200


def test_bind_rejects_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in error_message(lambda: bind("localhost", port))
    with bind("localhost", port) as ours, pytest.raises(ConnectionRefusedError):  # before the proxy listens
        socket.create_connection(ours.getsockname())


# ---- subprocesses

_WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
_WITH_FAILING_THREAD = """
import threading, time
threading.Thread(target=lambda: 1 / 0).start()
time.sleep(600)
"""
_PARENT = """
import sys, time
from pathlib import Path
from fedtailor.deploy.subprocesses import Subprocess, flower_environment
home, script = Path(sys.argv[1]), sys.argv[2]
Subprocess(home, [script], flower_environment(home), home / "log", lambda line: print(line, flush=True))
time.sleep(600)
"""


def script(home: Path, text: str) -> str:
    home.mkdir(exist_ok=True)
    (home / "script.py").write_text(text)
    return str(home / "script.py")


def run_script(home: Path, text: str, on_line: Callable[[str], None] | None = None) -> Subprocess:
    return Subprocess(home, [script(home, text)], flower_environment(home), home.parent / "log", on_line)


def test_subprocess_stop_ends_all_descendants(tmp_path: Path) -> None:
    home, lines = tmp_path / "home", list[str]()
    process = run_script(home, _WITH_CHILD, lines.append)
    wait_until(lambda: lines, "the subprocess prints a line")
    assert process.returncode is None and len(find_processes(home)) == 2
    process.stop()
    assert process.returncode is not None and find_processes(home) == []
    assert lines == ["started"] and "started" in (tmp_path / "log").read_text()


def test_subprocess_does_not_outlive_killed_parent(tmp_path: Path) -> None:
    home = tmp_path / "home"
    call = [sys.executable, "-c", _PARENT, str(home), script(home, _WITH_CHILD)]
    parent = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # a process in another session is found and stopped by the next start
    wait_until(lambda: len(find_processes(home)) <= 1, "the subprocess ends")
    stop_all(home)
    assert find_processes(home) == []


def test_subprocess_ends_when_a_thread_fails(tmp_path: Path) -> None:
    process = run_script(tmp_path / "home", _WITH_FAILING_THREAD)
    wait_until(lambda: process.returncode is not None, "the subprocess ends")
    process.stop()
    assert process.returncode == 1 and "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_keep_running_starts_command_again_until_stopped(tmp_path: Path) -> None:
    home, stop, ended = tmp_path / "home", threading.Event(), list[Subprocess]()

    def watch(process: Subprocess) -> bool:
        wait_until(lambda: process.returncode is not None, "the subprocess ends")
        ended.append(process)
        if len(ended) == 2:
            stop.set()
        return True

    keep_running(lambda: run_script(home, "raise SystemExit(3)"), watch, stop)
    assert [process.returncode for process in ended] == [3, 3] and find_processes(home) == []


def test_worker_answers_messages_until_it_ends_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"network": "mlp", "rounds": 1, "batch_size": 4, "method": "fedavg"}
    federation = federate(tmp_path, replace(tiny_federation((9, 4)), names=("ann", "bob")), settings)
    folder, home = federation.client_folders["ann"], tmp_path / "home"
    monkeypatch.setenv("FEDTAILOR_WORKER", str(worker_file(folder)))
    monkeypatch.setattr("fedtailor.deploy.client_app._START_TIMEOUT", TIMEOUT)

    def start() -> Subprocess:
        command = [worker_process.__file__, str(folder)]
        return Subprocess(home, command, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "log")

    def ask(kind: str) -> dict[str, Any]:
        message = FlowerMessage(to_record({"index": 0}), 1, kind)
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        return from_record(client_app.app(message, context).content, 0)[0]

    worker = start()
    assert ask("query")["train"] == 9  # also while the worker is starting
    assert ask("train")["error"].startswith("The server addresses this client by another")
    worker.stop()
    monkeypatch.setattr("fedtailor.deploy.client_app._START_TIMEOUT", 0.0)
    with pytest.raises(RuntimeError, match="the worker ended"):
        ask("query")
    monkeypatch.setattr("fedtailor.deploy.client_app._START_TIMEOUT", TIMEOUT)
    worker = start()
    assert ask("query")["train"] == 9
    worker.stop()


def test_new_key_replaces_old_one_when_it_is_first_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said, nodes = prepare(tmp_path / "operator", ["a", "b"]), list[str](), dict[bytes, NodeInfo]()

    def call(folder: Path, name: str, request: Any, response_type: Any, timeout: float = 0.0) -> Any:
        """Answer like Flower."""
        if name == "register-node":
            node = NodeInfo(node_id=len(nodes) + 1, name=request.name, public_key=request.public_key)
            nodes[request.public_key] = node
            return response_type(node_id=node.node_id)
        if name == "unregister-node":
            (node,) = (node for node in nodes.values() if node.node_id == request.node_id)
            node.status = "unregistered"
        return response_type()

    monkeypatch.setattr(registration, "call_flower", call)
    monkeypatch.setattr(registration, "list_nodes", lambda folder: list(nodes.values()))
    proxy, registered = Proxy("127.0.0.1:1", ssl.create_default_context()), dict[str, EnrolledClient]()

    def register() -> tuple[EnrolledClient, list[str]]:
        """Return what is known about a, and what the server says."""
        nonlocal registered
        said.clear()
        registered = registration.register_clients(folder, proxy, registered, said.append)
        return enrolled_clients(folder)["a"], said

    old, _ = register()
    assert (old.node_id, len(proxy._keys)) == (1, 2)
    renew_client_key(folder, "a")
    renewed, said = register()
    assert (renewed.node_id, renewed.public_key, len(proxy._keys)) == (1, old.public_key, 3)
    assert said == ["'a' can connect with its new key."] and register()[1] == []
    nodes[registration._encode_key(str(renewed.next_key))].status = "online"
    used, said = register()
    assert (used.node_id, used.public_key, used.next_key, len(proxy._keys)) == (3, renewed.next_key, None, 2)
    assert said == ["'a' uses its new key.", "The old key of 'a' is revoked."]
    assert nodes[registration._encode_key(old.public_key)].status == "unregistered"
    renew_client_key(folder, "a", at_once=True)
    register()
    last, _ = register()
    assert last.node_id == 4 and len(proxy._keys) == 2
    assert nodes[registration._encode_key(used.public_key)].status == "unregistered"
    mark_as_left(folder, "a")
    assert register()[1] == ["'a' has left."] and len(proxy._keys) == 1


def test_client_app_reports_why_the_worker_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / client_app.WORKER_END_FILE).write_text("the worker was killed by signal 9 (SIGKILL)")
    monkeypatch.setenv("FEDTAILOR_WORKER", str(tmp_path / "address"))
    assert client_app._worker_end(since=0.0) == "the worker was killed by signal 9 (SIGKILL)"
    monkeypatch.setattr(client_app, "_END_TIMEOUT", 0.2)
    assert client_app._worker_end(since=time.time() + 60) == "the worker ended"  # the file is about an earlier one


def test_server_of_folder_cannot_be_started_twice(folder: Path) -> None:
    (folder / "home").mkdir()
    with folder_lock(folder / "home"):
        assert "is already running" in error_message(lambda: superlink.serve(folder))


# ---- the SuperNode's output, and when it stalls


def make_connection(tmp_path: Path) -> tuple[supernode._Connection, list[str]]:
    reports: list[str] = []
    bundle = Bundle("a", "here:1", tmp_path)
    return supernode._Connection(bundle, tmp_path, skip_repeats(reports.append)), reports


_REPORTS = {
    "WARNING :   Connection attempt failed, retrying in 0.88 seconds": "No server responds at here:1;",
    "INFO :      SuperNode ID: 123": "Connected to here:1 as 'a'.",
    "WARNING :   Connection attempt failed, retrying in 2.88 seconds": "Lost the connection to here:1;",
    "INFO :      Connection successful after 3.1 seconds and 3 tries.": "Connected to here:1 as 'a'.",
    "[code: 0] The server does not know this client's key; ask the operator.": "The server does not know",
    "[code: 1004] Failed to activate SuperNode.": "'a' seems to be connected already;",
    "ERROR : Failed to send message 1: Client error '413 Request'": "The server did not accept a reply;",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to": "The server at here:1 is not this",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired": "The certificate of the",
    "_ssl.c:989: The handshake operation timed out": "Lost the connection to here:1;",
}


def test_supernode_output_is_reported_once(tmp_path: Path) -> None:
    connection, reports = make_connection(tmp_path)
    for line, sentence in _REPORTS.items():
        for _ in range(2):
            connection.read_line(line)
            connection.report_loss()
        assert reports.pop().startswith(sentence) and reports == []
    assert (tmp_path / "node").read_text() == "123"


def test_stalled_supernode_is_detected(tmp_path: Path) -> None:
    connection, _ = make_connection(tmp_path)

    def stalls(after: float, **last_seen: float) -> bool:
        """Return whether it stalls `after` seconds from the start; processes not given were just seen."""
        start = connection.busy_since or 0.0
        times = {process: start + last_seen.get(process, after) for process in ("supernode", "executor", "client_app")}
        return supernode._find_stall(connection, supernode._LastSeen(**times), start + after, 1000.0) is not None

    assert not stalls(10_000) and not stalls(10_000, client_app=0)
    assert stalls(91, supernode=0) and not stalls(89, supernode=0)
    assert stalls(100, executor=80) and not stalls(100, executor=95)
    connection.read_line("INFO :      Receiving: train message (ID: 1)")
    assert not stalls(80, client_app=-500) and stalls(91, client_app=-500)  # no ClientApp has started
    assert not stalls(900) and stalls(1000, client_app=900)  # the ClientApp has ended
    connection.read_line("INFO :      Sending: train message (ID: 2)")
    assert not stalls(2000, client_app=100) and stalls(2091, client_app=100)  # a slow network, or too late
    connection.read_line("INFO :      Sent successfully")
    assert not stalls(10_000, client_app=0)
