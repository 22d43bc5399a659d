"""Flower's processes: the gate, what is started and ended, and a federation that loses its parts."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from starlette.types import Receive, Scope, Send

from conftest import refusal
from federating import LONGEST, free_port, until
from fedtailor.deploy import link, node
from fedtailor.deploy.child import Child, end_all, environment, kin, once
from fedtailor.deploy.folder import enrol, enrolled
from fedtailor.deploy.gate import Gate, Limits, bind, standing
from fedtailor.deploy.keys import Bundle, make_keys, open_bundle
from fedtailor.deploy.settings import Deployment, read_deployment, write_deployment

_LIMITS = Limits(body=3_000_000, upload=5_000_000)
_FLEET = "/v1/fleet/"


def prepare(folder: Path, clients: list[str]) -> Path:
    """An operator's folder, on a port that is free, and the clients' folders beside it."""
    write_deployment(folder, Deployment(address=f"localhost:{free_port()}"))
    for tar in make_keys(folder, clients):
        open_bundle(tar, folder.parent / tar.stem / "bundle")
    return folder


# ---- the gate


class Flower:
    """In Flower's place: notes what comes through, and answers what the test wants."""

    def __init__(self) -> None:
        self.came: list[tuple[str, bytes]] = []
        self.answer = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.came.append((scope["path"], body))
        headers = [(b"content-type", b"application/x-protobuf"), (b"content-length", str(len(self.answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer})


class Caller:
    """A client at the gate, with a key."""

    def __init__(self, folder: Path, port: int, key: Path) -> None:
        self._trust = ssl.create_default_context(cafile=folder / "keys" / "authority.crt")
        self.port = port
        private = load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, EllipticCurvePrivateKey)
        self._private = private

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self._trust, timeout=20)

    def signed(self, later: timedelta = timedelta(0)) -> dict[str, str]:
        spelled = self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        now = (datetime.now(UTC) + later).isoformat()
        signature = self._private.sign(now.encode(), ECDSA(SHA256()))
        headers = {"flwr-public-key": b64encode(spelled).decode(), "flwr-timestamp": now}
        return {**headers, "flwr-signature": b64encode(signature).decode(), "content-type": "application/x-protobuf"}

    def post(
        self, path: str, body: bytes = b"", method: str = "POST", instead: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request(method, path, body, {**self.signed(), **(instead or {})})
        response = connection.getresponse()
        said = response.read()
        connection.close()
        return response.status, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("gate") / "operator", ["a", "b"])


@contextmanager
def serving(flower: Flower, folder: Path) -> Iterator[int]:
    """Something in Flower's place, on this machine alone."""
    keys, listener = folder / "keys", socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        flower,
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
def standing_before(flower: Flower, folder: Path, limits: Limits) -> Iterator[Caller]:
    """A gate, and a client that is let through it; b is not."""
    keys = folder / "keys"
    with ExitStack() as stack:
        inner = stack.enter_context(serving(flower, folder))
        listener = stack.enter_context(bind("localhost", 0))
        gate = Gate(f"127.0.0.1:{inner}", ssl.create_default_context(cafile=keys / "authority.crt"), limits)
        gate.admit({"a": enrolled(folder)["a"].public_key})
        stack.enter_context(standing(gate, listener, keys / "server.crt", keys / "server.key"))
        port = int(listener.getsockname()[1])
        yield Caller(folder, port, folder.parent / "a" / "bundle" / "key")


@pytest.fixture
def gated(folder: Path) -> Iterator[tuple[Flower, Caller]]:
    flower = Flower()
    with standing_before(flower, folder, _LIMITS) as client:
        yield flower, client


def test_the_gate_hands_a_clients_request_on_and_the_answer_back(gated: tuple[Flower, Caller]) -> None:
    flower, client = gated
    flower.answer = os.urandom(1_500_000)
    sent = os.urandom(2_000_000)
    assert client.post(_FLEET + "push-object", sent) == (200, flower.answer)
    assert flower.came == [("/v1/fleet/push-object", sent)]


