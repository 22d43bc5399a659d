"""Measure what a user of `ft.simulate` pays on a CPU: seconds per round, and of whole short runs.

python benchmarks/user_time.py [--parts rounds,short,profile] [--rows e,d] [--rounds 20] [--repeats 3]

rounds: a run of `ft.simulate` with its evaluation after every round. After each of its rounds, the hand-written loop of
`engines.py` takes the same steps in its own process, so that both are measured side by side. `ratio`
is that of the loop's seconds to `records[...]["seconds"]`, and `engine_ratio` to the time inside the engine.
`processor_ratio` compares seconds of the processor in the two main threads. On an idle machine, it is the ratio that a
user sees, if the other core has as much to do; on a busy one, several processes wait longer for each other than one.
short: the first six rounds in a fresh process for every engine, with everything but imports. `auto` runs with an empty
cache folder, and then with what it learned. The engines alternate.
profile: the share of each operation in a training step of one process.
results/user_time.json is written after every part.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import fedtailor as ft
from engines import CORES, LR, describe_machine, limit_cores
from fedtailor.core.system import deterministic
from fedtailor.methods import FedAvg
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import learned_choices
from fedtailor.training.simulate import make_trainer
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from loops import LoopProcess
from works import WORKLOADS, Workload

OUT = Path(__file__).parent / "results" / "user_time.json"
CHOICES: dict[str, list[tuple[str, int | None]]] = {  # row -> engines and chunk sizes
    "e": [("sequential", None), ("vectorized", 50)],
    "f": [("sequential", None), ("vectorized", 32)],
    "d": [("pool", None)],
}
LOOP_THREADS = {"e": 1, "f": 1, "d": CORES}
SHORT_ROUNDS = 6
Row = dict[str, Any]


def simulate(
    workload: Workload, engine: str, chunk: int | None, rounds: int, on_round_end: Callable[[Any], None] | None = None
) -> ft.Run:
    """Run FedAvg as a user does."""
    fed = workload.federation()
    method = FedAvg(lr=LR, epochs=workload.epochs)
    settings: dict[str, Any] = {
        "batch_size": workload.batch_size,
        "engine": engine,
        "chunk_size": chunk,
        "device": "cpu",
    }
    return ft.simulate(method, workload.model(fed), fed, rounds=rounds, on_round_end=on_round_end, **settings)


class Clock:
    """Adds up the time inside a method of a class."""

    def __init__(self, owner: type, name: str, clock: Callable[[], float]) -> None:
        self.seconds, original = 0.0, getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = clock()
            try:
                return original(*arguments)
            finally:
                self.seconds += clock() - started

        setattr(owner, name, timed)

    def take(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the quartiles: the median is the second."""
    return statistics.quantiles(values, n=4)


def measure_rounds(key: str, engine: str, chunk: int | None, rounds: int) -> Row:
    """Return seconds per round of a run and of the loop, which takes turns with it."""
    limit_cores()
    workload = WORKLOADS[key]
    engine_clock = Clock(SimulatedClients, "apply_train", time.perf_counter)
    round_clock = Clock(Trainer, "train_round", time.thread_time)
    found: list[Row] = []
    with LoopProcess(workload, LR, "cpu") as loop:

        def after_round(record: Any) -> None:
            seconds = {
                "user": record["seconds"],
                "engine": engine_clock.take(),
                "user_processor": round_clock.take(),
                "evaluation": record.get("seconds_evaluating", 0.0),
                "loop": loop.seconds(LOOP_THREADS[key], workload.clients),
            }
            found.append(seconds | {"loop_processor": loop.processor})

        run = simulate(workload, engine, chunk, rounds, after_round)
    found = found[2:]  # workers that stay alive start in round 2
    return {
        "name": workload.name,
        "engine": engine,
        "chunk_size": run.info["chunk_size"],
        "loop_threads": LOOP_THREADS[key],
        "client_steps": workload.steps(workload.federation()),
        "rounds": len(found),
        "seconds": {part: statistics.median(each[part] for each in found) for part in found[0]},
        "ratio": quartiles([each["loop"] / each["user"] for each in found]),
        "engine_ratio": quartiles([each["loop"] / each["engine"] for each in found]),
        "processor_ratio": quartiles([each["loop_processor"] / each["user_processor"] for each in found]),
    }


