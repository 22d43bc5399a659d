"""The engine of a run: named, or the fastest of those that are tried on its first clients."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fedtailor.engines import ENGINES, USUAL_CHUNK, Engine, Way
from fedtailor.engines.vectorized import waiting
from fedtailor.errors import Refused, unknown
from fedtailor.machine import repeatable, usable_cores
from fedtailor.samples import Samples

_MOST = 128  # clients at once on one core of a CPU, where more only fall out of its caches
_ENOUGH = 0.01  # seconds that tell roughly how long a step takes
_FRAGILE = 1.1  # threads that wait for each other lose most when others use the machine
_LONG = 1.0  # seconds a client above which a CPU is not asked to try many at once: such large steps never gain
_SHORT = 5.0  # seconds of a whole run below which nothing is worth trying


def named(engine: str, chunk: int | None, threads: int, most: int, device: torch.device) -> Way:
    """The way to run an engine of that name; `most` clients at once fit into memory."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ["auto", *ENGINES])
    if chunk is not None and engine != "vectorized":
        raise Refused(f"chunk is how many clients the engine 'vectorized' takes at once; '{engine}' has no use for it.")
    if engine == "vectorized":
        usual = most if device.type == "cuda" else min(most, USUAL_CHUNK)
        return Way(engine, 1, usual if chunk is None else min(chunk, most))
    return Way(engine, threads if engine == "sequential" else 1)


@dataclass(frozen=True, eq=False)
class Trial:
    """Times ways of running on the clients of a round, whose data are cut short for it."""

    build: Callable[[Way, Samples], Engine]
    train: Callable[[Engine, Sequence[int]], object]  # these clients, for the clock only
    samples: Samples
    clients: Sequence[int]  # of the largest round
    batch_size: int
    rounds: int
    device: torch.device

    def choose(self, plain: Way, most: int) -> tuple[Way, str]:
        """The fastest way, and why in a sentence or two; `plain` is sequential, `most` clients at once fit into
        memory."""
        if len(self.clients) == 1:
            return plain, "There is one client at a time."
        try:
            batches, found = self._measure(plain)
        except Exception:  # whatever a method or a model raises: round 1 raises it again, with the data as they are
            return plain, "The first steps failed."
        whole = found * self._mean_batches() / batches * len(self.clients) * self.rounds
        if whole < _SHORT:
            return plain, f"The whole run takes less than {_SHORT:g} s, too little to try others."
        seconds, refusals = self._compare([plain, *self._others(found, most)], batches)
        close = [way for way in seconds if seconds[way] < 2 * min(seconds.values())]
        if len(close) > 1 and found < _LONG:  # over more steps, what a call costs once counts less
            seconds |= self._compare(close, min(4 * batches, math.ceil(self._mean_batches())))[0]
        told = ", ".join(f"{way} {1000 * seconds[way]:.3g}" for way in sorted(close, key=lambda way: seconds[way]))
        best = min(close, key=lambda way: seconds[way])
        return best, " ".join([f"Milliseconds a client and batch: {told}.", *dict.fromkeys(refusals)])

    def _compare(self, ways: Sequence[Way], batches: int) -> tuple[dict[Way, float], list[str]]:
        """Seconds a client and batch, waiting included, of ways that work, and the words of those that do not."""
        seconds: dict[Way, float] = {}
        refusals: list[str] = []
        for way in ways:
            count = 2 if way.engine == "sequential" else self._cores() * (way.chunk or 8)
            try:
                seconds[way] = self._seconds(way, self._largest(count), batches) / batches
            except (Refused, OSError, torch.OutOfMemoryError) as refusal:
                refusals.append(str(refusal))
                continue
            if way.chunk is not None:
                seconds[way] *= waiting(self._batches(), way.chunk, self.device)
            if way.threads > 1:
                seconds[way] *= _FRAGILE
        return seconds, refusals

    def _largest(self, count: int) -> list[int]:
        """So many of the clients with most data, who have all the batches they are asked for."""
        return sorted(self.clients, key=lambda client: -int(self.samples.sizes[client]))[:count]

    def _cores(self) -> int:
        return 1 if self.device.type == "cuda" else usable_cores()

    def _measure(self, plain: Way) -> tuple[int, float]:
        """How many batches a client are enough to tell ways apart, and how long these take sequentially."""
        batches = 1
        while True:
            took = self._seconds(plain, self._largest(2), batches)
            if 2 * took > _ENOUGH or batches >= self._mean_batches():
                return batches, took
            batches *= 2

    def _others(self, found: float, most: int) -> Iterator[Way]:
        if self.device.type == "cuda":
            yield Way("vectorized", 1, min(most, len(self.clients)))
            return
        if self._cores() > 1:
            yield Way("pool")
        largest = min(most, -(-len(self.clients) // self._cores()), _MOST)
        for chunk in sorted({min(8, largest), min(32, largest), largest} if found < _LONG else ()):
            yield Way("vectorized", 1, chunk)

    def _seconds(self, way: Way, clients: Sequence[int], batches: int) -> float:
        """Seconds a client."""
        engine = self.build(way, self.samples.first(batches * self.batch_size))
        took = 0.0
        with repeatable(way.threads):
            for _ in range(2):  # once for what starts up lazily
                began = time.perf_counter()
                self.train(engine, clients)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                took = time.perf_counter() - began
                if took > _LONG and self.device.type == "cpu":  # a GPU may have compiled kernels at first
                    break
        return took / len(clients)

    def _batches(self) -> tuple[int, ...]:
        return tuple((-(-self.samples.sizes[list(self.clients)] // self.batch_size)).tolist())

    def _mean_batches(self) -> float:
        return sum(self._batches()) / len(self.clients)
