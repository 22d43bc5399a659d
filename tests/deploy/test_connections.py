"""Connections to the server's port: how many stay open, for how long, and for whom."""

import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fedtailor.deploy.server.proxy.admission import Admission, Connection
from fedtailor.deploy.server.proxy.event_log import EventLog
from fedtailor.deploy.server.proxy.limits import Limits
from fedtailor.deploy.server.proxy.listener import raise_descriptor_limit
from support.federation_processes import TIMEOUT, wait_until
from support.proxied_superlink import FLEET, LIMITS, FakeSuperLink, SigningClient, prepare, proxy_before, serve_fake

ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
PATH = FLEET + "pull-messages"
PARTIAL = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: localhost\r\n"
FEW = replace(LIMITS, unsigned=16, unsigned_per_address=8, new_per_second=1e6)


# ---- by hand


class Visitors:
    """Connections to an admission, by name; a new one arrives every `interval` seconds."""

    def __init__(self, limits: Limits, places: int = 1000, interval: float = 1.0) -> None:
        self.now, self._interval = 0.0, interval
        self.reported: list[tuple[str, str]] = []
        self.admission = Admission(
            limits, lambda *event: self.reported.append(event), places=places, clock=lambda: self.now
        )
        self.open: list[str] = []
        self._connections: dict[str, Connection] = {}

    def arrive(self, *names: str) -> None:
        """Open connections, each named after its address with a letter for each further connection."""
        for name in names:
            self.now += self._interval
            connection = Connection(name.rstrip("abcd"), lambda name=name: self.open.remove(name), self.now)  # type: ignore[misc]
            self.open.append(name)
            self._connections[name] = connection
            if not self.admission.admit(connection) and name in self.open:
                self.open.remove(name)

    def sign(self, name: str, client: str) -> None:
        self.admission.sign(self._connections[name], client)

    def leave(self, name: str) -> None:
        self.open.remove(name)
        self.admission.release(self._connections[name])


def test_admission_closes_oldest_connection_of_an_address_with_too_many() -> None:
    visitors = Visitors(Limits(unsigned=10, unsigned_per_address=2))
    visitors.arrive("1a", "2a", "1b", "1c")
    assert visitors.open == ["2a", "1b", "1c"]
    assert [address for address, _ in visitors.reported] == ["1"]
    visitors.leave("1b")
    visitors.arrive("1d")
    assert visitors.open == ["2a", "1c", "1d"]


def test_admission_without_places_closes_oldest_connection_of_address_with_most() -> None:
    visitors = Visitors(Limits(unsigned=4, unsigned_per_address=3))
    visitors.arrive("1a", "2a", "2b", "2c", "3a", "4a")
    assert visitors.open == ["1a", "2c", "3a", "4a"]
    visitors.arrive("5a", "6a")  # all have one: the oldest address
    assert visitors.open == ["3a", "4a", "5a", "6a"]


def test_admission_reserves_places_for_addresses_of_clients() -> None:
    limits = Limits(unsigned=4, unsigned_per_address=4, reserved_per_address=2)
    visitors = Visitors(limits)
    visitors.arrive("1a")
    visitors.sign("1a", "hospital")
    visitors.arrive("1b", "1c", "2a", "3a", "4a", "5a", "6a")
    assert visitors.open == ["1a", "1b", "1c", "5a", "6a"]
    strangers = Visitors(limits)
    strangers.arrive("1b", "1c", "2a", "3a", "4a", "5a", "6a")
    assert strangers.open == ["3a", "4a", "5a", "6a"]


def test_admission_does_not_count_signed_connections_as_unsigned() -> None:
    visitors = Visitors(Limits(unsigned=2, unsigned_per_address=2, per_client=2, reserved_per_address=0))
    for name, client in {"1a": "hospital", "1b": "hospital", "2a": "clinic"}.items():
        visitors.arrive(name)
        visitors.sign(name, client)
    visitors.arrive("1c", "1d", "3a")
    assert visitors.open == ["1a", "1b", "2a", "1d", "3a"]
    visitors.sign("1a", "hospital")
    visitors.sign("1d", "hospital")  # its third: the one that it has not used for longest is closed
    assert visitors.open == ["1a", "2a", "1d", "3a"]


def test_admission_counts_new_connections_per_second_except_those_of_clients() -> None:
    visitors = Visitors(Limits(unsigned=9, unsigned_per_address=2, new_per_second=1.0), interval=0.0)
    visitors.arrive("1a", "1b", "1c", "2a")
    assert visitors.open == ["1a", "1b", "2a"] and visitors.reported[0][0] == "1"
    visitors.sign("1a", "hospital")
    visitors.arrive("1c", "1d")
    assert visitors.open == ["1a", "1b", "2a", "1c"]
    visitors.now = 1.0
    visitors.arrive("1d")
    assert "1d" in visitors.open
    visitors.now = 3.0
    visitors.admission.forget_arrivals()
    assert visitors.admission._arrivals == {}


def test_admission_with_few_descriptors_leaves_places_to_clients() -> None:
    visitors = Visitors(Limits(unsigned=9, unsigned_per_address=9), places=3)
    visitors.arrive("1a")
    visitors.sign("1a", "hospital")
    visitors.arrive("2a", "3a", "4a")
    assert visitors.open == ["1a", "3a", "4a"]


