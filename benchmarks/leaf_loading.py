"""Measure how long FEMNIST with all its writers takes to load from the cache, and how much memory it needs.

python benchmarks/leaf_loading.py [--clients 3550] [--samples 805263] [--repeats 5]

Random images are written to a temporary cache, in place of LEAF's JSON files, which have 6 GB of text. Each load has
its own process, which imports the library before the clock starts, and then reads the images of all clients, as
training does. The results are written to results/leaf_loading.json.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.leaf import datasets
from fedtailor.data.leaf.femnist import CHARACTERS
from fedtailor.data.sample_table import SampleTable

RESULTS = Path(__file__).parent / "results" / "leaf_loading.json"


def make_table(clients: int, samples: int) -> SampleTable:
    """Return random images; the writers have about as many as in FEMNIST."""
    random = np.random.default_rng(0)
    weights = random.lognormal(0, 0.4, clients)
    owner = np.repeat(np.arange(clients), random.multinomial(samples, weights / weights.sum()))
    x, y = random.integers(0, 256, (samples, 1, 28, 28), np.uint8), random.integers(0, 62, samples)
    names = tuple(f"f{client:04d}_{client % 50:02d}" for client in range(clients))
    return SampleTable(x, y, 62, owner, names, random.random(samples) < 0.1, tuple(CHARACTERS))


def fill_cache(folder: Path, clients: int, samples: int) -> None:
    """Convert a folder whose content is replaced by random images."""
    (folder / "data" / "all_data").mkdir(parents=True)
    (folder / "data" / "all_data" / "all_data_0.json").write_text("{}")
    datasets.read_femnist = lambda folder: make_table(clients, samples)  # type: ignore[attr-defined]
    datasets.FEMNIST(folder=str(folder)).download()


def measure_load(folder: str) -> dict[str, float]:
    """Load the clients in this process, and use their images."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    fed = ft.load("femnist", folder=folder)
    seconds = time.perf_counter() - started
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(fed.x, torch.Tensor)
    for own in fed.train + fed.test:
        fed.x[own].sum()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "loaded_MiB": loaded / 1024, "used_MiB": used / 1024}


def in_new_process(function: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3550)
    parser.add_argument("--samples", type=int, default=805_263)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with TemporaryDirectory() as work:
        os.environ["FEDTAILOR_CACHE"] = str(Path(work) / "cache")  # inherited by the processes
        folder = Path(work) / "femnist"
        in_new_process(fill_cache, folder, arguments.clients, arguments.samples)
        loads = [in_new_process(measure_load, str(folder)) for _ in range(arguments.repeats)]
    seconds = [load["seconds"] for load in loads]
    row = {"clients": arguments.clients, "samples": arguments.samples, "best_seconds": min(seconds)}
    row |= {"median_seconds": statistics.median(seconds)}
    row |= {name: max(load[name] for load in loads) for name in ("loaded_MiB", "used_MiB")}
    machine = {"date": str(date.today()), "machine": platform.processor() or platform.machine()}
    RESULTS.write_text(json.dumps({**machine, "torch": torch.__version__, **row}, indent=1) + "\n")
    times = f"best {row['best_seconds']:.2f} s, median {row['median_seconds']:.2f} s"
    print(f"femnist: {times}; peak {row['loaded_MiB']:,.0f} MiB, {row['used_MiB']:,.0f} MiB after use of all images")


if __name__ == "__main__":
    main()
