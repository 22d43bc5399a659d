"""What clients cost that do not take part: 100,000 clients against 1,000, 100 of them a round.

python benchmarks/population.py [--engine auto]

Logistic regression 784×10 on bytes drawn at random, ten training samples and two test samples a client, batches of 10,
evaluate="participants". Every run is a process of its own; runs of both populations take turns, and the ratio is the
median over pairs. Self-FL takes the same number of steps from everyone, so that both populations do the same work.

The last row makes everybody take part once, with one step each, so that all 100,000 states are kept (Self-FL: two
models, and the model as trained). Training is so short there that the disk sets the pace once the system's own buffer
is full: its seconds are those of the last 100 rounds, and no aim.
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

METHODS = {"Ditto": ft.methods.Ditto(), "Self-FL": ft.methods.SelfFL(adjust_steps=False)}
FEW, MANY, COHORT = 1_000, 100_000, 100
TRAIN, TEST = 10, 2  # samples of a client


def population(clients: int) -> ft.Federation:
    """Clients with samples of 784 random bytes."""
    random, each = np.random.default_rng(0), TRAIN + TEST
    x = torch.from_numpy(random.integers(0, 256, (clients * each, 784), dtype=np.uint8))
    y = torch.from_numpy(random.integers(0, 10, clients * each))
    own = torch.arange(clients * each).reshape(clients, each)
    names = tuple(str(client) for client in range(clients))
    return ft.Federation(x, y, tuple(own[:, :TRAIN]), tuple(own[:, TRAIN:]), names, classes=10)


def run(method: ft.Method, clients: int, plan: list[list[int]], engine: str, evaluate_every: int = 1) -> dict[str, Any]:
    """Peak memory of this process, seconds of every round but the first, and bytes that lie in files."""
    fed, times = population(clients), []
    kept = ft.simulate(
        method,
        ft.network("logistic", fed),
        fed,
        schedule=plan,
        batch_size=10,
        engine=engine,
        device="cpu",
        evaluate="participants",
        evaluate_every=evaluate_every,
        record=lambda line: times.append(time.perf_counter()),
    )
    return {
        "engine": kept.info["engine"],
        "peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "file_GiB": _temporary_bytes() / 2**30,
        "seconds": np.diff(times).tolist(),
    }


def _temporary_bytes() -> int:
    """Of this process's open files that have no name any more, where the system tells."""
    opened = Path("/proc/self/fd")
    found = [file for file in opened.iterdir() if "(deleted)" in _target(file)] if opened.exists() else []
    return sum(file.stat().st_blocks * 512 for file in found)


def _target(file: Path) -> str:
    return str(file.readlink()) if file.is_symlink() else ""


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The function's result from a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def compare(name: str, engine: str, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each population."""
    found: dict[int, list[dict[str, Any]]] = {FEW: [], MANY: []}
    for seed in range(repeats):
        for clients, runs in found.items():
            plan = ft.schedule.make_schedule(clients, rounds, COHORT / clients, seed)
            runs.append(apart(run, METHODS[name], clients, plan, engine))
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


def everyone(engine: str) -> dict[str, Any]:
    """A row for the run in which all of the many take part once."""
    plan = np.random.default_rng(0).permutation(MANY).reshape(-1, COHORT).tolist()
    method = ft.methods.SelfFL(default_steps=1, max_steps=1, adjust_steps=False)
    found = apart(run, method, MANY, plan, engine, len(plan))
    seconds = statistics.median(found["seconds"][-100:])
    return {"work": "Self-FL, everyone once", "clients": MANY} | found | {"seconds": seconds, "ratio": None}


def show(row: dict[str, Any]) -> None:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:5.2f}"
    numbers = f"{row['peak_GiB']:8.2f}  {row['file_GiB']:8.2f}  {1000 * row['seconds']:10.1f}  {ratio}"
    print(f"{row['work']:23} {row['clients']:8,}  {row['engine']:10.10}  {numbers}".rstrip(), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", default="auto")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--repeats", type=int, default=5)
    settings = options.parse_args()
    print("work                     clients  engine      peak GiB  file GiB  ms a round  ratio (aims: 4 GiB, 1.2)")
    rows = []
    for name in METHODS:
        rows += compare(name, settings.engine, settings.rounds, settings.repeats)
        for row in rows[-2:]:
            show(row)
    rows.append(everyone(settings.engine))
    show(rows[-1])
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__.split('+')[0]}"
    result = {"date": str(date.today()), "machine": machine, "rounds": settings.rounds, "repeats": settings.repeats}
    path = Path(__file__).parent / "results" / "population.json"
    path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
