"""The live page with large runs: milliseconds and bytes per request, while one of the runs grows.

python benchmarks/live.py [--runs 4] [--clients 1000] [--rounds 500]

By default, the benchmark writes half a gigabyte to a temporary folder.
"""

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from fedtailor.reporting.dashboard.server import DashboardServer
from fedtailor.runs.run import FORMAT
from fedtailor.runs.toml import to_toml

METRICS = ("loss", "accuracy", "macro_f1", "auc")
CLASSES = 10
METHODS = ("local", "fedavg", "ditto", "fedper", "fedprox", "fedrep", "pfedme", "apple")


def make_run(folder: Path, method: str, clients: int, rounds: int, written: int) -> list[bytes]:
    """Write a run folder with random values, and return the records that are not written yet."""
    folder.mkdir(parents=True)
    info = {
        "format": FORMAT, "fedtailor": "0.1.0", "engine": "vectorized", "chunk_size": None, "device": "cpu",
        "threads": 1, "torch": "2", "parameters": 1000, "score": "accuracy", "higher_is_better": True,
        "method_title": method, "layers": ["body", "head"], "fingerprint": {"data": "one split"},
        "clients": [
            {"name": str(n), "train": 100, "validation": 0, "test": 30,
             "classes": [random.Random(n * CLASSES + c).randrange(20) for c in range(CLASSES)]}
            for n in range(clients)
        ],
    }  # fmt: skip
    settings = {"rounds": rounds, "seed": 0, "method": {"name": method}, "network": {"name": "mlp"},
                "data": {"name": "digits", "clients": clients}, "channel": {}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    templates = [_record(method, clients, number) for number in range(8)]  # reused with other round numbers
    records = [templates[n % 8].replace(b'"round": 0', b'"round": %d' % (n + 1), 1) for n in range(rounds)]
    (folder / "rounds.jsonl").write_bytes(b"".join(records[:written]))
    if written == rounds:
        (folder / "personal").mkdir()
        (folder / "personal" / "models.json").write_text("{}")
    (folder / "experiment.toml").write_text(to_toml(settings))
    return records[written:]


def _record(method: str, clients: int, number: int) -> bytes:
    random.seed(f"{method} {number}")
    tables: dict[str, Any] = {name: {str(n): 104_000 for n in range(clients)} for name in ("bytes_up", "bytes_down")}
    for name in (*(f"{metric}_{moment}" for metric in METRICS for moment in ("received", "trained")), "loss"):
        tables[name] = {str(n): random.random() for n in range(clients)}
    record = {"round": 0, "clients": [*range(clients)], "missed": {str(number): "late"}, "failed": {}, "seconds": 0.5,
            "bytes_up": 104_000 * clients, "bytes_down": 104_000 * clients, "per_client": tables, "diverged": [],
            "method_metrics": {}}  # fmt: skip
    return json.dumps(record).encode() + b"\n"


class Client:
    """An HTTP client that keeps its connection open, as a browser does."""

    def __init__(self, live: DashboardServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", live.port)
        self._headers = {"Cookie": f"fedtailor_{live.port}={live.token}"}

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body[:300]
        return body


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def measure(name: str, request: Callable[[int], bytes], times: int) -> None:
    """Repeat a request, and print its median and maximum time and its maximum size."""
    milliseconds, sizes = [], []
    for repeat in range(times):
        started = time.perf_counter()
        sizes.append(len(request(repeat)))
        milliseconds.append(1000 * (time.perf_counter() - started))
        time.sleep(0.02)
    print(f"{name:44}{median(milliseconds):9.1f} ms   max {max(milliseconds):8.1f} ms {max(sizes):10,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for method in METHODS[1 : options.runs]:
            make_run(root / method, method, options.clients, options.rounds, options.rounds)
        pending = make_run(root / "local", "local", options.clients, options.rounds, options.rounds // 2)
        size = sum(path.stat().st_size for path in root.glob("*/rounds.jsonl"))
        before = resident()
        started = time.perf_counter()
        live = DashboardServer(root, port=0)
        server = threading.Thread(target=live.serve_forever)
        server.start()
        client = Client(live)
        measure("list of runs, during the first read", lambda repeat: client.get("/api/runs?since="), 30)
        while any(row["reading"] for row in json.loads(client.get("/api/runs?since="))["runs"]):
            time.sleep(0.05)
        seconds, growth = time.perf_counter() - started, resident() - before
        print(
            f"{options.runs} runs, records of {size / 1e6:.0f} MB: read in {seconds:.1f} s, {growth:.0f} MB of memory"
        )
        _measure_all(client, root, pending)
        live.stop()
        server.join()


def _measure_all(client: Client, root: Path, pending: list[bytes]) -> None:
    """Measure the requests of the page, while a run grows by five rounds per second."""
    stop = threading.Event()

    def grow() -> None:
        with (root / "local" / "rounds.jsonl").open("ab", buffering=0) as file:
            for record in pending:
                file.write(record)
                if stop.wait(0.2):
                    return

    writer = threading.Thread(target=grow)
    writer.start()
    names = sorted(path.name for path in root.iterdir())
    version = json.loads(client.get("/api/runs?since="))["version"]

    def changes(repeat: int) -> bytes:
        nonlocal version
        body = client.get(f"/api/runs?since={version}")
        version = json.loads(body)["version"]
        return body

    selected = "&".join(f"run={name}" for name in names)
    measure("changes to the list", changes, 100)
    measure("one run", lambda repeat: client.get("/api/run?run=local"), 50)
    sorted_clients = "/api/clients?run=local&sort=trained&descending=1"
    measure("50 clients of a run, sorted", lambda repeat: client.get(sorted_clients), 50)
    measure("one client", lambda repeat: client.get(f"/api/client?run=local&client={repeat}"), 30)
    measure(f"comparison of {len(names)} runs", lambda repeat: client.get(f"/api/comparison?{selected}"), 10)
    stop.set()
    writer.join()


if __name__ == "__main__":
    main()