_ELSEWHERE = """
/v1/control/start-run /v1/control/list-nodes /v1/runtime/acquire-task /docs /health /
/v1/fleet/../control/start-run /v1/fleet/%2e%2e/control/start-run /v1/fleet/..%2fcontrol%2fstart-run
/v1/fleet//pull-messages //v1/fleet/pull-messages /v1/fleet/pull-messages/ /v1/fleet/pull-messages?x
/v1/fleet/pull%2dmessages /V1/fleet/pull-messages /v1/fleet/ /v1/fleet/pull-messages;x
https://localhost/v1/control/start-run /v1/fleet/pull-messages%00
"""


def test_nothing_but_the_fleet_interface_is_there(gated: tuple[Flower, Caller]) -> None:
    flower, client = gated
    assert {path: client.post(path)[0] for path in _ELSEWHERE.split()} == dict.fromkeys(_ELSEWHERE.split(), 404)
    assert flower.came == []


def test_odd_requests_do_not_go_through(gated: tuple[Flower, Caller]) -> None:
    flower, client = gated
    path = _FLEET + "pull-messages"
    assert [client.post(path, method=method)[0] for method in ("GET", "PUT", "DELETE", "OPTIONS")] == [405] * 4
    assert client.post(path, instead={"connection": "upgrade", "upgrade": "websocket"})[0] == 411
    connection = client.connect()
    connection.request("POST", path, iter([b"a", b"b"]), client.signed())  # in chunks, of a length nobody knows
    assert connection.getresponse().status == 411
    assert client.post(path, instead={"more": "x" * 20_000})[0] == 431
    assert flower.came == []


def test_only_what_an_enrolled_client_signed_goes_through(gated: tuple[Flower, Caller], folder: Path) -> None:
    flower, client = gated
    path = _FLEET + "pull-messages"
    stranger = Caller(folder, client.port, folder.parent / "b" / "bundle" / "key")
    status, said = stranger.post(path)
    assert status == 412 and "does not know this client's key" in json.loads(said)["detail"]
    borrowed = {"flwr-signature": stranger.signed()["flwr-signature"]}
    assert "not signed by its key" in json.loads(client.post(path, instead=borrowed)[1])["detail"]
    for hours in (-1, 1):
        said = client.post(path, instead=client.signed(timedelta(hours=hours)))[1]
        assert "clock of 'a'" in json.loads(said)["detail"] and f"{hours * 3600:+,}"[:4] in json.loads(said)["detail"]
    assert [client.post(path, instead={"flwr-timestamp": odd})[0] for odd in ("", "now", "9" * 400)] == [412] * 3
    assert flower.came == []


def test_a_client_cannot_send_more_than_its_message_asks_for(gated: tuple[Flower, Caller]) -> None:
    flower, client = gated
    piece = bytes(2_000_000)
    assert client.post(_FLEET + "push-object", bytes(_LIMITS.body + 1))[0] == 413
    assert [client.post(_FLEET + "push-object", piece)[0] for _ in range(3)] == [200, 200, 413]
    assert client.post(_FLEET + "pull-messages")[0] == 200  # nothing for it: an empty answer
    assert client.post(_FLEET + "push-object", piece)[0] == 413
    flower.answer = b"a message"
    assert client.post(_FLEET + "pull-messages")[0] == 200
    assert client.post(_FLEET + "push-object", piece)[0] == 200
    assert sum(len(body) for _, body in flower.came) == 3 * len(piece)


def test_a_refused_upload_is_heard_on_a_connection_that_goes_on(gated: tuple[Flower, Caller]) -> None:
    """Flower's client would take a connection that breaks for a bad network, and send it all again."""
    _, client = gated
    connection = client.connect()
    for _ in range(2):
        connection.request("POST", _FLEET + "push-object", bytes(8 * _LIMITS.body), client.signed())
        response = connection.getresponse()
        assert response.status == 413 and b"'a'" in response.read()


def test_nobody_answers_in_another_clients_name(gated: tuple[Flower, Caller]) -> None:
    flower, client = gated

    def answer(node: int, source: int) -> bytes:
        message = Message(metadata=Metadata(src_node_id=source))
        return bytes(PushMessagesRequest(node=Node(node_id=node), messages_list=[message]).SerializeToString())

    assert client.post(_FLEET + "push-messages", answer(5, 6))[0] == 400
    assert client.post(_FLEET + "push-messages", b"\xff\xff")[0] == 400
    assert flower.came == []
    assert client.post(_FLEET + "push-messages", answer(5, 5)) == (200, b"")
    assert flower.came == [("/v1/fleet/push-messages", answer(5, 5))]


