"""Messages to clients by name, and their replies, over Flower's grid."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid

from fedtailor.core.untrusted_input import sanitize
from fedtailor.deploy.server.operator_folder import enrolled_clients
from fedtailor.deploy.server.proxy.refusals import find_refusal
from fedtailor.deploy.server.suspension import active_clients
from fedtailor.errors import reason

_MIN_POLL_INTERVAL, _MAX_POLL_INTERVAL = 0.1, 1.0  # seconds
_READ_TIMEOUT = 2.0  # seconds to read a reply before the other replies are polled again
_TTL_MARGIN = 60.0  # seconds that a message outlives its deadline in Flower, so that clock differences lose nothing


class NoReplyError(Exception):
    """The reason why a message has no usable reply."""


class _CountedChunks(dict[str, Any]):
    """The chunks of an array, counted while they are assembled.

    Flower sends equal chunks once, and an array may list a chunk any number of times: five megabytes on the network
    could become terabytes in memory.
    """

    def __getitem__(self, name: str) -> Any:
        chunk = super().__getitem__(name)
        _reading.bytes_left -= len(chunk.data)
        if _reading.bytes_left < 0:
            raise NoReplyError("its reply is larger than expected")
        return chunk


_reading = threading.local()  # bytes_left: how many more bytes the arrays of the reply that this thread reads may have
_inflate = Array.inflate


def _inflate_bounded(object_content: bytes, children: dict[str, Any] | None = None) -> Array:
    return _inflate(object_content, _CountedChunks(children or {}) if hasattr(_reading, "bytes_left") else children)


Array.inflate = staticmethod(_inflate_bounded)  # type: ignore[method-assign]


@dataclass(frozen=True)
class SentMessages:
    """Messages that wait for replies."""

    pending: dict[str, str]  # Flower's message ID -> name of the client
    node_ids: dict[str, int | None]
    errors: dict[str, NoReplyError]  # of clients to which no message could be sent
    deadline: float


@dataclass(frozen=True)
class Mailbox:
    """A grid that addresses clients by name.

    A name belongs permanently to a node, which Flower identifies by its key. A reply from a node is therefore from that
    client, whatever the reply claims.
    """

    grid: Grid
    folder: Path
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    late: dict[str, int | None] = field(default_factory=dict)  # IDs of messages without a reply in time -> node ID

    def online(self) -> list[str]:
        """Return the clients that can be selected now, in the order of enrollment."""
        online = set(self.grid.get_node_ids())
        clients = enrolled_clients(self.folder)
        return [name for name in active_clients(self.folder) if clients[name].node_id in online]

    def send(self, kind: str, contents: Mapping[str, RecordDict], timeout: float, group: str = "") -> SentMessages:
        """Send each client its message; replies must arrive within `timeout` seconds."""
        if self.late:
            threading.Thread(target=self._discard_late_replies, daemon=True).start()
        node_ids = {name: client.node_id for name, client in enrolled_clients(self.folder).items()}
        pending, errors = dict[str, str](), dict[str, NoReplyError]()
        for name, content in contents.items():
            node_id = node_ids[name]
            if node_id is None:
                errors[name] = NoReplyError("it is not registered")
                continue
            message = Message(
                content, dst_node_id=node_id, message_type=kind, ttl=timeout + _TTL_MARGIN, group_id=group
            )
            (message_id,) = self.grid.push_messages([message])
            if message_id is None:
                errors[name] = NoReplyError("it could not be reached")
            else:
                pending[message_id] = name
        return SentMessages(pending, node_ids, errors, self.clock() + timeout)

    def replies(self, sent: SentMessages, max_bytes: int = 0) -> Iterator[tuple[str, RecordDict | NoReplyError]]:
        """Yield each client's reply as it arrives; its arrays may have at most `max_bytes` bytes.

        Clients that do not reply before the deadline are not yielded, and late replies are never read.
        """
        yield from sent.errors.items()
        pending, pool = dict(sent.pending), ThreadPoolExecutor(max(len(sent.pending), 1))
        try:
            yield from self._collect(pool, pending, sent.node_ids, sent.deadline, max_bytes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.late.update({message_id: sent.node_ids[name] for message_id, name in pending.items()})

    def _collect(
        self,
        pool: ThreadPoolExecutor,
        pending: dict[str, str],
        node_ids: Mapping[str, int | None],
        deadline: float,
        max_bytes: int,
    ) -> Iterator[tuple[str, RecordDict | NoReplyError]]:
        """Yield replies as they arrive, each read in a thread because Flower waits minutes for an incomplete one."""
        readers: dict[str, Future[RecordDict | NoReplyError | None]] = {}
        interval = _MIN_POLL_INTERVAL
        while pending and self.clock() < deadline:
            for message_id, name in list(pending.items()):
                timeout = 0.0 if message_id in readers else min(_READ_TIMEOUT, max(0.0, deadline - self.clock()))
                reader = readers.get(message_id) or pool.submit(self._pull, message_id, node_ids[name], max_bytes)
                try:
                    reply = reader.result(timeout)
                except TimeoutError:
                    readers[message_id] = reader
                    continue
                readers.pop(message_id, None)
                if reply is not None:
                    del pending[message_id]
                    interval = _MIN_POLL_INTERVAL
                    yield name, reply
            yield from self._give_up(pending, node_ids)
            if pending:
                self.sleep(min(interval, max(0.0, deadline - self.clock())))
                interval = min(2 * interval, _MAX_POLL_INTERVAL)

    def _give_up(
        self, pending: dict[str, str], node_ids: Mapping[str, int | None]
    ) -> Iterator[tuple[str, NoReplyError]]:
        """Yield the clients whose replies are not awaited any longer, with the reason, and remove their messages."""
        active = active_clients(self.folder)
        for message_id, name in list(pending.items()):
            if (refusal := find_refusal(self.folder, name, message_id)) is not None:
                problem = f"its reply was refused: {refusal}"
            elif name not in active:
                problem = "it was suspended or has left"
            else:
                continue
            del pending[message_id]
            self.late[message_id] = node_ids[name]
            yield name, NoReplyError(problem)

    def _discard_late_replies(self) -> None:
        """Remove late replies from Flower's database, where they would otherwise remain until the run ends.

        Each reply is handled by one thread at a time, because an incomplete one blocks its thread for minutes.
        """
        missing: dict[str, int | None] = {}
        for _ in range(len(self.late)):
            try:
                message_id, node_id = self.late.popitem()
            except KeyError:  # another thread handles the rest
                return
            if self._pull(message_id, node_id, max_bytes=0) is None:
                missing[message_id] = node_id
        self.late.update(missing)

    def _pull(self, message_id: str, node_id: int | None, max_bytes: int) -> RecordDict | NoReplyError | None:
        """Return the reply to one message, or None if it has not arrived.

        Replies are pulled one by one, so that an invalid reply does not affect the others.
        """
        _reading.bytes_left = max_bytes
        try:
            for reply in self.grid.pull_messages([message_id]):
                if reply.metadata.reply_to_message_id != message_id:
                    continue
                if reply.has_error():
                    return NoReplyError(f"Flower reports: {sanitize(reply.error.reason or 'no reason')}")
                if reply.metadata.src_node_id != node_id:
                    return NoReplyError("another client replied for it")
                return reply.content
        except NoReplyError as error:
            return error
        except Exception as error:  # Flower may raise anything on an invalid reply
            return NoReplyError(f"its reply cannot be read: {sanitize(reason(error))}")
        return None
