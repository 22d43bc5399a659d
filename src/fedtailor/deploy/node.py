"""A client's side of Flower: its SuperNode, kept connected whatever happens to it, the network or the server."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedtailor.deploy.child import (
    Child,
    alone,
    answers,
    command,
    end_all,
    environment,
    free_address,
    hearing_stops,
    kin,
    once,
)
from fedtailor.deploy.gate import CODE
from fedtailor.deploy.keys import Bundle, read_bundle
from fedtailor.deploy.settings import read_deployment
from fedtailor.files import write, writing

_PAUSES = (1.0, 30.0)  # seconds before it is started again: the first, and the longest
_IDLE = 90.0  # seconds that a message waits for somebody to work on it; Flower itself answers for the dead after 60
_GONE = 10.0  # seconds without a process that must be there, once all have started
_LOOK = 2.0  # seconds between two looks at them
_LOG = "log/supernode.log"
_WORKER, _EXECUTOR = "flwr-clientapp", "flower-superexec"
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")
_REFUSED = re.compile(r"\[code: (\d+)\] (.+)")
_DONE = re.compile(r"Sent successfully|Failed to (send|receive) message|Ignoring|Failed to create task")


@contextmanager
def alone_in(site: Path) -> Iterator[None]:
    """Work in a client's folder in which nobody else does.

    >>> from tempfile import mkdtemp
    >>> with alone_in(Path(mkdtemp())): print("alone")
    alone
    """
    with writing(f"The folder '{site}' cannot be written"):
        (site / "home").mkdir(parents=True, exist_ok=True)
    with alone(site / "home", f"'{site}' is connected already; one process is enough."):
        yield


def keep_connected(site: Path, say: Callable[[str], None]) -> None:
    """Take part in a federation until SIGTERM or Ctrl-C, `alone_in` a client's folder with a bundle in it.

    >>> keep_connected(Path("nowhere"), print)
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no bundle in 'nowhere/bundle'; open the file your operator gave you.
    """
    bundle, home = read_bundle(site / "bundle"), site / "home"
    deadline = read_deployment(bundle.folder).deadline
    with hearing_stops() as asked:
        end_all(home)  # of one that was killed
        ear, pause = _Ear(bundle, home, once(say)), _PAUSES[0]
        while not asked.is_set():
            _sign_off(bundle, home)
            ear.begin()
            here, told = free_address(), environment(home, FEDTAILOR_SITE=str(site.absolute()))
            flower = Child(home, _supernode(bundle, here), told, site / _LOG, ear.hear)
            try:
                _watch(flower, ear, site, here, deadline, asked)
            finally:
                flower.stop()
                if flower.ended == 0 and asked.is_set():  # it said goodbye itself
                    (home / "node").unlink(missing_ok=True)
            pause = _PAUSES[0] if ear.connected else min(2 * pause, _PAUSES[1])
            asked.wait(pause)


class _Ear:
    """What Flower's lines say of the connection and of its work."""

    def __init__(self, bundle: Bundle, home: Path, say: Callable[[str], None]) -> None:
        self._bundle, self._home, self.say = bundle, home, say
        self.begin()

    def begin(self) -> None:
        self.connected = False  # at some time since it was started
        self.lost = False  # since
        self.refused = False  # and told why
        self.busy: float | None = None  # since when it has a message to answer
        self.sending = False  # the answer

    def hear(self, line: str) -> None:
        """Take note of a line."""
        name, address = self._bundle.name, self._bundle.address
        if node := _CONNECTED.search(line):
            self.connected, self.lost = True, False
            write(self._home / "node", node[1].encode())
            self.say(f"Connected to {address} as '{name}'.")
        elif "Connection successful after" in line and self.connected:
            self.lost = False
            self.say(f"Connected to {address} as '{name}'.")
        elif "Connection attempt failed" in line:
            self.lost = True
        elif "handshake operation timed out" in line:  # after which Flower's client ends
            self.lost = self.refused = True
            self.tell_loss()
        elif "certificate verify failed" in line:
            self.refused = True
            self.say(f"Who answers at {address} is not this federation's server, or its certificate has ended.")
        elif refused := _REFUSED.search(line):
            self.refused = True
            self.say(self._why(int(refused[1]), refused[2]))
        elif "Receiving:" in line:
            self.busy, self.sending = time.monotonic(), False
        elif "Sending:" in line:
            self.sending = True
        elif _DONE.search(line):
            self.busy = None
            if "Failed to send" in line:
                large = "413" in line
                self.say(f"The server did not take an answer; {'it is too large' if large else 'the log says why'}.")

    def tell_loss(self) -> None:
        """Say that the server is not there. Flower's lines alone do not tell: its processes lose each other too."""
        if self.lost:
            lost = "The connection is lost to" if self.connected else "Nobody answers at"
            self.say(f"{lost} {self._bundle.address}; trying until somebody does.")

    def _why(self, code: int, words: str) -> str:
        if code == CODE:
            return words
        if "activate" not in words:
            return f"Refused by {self._bundle.address}: {words}"
        return (
            f"'{self._bundle.name}' seems connected already; unless others have its bundle too, it joins in a minute."
        )


