"""Check that a change of the code keeps all results bit-identical.

Record all methods on all CPU engines before the change, and compare after it:

    python benchmarks/bits.py record before.json
    python benchmarks/bits.py compare before.json
"""

import argparse
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.methods import METHODS

ENGINES = ("sequential", "vectorized", "pool")
TASKS = ("digits", "images")
DTYPES = ("float64", "float32")
SCHEDULE = [[0, 1, 2, 3, 4, 5], [1, 3, 4], [0, 2, 3, 5]]  # full participation, then partial
SIZES = (40, 7, 24, 1, 33, 16)  # training images per client


def task(name: str) -> tuple[ft.Model, ft.Federation]:
    """Return a network and its federation: an MLP on digits, or LeNet-5 on random images."""
    if name == "digits":
        fed = ft.load("digits", clients=6, alpha=0.3, seed=3)
        return ft.network("mlp", fed), fed
    random = np.random.default_rng(0)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8), random.integers(0, 4, count)

    fed = ft.Federation.from_arrays([(*images(size), *images(3)) for size in SIZES], classes=4)
    return ft.network("lenet5", fed), fed


def digest(tree: Any) -> str:
    """Hash the values of a tree of tensors or scalars in the order of their names."""
    hasher = hashlib.sha256()

    def add(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for name in sorted(node, key=str):
                add(f"{path}/{name}", node[name])
        elif isinstance(node, torch.Tensor):
            hasher.update(f"{path} {node.dtype} {tuple(node.shape)}".encode())
            hasher.update(node.detach().cpu().contiguous().numpy().tobytes())
        elif hasattr(node, "values") and hasattr(node, "present"):
            add(path, {"values": node.values, "present": node.present})
        else:
            hasher.update(f"{path} {node!r}".encode())

    add("", tree)
    return hasher.hexdigest()[:16]


def fingerprint(case: tuple[str, str, str, str]) -> tuple[str, dict[str, str]]:
    """Run one case and hash the server state, the client states, the personal models, and the records."""
    method, name, engine, dtype = case
    torch.set_num_threads(1)
    model, fed = task(name)
    try:
        run = ft.simulate(
            METHODS[method](), model, fed, schedule=SCHEDULE, batch_size=8, engine=engine, device="cpu",
            dtype=getattr(torch, dtype),
        )  # fmt: skip
    except Exception as error:
        return "-".join(case), {"error": type(error).__mro__[-3].__name__}
    clients = range(run.num_clients)
    records = [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in run.records]
    return "-".join(case), {
        "server": digest(run.server),
        "clients": digest({client: run.client(client) for client in clients}),
        "trained": digest({client: run.personal(client) for client in clients}),
        "received": digest({client: run.personal(client, "received") for client in clients}),
        "records": digest({str(record["round"]): record for record in records}),
    }


def main() -> None:
    """Write fingerprints to a file, or compare them with those in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    cases = list(product(arguments.methods.split(","), TASKS, ENGINES, DTYPES))
    with ProcessPoolExecutor() as pool:
        found = dict(pool.map(fingerprint, cases))
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1))
        print(f"Recorded {len(found)} runs in {arguments.file}.")
        return
    before = json.loads(arguments.file.read_text())
    changed = [
        f"{case}: {', '.join(part for part in before[case] if now.get(part) != before[case][part])}"
        for case, now in found.items()
        if before[case] != now
    ]
    print("\n".join(changed))
    print(f"{len(found) - len(changed)} of {len(found)} runs are bit-identical.")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
