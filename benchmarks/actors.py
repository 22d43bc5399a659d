"""One run in several actors (engine="ray"): time per round, a cost model, and the memory of 100,000 clients.

python benchmarks/actors.py [--repeats 5]

**Time**: FedAvg on generated images, with 1, 2, and 4 actors in turn, each with one thread. The model predicts the
seconds of a round as

    compute / min(actors, cores) + copies of the model / bandwidth + ⌈log2 actors⌉ · reduce + calls · latency

where `compute` is the time with one actor without its communication, and bandwidth (to pack, move, and unpack a tree),
reduce (to average two models of this size), and latency (of an empty call) are measured by themselves.

**Memory**: 100,000 clients with 12 samples of 784 bytes each, 1,000 per round, on two actors. Peaks are sums over all
processes (the driver, Ray's own processes, and the actors): of resident memory, in which memory that several processes
share counts several times, and of the proportional set size, in which it counts once.

**Projection**: the same model for clusters of GPUs; its assumptions are in `ASSUMPTIONS`.
"""

import argparse
import json
import logging
import math
import os
import platform
import statistics
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

import fedtailor as ft
from fedtailor.training.ray_clients.cluster import ActorGroup
from fedtailor.training.ray_clients.packets import Packet

Row = dict[str, Any]
COUNTS = (1, 2, 4)
CLIENTS = 100  # per round, in the measurement of time
ASSUMPTIONS = {
    "clients": 1_000_000,
    "model_MB": 4.0,  # a million parameters in float32, more than LeNet-5 has, so communication is overestimated
    "clients_per_round": 10_000,
    "steps_per_client": 50,  # five epochs of ten batches
    "microseconds_per_step": 21.4,  # one GPU, LeNet-5: row `a` of engines-cuda.json, vectorized
    "network_GB_per_s": 1.25,  # 10 Gbit/s between machines
    "memory_GB_per_s": 1.0,  # to pack and unpack a tree
    "seconds_per_call": 0.005,
}


def images(clients: int, train: int, test: int, side: int) -> ft.Federation:
    """Return clients with random images."""
    random, per_client = np.random.default_rng(0), train + test
    x = torch.from_numpy(random.integers(0, 256, (clients * per_client, 1, side, side), dtype=np.uint8))
    y = torch.from_numpy(random.integers(0, 10, clients * per_client))
    rows = torch.arange(clients * per_client).reshape(clients, per_client)
    return ft.Federation(
        x, y, tuple(rows[:, :train]), tuple(rows[:, train:]), tuple(map(str, range(clients))), classes=10
    )


def seconds_per_round(fed: ft.Federation, actors: int, rounds: int) -> float:
    """Return the median time of training a round, without the first round."""
    run = ft.simulate(
        ft.methods.FedAvg(epochs=5), ft.network("mlp", fed), fed, rounds=rounds, batch_size=10, engine="ray",
        actors=actors, actor_engine="sequential", device="cpu", evaluate=1, evaluate_every=rounds,
    )  # fmt: skip
    assert run.info["threads"] == 1, "with more threads, one actor would use all cores"
    return float(statistics.median(record["seconds"] for record in run.records[1:]))


def communication(parameters: int) -> Row:
    """Return the latency of an empty call, the seconds to move a model to an actor, and those to average two models."""
    actors = ActorGroup(2, "cpu")
    actors.start()
    tree = {"params": torch.randn(parameters)}

    def median(function: Any) -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def move() -> None:
        actors.result(actors.submit(0, "ping", actors.put(Packet.pack(tree))))

    def reduce() -> None:
        left, right = (actors.put((1.0, Packet.pack(tree))) for _ in range(2))
        actors.result(actors.submit(0, "combine", left, right))

    latency = median(lambda: actors.call_all("ping"))
    moved, reduced = median(move), median(reduce)
    actors.stop()
    return {"latency": latency, "move": max(0.0, moved - latency), "reduce": max(0.0, reduced - latency)}


def predict(compute: float, actors: int, cores: int, cost: Row) -> float:
    """Return the seconds of a round according to the model."""
    levels = math.ceil(math.log2(actors))
    calls = 3 + levels  # train, mean of the uploads, commit
    return float(compute / min(actors, cores) + 2 * cost["move"] + levels * cost["reduce"] + calls * cost["latency"])


