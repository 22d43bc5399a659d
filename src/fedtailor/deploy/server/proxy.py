"""The reverse proxy: the only part of the server that is reachable from outside.

Flower serves all its interfaces on one port. Anyone with the authority's certificate, which every client has, could use
its control interface to run code on all clients. Therefore Flower listens on the local machine only, and the proxy, on
the public address, forwards only what clients need: requests to the fleet interface that are signed by an enrolled
client and of bounded size.
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
from binascii import Error as Base64Error
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

from fedtailor.deploy.server.certificate_reload import certificate_reloader
from fedtailor.errors import DeployError, reason

log = logging.getLogger("fedtailor.proxy")
ERROR_CODE = 0  # of errors from the proxy; Flower's error codes start at 1
# matched as sent: nothing encoded, no dots, no extra slash
_FLEET_PATH = re.compile(rb"/v1/fleet/([a-z]+(?:-[a-z]+)*)")
_FORWARDED_HEADERS = ("content-type", "content-length", "accept")  # in addition to Flower's headers
_KEY, _TIME, _SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
_MAX_HEADER_BYTES = 2**14  # Flower's headers take about 1,000
_CHUNK_BYTES = 2**18  # of a response that are read at a time
_MAX_FLOWER_CONNECTIONS = 64
_MAX_CLOCK_LEAD = 4.0  # seconds; from 5 s on, Flower rejects the request without a reason
_KEEPALIVE = 3.0  # seconds that a connection to Flower stays open; Flower closes it after 5


@dataclass(frozen=True)
class Limits:
    """Limits per request, per client, and for all clients together."""

    body_bytes: int = 2**24  # of a request; Flower sends arrays in chunks of 5 MiB
    upload_bytes: int = 2**30  # of all that a client sends in reply to one message
    connections: int = 512  # open at the same time
    idle_timeout: float = 30.0  # seconds without a byte where some are expected
    max_clock_lag: float = 300.0  # seconds that a client's clock may be behind


class _RejectedError(Exception):
    """A request that is not forwarded: the HTTP status and the reason."""

    def __init__(self, status: int, problem: str, disconnect: bool = False) -> None:
        super().__init__(problem)
        self.status, self.disconnect = status, disconnect


@dataclass(frozen=True)
class _Request:
    """A request that may be forwarded."""

    client: str
    call: str  # such as push-object
    length: int
    headers: dict[bytes | str, bytes | str]


class Proxy:
    """An ASGI application that forwards clients' requests to Flower's SuperLink at an address on this machine.

    >>> proxy = Proxy("127.0.0.1:9000", ssl.create_default_context())
    >>> proxy.allow_only({})
    """

    def __init__(self, superlink: str, tls: ssl.SSLContext, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._superlink, self._tls = f"http://{superlink}", tls  # `_TLSBackend` encrypts the connection nevertheless
        self._keys: dict[str, tuple[str, EllipticCurvePublicKey]] = {}
        self._uploaded: dict[str, int] = {}  # bytes per client since the last message it received
        self._flower: httpcore.AsyncConnectionPool

    def allow_only(self, clients: Mapping[str, str]) -> None:
        """Forward only requests of these clients, given as names with public keys, one per line."""
        keys = {}
        for name, text in ((name, line) for name, lines in clients.items() for line in lines.splitlines()):
            key = None
            with suppress(ValueError, UnsupportedAlgorithm):
                key = load_ssh_public_key(text.encode())
            if not isinstance(key, EllipticCurvePublicKey):
                raise DeployError(f"The public key of '{name}' is invalid or of a type that Flower does not support.")
            encoded = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            keys[b64encode(encoded).decode()] = (name, key)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        try:
            request = self._check(scope)
            body = _read_body(receive, self.limits.idle_timeout)
            await self._forward(request, await _read_replies(request, body) or body, send)
        except _RejectedError as rejection:
            log.warning("%s %s", scope["client"], rejection)
            await _reject(send, rejection)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        backend = _TLSBackend(self._tls)
        pool = httpcore.AsyncConnectionPool(
            max_connections=_MAX_FLOWER_CONNECTIONS, keepalive_expiry=_KEEPALIVE, network_backend=backend
        )
        async with pool as self._flower:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def _check(self, scope: Scope) -> _Request:
        """Return the request if its headers allow forwarding; the body is not read before this check."""
        path = _FLEET_PATH.fullmatch(scope["raw_path"])
        if not path or scope["query_string"]:
            raise _RejectedError(404, "This path does not exist.", disconnect=True)
        if scope["method"] != "POST":
            raise _RejectedError(405, "Only POST is allowed.", disconnect=True)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _MAX_HEADER_BYTES:
            raise _RejectedError(
                431, f"A request has more than {_MAX_HEADER_BYTES:,} bytes of headers.", disconnect=True
            )
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = self._authenticate(headers)
        size = headers.get("content-length", "")
        if "transfer-encoding" in headers or "upgrade" in headers or not (size.isdecimal() and len(size) < 16):
            raise _RejectedError(411, f"A request of '{client}' has no valid content length.", disconnect=True)
        call, length = path[1].decode(), int(size)
        if length > self.limits.body_bytes:
            limit = self.limits.body_bytes
            raise _RejectedError(413, f"A request of '{client}' has {length:,} bytes; at most {limit:,} are allowed.")
        if call == "push-object":
            self._count_upload(client, length)
        forwarded: dict[bytes | str, bytes | str]
        forwarded = {n: v for n, v in headers.items() if n in _FORWARDED_HEADERS or n.startswith("flwr-")}
        forwarded["accept-encoding"] = "identity"  # otherwise the response might be compressed
        return _Request(client, call, length, forwarded)

    def _authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the client that signed a request; Flower verifies the signature only after it has read the body."""
        name, key = self._keys.get(headers.get(_KEY, ""), ("", None))
        if key is None:
            raise _RejectedError(412, "The server does not know this client's key; ask the operator.", disconnect=True)
        try:
            signed = headers[_TIME]
            key.verify(b64decode(headers[_SIGNATURE], validate=True), signed.encode(), ECDSA(SHA256()))
            lead = (datetime.fromisoformat(signed).astimezone(UTC) - datetime.now(UTC)).total_seconds()
        except (KeyError, ValueError, OverflowError, Base64Error, InvalidSignature) as error:
            raise _RejectedError(412, f"A request of '{name}' is not signed with its key.", disconnect=True) from error
        if not -self.limits.max_clock_lag <= lead <= _MAX_CLOCK_LEAD:
            raise _RejectedError(
                412, f"The clock of '{name}' differs from the server's by {lead:+,.0f} s; synchronize it."
            )
        return name

    def _count_upload(self, client: str, length: int) -> None:
        uploaded = self._uploaded.get(client, 0) + length
        if uploaded > self.limits.upload_bytes:
            limit = self.limits.upload_bytes
            raise _RejectedError(413, f"'{client}' sends more than {limit:,} bytes in reply to one message.")
        self._uploaded[client] = uploaded

    async def _forward(self, request: _Request, body: AsyncIterator[bytes] | bytes, send: Send) -> None:
        url = f"{self._superlink}/v1/fleet/{request.call}"
        timeouts = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self.limits.idle_timeout)}
        stream = self._flower.stream("POST", url, headers=request.headers, content=body, extensions=timeouts)
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(stream)
            except (OSError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
                if request.call == "push-object":  # the client will send it again
                    self._uploaded[request.client] -= request.length
                status = 504 if isinstance(error, TimeoutError | httpcore.TimeoutException) else 502
                raise _RejectedError(status, f"Flower does not respond: {reason(error)}.") from error
            headers = {name.lower(): value for name, value in response.headers}
            if request.call == "pull-messages" and headers.get(b"content-length", b"0") != b"0":
                self._uploaded[request.client] = 0  # the client received a message and may reply to it
            forwarded = [
                (n, v) for n, v in headers.items() if n.decode() in _FORWARDED_HEADERS or n.startswith(b"flwr-")
            ]
            await send({"type": "http.response.start", "status": response.status, "headers": forwarded})
            async for chunk in response.aiter_stream():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})


