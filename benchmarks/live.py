"""The live page with large runs: milliseconds and bytes a request, while one of the runs grows.

python benchmarks/live.py [--runs 4] [--clients 1000] [--rounds 500]     writes half a gigabyte to the temporary folder
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

from fedtailor.run import FORMAT
from fedtailor.see.live import Live
from fedtailor.toml import to_toml

METRICS = ("loss", "accuracy", "macro_f1", "auc")
CLASSES = 10
METHODS = ("local", "fedavg", "ditto", "fedper", "fedprox", "fedrep", "pfedme", "apple")


def make_run(folder: Path, method: str, clients: int, rounds: int, written: int) -> list[bytes]:
    """A folder as a run leaves it, with made-up numbers; the lines that are not written yet."""
    folder.mkdir(parents=True)
    info = {
        "format": FORMAT, "fedtailor": "0.1.0", "engine": "vectorized", "chunk": None, "device": "cpu", "threads": 1,
        "torch": "2", "parameters": 1000, "score": "accuracy", "higher_is_better": True, "layers": ["body", "head"],
        "fingerprint": {"data": "one split"},
        "clients": [
            {"name": str(n), "train": 100, "validation": 0, "test": 30,
             "classes": [random.Random(n * CLASSES + c).randrange(20) for c in range(CLASSES)]}
            for n in range(clients)
        ],
    }  # fmt: skip
    settings = {"rounds": rounds, "seed": 0, "method": {"name": method}, "network": {"name": "mlp"},
                "data": {"name": "digits", "clients": clients}, "channel": {}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    some = [_line(method, clients, number) for number in range(8)]  # others say the same, under another number
    lines = [some[n % 8].replace(b'"round": 0', b'"round": %d' % (n + 1), 1) for n in range(rounds)]
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:written]))
    if written == rounds:
        (folder / "personal").mkdir()
        (folder / "personal" / "models.json").write_text("{}")
    (folder / "experiment.toml").write_text(to_toml(settings))
    return lines[written:]


def _line(method: str, clients: int, number: int) -> bytes:
    random.seed(f"{method} {number}")
    tables: dict[str, Any] = {name: {str(n): 104_000 for n in range(clients)} for name in ("bytes_up", "bytes_down")}
    for name in (*(f"{metric}_{moment}" for metric in METRICS for moment in ("received", "trained")), "loss"):
        tables[name] = {str(n): random.random() for n in range(clients)}
    line = {"round": 0, "clients": [*range(clients)], "missed": {str(number): "late"}, "failed": {}, "seconds": 0.5,
            "bytes_up": 104_000 * clients, "bytes_down": 104_000 * clients, "per_client": tables, "diverged": [],
            "monitor": {}}  # fmt: skip
    return json.dumps(line).encode() + b"\n"


class Client:
    """Keeps its connection, as a browser does."""

    def __init__(self, live: Live) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", live.port)
        self._headers = {"Cookie": f"fedtailor_{live.port}={live.token}"}

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found[:300]
        return found


def resident() -> float:
    """MB of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def measure(name: str, ask: Callable[[int], bytes], times: int) -> None:
    spent, sizes = [], []
    for turn in range(times):
        began = time.perf_counter()
        sizes.append(len(ask(turn)))
        spent.append(1000 * (time.perf_counter() - began))
        time.sleep(0.02)
    print(f"{name:44}{median(spent):9.1f} ms   worst {max(spent):8.1f} ms {max(sizes):10,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for method in METHODS[1 : asked.runs]:
            make_run(root / method, method, asked.clients, asked.rounds, asked.rounds)
        left = make_run(root / "local", "local", asked.clients, asked.rounds, asked.rounds // 2)
        size = sum(path.stat().st_size for path in root.glob("*/rounds.jsonl"))
        before = resident()
        began = time.perf_counter()
        live = Live(root, port=0)
        threading.Thread(target=live.serve_forever, daemon=True).start()
        client = Client(live)
        measure("the list, while all is read for the first time", lambda turn: client.get("/api/runs?since="), 30)
        while any(row["reading"] for row in json.loads(client.get("/api/runs?since="))["runs"]):
            time.sleep(0.05)
        took, more = time.perf_counter() - began, resident() - before
        print(f"{asked.runs} runs, records of {size / 1e6:.0f} MB: read in {took:.1f} s, kept in {more:.0f} MB")
        _measure_all(client, root, left)
        live.shutdown()
        live.server_close()


def _measure_all(client: Client, root: Path, left: list[bytes]) -> None:
    """What the page asks for, while a run grows by five rounds a second."""
    stop = threading.Event()

    def grow() -> None:
        with (root / "local" / "rounds.jsonl").open("ab", buffering=0) as file:
            for line in left:
                file.write(line)
                if stop.wait(0.2):
                    return

    writer = threading.Thread(target=grow)
    writer.start()
    names = sorted(path.name for path in root.iterdir())
    version = json.loads(client.get("/api/runs?since="))["version"]

    def changes(turn: int) -> bytes:
        nonlocal version
        found = client.get(f"/api/runs?since={version}")
        version = json.loads(found)["version"]
        return found

    both = "&".join(f"run={name}" for name in names)
    measure("what changed", changes, 100)
    measure("a run", lambda turn: client.get("/api/run?run=local"), 50)
    measure("50 of its clients, sorted", lambda turn: client.get("/api/clients?run=local&sort=trained&down=1"), 50)
    measure("a client", lambda turn: client.get(f"/api/client?run=local&client={turn}"), 30)
    measure(f"{len(names)} runs compared", lambda turn: client.get(f"/api/compared?{both}"), 10)
    stop.set()
    writer.join()


if __name__ == "__main__":
    main()