def test_without_flower_the_gate_says_so_and_counts_nothing(folder: Path) -> None:
    flower, keys = Flower(), folder / "keys"
    with serving(flower, folder) as inner:
        pass
    with bind("localhost", 0) as listener:
        gate = Gate(f"127.0.0.1:{inner}", ssl.create_default_context(cafile=keys / "authority.crt"), _LIMITS)
        gate.admit({"a": enrolled(folder)["a"].public_key})
        with standing(gate, listener, keys / "server.crt", keys / "server.key"):
            client = Caller(folder, int(listener.getsockname()[1]), folder.parent / "a" / "bundle" / "key")
            answers = [client.post(_FLEET + "push-object", bytes(2_000_000))[0] for _ in range(4)]
    assert answers == [502] * 4  # of which Flower's client knows that they pass


def test_who_says_nothing_and_who_comes_too_often_is_sent_away(folder: Path) -> None:
    flower, limits = Flower(), replace(_LIMITS, silence=1.0, connections=2)
    with standing_before(flower, folder, limits) as client:
        silent = client.connect()
        silent.connect()
        assert silent.sock.recv(1) == b""
        slow = client.connect()
        slow.request("POST", _FLEET + "push-object", b"", {**client.signed(), "content-length": "100"})
        assert slow.getresponse().status == 408
        many = [client.connect() for _ in range(3)]
        for connection in many:
            connection.connect()
        with pytest.raises(OSError):
            many[-1].request("POST", _FLEET + "pull-messages", b"", client.signed())
            many[-1].getresponse()
    assert flower.came == []


def test_a_key_that_is_none_is_refused() -> None:
    gate = Gate("127.0.0.1:1", ssl.create_default_context())
    assert "'a'" in refusal(lambda: gate.admit({"a": "ssh-rsa what"}))


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal(lambda: bind("localhost", port))
    with bind("localhost", port) as ours, pytest.raises(ConnectionRefusedError):  # before the gate stands
        socket.create_connection(ours.getsockname())


# ---- children

_FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
_HALF_DEAD = """
import threading, time
threading.Thread(target=lambda: 1 / 0).start()
time.sleep(600)
"""
_PARENT = """
import sys, time
from pathlib import Path
from fedtailor.deploy.child import Child, environment
home, script = Path(sys.argv[1]), sys.argv[2]
Child(home, [script], environment(home), home / "log", lambda line: print(line, flush=True))
time.sleep(600)
"""


def script(home: Path, text: str) -> str:
    home.mkdir(exist_ok=True)
    (home / "script.py").write_text(text)
    return str(home / "script.py")


def test_a_child_ends_with_all_that_it_started(tmp_path: Path) -> None:
    home, lines = tmp_path / "home", list[str]()
    child = Child(home, [script(home, _FAMILY)], environment(home), tmp_path / "log", lines.append)
    until(lambda: lines, "the child speaks")
    assert child.ended is None and len(kin(home)) == 2
    child.stop()
    assert child.ended is not None and kin(home) == []
    assert lines == ["started"] and "started" in (tmp_path / "log").read_text()


def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    home = tmp_path / "home"
    call = [sys.executable, "-c", _PARENT, str(home), script(home, _FAMILY)]
    parent = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # what went into a session of its own is found and ended by the next
    until(lambda: len(kin(home)) <= 1, "the child ends")
    end_all(home)
    assert kin(home) == []


def test_a_child_whose_thread_died_ends(tmp_path: Path) -> None:
    home = tmp_path / "home"
    child = Child(home, [script(home, _HALF_DEAD)], environment(home), tmp_path / "log")
    until(lambda: child.ended is not None, "the child ends")
    child.stop()
    assert child.ended == 1 and "ZeroDivisionError" in (tmp_path / "log").read_text()


