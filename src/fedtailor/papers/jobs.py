"""Run many jobs, perhaps at the same time. Every result is one line of a file, so a stopped script can continue."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from fedtailor.progress import OnRoundEnd, ProgressDisplay
from fedtailor.tasks.task import InThisProcess, Runner, Task

log = logging.getLogger("fedtailor")
Job = TypeVar("Job")
Result = dict[str, Any]


def run_jobs(
    run: Callable[[Job, OnRoundEnd], Result | None],
    jobs: Sequence[Job],
    results: Path,
    runner: Runner | None = None,
    seconds: float = inf,
    label: Callable[[Job], tuple[str, int | None]] = lambda job: (str(job), None),
) -> int:
    """Run jobs and append each result to the file as soon as it is there; start no job after so many seconds. Return
    the number of jobs that were run; a job that fails is logged, and the others go on. A job without a result is left
    out.

    For a runner in other processes, `run` must be a function of a module. `label` returns what the progress display
    shows for a job, and its number of rounds.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     run_jobs(lambda job, on_round_end: {"square": job * job}, [2, 3], Path(folder, "results.jsonl"))
    2
    """
    if not jobs:
        return 0
    results.parent.mkdir(parents=True, exist_ok=True)
    runner, deadline, count = runner or InThisProcess(), time.time() + seconds, 0
    tasks = [Task(*label(job), partial(_run_in_time, run, job, deadline)) for job in jobs]
    with results.open("a", encoding="utf-8") as file:
        if not _ends_line(results):
            file.write("\n")  # a line that a killed process left unfinished
        with ProgressDisplay(len(jobs)) as display, closing(runner.run(tasks, display)) as outcomes:
            for position, outcome in outcomes:
                if outcome.failure is not None:
                    log.warning("%s failed: %s", tasks[position].label, outcome.failure)
                elif outcome.value is not None:
                    file.write(json.dumps(outcome.value) + "\n")
                    file.flush()
                    count += 1
    return count


def _run_in_time(
    run: Callable[[Job, OnRoundEnd], Result | None], job: Job, deadline: float, on_round_end: OnRoundEnd
) -> Result | None:
    return run(job, on_round_end) if time.time() < deadline else None


def read_results(path: Path) -> list[Result]:
    """Return the results in a file, in their order; a last line that was not finished is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return size == 0 or file.read(1) == b"\n"
