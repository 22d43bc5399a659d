"""The reverse proxy: the only part of the server that is reachable from outside.

Flower serves all its interfaces on one port. Anyone with the authority's certificate, which every client has, could use
its control interface to run code on all clients. Therefore Flower listens on the local machine only, and the proxy, on
the public address, forwards only what clients need: requests to the fleet interface that are signed by an enrolled
client and of bounded size.
"""

import asyncio
import json
import re
import ssl
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import httpcore
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.types import Receive, Scope, Send

from fedtailor.deploy.server.proxy.limits import Limits
from fedtailor.errors import DeployError, reason

ERROR_CODE = 0  # of errors from the proxy; Flower's error codes start at 1
# matched as sent: nothing encoded, no dots, no extra slash
_FLEET_PATH = re.compile(rb"/v1/fleet/([a-z]+(?:-[a-z]+)*)")
_FORWARDED_HEADERS = ("content-type", "content-length", "accept")  # in addition to Flower's headers
_KEY, _TIME, _SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
MAX_HEADER_BYTES = 2**14  # Flower's headers take about 1,000
_CHUNK_BYTES = 2**18  # of a response that are read at a time
_MAX_FLOWER_CONNECTIONS = 128
_MAX_CLOCK_LEAD = 4.0  # seconds; from 5 s on, Flower rejects the request without a reason
_KEEPALIVE = 3.0  # seconds that a connection to Flower stays open; Flower closes it after 5


class _RejectedError(Exception):
    """A request that is not forwarded: the HTTP status, the reason, and the client whose reply is incomplete now."""

    def __init__(self, status: int, problem: str, disconnect: bool = False, reply_of: str = "") -> None:
        super().__init__(problem)
        self.status, self.disconnect, self.reply_of = status, disconnect, reply_of


class _StalledError(Exception):
    """The client does not read its response."""


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

    def __init__(
        self,
        superlink: str,
        tls: ssl.SSLContext,
        limits: Limits | None = None,
        on_refusal: Callable[[str, str, str], None] = lambda client, message_id, reason: None,
    ) -> None:
        self.limits = limits or Limits()
        self._on_refusal = on_refusal  # called when a client's reply to a message will never arrive
        self._replying_to: dict[str, str] = {}  # client -> ID of the message to which it replies
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
        connection = scope["state"]  # of `listener._Protocol`
        try:
            call, headers = _check_headers(scope)
            client = self._authenticate(headers)
            connection["sign"](client)
            request = self._check_size(client, call, headers)
            body = _read_body(receive, self.limits.idle_timeout)
            await self._forward(request, await self._read_replies(request, body) or body, send)
        except _RejectedError as rejection:
            if rejection.reply_of:
                message_id = self._replying_to.get(rejection.reply_of, "")
                self._on_refusal(rejection.reply_of, message_id, str(rejection).rstrip("."))
            connection["report"](str(rejection).rstrip("."))
            await _reject(send, rejection)
        except _StalledError:
            connection["report"](f"does not read its response for {self.limits.idle_timeout:.0f} s")
            connection["abort"]()

    @asynccontextmanager
    async def connected_to_flower(self) -> AsyncIterator[None]:
        """Keep connections to Flower open, in the event loop in which requests are forwarded."""
        backend = _TLSBackend(self._tls)
        pool = httpcore.AsyncConnectionPool(
            max_connections=_MAX_FLOWER_CONNECTIONS, keepalive_expiry=_KEEPALIVE, network_backend=backend
        )
        async with pool as self._flower:
            yield

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

    def _check_size(self, client: str, call: str, headers: Mapping[str, str]) -> _Request:
        """Return the request if its body may be forwarded."""
        size = headers.get("content-length", "")
        if "transfer-encoding" in headers or "upgrade" in headers or not (size.isdecimal() and len(size) < 16):
            raise _RejectedError(411, f"A request of '{client}' has no valid content length.", disconnect=True)
        length, limit = int(size), self.limits.body_bytes
        if length > limit:
            problem = f"A request of '{client}' has {length:,} bytes; at most {limit:,} are allowed."
            raise _RejectedError(413, problem, reply_of=client if call == "push-object" else "")
        if call == "push-object":
            self._count_upload(client, length)
        forwarded: dict[bytes | str, bytes | str]
        forwarded = {n: v for n, v in headers.items() if n in _FORWARDED_HEADERS or n.startswith("flwr-")}
        forwarded["accept-encoding"] = "identity"  # otherwise the response might be compressed
        return _Request(client, call, length, forwarded)

    def _count_upload(self, client: str, length: int) -> None:
        uploaded = self._uploaded.get(client, 0) + length
        if uploaded > self.limits.upload_bytes:
            limit = self.limits.upload_bytes
            problem = f"'{client}' sends more than {limit:,} bytes in reply to one message."
            raise _RejectedError(413, problem, reply_of=client)
        self._uploaded[client] = uploaded

    async def _read_replies(self, request: _Request, chunks: AsyncIterator[bytes]) -> bytes | None:
        """Return the body of a push-messages call after checking its senders (Flower does not); otherwise None."""
        client = request.client
        if request.call != "push-messages":
            return None
        body = b"".join([chunk async for chunk in chunks])
        try:
            parsed = PushMessagesRequest.FromString(body)
        except DecodeError as error:
            raise _RejectedError(400, f"'{client}' sends an invalid list of messages.", reply_of=client) from error
        for message in parsed.messages_list:
            self._replying_to[client] = message.metadata.reply_to_message_id
            if message.metadata.src_node_id != parsed.node.node_id:
                raise _RejectedError(400, f"'{client}' replies in another client's name.", reply_of=client)
        return body

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
                await self._send(send, chunk)
            await send({"type": "http.response.body"})

    async def _send(self, send: Send, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(self.limits.idle_timeout):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError as error:
            raise _StalledError from error


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


def _check_headers(scope: Scope) -> tuple[str, dict[str, str]]:
    """Return the call and the headers of a request that may be for the fleet interface."""
    path = _FLEET_PATH.fullmatch(scope["raw_path"])
    if not path or scope["query_string"]:
        raise _RejectedError(404, "This path does not exist.", disconnect=True)
    if scope["method"] != "POST":
        raise _RejectedError(405, "Only POST is allowed.", disconnect=True)
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise _RejectedError(431, f"A request has more than {MAX_HEADER_BYTES:,} bytes of headers.", disconnect=True)
    return path[1].decode(), {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


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
