"""Partial participation: what clients hold if only a fraction of them trains in each round.

python benchmarks/participation.py           # CIFAR-10, LeNet-5, 100 clients, 20 % per round, 200 rounds; on a GPU
python benchmarks/participation.py --data digits --network mlp --clients 50 --rounds 40    # a minute on two cores

For local training (in every round, and in the rounds in which a server would select the client), FedAvg, FedPer, and
FedLAG with both rules for personal layers that a client has not trained since they became personal. The results are
saved in benchmarks/results/participation-DATA.json.
"""

import argparse
import json
import platform
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fedtailor as ft
from fedtailor.methods import FedAvg, FedLAG, FedPer, Local

METHODS: dict[str, ft.Method] = {
    "Local training": Local(lr=0.05),
    "Local training in sampled rounds": Local(lr=0.05, sampled=True),
    "FedAvg": FedAvg(lr=0.05),
    "FedPer": FedPer(lr=0.05),
    "FedLAG": FedLAG(lr=0.05),
    "FedLAG as in the paper": FedLAG(lr=0.05, missing="own"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--network", default="lenet5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--participation", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in options.methods}
    for seed in options.seeds:
        for name in options.methods:
            rows[name].append(measure(METHODS[name], seed, options))
            print(name, seed, rows[name][-1], flush=True)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    result = {"date": str(date.today()), "machine": machine, "torch": torch.__version__, **settings, "results": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"participation-{options.data}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in rows.items():
        means = {key: round(fmean(one[key] for one in found), 1) for key in found[0]}
        print(f"{name:34}", *(f"{key} {value}" for key, value in means.items()))


def measure(method: ft.Method, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return accuracies in percent, at both moments, after the last round and in the best one."""
    fed = ft.load(options.data, clients=options.clients, alpha=0.1, seed=seed)
    run = ft.simulate(
        method,
        ft.network(options.network, fed),
        fed,
        rounds=options.rounds,
        participation=options.participation,
        evaluate_every=options.evaluate_every,
        seed=seed,
    )
    summary = run.summary()
    found = {
        f"{moment} {choice}": 100 * summary[moment][choice]["weighted"]
        for moment in ("trained", "received")
        for choice in ("last", "best_test")
    }
    evaluated = [record["accuracy_received"] for record in run.records if record["accuracy_received"] is not None]
    found["received, lowest in the second half"] = 100 * min(evaluated[len(evaluated) // 2 :])
    changes = 0
    if isinstance(method, FedLAG):
        chosen = list(run.metric("personal").values())
        changes = sum(not torch.equal(a, b) for a, b in pairwise(chosen))
    return found | {"changes of the personal layers": changes, "seconds": run.total("seconds")}


if __name__ == "__main__":
    main()