_HOLDER = """
import sys
from pathlib import Path
from fedtailor.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


_RUN: dict[str, Callable[[Path], None]] = {
    "client": lambda site: node.alone_in(site).__enter__(),
    "server": link.serve,
}


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_same_place_is_not_used_twice(folder: Path, side: str) -> None:
    place = folder if side == "server" else folder.parent / "a"
    (place / "home").mkdir(exist_ok=True)
    call = [sys.executable, "-c", _HOLDER, str(place / "home")]
    other = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    assert "already" in refusal(lambda: _RUN[side](place))
    other.communicate("")


def test_commands_of_a_server_that_never_ran_are_refused_in_words(tmp_path: Path) -> None:
    assert "fedtailor deploy server" in refusal(lambda: link.submit(tmp_path))
    assert "fedtailor deploy server" in refusal(lambda: link.nodes(tmp_path))
    write_deployment(tmp_path, Deployment(address="localhost:1"))
    assert "fedtailor deploy keys" in refusal(lambda: link.serve(tmp_path))


# ---- what a client's Flower says, and when it hangs


def ear(tmp_path: Path) -> tuple[node._Ear, list[str]]:
    said: list[str] = []
    return node._Ear(Bundle("a", "here:1", tmp_path), tmp_path, once(said.append)), said


_SAID = {
    "WARNING :   Connection attempt failed, retrying in 0.88 seconds": "Nobody answers at here:1;",
    "INFO :      SuperNode ID: 123": "Connected to here:1 as 'a'.",
    "WARNING :   Connection attempt failed, retrying in 2.88 seconds": "The connection is lost to here:1;",
    "INFO :      Connection successful after 3.1 seconds and 3 tries.": "Connected to here:1 as 'a'.",
    "[code: 0] The server does not know this client's key; ask its operator.": "The server does not know",
    "[code: 1004] Failed to activate SuperNode.": "'a' seems connected already;",
    "ERROR : Failed to send message 1: Client error '413 Request'": "The server did not take an answer;",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to": "Who answers at here:1 is not this",
    "_ssl.c:989: The handshake operation timed out": "The connection is lost to here:1;",
}


def test_flowers_lines_become_sentences(tmp_path: Path) -> None:
    listening, said = ear(tmp_path)
    for line, sentence in _SAID.items():
        for _ in range(2):  # it is told once
            listening.hear(line)
            listening.tell_loss()
        assert said.pop().startswith(sentence) and said == []
    assert (tmp_path / "node").read_text() == "123"


def test_a_client_that_waits_in_vain_is_found(tmp_path: Path) -> None:
    listening, _ = ear(tmp_path)

    def hangs(after: float, **last: float) -> bool:
        """So long after it began; all signs of life are fresh but those that are given."""
        start = listening.busy or 0.0
        seen = {sign: start + last.get(sign, after) for sign in ("answer", "executor", "worker")}
        return node._hangs(listening, node._Signs(**seen), start + after, deadline=1000.0) is not None

    assert not hangs(10_000) and not hangs(10_000, worker=0)
    assert hangs(91, answer=0) and not hangs(89, answer=0)
    assert hangs(100, executor=80) and not hangs(100, executor=95)
    listening.hear("INFO :      Receiving: train message (ID: 1)")
    assert not hangs(80, worker=-500) and hangs(91, worker=-500)  # nobody came to work on it
    assert not hangs(900) and hangs(1000, worker=900)  # who worked is gone
    listening.hear("INFO :      Sending: train message (ID: 2)")
    assert not hangs(2000, worker=100) and hangs(2091, worker=100)  # a slow network, or nobody waits for it any more
    listening.hear("INFO :      Sent successfully")
    assert not hangs(10_000, worker=0)


# ---- all of it

_APP = {
    "pyproject.toml": """
[project]
name = "roll-call"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedtailor"
[tool.flwr.app.components]
serverapp = "roll.server:app"
clientapp = "roll.client:app"
""",
    "roll/__init__.py": "",
    "roll/server.py": """
import json, os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    folder, names = Path(os.environ["FEDTAILOR_DEPLOYMENT"]), {}
    clients = json.loads((folder / "clients.json").read_text())
    messages = [Message(RecordDict(), about["node"], "query.who") for about in clients.values() if about["node"]]
    asked = set(grid.push_messages(messages))
    while asked:
        for reply in grid.pull_messages(asked):
            asked.discard(reply.metadata.reply_to_message_id)
            if reply.has_content():
                names[str(reply.metadata.src_node_id)] = reply.content["who"]["name"]
        time.sleep(0.1)
    (folder / "roll.json").write_text(json.dumps(names))
""",
    "roll/client.py": """