class _TLSBackend(httpcore.AsyncNetworkBackend):
    """TLS connections to this machine by asyncio, which reads larger chunks than httpcore's own backend."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: object, **__: object
    ) -> "_TLSStream":
        async with asyncio.timeout(timeout):
            return _TLSStream(*await asyncio.open_connection(host, port, ssl=self._tls, limit=_CHUNK_BYTES))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _TLSStream(httpcore.AsyncNetworkStream):
    """One connection of the backend."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        async with asyncio.timeout(timeout):
            return await self._reader.read(_CHUNK_BYTES)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._writer.write(buffer)
        async with asyncio.timeout(timeout):
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()


async def _read_body(receive: Receive, timeout: float) -> AsyncIterator[bytes]:
    more = True
    while more:
        try:
            async with asyncio.timeout(timeout):
                message = await receive()
        except TimeoutError as error:
            raise _RejectedError(408, f"A request stalled for {timeout:.0f} s.", disconnect=True) from error
        if message["type"] == "http.disconnect":
            raise _RejectedError(400, "A request ended prematurely.", disconnect=True)
        more = message.get("more_body", False)
        if message["body"]:
            yield message["body"]


async def _read_replies(request: _Request, chunks: AsyncIterator[bytes]) -> bytes | None:
    """Return the body of a push-messages call after checking its senders (Flower does not), None for other calls."""
    if request.call != "push-messages":
        return None
    body = b"".join([chunk async for chunk in chunks])
    try:
        parsed = PushMessagesRequest.FromString(body)
    except DecodeError as error:
        raise _RejectedError(400, f"'{request.client}' sends an invalid list of messages.") from error
    if any(message.metadata.src_node_id != parsed.node.node_id for message in parsed.messages_list):
        raise _RejectedError(400, f"'{request.client}' replies in another client's name.")
    return body