def in_fresh_process(function: Callable[..., Row], *arguments: Any) -> Row:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def short_run(key: str, engine: str, chunk: int | None) -> Row:
    """Return the seconds of a short run, without imports, and of its first round."""
    limit_cores()
    learned_choices._BUSY = math.inf  # keep what is learned also if other programs use the machine
    workload = WORKLOADS[key]
    ends: list[float] = []
    started, processor = time.perf_counter(), time.process_time()
    run = simulate(workload, engine, chunk, SHORT_ROUNDS, lambda record: ends.append(time.perf_counter()))
    total = time.perf_counter() - started
    return {
        "total": total,
        "first_round": float(run.records[0]["seconds"]),
        "later_rounds": statistics.median(float(record["seconds"]) for record in run.records[1:]),
        "processor": time.process_time() - processor,
        "engine": run.info["engine"],
    }


def measure_short(key: str, repeats: int) -> Row:
    """Compare whole short runs, alternating; `auto` learns in the first and uses it in the second."""
    found: dict[str, list[Row]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FEDTAILOR_CACHE"] = folder
            for name, engine, chunk in [
                *((engine, engine, chunk) for engine, chunk in CHOICES[key]),
                ("auto, empty cache", "auto", None),
                ("auto, second run", "auto", None),
            ]:
                found.setdefault(name, []).append(in_fresh_process(short_run, key, engine, chunk))
    parts = ("total", "first_round", "later_rounds", "processor")
    medians = {
        name: {part: statistics.median(each[part] for each in runs) for part in parts} for name, runs in found.items()
    }
    best = min((medians[engine]["total"], engine) for engine, _ in CHOICES[key])[1]
    return {
        "name": WORKLOADS[key].name,
        "rounds": SHORT_ROUNDS,
        "seconds": medians,
        "engines": {name: [each["engine"] for each in runs] for name, runs in found.items()},
        "best": best,
        "auto_over_best": {
            name: sorted(a["total"] / b["total"] for a, b in zip(found[name], found[best], strict=True))
            for name in found
            if name.startswith("auto")
        },
    }


def measure_profile(key: str) -> Row:
    """Return the percentage of time per operation in the sequential engine with one thread, for two clients."""
    workload = WORKLOADS[key]
    fed = workload.federation()
    settings = TrainingConfig(rounds=1, batch_size=workload.batch_size, engine="sequential", device="cpu")
    method = FedAvg(lr=LR, epochs=workload.epochs)
    trainer = make_trainer(settings, method, workload.model(fed), fed)[0]
    clients = trainer.clients

    def train() -> None:
        clients.apply_train(clients.engine, 1, [0, 1], trainer.server.send(trainer.server.state, [0, 1], 1))

    with deterministic(1):
        train()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares = sorted(((100 * event.self_cpu_time_total / total, event.key) for event in events), reverse=True)
    return {"name": workload.name, "percent": {name: round(share, 1) for share, name in shares[:8]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rounds,short,profile")
    parser.add_argument("--rows", default="e,d")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    limit_cores()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    results |= describe_machine("cpu")

    def keep(name: str, row: Row) -> None:
        when = {"date": datetime.now(UTC).date().isoformat(), "load": os.getloadavg()[0]}
        results.setdefault("rows", {})[name] = row | when
        options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(name, json.dumps(row, ensure_ascii=False), flush=True)

    for key in options.rows.split(","):
        if "rounds" in options.parts:
            for engine, chunk in CHOICES[key]:
                rounds = options.rounds if key != "d" else max(4, options.rounds // 4)
                keep(f"{key} rounds {engine}", in_fresh_process(measure_rounds, key, engine, chunk, rounds))
        if "short" in options.parts:
            keep(f"{key} short", measure_short(key, options.repeats))
        if "profile" in options.parts:
            keep(f"{key} profile", measure_profile(key))


if __name__ == "__main__":
    main()