@dataclass
class _Signs:
    """When there was the last sign of life of each of Flower's processes on this machine."""

    answer: float  # of the one that speaks with the server
    executor: float  # of the one that starts others
    worker: float  # of one that works on a message

    def look(self, home: Path, address: str) -> None:
        now, running = time.monotonic(), [process.words for process in kin(home)]
        if answers(address):
            self.answer = now
        if not running or any(_EXECUTOR in words for words in running):  # none: this system does not tell
            self.executor = max(now, self.executor)
        if not running or any(_WORKER in words for words in running):
            self.worker = now


def _watch(flower: Child, ear: _Ear, site: Path, address: str, deadline: float, asked: Event) -> None:
    """Return when Flower's client has ended, hangs, or is to be stopped."""
    looked = time.monotonic()
    signs = _Signs(looked, looked + _IDLE, looked)
    while not asked.wait(0.2) and flower.ended is None:
        if time.monotonic() < looked + _LOOK:
            continue
        ear.tell_loss()
        signs.look(site / "home", address)
        looked = time.monotonic()
        if why := _hangs(ear, signs, looked, deadline):
            ear.say(f"Flower's client hangs, for {why}; starting it again.")
            return
    if not asked.is_set() and not ear.refused:
        ended = "ended by itself" if ear.connected else "did not start"
        ear.say(f"Flower's client {ended} ({flower.ended}), trying again; '{site / _LOG}' says more.")


def _hangs(ear: _Ear, signs: _Signs, now: float, deadline: float) -> str | None:
    """What it waits for in vain, if anything.

    Flower's client works on one message at a time and waits for the answer as long as it takes. It does so for ever
    when the process that works on it is gone before it took the message, or before it handed over all of the answer.
    """
    busy = now if ear.busy is None else ear.busy
    vain = {
        "it does not answer": now > signs.answer + _IDLE,
        "the process is gone that starts others": now > signs.executor + _GONE,
        "nobody works on the server's message": not ear.sending and now > max(busy, signs.worker) + _IDLE,
        "its answer is not done by twice the deadline": now > busy + 2 * deadline + _IDLE,  # nobody waits for it
    }
    return next((why for why, holds in vain.items() if holds), None)


def _supernode(bundle: Bundle, here: str) -> list[str]:
    host, _, port = here.rpartition(":")
    folder = bundle.folder.absolute()
    return [
        command("flower-supernode"), "--superlink", bundle.address, "--host", host, "--port", port,
        "--root-certificates", str(folder / "authority.crt"), "--auth-supernode-private-key", str(folder / "key"),
    ]  # fmt: skip


def _sign_off(bundle: Bundle, home: Path) -> None:
    """Say goodbye for one of ours that could not any more; else the server refuses the next for a minute."""
    kept = home / "node"
    if not kept.is_file():
        return
    with suppress(Exception):  # a courtesy, and nothing depends on it
        if _deactivate(bundle, int(kept.read_text())):
            kept.unlink()


def _deactivate(bundle: Bundle, node: int) -> bool:
    """Whether the server has heard it."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_ssh_private_key((bundle.folder / "key").read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    authority = str(bundle.folder / "authority.crt")
    with FleetHttpClient.from_server_address(bundle.address, False, authority, [signed]) as fleet:
        try:
            fleet.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except httpx.HTTPStatusError as error:
            return error.response.status_code < 500  # it was off already, or the gate alone is there
    return True
