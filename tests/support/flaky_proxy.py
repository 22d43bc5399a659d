"""A TCP proxy between clients and a server that can drop all traffic, slow it down, and record it."""

import asyncio
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from support.federation_processes import Federation

T = TypeVar("T")


class FlakyProxy:
    """A proxy to the server's port; with the server's keys, it decrypts and records the traffic."""

    def __init__(self, port: int, keys: Path | None = None) -> None:
        self.up: list[bytearray] = []  # bytes per connection, if the traffic is recorded
        self.down: list[bytearray] = []
        self._target, self._keys = port, keys
        self._outages = 0
        self._pause = 0.0  # seconds per byte
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._run(self._start())

    def disconnect(self) -> None:
        """Drop all traffic silently. Existing connections never recover, as when a router has lost its state."""
        self._outages += 1
        self._loop.call_soon_threadsafe(self._connected.clear)

    def reconnect(self) -> None:
        self._loop.call_soon_threadsafe(self._connected.set)

    def limit_rate(self, bytes_per_second: float | None) -> None:
        """Slow down each connection in each direction, or stop doing so."""
        self._pause = 0.0 if bytes_per_second is None else 1 / bytes_per_second

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30.0)

    async def _start(self) -> int:
        self._connected = asyncio.Event()
        self._connected.set()
        tls: ssl.SSLContext | None = None
        if self._keys is not None:  # impersonate the server
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Forward one connection in both directions until it ends or is dropped."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._connected.wait()
        outages, up, down = self._outages, bytearray(), bytearray()
        tls = None if self._keys is None else ssl.create_default_context(cafile=self._keys / "authority.crt")
        with suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target, ssl=tls)
            if self._keys is not None:
                self.up.append(up)
                self.down.append(down)
            pumps = [
                self._pump(from_client, to_server, up, outages),
                self._pump(from_server, to_client, down, outages),
            ]
            await asyncio.gather(*pumps, return_exceptions=True)
            to_server.close()
        to_client.close()
        self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, recorded: bytearray, outages: int
    ) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                await asyncio.sleep(self._pause * len(data))
                if self._outages != outages:
                    await asyncio.Event().wait()  # forever
                sink.write(data)
                if self._keys is not None:
                    recorded += data
                await sink.drain()
        if self._outages != outages:
            await asyncio.Event().wait()
        sink.close()


@contextmanager
def flaky_proxy(federation: Federation, record: bool = False) -> Iterator[FlakyProxy]:
    """Start a proxy to a federation's server."""
    keys = federation.operator / "keys" if record else None
    proxy = FlakyProxy(federation.deployment.port, keys)
    try:
        yield proxy
    finally:
        proxy.close()
