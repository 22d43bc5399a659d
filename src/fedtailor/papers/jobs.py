"""Run many jobs in several processes. Every result is one line of a file, so a stopped script can continue."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = dict[str, Any]


def run_jobs(
    run: Callable[[Job], Result], jobs: Sequence[Job], results: Path, workers: int = 1, seconds: float = inf
) -> int:
    """Run jobs and append each result to the file as soon as it is there; start no job after so many seconds. Return
    the number of jobs that were run. With several workers, `run` must be a function of a module, for `spawn`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     run_jobs(lambda job: {"square": job * job}, [2, 3], Path(folder, "results.jsonl"))
    2
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    started, count = time.monotonic(), 0
    in_time = _until(jobs, started + seconds)
    with results.open("a", encoding="utf-8") as file:
        if not _ends_line(results):
            file.write("\n")  # a line that a killed process left unfinished
        for result in map(run, in_time) if workers == 1 else _in_processes(run, in_time, workers):
            file.write(json.dumps(result) + "\n")
            file.flush()
            count += 1
    return count


def read_results(path: Path) -> list[Result]:
    """Return the results in a file, in their order; a last line that was not finished is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _until(jobs: Iterable[Job], end: float) -> Iterator[Job]:
    for job in jobs:
        if time.monotonic() >= end:
            return
        yield job


def _in_processes(run: Callable[[Job], Result], jobs: Iterator[Job], workers: int) -> Iterator[Result]:
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
        running: set[Future[Result]] = {pool.submit(run, job) for _, job in zip(range(workers), jobs, strict=False)}
        while running:
            finished = next(as_completed(running))
            running.remove(finished)
            yield finished.result()
            if (job := next(jobs, None)) is not None:
                running.add(pool.submit(run, job))


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return size == 0 or file.read(1) == b"\n"
