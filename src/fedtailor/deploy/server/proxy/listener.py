"""The public port: accepts connections, and closes those that take too long or are too many.

A connection counts from the moment it is accepted, before its TLS handshake, and is closed if it has not sent complete
headers in time. uvicorn would count it only after the handshake, and wait for its headers without a limit.
"""

import asyncio
import errno
import gc
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedtailor.deploy.server.proxy.admission import Admission, Connection, address_of
from fedtailor.deploy.server.proxy.certificate_reload import certificate_reloader
from fedtailor.deploy.server.proxy.event_log import EventLog, proxy_events
from fedtailor.deploy.server.proxy.proxy import MAX_HEADER_BYTES, Proxy
from fedtailor.errors import DeployError, reason

log = logging.getLogger("fedtailor.proxy")
_FLUSH_INTERVAL = 60.0  # seconds between summaries of repeated events in the log
_ACCEPT_PAUSE = 0.2  # seconds without accepting, if there are no descriptors
_TLS_SHUTDOWN = 3.0  # seconds that a peer has to end TLS
_BACKLOG = 1024  # connections that wait to be accepted
_MAX_DESCRIPTORS = 2**16
_OTHER_DESCRIPTORS = 256  # of this process: files, and connections to Flower
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_BROKEN = (errno.EBADF, errno.EINVAL)  # the listening socket is closed


@contextmanager
def run_proxy(proxy: Proxy, listener: socket.socket, certificate: Path, key: Path) -> Iterator[Callable[[], bool]]:
    """Serve at a socket in a separate thread; yield a function that returns whether the thread is still running."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    descriptors = raise_descriptor_limit()
    places = max(descriptors - _OTHER_DESCRIPTORS, descriptors // 2)
    server = _Server(proxy, listener, tls, places, certificate_reloader(lambda: tls, certificate, key))
    gc.freeze()  # exempts imported modules from garbage collection, which would otherwise dominate the proxy's CPU time
    thread = threading.Thread(target=server.http.run, args=([],), name="proxy", daemon=True)
    thread.start()
    while thread.is_alive() and not server.http.started:
        thread.join(0.02)
    try:
        yield thread.is_alive
    finally:
        server.http.should_exit = True
        thread.join(10)


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many files and connections as the system allows; return the number.

    >>> raise_descriptor_limit() > 0
    True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MAX_DESCRIPTORS if hard == unlimited else min(hard, _MAX_DESCRIPTORS)
    if soft == unlimited or soft >= wanted:
        return _MAX_DESCRIPTORS if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class _Server:
    """An ASGI server whose connections are accepted here instead of by uvicorn."""

    def __init__(
        self,
        proxy: Proxy,
        listener: socket.socket,
        tls: ssl.SSLContext,
        places: int,
        reload_certificate: Callable[[], Awaitable[None]],
    ) -> None:
        self._proxy, self._listener, self._tls = proxy, listener, tls
        self._events = proxy_events()
        self._admission = Admission(proxy.limits, self._events.add, places)
        self._handshakes = set[asyncio.Task[None]]()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=H11Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(proxy.limits.idle_timeout),
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_notify=1,
            callback_notify=reload_certificate,
        )
        self.http = uvicorn.Server(config)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._proxy(scope, receive, send)
            return
        await receive()
        tasks = [asyncio.create_task(self._accept_connections()), asyncio.create_task(self._tidy())]
        for task in tasks:
            task.add_done_callback(self._end)
        try:
            async with self._proxy.connected_to_flower():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        finally:
            for task in tasks:
                task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("The reverse proxy ends.", exc_info=task.exception())
            self.http.should_exit = True

    async def _tidy(self) -> None:
        try:
            while True:
                await asyncio.sleep(_FLUSH_INTERVAL)
                self._events.flush()
                self._admission.forget_arrivals()
        finally:
            self._events.flush()

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listener)
            except ConnectionError:  # the peer has already gone
                continue
            except OSError as error:
                if error.errno in _BROKEN:
                    raise
                if error.errno not in _OUT_OF_DESCRIPTORS or not self._admission.make_room(reason(error)):
                    self._events.add("Nobody can connect at the moment", reason(error))
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            connection = Connection(address_of(peer[0]), partial(_shut_down, accepted), loop.time())
            if self._admission.admit(connection):
                task = loop.create_task(self._shake_hands(accepted, connection))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                accepted.close()

    async def _shake_hands(self, accepted: socket.socket, connection: Connection) -> None:
        loop, timeout = asyncio.get_running_loop(), self._proxy.limits.header_timeout
        protocol = _Protocol(connection, self._admission, self._events, timeout, self.http)
        try:
            async with asyncio.timeout(timeout):
                await loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=self._tls, ssl_shutdown_timeout=_TLS_SHUTDOWN
                )
        except TimeoutError:
            self._events.add(connection.address, f"no TLS handshake within {timeout:.0f} s")
        except ssl.SSLError:  # it does not speak TLS, or does not trust the certificate
            self._events.add(connection.address, "no successful TLS handshake")
        except OSError:  # closed: probes of load balancers do nothing else
            pass
        finally:
            if not protocol.connected:
                self._admission.release(connection)


def _shut_down(accepted: socket.socket) -> None:
    with suppress(OSError):  # already closed
        accepted.shutdown(socket.SHUT_RDWR)


class _Protocol(H11Protocol):
    """HTTP on one connection, with a deadline for complete headers."""

    def __init__(
        self, connection: Connection, admission: Admission, events: EventLog, timeout: float, server: uvicorn.Server
    ) -> None:
        state = {"sign": partial(admission.sign, connection), "abort": lambda: connection.abort()}
        state["report"] = partial(events.add, connection.address)
        super().__init__(server.config, server.server_state, state)
        self._connection, self._admission, self._events, self._timeout = connection, admission, events, timeout
        self._deadline: asyncio.TimerHandle | None = None
        self.connected = False  # the TLS handshake has succeeded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connected = True
        self._connection.abort = transport.abort
        self._close_at(self._connection.opened + self._timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._admission.release(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_deadline()
            if self.cycle is not None and self.cycle.response_complete:  # the rest of a rejected body is discarded
                self._close_at(self.loop.time() + self.timeout_keep_alive)
        elif self._deadline is None:
            self._close_at(self.loop.time() + self._timeout)

    def send_400_response(self, msg: str) -> None:
        self._events.add(self._connection.address, "an invalid HTTP request")
        super().send_400_response(msg)

    def _close_at(self, time: float) -> None:
        self._deadline = self.loop.call_at(time, self._expire)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._events.add(self._connection.address, f"no complete request headers within {self._timeout:.0f} s")
        self.transport.abort()


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
