"""The gate: the only part of the server that the world can reach.

Flower serves all its interfaces on one port, and whoever holds the authority's certificate, which every client does,
could submit code to everybody. So Flower listens on its own machine alone, and the gate, on the public address, lets
through what clients need: the fleet interface, to requests that an enrolled client signed, of bounded size.
"""

import asyncio
import gc
import json
import logging
import re
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpcore
import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedtailor.errors import Refused

log = logging.getLogger("fedtailor.gate")
CODE = 0  # of errors that are the gate's own; Flower counts its own from 1
_FLEET = re.compile(rb"/v1/fleet/([a-z]+(?:-[a-z]+)*)")  # as it was sent: nothing encoded, no dots, no more slashes
_KEPT = ("content-type", "content-length", "accept")  # headers that go through, beside Flower's own
_KEY, _TIME, _SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
_HEADERS = 2**14  # bytes of a request's headers; Flower's take one thousand
_PIECE = 2**18  # bytes of an answer that are read at once
_INSIDE = 64  # connections to Flower
_AHEAD = 4.0  # seconds by which a client's clock may be ahead; from 5 on Flower refuses it without saying why
_REUSED = 3.0  # seconds a connection to Flower waits for its next request; Flower closes it after 5


@dataclass(frozen=True)
class Limits:
    """What one request, one client and all of them together may take."""

    body: int = 2**24  # bytes of a request; Flower sends arrays in pieces of 5 MiB
    upload: int = 2**30  # bytes of all that a client sends in answer to one message
    connections: int = 512  # open at once
    silence: float = 30.0  # seconds without a byte where some are due
    clock: float = 300.0  # seconds by which a client's clock may be behind


class _Turned(Exception):
    """A request that does not go through: its status, and why."""

    def __init__(self, status: int, why: str, stranger: bool = False) -> None:
        super().__init__(why)
        self.status, self.stranger = status, stranger


@dataclass(frozen=True)
class _Passing:
    """A request that may go through."""

    client: str  # whose it is
    call: str  # such as push-object
    length: int
    headers: dict[bytes | str, bytes | str]


class Gate:
    """An ASGI application that hands clients' requests on to Flower at `link`, an address on this machine.

    >>> gate = Gate("127.0.0.1:9000", ssl.create_default_context())
    >>> gate.admit({})
    """

    def __init__(self, link: str, trust: ssl.SSLContext, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._link, self._trust = f"http://{link}", trust  # encrypted all the same, by `_Inside`
        self._keys: dict[str, tuple[str, EllipticCurvePublicKey]] = {}
        self._sent: dict[str, int] = {}  # bytes of every client, since it was last sent a message
        self._flower: httpcore.AsyncConnectionPool

    def admit(self, clients: Mapping[str, str]) -> None:
        """Let through these clients, of whom it is given the public key, and nobody else."""
        keys = {}
        for name, line in clients.items():
            key = None
            with suppress(ValueError, UnsupportedAlgorithm):
                key = load_ssh_public_key(line.encode())
            if not isinstance(key, EllipticCurvePublicKey):
                raise Refused(f"The public key of '{name}' is none, or of a kind that Flower does not use.")
            spelled = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            keys[b64encode(spelled).decode()] = (name, key)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            passing = self._check(scope)
            body = _pieces(receive, self.limits.silence)
            await self._hand_on(passing, await _read_answers(passing, body) or body, send)
        except _Turned as turned:
            log.warning("%s %s", scope["client"], turned)
            await _answer(send, turned)

    async def _live(self, receive: Receive, send: Send) -> None:
        inside = _Inside(self._trust)
        pool = httpcore.AsyncConnectionPool(max_connections=_INSIDE, keepalive_expiry=_REUSED, network_backend=inside)
        async with pool as self._flower:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def _check(self, scope: Scope) -> _Passing:
        """What a request's headers say, if it may go through; nothing of its body is read before."""
        path = _FLEET.fullmatch(scope["raw_path"])
        if not path or scope["query_string"]:
            raise _Turned(404, "There is nothing here.", stranger=True)
        if scope["method"] != "POST":
            raise _Turned(405, "There is nothing here but for POST.", stranger=True)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _HEADERS:
            raise _Turned(431, f"A request has more than {_HEADERS:,} bytes of headers.", stranger=True)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = self._whose(headers)
        size = headers.get("content-length", "")
        if "transfer-encoding" in headers or "upgrade" in headers or not (size.isdecimal() and len(size) < 16):
            raise _Turned(411, f"A request of '{client}' does not say how long it is.", stranger=True)
        call, length = path[1].decode(), int(size)
        if length > self.limits.body:
            raise _Turned(413, f"A request of '{client}' has {length:,} bytes; {self.limits.body:,} are the most.")
        if call == "push-object":
            self._count(client, length)
        kept: dict[bytes | str, bytes | str]
        kept = {n: v for n, v in headers.items() if n in _KEPT or n.startswith("flwr-")}
        kept["accept-encoding"] = "identity"  # else the answer could come packed
        return _Passing(client, call, length, kept)

    def _whose(self, headers: Mapping[str, str]) -> str:
        """Whose request it is, by its signature; Flower checks it once more, but only when it has read everything."""
        name, key = self._keys.get(headers.get(_KEY, ""), ("", None))
        if key is None:
            raise _Turned(412, "The server does not know this client's key; ask its operator.", stranger=True)
        try:
            signed = headers[_TIME]
            key.verify(b64decode(headers[_SIGNATURE], validate=True), signed.encode(), ECDSA(SHA256()))
            ahead = (datetime.fromisoformat(signed).astimezone(UTC) - datetime.now(UTC)).total_seconds()
        except (KeyError, ValueError, OverflowError, NotBase64, InvalidSignature) as error:
            raise _Turned(412, f"A request of '{name}' is not signed by its key.", stranger=True) from error
        if not -self.limits.clock <= ahead <= _AHEAD:
            raise _Turned(412, f"The clock of '{name}' is {ahead:+,.0f} s off the server's; set it right.")
        return name

    def _count(self, client: str, length: int) -> None:
        sent = self._sent.get(client, 0) + length
        if sent > self.limits.upload:
            raise _Turned(413, f"'{client}' sends more than {self.limits.upload:,} bytes in answer to one message.")
        self._sent[client] = sent

    async def _hand_on(self, passing: _Passing, body: AsyncIterator[bytes] | bytes, send: Send) -> None:
        url = f"{self._link}/v1/fleet/{passing.call}"
        waits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self.limits.silence)}
        called = self._flower.stream("POST", url, headers=passing.headers, content=body, extensions=waits)
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(called)
            except (OSError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                if passing.call == "push-object":  # it comes once more
                    self._sent[passing.client] -= passing.length
                status = 504 if isinstance(error, TimeoutError | httpcore.TimeoutException) else 502
                raise _Turned(status, f"Flower does not answer ({type(error).__name__}).") from error
            headers = {name.lower(): value for name, value in response.headers}
            if passing.call == "pull-messages" and headers.get(b"content-length", b"0") != b"0":
                self._sent[passing.client] = 0  # it was sent a message, and may answer it
            kept = [(n, v) for n, v in headers.items() if n.decode() in _KEPT or n.startswith(b"flwr-")]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for piece in response.aiter_stream():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})


