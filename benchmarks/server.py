"""Benchmark a round on the server of FedAPA and FedLAG: 1,000 clients with LeNet-5 on inputs of CIFAR-10's shape.

python benchmarks/server.py [--clients 1000]

All clients take part in the round. Each method runs in a separate process, with torch on all cores. "floor" is the
matrix product that the update requires (all pairs of clients, all shared parameters). It is timed in the same process,
so that the ratio is comparable between machines.
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
from typing import Any

import torch

import fedtailor as ft
from fedtailor.core.method import Exchange, Setup

METHODS = {"FedAPA": ft.methods.FedAPA(), "FedLAG": ft.methods.FedLAG()}
REPEATS = 5


def build(method: ft.Method, clients: int) -> tuple[ft.trees.Tree, Exchange]:
    """Return a server and a round in which half of the clients move one way, half the other, each with noise."""
    x, y = torch.zeros(2, 3, 32, 32), torch.tensor([0, 9])
    model = ft.network("lenet5", ft.Federation.from_arrays([(x, y, x, y)]))
    sizes = torch.full((clients,), 100)
    server = method.init_server(Setup(model, model.init(0), clients, sizes, rounds=1, seed=0))
    indices = range(clients)
    sent = method.send(server, indices, 1)
    torch.manual_seed(0)
    direction = torch.tensor([1.0, -1.0]).repeat(clients)[:clients]
    received = {}
    for name, leaf in sent["params"].items():
        common = direction.reshape(-1, *[1] * (leaf.ndim - 1)) * torch.randn(leaf.shape[1:])
        received[name] = leaf + 0.01 * (common + torch.randn(leaf.shape))
    return server, Exchange(1, indices, clients, sizes, model, sent, {"params": received}, sizes.sum())


def seconds(function: Any) -> float:
    """Return the median time of a few calls."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(name: str, clients: int) -> dict[str, float]:
    method = METHODS[name]
    with torch.no_grad():
        server, exchange = build(method, clients)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first = method.receive(server, exchange)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows = torch.cat([leaf.flatten(1) for leaf in exchange.received["params"].values()], 1)
        return {
            "receive_seconds": seconds(lambda: method.receive(server, exchange)),
            "send_seconds": seconds(lambda: method.send(first, exchange.clients, 2)),
            "monitor_seconds": seconds(lambda: method.server_metrics(server, first, exchange)),
            "floor_seconds": seconds(lambda: rows @ rows.T),
            "peak_GiB": peak / 2**20,
            "receive_adds_GiB": (peak - before) / 2**20,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    clients = parser.parse_args().clients
    results = {}
    for name in METHODS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = values = pool.apply(measure, (name, clients))
        parts = ", ".join(
            f"{part} {values[f'{part}_seconds']:.2f} s" for part in ("receive", "send", "monitor", "floor")
        )
        ratio = values["receive_seconds"] / values["floor_seconds"]
        peak = values["peak_GiB"]
        print(f"{name}, {clients} clients: {parts}; receive takes {ratio:.1f} times the floor; peak {peak:.2f} GiB")
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__.split('+')[0]}"
    result = {
        "date": str(date.today()),
        "machine": machine,
        "clients": clients,
        "network": "lenet5 (3×32×32)",
    } | results
    path = Path(__file__).parent / "results" / "server.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