def measure_time(repeats: int) -> Row:
    """Return the time of a round for several numbers of actors, measured in turn, and as predicted."""
    fed = images(CLIENTS, train=20, test=1, side=28)
    parameters = sum(p.numel() for p in ft.network("mlp", fed).module.parameters())
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(repeats):
        for count in COUNTS:
            times[count].append(seconds_per_round(fed, count, rounds=3))
    cost = communication(parameters)
    cores = len(os.sched_getaffinity(0))
    compute = statistics.median(times[1]) - predict(0.0, 1, cores, cost)
    rows = [
        {
            "actors": count,
            "seconds": statistics.median(found),
            "predicted": predict(compute, count, cores, cost),
            "speedup": statistics.median(one / many for one, many in zip(times[1], found, strict=True)),
            "speedups": sorted(round(one / many, 2) for one, many in zip(times[1], found, strict=True)),
        }
        for count, found in times.items()
    ]
    return {"clients": CLIENTS, "parameters": parameters, "cores": cores, "costs": cost, "rows": rows}


class PeakMemory(threading.Thread):
    """Measures the memory of this process and all its descendants until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.resident = self.proportional = 0.0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.5):
            found = [psutil.Process(), *psutil.Process().children(recursive=True)]
            sizes = [size for process in found if (size := _memory(process)) is not None]
            self.resident = max(self.resident, sum(rss for rss, _ in sizes) / 2**30)
            self.proportional = max(self.proportional, sum(pss for _, pss in sizes) / 2**30)

    def stop(self) -> Row:
        self._stopped.set()
        self.join()
        return {"peak_resident_GiB": self.resident, "peak_proportional_GiB": self.proportional}


def _memory(process: psutil.Process) -> tuple[int, int] | None:
    try:
        return process.memory_info().rss, process.memory_full_info().pss
    except (psutil.Error, OSError):
        return None  # it has ended


def measure_memory(clients: int, per_round: int) -> Row:
    """Return the peak memory of all processes, and the time of a round."""
    peak = PeakMemory()
    peak.start()
    fed = images(clients, train=10, test=2, side=28)
    run = ft.simulate(
        ft.methods.Ditto(), ft.network("logistic", fed), fed, rounds=4, participation=per_round / clients,
        batch_size=10, engine="ray", actors=2, actor_engine="vectorized", chunk_size=32, device="cpu",
        evaluate="participants",
    )  # fmt: skip
    seconds = statistics.median(record["seconds"] for record in run.records[1:])
    return {"clients": clients, "per_round": per_round, "actors": 2, "seconds": seconds, **peak.stop()}


def project(gpus: int, reduced: bool) -> Row:
    """Return the seconds of a round on a cluster of GPUs, by part. Without reduction, the driver gets all uploads."""
    a = ASSUMPTIONS
    copies = 1 if reduced else a["clients_per_round"]
    hop = a["model_MB"] / 1000 * (1 / a["network_GB_per_s"] + 2 / a["memory_GB_per_s"])
    levels = math.ceil(math.log2(gpus))
    parts = {
        "compute": a["clients_per_round"] * a["steps_per_client"] * a["microseconds_per_step"] / 1e6 / gpus,
        "messages": gpus * a["model_MB"] / 1000 / a["network_GB_per_s"]
        + 2 * a["model_MB"] / 1000 / a["memory_GB_per_s"],
        "uploads": levels * hop if reduced else copies * hop,
        "calls": (3 + (levels if reduced else 0)) * a["seconds_per_call"],
    }
    return {"gpus": gpus, "reduced": reduced, **parts, "seconds": sum(parts.values())}


def project_checkpoint() -> Row:
    """Return the size of a checkpoint after every client took part, with one model per client, and its seconds."""
    size = ASSUMPTIONS["clients"] * ASSUMPTIONS["model_MB"] / 1e6  # TB
    return {"TB": size, "seconds": size * 1e3 / ASSUMPTIONS["network_GB_per_s"]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--clients", type=int, default=100_000)
    options.add_argument("--parts", nargs="+", default=["memory", "time"], choices=["memory", "time"])
    settings = options.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    path = Path(__file__).parent / "results" / "actors.json"
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    found["date"] = date.today().isoformat()
    machine = f"{len(os.sched_getaffinity(0))} CPU cores, {platform.machine()}"
    found["machine"] = f"{machine}, torch {torch.__version__}, ray {ray.__version__}"
    for part in settings.parts:
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, object_store_memory=2**29,
        )  # fmt: skip
        found[part] = measure_memory(settings.clients, 1_000) if part == "memory" else measure_time(settings.repeats)
        print(json.dumps(found[part], indent=1), flush=True)
        ray.shutdown()
    found |= {"assumptions": ASSUMPTIONS, "checkpoint": project_checkpoint()}
    found["projection"] = [project(gpus, reduced) for reduced in (True, False) for gpus in (1, 8, 16, 32, 64)]
    for row in found["projection"]:
        print({name: round(value, 3) for name, value in row.items()})
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