class _Inside(httpcore.AsyncNetworkBackend):
    """Encrypted connections on this machine, by asyncio, which takes larger pieces at once than httpcore's own way."""

    def __init__(self, trust: ssl.SSLContext) -> None:
        self._trust = trust

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: object, **__: object
    ) -> "_Stream":
        async with asyncio.timeout(timeout):
            return _Stream(*await asyncio.open_connection(host, port, ssl=self._trust, limit=_PIECE))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Stream(httpcore.AsyncNetworkStream):
    """One of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        async with asyncio.timeout(timeout):
            return await self._reader.read(_PIECE)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._writer.write(buffer)
        async with asyncio.timeout(timeout):
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()


async def _pieces(receive: Receive, silence: float) -> AsyncIterator[bytes]:
    more = True
    while more:
        try:
            async with asyncio.timeout(silence):
                message = await receive()
        except TimeoutError as error:
            raise _Turned(408, f"A request stopped for {silence:.0f} s in its middle.", stranger=True) from error
        if message["type"] == "http.disconnect":
            raise _Turned(400, "A request ended in its middle.", stranger=True)
        more = message.get("more_body", False)
        if message["body"]:
            yield message["body"]


async def _read_answers(passing: _Passing, pieces: AsyncIterator[bytes]) -> bytes | None:
    """A list of answers whole, once it is known whose they are: Flower does not ask. None of any other call."""
    if passing.call != "push-messages":
        return None
    whole = b"".join([piece async for piece in pieces])
    try:
        said = PushMessagesRequest.FromString(whole)
    except DecodeError as error:
        raise _Turned(400, f"'{passing.client}' sends what is no list of messages.") from error
    if any(message.metadata.src_node_id != said.node.node_id for message in said.messages_list):
        raise _Turned(400, f"'{passing.client}' answers in another client's name.")
    return whole


async def _answer(send: Send, turned: _Turned) -> None:
    """Say no in the way Flower does, so that its client can tell why. Strangers are hung up on.

    What a client of ours still sends is thrown away, piece by piece: cut off in the middle, it would not hear the
    answer and try again.
    """
    body = json.dumps({"code": CODE, "detail": str(turned)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if turned.stranger else []
    await send({"type": "http.response.start", "status": turned.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Connection(H11Protocol):
    """A connection that ends if it never asks for anything, or if there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency and len(self.connections) > self.limit_concurrency:
            transport.abort()
        self.loop.call_later(self.timeout_keep_alive, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


@contextmanager
def standing(gate: Gate, listener: socket.socket, certificate: Path, key: Path) -> Iterator[Callable[[], bool]]:
    """Serve at a socket, in a thread of its own; gives a function that says whether it still does."""
    config = uvicorn.Config(
        gate,
        http=_Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=gate.limits.connections,
        timeout_keep_alive=int(gate.limits.silence),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=_HEADERS,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(config)
    gc.freeze()  # nothing imported is ever garbage: without this, looking for some is most of what the gate does
    thread = threading.Thread(target=server.run, args=([listener],), name="gate", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.02)
    try:
        yield thread.is_alive
    finally:
        server.should_exit = True
        thread.join(10)


def bind(host: str, port: int) -> socket.socket:
    """A socket that clients can reach: on loopback for a host of that name, else on every address of this machine.

    Nobody listens yet: who calls too early is turned away, and calls again, rather than left hanging.

    >>> bind("localhost", 0).getsockname()[0]
    '127.0.0.1'
    """
    inside = host in ("localhost", "127.0.0.1")
    both = not inside and socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("127.0.0.1" if inside else "", port))
    except OSError as error:
        made.close()
        raise Refused(f"Port {port} cannot be used: {error.strerror}; is a server running already?") from error
    return made