def test_event_log_is_bounded_and_counts_repetitions() -> None:
    lines: list[str] = []
    events = EventLog(lines.append)
    for number in range(300):
        events.add(str(number), "connects")
        events.add("0", "connects")
    assert len(lines) == 100 and lines[0] == "0: connects."
    events.flush()
    assert lines[100:] == ["0: connects (301 times).", "Other addresses: 200 more events."]
    events.add("0", "connects")
    assert lines[-1] == "0: connects."


# ---- real connections to this machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("connections") / "operator", ["a", "b"])


@pytest.fixture
def proxy_log() -> Iterator[list[str]]:
    """The lines of the reverse proxy's log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedtailor.proxy")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@contextmanager
def listening(folder: Path, limits: Limits) -> Iterator[SigningClient]:
    with serve_fake(FakeSuperLink(), folder) as port, proxy_before(port, folder, limits) as client:
        yield client


def flood(client: SigningClient, count: int, slow_headers: bool, stack: ExitStack) -> list[socket.socket]:
    """Open connections from the attacker's address that never complete a request."""
    opened = []
    for _ in range(count):
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", client.port), TIMEOUT, (ATTACKER, 0)))
        if slow_headers:
            with suppress(OSError):  # it may already have been closed
                connection = stack.enter_context(client.tls.wrap_socket(connection, server_hostname="localhost"))
                connection.sendall(PARTIAL)
        opened.append(connection)
    return opened


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server's next bytes, and return whether it has closed the connection instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("slow_headers", [False, True], ids=["idle", "slow_headers"])
def test_flood_from_one_address_does_not_lock_out_clients(
    folder: Path, proxy_log: list[str], slow_headers: bool
) -> None:
    """Neither at other addresses nor at the attacker's own, and no connection that a client already has is closed."""
    with ExitStack() as stack, listening(folder, replace(FEW, header_timeout=TIMEOUT)) as client:
        earlier = client.connect(ATTACKER)
        earlier.request("POST", PATH, b"", client.sign())
        assert earlier.getresponse().read() == b""
        opened = flood(client, 40, slow_headers, stack)
        assert is_closed(opened[0])
        assert [client.post(PATH, source=source)[0] for source in (ATTACKER, OTHER, ATTACKER)] == [200] * 3
        port = earlier.sock.getsockname()[1]
        earlier.request("POST", PATH, b"", client.sign())
        assert earlier.getresponse().status == 200 and earlier.sock.getsockname()[1] == port
        assert any(line.startswith(f"{ATTACKER}: has too many connections without") for line in proxy_log)


def test_connection_without_complete_headers_is_closed(folder: Path, proxy_log: list[str]) -> None:
    with ExitStack() as stack, listening(folder, replace(FEW, header_timeout=1.0)) as client:
        assert all(map(is_closed, flood(client, 2, False, stack) + flood(client, 2, True, stack)))
        connected = client.connect()
        connected.connect()
        assert is_closed(connected.sock)  # it has not sent anything
        kept = client.connect()
        kept.request("POST", PATH, b"", client.sign())
        assert kept.getresponse().read() == b""
        kept.sock.sendall(PARTIAL)
        assert is_closed(kept.sock)  # the second request is not completed either
    assert {f"{ATTACKER}: no TLS handshake within 1 s.", f"{ATTACKER}: no complete request headers within 1 s."} <= set(
        proxy_log
    )


def test_connection_that_stalls_in_a_request_is_closed(folder: Path) -> None:
    with listening(folder, replace(FEW, idle_timeout=1.0)) as client:
        slow = client.connect()
        slow.request("POST", FLEET + "push-object", b"", {**client.sign(), "content-length": "100"})
        assert slow.getresponse().status == 408


def test_stranger_is_named_in_log(folder: Path, proxy_log: list[str]) -> None:
    with listening(folder, FEW) as client:
        stranger = SigningClient(folder, client.port, folder.parent / "b" / "bundle" / "key")
        for _ in range(3):
            assert stranger.post(PATH, source=OTHER)[0] == 412
        with socket.create_connection(("127.0.0.1", client.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wait_until(lambda: f"{ATTACKER}: no successful TLS handshake." in proxy_log, "the connection is logged")
    unknown = f"{OTHER}: The server does not know this client's key; ask the operator"
    assert [line for line in proxy_log if line.startswith(OTHER)] == [f"{unknown}.", f"{unknown} (3 times)."]


def test_raise_descriptor_limit_raises_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 2**16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_SERVER_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from support.proxied_superlink import proxy_before
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with proxy_before(int(sys.argv[2]), Path(sys.argv[1])) as client:
    print(client.port, flush=True)
    sys.stdin.readline()
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, 64))
    print("none left", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_server_with_few_descriptors_serves_clients_and_says_so_when_none_are_left(folder: Path) -> None:
    with ExitStack() as stack, serve_fake(FakeSuperLink(), folder) as superlink:
        command = [sys.executable, "-c", _SERVER_WITH_FEW_DESCRIPTORS, str(folder), str(superlink)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        server = stack.enter_context(
            subprocess.Popen(command, text=True, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=1)
        )
        stack.callback(server.kill)
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        client = SigningClient(folder, int(server.stdout.readline()), folder.parent / "a" / "bundle" / "key")
        flood(client, 100, False, stack)
        assert client.post(PATH)[0] == 200
        server.stdin.write("\n")
        assert server.stdout.readline() == "none left\n"
        flood(client, 5, False, stack)
        problem = f"{ATTACKER}: this process has too many files and connections open; raise its limit"
        assert any(line.startswith(problem) for line in server.stderr)
