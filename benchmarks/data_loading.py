"""Measure how long published data sets take to load from the cache, at their full size.

python benchmarks/data_loading.py [--dataset cifar100,emnist,femnist] [--repeats 5] [--folder FOLDER]

Random data in the publisher's layout is written to a temporary folder, with the published number of samples. The first
load reads these files and fills a temporary cache. Each further load has its own process, which imports the library
before the clock starts; the file is then in the system's memory, as after a recent download. `reading` is the part of
ft.load that returns the table of all samples: it compares the checksum of the cached file, and maps or reads the
arrays. The rest is the split into clients with default settings. FEMNIST is written to the cache directly,
because LEAF's JSON files would have 6 GB. The results are written to results/data_loading.json.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.datasets import DATASETS
from fedtailor.data.download.cache import ensure_cached
from fedtailor.data.leaf.datasets import FEMNIST
from fedtailor.data.leaf.femnist import CHARACTERS
from fedtailor.data.sample_table import SampleTable

RESULTS = Path(__file__).parent / "results" / "data_loading.json"
RNG = np.random.default_rng(0)


def write_cifar100(folder: Path) -> dict[str, Any]:
    """Write 60,000 images of 32×32 pixels."""
    for name, count in (("train", 50_000), ("test", 10_000)):
        records = RNG.integers(0, 256, (count, 2 + 3072), np.uint8)
        records[:, 0], records[:, 1] = RNG.integers(0, 20, count), RNG.integers(0, 100, count)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    for kind, classes in (("coarse", 20), ("fine", 100)):
        (folder / f"{kind}_label_names.txt").write_text("".join(f"class {label}\n" for label in range(classes)))
    return {}


def write_emnist(folder: Path) -> dict[str, Any]:
    """Write the 814,255 images of 28×28 pixels of the split byclass."""
    for part, count in (("train", 697_932), ("test", 116_323)):
        images, labels = RNG.integers(0, 256, (count, 28, 28), np.uint8), RNG.integers(0, 62, count, np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"emnist-byclass-{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    (folder / "emnist-byclass-mapping.txt").write_text("".join(f"{label} {label + 48}\n" for label in range(62)))
    return {"split": "byclass"}


def write_femnist(folder: Path) -> dict[str, Any]:
    """Write the 805,263 images of 28×28 pixels of 3,550 writers to the cache."""
    (folder / "all_data").mkdir()
    (folder / "all_data" / "all_data_0.json").write_text("{}")
    clients, samples = 3_550, 805_263
    weights = RNG.lognormal(0, 0.4, clients)
    owner = np.repeat(np.arange(clients), RNG.multinomial(samples, weights / weights.sum()))
    x, y = RNG.integers(0, 256, (samples, 1, 28, 28), np.uint8), RNG.integers(0, 62, samples)
    names = tuple(f"f{client:04d}_{client % 50:02d}" for client in range(clients))
    table = SampleTable(x, y, 62, owner, names, RNG.random(samples) < 0.1, tuple(CHARACTERS))
    source = FEMNIST().fingerprint(folder)
    ensure_cached(f"femnist-{source[:12]}", source, 0, lambda work: table)
    return {}


WRITERS: dict[str, Callable[[Path], dict[str, Any]]] = {  # each returns the settings of ft.load
    "cifar100": write_cifar100,
    "emnist": write_emnist,
    "femnist": write_femnist,
}


def measure_load(name: str, settings: dict[str, Any]) -> dict[str, float]:
    """Load a data set and return the seconds and the peak memory of this process."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    ft.load(name, **settings)
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text().splitlines()  # getrusage includes the peak of the parent process
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"seconds": seconds, "peak_MiB": peak / 1024}


def measure_read(name: str, settings: dict[str, Any]) -> float:
    """Return the seconds of reading the table of all samples."""
    started = time.perf_counter()
    DATASETS[name](**settings).read()  # type: ignore[attr-defined]
    return time.perf_counter() - started


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(function, arguments)


def measure(name: str, repeats: int, folder: Path) -> dict[str, Any]:
    files = folder / name
    files.mkdir()
    settings = {"folder": str(files), **WRITERS[name](files)}
    first = in_new_process(measure_load, name, settings)
    loads, reads = list[dict[str, float]](), list[float]()
    for _ in range(repeats):  # alternating, so that other load on the machine affects both
        loads.append(in_new_process(measure_load, name, settings))
        reads.append(in_new_process(measure_read, name, settings))
    seconds = [load["seconds"] for load in loads]
    return {
        "data": name,
        "first_seconds": first["seconds"],
        "best_seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "best_read_seconds": min(reads),
        "peak_MiB": max(load["peak_MiB"] for load in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default=",".join(WRITERS), help="names with commas between them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the temporary files are written; default: the system's folder")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.dataset.split(","):
        with TemporaryDirectory(dir=arguments.folder) as folder:
            os.environ["FEDTAILOR_CACHE"] = str(Path(folder) / "cache")  # inherited by the processes
            rows.append(row := measure(name, arguments.repeats, Path(folder)))
        times = f"best {row['best_seconds']:.2f} s, median {row['median_seconds']:.2f} s"
        parts = f"reading: best {row['best_read_seconds']:.2f} s; first load: {row['first_seconds']:.1f} s"
        print(f"{name}: {times} ({parts}); peak {row['peak_MiB']:,.0f} MiB")
    machine = {"date": str(date.today()), "machine": platform.processor() or platform.machine()}
    RESULTS.write_text(json.dumps({**machine, "torch": torch.__version__, "loads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
