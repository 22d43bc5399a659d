"""What lies between clients and a server: cables that can be cut, and looked into."""

import asyncio
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from federating import Federation

T = TypeVar("T")


class Cable:
    """What lies between clients and the server's port: a wire that can be cut, and looked into."""

    def __init__(self, port: int, keys: Path | None = None) -> None:
        self.up: list[bytearray] = []  # what crossed, by connection, if it may be looked into
        self.down: list[bytearray] = []
        self._target, self._keys = port, keys
        self._cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._do(self._begin())

    def cut(self) -> None:
        """From now on nothing gets through, and nobody is told. Connections of before never come to life again, as
        when a router forgot them."""
        self._cuts += 1
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._whole.set)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30.0)

    async def _begin(self) -> int:
        self._whole = asyncio.Event()
        self._whole.set()
        ours: ssl.SSLContext | None = None
        if self._keys is not None:  # as the server to clients: with its own keys nothing is hidden
            ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            ours.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, ssl=ours)
        return int(self._server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        """One connection, both ways, until it ends or is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._whole.wait()
        cuts, up, down = self._cuts, bytearray(), bytearray()
        trust = None if self._keys is None else ssl.create_default_context(cafile=self._keys / "authority.crt")
        with suppress(OSError, asyncio.CancelledError):
            far, to_far = await asyncio.open_connection("127.0.0.1", self._target, ssl=trust)
            if self._keys is not None:
                self.up.append(up)
                self.down.append(down)
            ways = [self._pump(near, to_far, up, cuts), self._pump(far, to_near, down, cuts)]
            await asyncio.gather(*ways, return_exceptions=True)
            to_far.close()
        to_near.close()
        self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, crossed: bytearray, cuts: int
    ) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                if self._cuts != cuts:
                    await asyncio.Event().wait()  # silence
                sink.write(data)
                if self._keys is not None:
                    crossed += data
                await sink.drain()
        if self._cuts != cuts:
            await asyncio.Event().wait()
        sink.close()


@contextmanager
def cable(federation: Federation, look_into: bool = False) -> Iterator[Cable]:
    """A cable to a federation's server."""
    keys = federation.operator / "keys" if look_into else None
    made = Cable(federation.deployment.port, keys)
    try:
        yield made
    finally:
        made.close()
