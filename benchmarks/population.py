"""The cost of clients that do not participate: 100,000 clients compared with 1,000, with 100 clients per round.

python benchmarks/population.py [--engine auto]

The workload is logistic regression 784×10 on random bytes, with ten training samples and two test samples per client,
batches of 10, and evaluate="participants". Each run has its own process. Runs of both populations alternate, and the
ratio is the median over pairs. Self-FL uses the same number of steps for all clients, so that both populations do the
same work.

In the last row, every client participates once with one step, so that all 100,000 states are stored (for Self-FL, two
models and the trained model). Training is so short that the disk determines the time once the page cache is full. This
row reports the last 100 rounds and has no target.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.training.participation import make_schedule

METHODS = {"Ditto": ft.methods.Ditto(), "Self-FL": ft.methods.SelfFL(adjust_steps=False)}
Row = dict[str, Any]
FEW, MANY, COHORT = 1_000, 100_000, 100
TRAIN, TEST = 10, 2  # samples per client


def population(clients: int) -> ft.Federation:
    """Return clients with samples of 784 random bytes."""
    random, per_client = np.random.default_rng(0), TRAIN + TEST
    x = torch.from_numpy(random.integers(0, 256, (clients * per_client, 784), dtype=np.uint8))
    y = torch.from_numpy(random.integers(0, 10, clients * per_client))
    indices = torch.arange(clients * per_client).reshape(clients, per_client)
    names = tuple(str(client) for client in range(clients))
    return ft.Federation(x, y, tuple(indices[:, :TRAIN]), tuple(indices[:, TRAIN:]), names, classes=10)


def run(method: ft.Method, clients: int, schedule: list[list[int]], engine: str, evaluate_every: int = 1) -> Row:
    """Return peak memory of this process, the size of its files, and the seconds of every round but the first."""
    fed, times = population(clients), []
    finished = ft.simulate(
        method,
        ft.network("logistic", fed),
        fed,
        schedule=schedule,
        batch_size=10,
        engine=engine,
        device="cpu",
        evaluate="participants",
        evaluate_every=evaluate_every,
        on_round_end=lambda record: times.append(time.perf_counter()),
    )
    return {
        "engine": finished.info["engine"],
        "peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "file_GiB": _temporary_bytes() / 2**30,
        "seconds": np.diff(times).tolist(),
    }


def _temporary_bytes() -> int:
    """Return the size of this process's open but deleted files, or 0 if the system has no /proc."""
    folder = Path("/proc/self/fd")
    deleted = [file for file in folder.iterdir() if "(deleted)" in _target(file)] if folder.exists() else []
    return sum(file.stat().st_blocks * 512 for file in deleted)


def _target(file: Path) -> str:
    return str(file.readlink()) if file.is_symlink() else ""


def in_new_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """Call a function in a new process and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def compare(name: str, engine: str, rounds: int, repeats: int) -> list[Row]:
    """Return one row per population."""
    found: dict[int, list[Row]] = {FEW: [], MANY: []}
    for seed in range(repeats):
        for clients, runs in found.items():
            schedule = make_schedule(clients, rounds, COHORT / clients, seed)
            runs.append(in_new_process(run, METHODS[name], clients, schedule, engine))
    seconds = {clients: [statistics.median(each["seconds"]) for each in runs] for clients, runs in found.items()}
    ratios = [many / few for few, many in zip(seconds[FEW], seconds[MANY], strict=True)]
    return [
        {
            "work": name,
            "clients": clients,
            "engine": runs[-1]["engine"],
            "peak_GiB": max(each["peak_GiB"] for each in runs),
            "file_GiB": max(each["file_GiB"] for each in runs),
            "seconds": statistics.median(seconds[clients]),
            "ratio": statistics.median(ratios) if clients == MANY else None,
        }
        for clients, runs in found.items()
    ]


def all_clients_once(engine: str) -> Row:
    """Return the row of the run in which all 100,000 clients participate once."""
    schedule = np.random.default_rng(0).permutation(MANY).reshape(-1, COHORT).tolist()
    method = ft.methods.SelfFL(default_steps=1, max_steps=1, adjust_steps=False)
    found = in_new_process(run, method, MANY, schedule, engine, len(schedule))
    seconds = statistics.median(found["seconds"][-100:])
    return {"work": "Self-FL, all clients once", "clients": MANY} | found | {"seconds": seconds, "ratio": None}


def show(row: Row) -> None:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:5.2f}"
    values = f"{row['peak_GiB']:8.2f}  {row['file_GiB']:8.2f}  {1000 * row['seconds']:10.1f}  {ratio}"
    print(f"{row['work']:25} {row['clients']:8,}  {row['engine']:10.10}  {values}".rstrip(), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", default="auto")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--repeats", type=int, default=5)
    settings = options.parse_args()
    print("work                       clients  engine      peak GiB  file GiB  ms/round    ratio (targets: 4 GiB, 1.2)")
    rows = []
    for name in METHODS:
        rows += compare(name, settings.engine, settings.rounds, settings.repeats)
        for row in rows[-2:]:
            show(row)
    rows.append(all_clients_once(settings.engine))
    show(rows[-1])
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__.split('+')[0]}"
    result = {"date": str(date.today()), "machine": machine, "rounds": settings.rounds, "repeats": settings.repeats}
    path = Path(__file__).parent / "results" / "population.json"
    path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
