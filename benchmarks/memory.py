"""Check that memory does not grow with rounds: resident memory after 100 and after 2,000 rounds on digits.

python benchmarks/memory.py [--rounds 2000]

The runs use 20 clients, Dir(0.1), and an MLP, evaluate all clients in every round, and are stored in memory or in a
folder with checkpoints. Each run has its own process with one thread. Only the record grows, by one packed line per
round. The results are written to results/memory.json.
"""

import argparse
import json
import multiprocessing
import platform
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fedtailor as ft
from fedtailor.runs.records import Record

EARLY = 100
METHODS = {"FedAvg": ft.methods.FedAvg(), "Ditto": ft.methods.Ditto(), "FedAPA": ft.methods.FedAPA()}
RESULTS = Path(__file__).parent / "results" / "memory.json"


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measure(name: str, rounds: int, in_folder: bool) -> dict[str, Any]:
    """Run a method and return the memory after the early and the last round."""
    torch.set_num_threads(1)
    fed = ft.load("digits", clients=20, alpha=0.1, seed=0)
    memory: dict[int, float] = {}

    def measure_round(record: Record) -> None:
        if record["round"] in (EARLY, rounds):
            memory[record["round"]] = resident()

    with TemporaryDirectory() as folder:
        path = Path(folder) / "run" if in_folder else None
        model = ft.network("mlp", fed)
        ft.simulate(
            METHODS[name], model, fed, rounds=rounds, engine="vectorized", on_round_end=measure_round, folder=path
        )
    growth = memory[rounds] / memory[EARLY] - 1
    storage = "folder" if in_folder else "memory"
    early, late = memory[EARLY], memory[rounds]
    return {"method": name, "kept_in": storage, "early_MiB": early, "late_MiB": late, "growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    rows = []
    for name in METHODS:
        for in_folder in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                rows.append(row := process.apply(measure, (name, rounds, in_folder)))
            sizes = f"{row['early_MiB']:.0f} MiB after {EARLY} rounds, {row['late_MiB']:.0f} after {rounds}"
            print(f"{name:8} stored in {row['kept_in']}: {sizes} ({row['growth']:+.1%})")
    machine = {"date": str(date.today()), "machine": platform.processor() or platform.machine(), "rounds": rounds}
    RESULTS.write_text(json.dumps({**machine, "torch": torch.__version__, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
