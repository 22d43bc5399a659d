"""Choose the engine of a run: by name, or the fastest in a benchmark on the run's clients."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtailor.core.system import available_cores, deterministic, synchronize
from fedtailor.errors import ConfigError, FedTailorError, unknown_name
from fedtailor.training.engines import DEFAULT_CHUNK_SIZE, ENGINES, RAY, EngineChoice
from fedtailor.training.engines.learned_choices import LearnedChoice
from fedtailor.training.engines.pool import cannot_fork
from fedtailor.training.engines.vectorized import padding_overhead
from fedtailor.training.sample_index import SampleIndex

_MAX_CHUNK_SIZE = 128  # on one core of a CPU; larger chunks do not fit into its caches
_MIN_SECONDS = 0.01  # time of a measurement that is long enough to compare engines
_THREADS_PENALTY = 1.1  # several threads are slowed down most when other programs use the machine
_LONG_SECONDS = 1.0  # per batch; on a CPU, the vectorized engine is never faster for such large steps
_SHORT_RUN_SECONDS = 0.2  # a shorter run is not worth a benchmark
_QUICK_RUN_SECONDS = 10.0  # a shorter run is worth a single measurement of a few engines, on a CPU in one process
_QUICK_CLIENTS = 8  # such a measurement has the batches of so many clients


def named_engine(
    engine: str, chunk_size: int | None, threads: int, max_clients: int, device: torch.device
) -> EngineChoice:
    """Return the settings for an engine given by name; `max_clients` is how many clients fit into memory."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ["auto", *ENGINES, RAY])
    if chunk_size is not None and engine != "vectorized":
        raise ConfigError(f"chunk_size applies only to the engine 'vectorized', not to '{engine}'; omit it.")
    if engine == "vectorized":
        default = min(max_clients, DEFAULT_CHUNK_SIZE) if device.type == "cpu" else max_clients
        return EngineChoice(engine, 1, default if chunk_size is None else min(chunk_size, max_clients))
    return EngineChoice(engine, threads if engine == "sequential" else 1)


def explain_request(choice: EngineChoice, device: torch.device) -> str:
    """Return the reason of an engine that was given by name, and what it lacks on this machine.

    >>> explain_request(EngineChoice("sequential"), torch.device("cpu"))
    'The engine was requested.'
    """
    is_parallel = choice.engine != "sequential" and device.type == "cpu" and available_cores() > 1
    return " ".join(["The engine was requested.", *_one_process(is_parallel)])


def _one_process(is_parallel: bool) -> list[str]:
    """Return a sentence if an engine would use several processes and cannot."""
    problem = cannot_fork() if is_parallel else None
    return [f"All clients train in one process, because {problem}."] if problem else []


