"""FedAPM's Table 3 on CIFAR-10, when clients share samples as in the authors' code, and when they do not.

python benchmarks/shared_samples.py --device cuda       # runs what is missing in results/shared_samples.json
python benchmarks/shared_samples.py --device cpu --override rounds=2 --out /tmp       # try it, some minutes

In the code, each client draws its samples of a class from the whole class, so one client's test samples can be training
samples of others. All settings are those of `fedtailor paper run fedapm table-3-cifar10`; there, no sample is shared.
The two splits are different draws of Dir(0.5), so compare several seeds.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.splits.class_fractions import PARTITIONS, SplitSettings
from fedtailor.papers.running import Job, make_jobs, select_cells
from fedtailor.training.simulate import train

ROWS = ["FedAPM", "FedAvg, as described", "FedAvg-FT", "Local training, same budget"]
TEST = 0.2


def share_samples(fed: ft.Federation, alpha: float, seed: int) -> tuple[ft.Federation, float]:
    """Return clients that draw their samples of each class independently, by Dir(alpha), and the mean fraction of a
    client's test samples on which another client trains."""
    random, labels = np.random.default_rng(seed), fed.y.numpy()
    members = [np.flatnonzero(labels == label) for label in range(fed.classes or 0)]
    totals = np.array([len(own) for own in members])
    fractions = PARTITIONS["dirichlet"](random, totals, fed.num_clients, SplitSettings(alpha=alpha, cap=False))
    counts = np.round(fractions * totals[:, None]).astype(int)
    owned = [
        np.concatenate([random.permutation(own)[:count] for own, count in zip(members, column, strict=True)])
        for column in counts.T
    ]
    rows, ends = np.concatenate(owned), np.cumsum([len(own) for own in owned])[:-1]
    shared = ft.Federation.from_owners(
        fed.x[rows], fed.y[rows], np.split(np.arange(len(rows)), ends), test=TEST, seed=seed, classes=fed.classes,
        mean=fed.mean, std=fed.std,
    )  # fmt: skip
    trained = [set(rows[own.numpy()].tolist()) for own in shared.train]
    leaked = [
        np.mean([any(index in trained[j] for j in range(len(trained)) if j != i) for index in rows[own.numpy()]])
        for i, own in enumerate(shared.test)
    ]
    return shared, float(np.mean(leaked))


def measure(job: Job, is_shared: bool) -> dict[str, Any]:
    """Return the best and the last accuracy of a run as trained, as the mean over clients, and the training loss."""
    model, fed = job.load()
    fed, leaked = share_samples(fed, job.setup.describe()["data"]["alpha"], job.seed) if is_shared else (fed, 0.0)
    found = train(job.config, job.setup.method, model, fed)
    curve = [record["accuracy_trained_mean"] for record in found.records]
    losses = {number: found.records[number - 1]["loss"] for number in (10, 50, 100, 200, 300) if number <= len(curve)}
    return {
        "accuracy": {"best": max(curve), "last": curve[-1]},
        "loss of the participants by round": losses,
        "fraction of test samples on which other clients train": round(leaked, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--override", action="append", default=[], help="as in fedtailor paper run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.out / "shared_samples.json"
    runs: dict[str, Any] = json.loads(path.read_text())["runs"] if path.is_file() else {}
    for row in ROWS:
        cells = [
            cell
            for cell in select_cells("fedapm", "table-3-cifar10", [row], options.override)
            if f", {row}, accuracy" in cell.label
        ]
        (job,) = make_jobs(cells, [options.seed], options.device)
        for is_shared in (True, False):
            samples = "shared" if is_shared else "separate"
            name = f"{row}, {samples} samples, {job.config.rounds} rounds, seed {options.seed}"
            if name not in runs:
                runs[name] = measure(job, is_shared)
                print(name, json.dumps(runs[name]), flush=True)
                is_gpu = job.config.torch_device.type == "cuda"
                about = {"date": str(date.today()), "device": torch.cuda.get_device_name() if is_gpu else "CPU"}
                path.write_text(json.dumps(about | {"torch": torch.__version__, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
