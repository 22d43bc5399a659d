"""Memory does not grow with rounds: resident memory after 100 and after 2,000 rounds on digits.

python benchmarks/memory.py [--rounds 2000]

20 clients, Dir(0.1), an MLP, everyone evaluated every round; in memory, and in a folder with checkpoints. Every run is
a process of its own with one thread. What grows is the record, a packed line a round. Writes results/memory.json.
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

EARLY = 100
METHODS = {"FedAvg": ft.methods.FedAvg(), "Ditto": ft.methods.Ditto(), "FedAPA": ft.methods.FedAPA()}
RESULTS = Path(__file__).parent / "results" / "memory.json"


def resident() -> float:
    """MiB of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measure(name: str, rounds: int, in_folder: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    fed = ft.load("digits", clients=20, alpha=0.1, seed=0)
    seen: dict[int, float] = {}

    def record(line: dict[str, Any]) -> None:
        if line["round"] in (EARLY, rounds):
            seen[line["round"]] = resident()

    with TemporaryDirectory() as folder:
        where = Path(folder) / "run" if in_folder else None
        model = ft.network("mlp", fed)
        ft.simulate(METHODS[name], model, fed, rounds=rounds, engine="vectorized", record=record, folder=where)
    growth = seen[rounds] / seen[EARLY] - 1
    kept = "folder" if in_folder else "memory"
    return {"method": name, "kept_in": kept, "early_MiB": seen[EARLY], "late_MiB": seen[rounds], "growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    found = []
    for name in METHODS:
        for in_folder in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found.append(row := process.apply(measure, (name, rounds, in_folder)))
            sizes = f"{row['early_MiB']:.0f} MiB after {EARLY} rounds, {row['late_MiB']:.0f} after {rounds}"
            print(f"{name:8} kept in {row['kept_in']}: {sizes} ({row['growth']:+.1%})")
    about = {"date": str(date.today()), "machine": platform.processor() or platform.machine(), "rounds": rounds}
    RESULTS.write_text(json.dumps({**about, "torch": torch.__version__, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