async def _reject(send: Send, rejection: _RejectedError) -> None:
    """Send an error in Flower's format, so that its client can read the reason, and disconnect unauthenticated senders.

    The rest of an enrolled client's body is read and discarded. If the connection were closed instead, the client would
    not receive the error and would try again.
    """
    body = json.dumps({"code": ERROR_CODE, "detail": str(rejection)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if rejection.disconnect else []
    await send({"type": "http.response.start", "status": rejection.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Connection(H11Protocol):
    """A connection that is closed if it never sends a request, or if there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency and len(self.connections) > self.limit_concurrency:
            transport.abort()
        self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()


@contextmanager
def run_proxy(proxy: Proxy, listener: socket.socket, certificate: Path, key: Path) -> Iterator[Callable[[], bool]]:
    """Serve at a socket in a separate thread; yield a function that returns whether the thread is still running."""
    config = uvicorn.Config(
        proxy,
        http=_Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=proxy.limits.connections,
        timeout_keep_alive=int(proxy.limits.idle_timeout),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        timeout_notify=1,
    )
    config.callback_notify = certificate_reloader(lambda: config.ssl, certificate, key)
    server = uvicorn.Server(config)
    gc.freeze()  # exempts imported modules from garbage collection, which would otherwise dominate the proxy's CPU time
    thread = threading.Thread(target=server.run, args=([listener],), name="proxy", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.02)
    try:
        yield thread.is_alive
    finally:
        server.should_exit = True
        thread.join(10)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that clients can reach: on loopback for a local host, otherwise on all addresses of this machine.

    The socket does not listen yet, so early connections are refused and retried instead of left waiting.

    >>> bind("localhost", 0).getsockname()[0]
    '127.0.0.1'
    """
    local = host in ("localhost", "127.0.0.1")
    dual_stack = not local and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual_stack else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual_stack:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("127.0.0.1" if local else "", port))
    except OSError as error:
        listener.close()
        raise DeployError(f"Port {port} cannot be used: {error.strerror}. Is a server already running?") from error
    return listener