import os
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("who")
def who(message, context):
    name = Path(os.environ["FEDTAILOR_SITE"]).name
    return Message(RecordDict({"who": ConfigRecord({"name": name})}), reply_to=message)
""",
}
_SERVE = "import sys, pathlib; from fedtailor.deploy.link import serve; from functools import partial\n"
_SERVE += "serve(pathlib.Path(sys.argv[1]), partial(print, flush=True))"
_CONNECT = "import sys, pathlib; from fedtailor.deploy import node; from functools import partial\n"
_CONNECT += (
    "site = pathlib.Path(sys.argv[1])\nwith node.alone_in(site): node.keep_connected(site, partial(print, flush=True))"
)


class Said:
    """A command that runs, and what it has said."""

    def __init__(self, program: str, folder: Path) -> None:
        call = [sys.executable, "-c", program, str(folder)]
        self.folder, self.lines = folder, list[str]()
        self.process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, words: str, times: int = 1) -> None:
        def there() -> bool:
            return sum(words in line for line in self.lines) >= times

        until(lambda: there() or self.process.poll() is not None, words)
        assert there(), "".join(self.lines)

    def kill_flower(self) -> None:
        """Kill the one process that ours started, as a lack of memory would."""
        os.kill(
            next(process.number for process in kin(self.folder / "home") if "leash" in process.words), signal.SIGKILL
        )


def roll_call(folder: Path) -> dict[int, str]:
    """The names of those who answer, by their numbers."""
    (folder / "roll.json").unlink(missing_ok=True)
    run = link.submit(folder)
    until((folder / "roll.json").is_file, "all answer")
    assert link.run_state(folder, run) in ("running", "finished:completed")
    return {int(number): name for number, name in json.loads((folder / "roll.json").read_text()).items()}


def numbers(folder: Path) -> dict[int, str]:
    return {client.node or 0: name for name, client in enrolled(folder).items()}


@pytest.mark.slow
def test_a_federation_loses_its_parts_and_finds_them_again(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "operator", ["a", "b", "late"])
    late = enrolled(folder)["late"]
    enlisted = {
        name: about for name, about in json.loads((folder / "clients.json").read_text()).items() if name != "late"
    }
    (folder / "clients.json").write_text(json.dumps(enlisted))
    for name, text in _APP.items():
        (folder / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "app" / name).write_text(text)
    with ExitStack() as stack:

        def start(program: str, where: Path) -> Said:
            said = Said(program, where)
            stack.callback(end_all, where / "home", 1.0)
            stack.callback(said.process.kill)
            return said

        server = start(_SERVE, folder)
        clients = {name: start(_CONNECT, tmp_path / name) for name in ("a", "b")}
        server.wait_for("Serving")
        for name in ("a", "b"):
            clients[name].wait_for("Connected")
        caller = Caller(folder, read_deployment(folder).port, tmp_path / "a" / "bundle" / "key")
        assert caller.post("/v1/control/list-nodes")[0] == 404  # the authority's certificate is not enough
        assert link.nodes(folder) == {"a": "online", "b": "online"}
        before = numbers(folder)

        clients["a"].kill_flower()  # comes back, as who it was
        clients["a"].wait_for("Connected", times=2)
        server.kill_flower()  # ends the server, for systemd to start it again
        assert server.process.wait(LONGEST) != 0
        assert kin(folder / "home") == []
        server = start(_SERVE, folder)
        clients["late"] = start(_CONNECT, tmp_path / "late")
        server.wait_for("Serving")
        clients["b"].wait_for("Connected", times=2)
        clients["a"].wait_for("Connected", times=3)
        clients["late"].wait_for("does not know this client's key")
        enrol(folder, {"late": late})  # while the server runs
        clients["late"].wait_for("Connected")
        everyone = roll_call(folder)
        assert everyone == numbers(folder) and before.items() < everyone.items()

        enrol(folder, {"b": replace(enrolled(folder)["b"], left=True)})
        clients["b"].wait_for("does not know this client's key")
        assert link.nodes(folder)["b"] == "left"
        everything = [running.process for running in (*clients.values(), server)]
        for process in everything:
            process.terminate()
        assert [process.wait(LONGEST) for process in everything] == [0] * 4
        assert all(kin(place / "home") == [] for place in (folder, *(tmp_path / name for name in clients)))
