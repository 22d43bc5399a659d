"""Messages to clients by their names, and their answers, over Flower's grid."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid

from fedtailor.deploy.folder import enrolled
from fedtailor.untrusted import quoted

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between looks for answers
_PATIENCE = 2.0  # seconds to read an answer before the others are looked at again
_MARGIN = 60.0  # seconds that a message outlives its deadline in Flower, so that nothing is lost to clocks


class Lost(Exception):
    """Why nothing came of a message: nobody's fault but the line's, or the client's."""


class _Pieces(dict[str, Any]):
    """The pieces of an array, counted as they are put together. Flower sends equal pieces once, and an array names them
    as often as it likes: what are five megabytes on the line could be terabytes here."""

    def __getitem__(self, name: str) -> Any:
        piece = super().__getitem__(name)
        _reading.left -= len(piece.data)
        if _reading.left < 0:
            raise Lost("its answer is larger than may be expected")
        return piece


_reading = threading.local()  # left: bytes of arrays that may yet be made of the answer which this thread reads
_inflate = Array.inflate


def _make_array(object_content: bytes, children: dict[str, Any] | None = None) -> Array:
    return _inflate(object_content, _Pieces(children or {}) if hasattr(_reading, "left") else children)


Array.inflate = staticmethod(_make_array)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Sent:
    """Messages that are on their way."""

    waiting: dict[str, str]  # a message's number in Flower -> the client whose it is
    nodes: dict[str, int | None]
    lost: dict[str, Lost]  # clients that could not even be sent theirs
    end: float  # by when they are to be answered


@dataclass(frozen=True)
class Post:
    """A grid that knows clients by name. A name belongs to a node for good, by the node's key: whoever answers as a
    node is that client, whatever it says."""

    grid: Grid
    folder: Path
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    late: dict[str, int | None] = field(default_factory=dict)  # messages that were not answered in time -> whose

    def online(self) -> list[str]:
        """Who may be asked now, in the order of enrolment."""
        there = set(self.grid.get_node_ids())
        return [name for name, about in enrolled(self.folder).items() if about.node in there and not about.left]

    def send(self, kind: str, contents: Mapping[str, RecordDict], deadline: float, group: str = "") -> Sent:
        """Send each client its message, to be answered before the deadline (seconds)."""
        if self.late:
            threading.Thread(target=self._throw_away, daemon=True).start()
        nodes = {name: about.node for name, about in enrolled(self.folder).items()}
        waiting, lost = dict[str, str](), dict[str, Lost]()
        for name, content in contents.items():
            node = nodes[name]
            if node is None:
                lost[name] = Lost("it is not registered")
                continue
            message = Message(content, dst_node_id=node, message_type=kind, ttl=deadline + _MARGIN, group_id=group)
            (number,) = self.grid.push_messages([message])
            if number is None:
                lost[name] = Lost("it could not be reached")
            else:
                waiting[number] = name
        return Sent(waiting, nodes, lost, self.clock() + deadline)

    def answers(self, sent: Sent, most: int = 0) -> Iterator[tuple[str, RecordDict | Lost]]:
        """Answers as they come, each once. Who is not heard of by the deadline is not in it, and what comes later is
        never looked at. An answer's arrays have at most `most` bytes."""
        yield from sent.lost.items()
        waiting, pool = dict(sent.waiting), ThreadPoolExecutor(max(len(sent.waiting), 1))
        try:
            yield from self._collect(pool, waiting, sent.nodes, sent.end, most)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.late.update({number: sent.nodes[name] for number, name in waiting.items()})

    def _collect(
        self, pool: ThreadPoolExecutor, waiting: dict[str, str], nodes: Mapping[str, int | None], end: float, most: int
    ) -> Iterator[tuple[str, RecordDict | Lost]]:
        """Answers as they come. Each is read in a thread of its own: Flower waits for minutes for the rest of one that
        broke off."""
        readers: dict[str, Future[RecordDict | Lost | None]] = {}
        pause = _FIRST_PAUSE
        while waiting and self.clock() < end:
            for number, name in list(waiting.items()):
                patience = 0.0 if number in readers else min(_PATIENCE, max(0.0, end - self.clock()))
                reader = readers.get(number) or pool.submit(self._answer, number, nodes[name], most)
                try:
                    answer = reader.result(patience)
                except TimeoutError:
                    readers[number] = reader
                    continue
                readers.pop(number, None)
                if answer is not None:
                    del waiting[number]
                    pause = _FIRST_PAUSE
                    yield name, answer
            if waiting:
                self.pause(min(pause, max(0.0, end - self.clock())))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _throw_away(self) -> None:
        """Take answers that came too late off Flower's disk, where they would stay until the run ends. Each is in one
        thread's hands at a time: one that broke off is waited for, for minutes."""
        waiting: dict[str, int | None] = {}
        for _ in range(len(self.late)):
            try:
                number, node = self.late.popitem()
            except KeyError:  # another thread has the rest
                return
            if self._answer(number, node, most=0) is None:  # not there yet
                waiting[number] = node
        self.late.update(waiting)

    def _answer(self, number: str, node: int | None, most: int) -> RecordDict | Lost | None:
        """One by itself, so that what one client sends spoils nobody else's."""
        _reading.left = most
        try:
            for reply in self.grid.pull_messages([number]):
                if reply.metadata.reply_to_message_id != number:
                    continue
                if reply.has_error():
                    return Lost(f"Flower says: {quoted(reply.error.reason or 'nothing')}")
                if reply.metadata.src_node_id != node:
                    return Lost("somebody else answered for it")
                return reply.content
        except Lost as lost:
            return lost
        except Exception as error:  # whatever Flower makes of an answer that is none
            return Lost(f"its answer cannot be read ({type(error).__name__})")
        return None