@dataclass(frozen=True, eq=False)
class EngineBenchmark:
    """Measures engines on the clients of a round, with fewer batches per client than in the run."""

    build: Callable[[EngineChoice, SampleIndex], Any]  # an engine, or one per architecture
    train: Callable[[Any, Sequence[int]], object]  # trains these clients; the result is not used
    samples: SampleIndex
    clients: Sequence[int]  # of the largest round
    batch_size: int
    rounds: int
    device: torch.device
    learned: LearnedChoice | None = None  # what earlier runs have measured

    def choose(self, sequential: EngineChoice, max_clients: int) -> tuple[EngineChoice, str]:
        """Return the fastest engine and the reason in one or two sentences.

        `sequential` is the choice to compare with; `max_clients` is how many clients fit into memory.
        """
        if len(self.clients) == 1:
            return sequential, "Each round trains one client at a time."
        known = None if self.learned is None else self.learned.get()
        if known is not None and self._works(known[0]):
            return replace(known[0], chunk_size=known[0].chunk_size and min(known[0].chunk_size, max_clients)), known[1]
        try:
            batches, per_batch, run_seconds = self._measure(sequential)
        except Exception:  # methods and models may raise anything; round 1 raises it again
            return sequential, "The benchmark failed."
        if run_seconds < _SHORT_RUN_SECONDS:
            return sequential, f"The run takes less than {_SHORT_RUN_SECONDS:g} s, too short for a benchmark."
        is_quick = run_seconds < _QUICK_RUN_SECONDS
        choices = [sequential, *self._alternatives(per_batch, max_clients, only_largest=is_quick)]
        if is_quick and self.device.type == "cpu":
            seconds, errors = self._compare_in_one_process(choices, {sequential: per_batch}, batches)
        else:
            seconds, errors = self._compare(choices, lambda choice: self._measure_choice(choice, batches))
        close = [choice for choice in seconds if seconds[choice] < 2 * min(seconds.values())]
        if len(close) > 1 and per_batch < _LONG_SECONDS and not is_quick:  # fixed costs weigh less
            more = min(4 * batches, self._usual_batches())
            seconds |= self._compare(close, lambda choice: self._measure_choice(choice, more))[0]
        ranking = sorted(close, key=lambda choice: seconds[choice])
        times = ", ".join(f"{choice} {1000 * seconds[choice]:.3g}" for choice in ranking)
        notes = [*dict.fromkeys(errors), *_one_process(self.device.type == "cpu" and available_cores() > 1)]
        reason = " ".join([f"Milliseconds per client and batch: {times}.", *notes])
        if self.learned is not None:
            self.learned.put(ranking[0], reason)
        return ranking[0], reason

    def _works(self, choice: EngineChoice) -> bool:
        """Return whether an engine can run two clients; the code of a model may have changed since an earlier run."""
        try:
            self._seconds(choice, self._largest(2), 1)
        except Exception:  # round 1 raises it again if it does not depend on the engine
            return False
        return True

    def _compare(
        self, choices: Sequence[EngineChoice], measure: Callable[[EngineChoice], float]
    ) -> tuple[dict[EngineChoice, float], list[str]]:
        """Return the seconds per client and batch of the engines that work, and the errors of the others."""
        seconds: dict[EngineChoice, float] = {}
        errors: list[str] = []
        for choice in choices:
            try:
                seconds[choice] = measure(choice)
            except (FedTailorError, OSError, torch.OutOfMemoryError) as error:
                errors.append(str(error))
                continue
            if choice.chunk_size is not None:
                seconds[choice] *= padding_overhead(self._batches(self.clients), choice.chunk_size, self.device)
            if choice.threads > 1:
                seconds[choice] *= _THREADS_PENALTY
        return seconds, errors

    def _measure_choice(self, choice: EngineChoice, batches: int) -> float:
        count = 2 if choice.engine == "sequential" else self._cores() * (choice.chunk_size or 8)
        return self._seconds_per_batch(choice, self._largest(count), batches)

    def _seconds_per_batch(self, choice: EngineChoice, clients: Sequence[int], batches: int) -> float:
        """Return the seconds per client and batch if these clients train for at most `batches` batches."""
        own = [min(batches, count) for count in self._batches(clients)]
        trained = max(own) * len(own) if choice.chunk_size else sum(own)  # `padding_overhead` is counted separately
        return self._seconds(choice, clients, batches) / trained

    def _compare_in_one_process(
        self, choices: Sequence[EngineChoice], known: dict[EngineChoice, float], batches: int
    ) -> tuple[dict[EngineChoice, float], list[str]]:
        """Compare engines as if processes shared the time of one, because starting workers takes too long for a quick
        run. `known` has the time of the sequential engine."""
        own = self._batches(self.clients)
        share = max(1 / self._cores(), max(own) / sum(own))  # no process has less to do than the longest client

        def measure(choice: EngineChoice) -> float:
            alone = choice if choice.chunk_size else EngineChoice("sequential", choice.threads)
            if alone not in known:
                clients = self._largest(choice.chunk_size or 2)
                some = math.ceil(_QUICK_CLIENTS * batches / len(clients))
                known[alone] = self._seconds_per_batch(alone, clients, some)
            return known[alone] * (1 if choice.engine == "sequential" else share)

        return self._compare(choices, measure)

    def _largest(self, count: int) -> list[int]:
        """Return the `count` clients with the most samples, which have enough batches for the benchmark."""
        return sorted(self.clients, key=lambda client: -int(self.samples.sizes[client]))[:count]

    def _cores(self) -> int:
        return available_cores() if self.device.type == "cpu" and not cannot_fork() else 1

    def _measure(self, sequential: EngineChoice) -> tuple[int, float, float]:
        """Return how many batches per client suffice for a comparison, and the sequential engine's seconds per client
        and batch, and for the whole run."""
        clients, batches = self._largest(2), 1
        while True:
            started = time.thread_time()
            per_batch = self._seconds_per_batch(sequential, clients, batches)
            processor = time.thread_time() - started
            trained = sum(min(batches, count) for count in self._batches(clients))
            if per_batch * trained > _MIN_SECONDS or batches >= self._usual_batches():
                break
            growth = max(2, min(8, int(_MIN_SECONDS / (per_batch * trained))))
            batches = min(growth * batches, self._usual_batches())
        # On a busy machine, the time of the processor, in which each batch was trained twice, says better how long the
        # run is.
        usual = per_batch if self.device.type != "cpu" else min(per_batch, processor / (2 * trained))
        return batches, per_batch, usual * sum(self._batches(self.clients)) * self.rounds

    def _alternatives(self, per_batch: float, max_clients: int, only_largest: bool) -> Iterator[EngineChoice]:
        if self.device.type != "cpu":
            yield EngineChoice("vectorized", 1, min(max_clients, len(self.clients)))
            return
        if self._cores() > 1:
            yield EngineChoice("pool")
        largest = min(max_clients, -(-len(self.clients) // self._cores()), _MAX_CHUNK_SIZE)
        smaller = set() if only_largest else {min(8, largest), min(32, largest)}
        for chunk in sorted({largest, *smaller} if per_batch < _LONG_SECONDS else ()):
            yield EngineChoice("vectorized", 1, chunk)

    def _seconds(self, choice: EngineChoice, clients: Sequence[int], batches: int) -> float:
        """Return the seconds in which an engine trains these clients, each for at most `batches` batches."""
        engine = self.build(choice, self.samples.first(batches * self.batch_size))
        starts_workers = choice.engine != "sequential" and len(clients) > (choice.chunk_size or 1)
        seconds = 0.0
        with deterministic(choice.threads):
            # The first time includes lazy initialization; workers that stay alive start in the second.
            for number in range(3 if starts_workers and self.device.type == "cpu" else 2):
                started = time.perf_counter()
                self.train(engine, clients)
                synchronize(self.device)
                taken = time.perf_counter() - started
                # the fastest after the first, because other programs may disturb one
                seconds = min(seconds, taken) if number > 1 else taken
                if taken > _LONG_SECONDS and self.device.type == "cpu":  # on a GPU, kernels may have been compiled
                    break
        return seconds

    def _batches(self, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple((-(-self.samples.sizes[list(clients)] // self.batch_size)).tolist())

    def _usual_batches(self) -> int:
        """Return the mean number of batches of a client, rounded up."""
        return math.ceil(sum(self._batches(self.clients)) / len(self.clients))
