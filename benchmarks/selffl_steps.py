"""Why Self-FL's personal models approach the common one: its steps and variances over rounds in Figures 1a and 2a.

python benchmarks/selffl_steps.py        # half an hour on one core; runs what is missing in results/selffl_steps.json

The runs are those of `fedtailor paper run selffl figure-1a` and `figure-2a`, with seed 0.
"""

import json
import platform
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from fedtailor.papers.running import make_jobs, select_cells
from fedtailor.training.simulate import train

ROUNDS = (10, 20, 30, 40, 50, 70, 100, 150, 200)
FIELDS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "no smoothing": {"smoothing": False},
    "forgetting 0.3": {"forgetting": 0.3},
    "50 rounds of warm-up": {"warmup": 50},
    "200 steps": {"max_steps": 200, "default_steps": 200},
    "fixed steps": {"adjust_steps": False},
}


def measure(figure: str, fields: dict[str, Any]) -> list[dict[str, float | None]]:
    """Return the steps, variances, and accuracies of one run in some rounds."""
    (job,) = make_jobs(select_cells("selffl", figure, ["selffl"]), [0], "cpu")
    config = replace(job.config, engine="vectorized", evaluate_global=True)
    run = train(config, replace(job.setup.method, **fields), *job.load())
    rows = []
    for number in ROUNDS:
        record = run.records[number - 1]
        metrics = record["method_metrics"]
        known = [variance for variance in metrics["variances"] if variance >= 0]
        rows.append(
            {
                "round": number,
                "mean steps": round(mean(record["per_client"]["steps"].values()), 1),
                "between clients": round(metrics["between"], 4),
                "median over rounds": round(median(known), 4) if known else None,
                "personal accuracy, %": round(100 * record["accuracy_trained"], 1),
                "common accuracy, %": round(100 * record["global_accuracy_received"], 1),
            }
        )
    return rows


def main() -> None:
    path = Path(__file__).parent / "results" / "selffl_steps.json"
    found: dict[str, Any] = json.loads(path.read_text())["runs"] if path.is_file() else {}
    for figure, names in (("figure-1a", list(FIELDS)), ("figure-2a", ["as in the paper"])):
        for name in names:
            label = f"{figure}, {name}"
            if label not in found:
                found[label] = measure(figure, FIELDS[name])
                about = {"date": str(date.today()), "machine": platform.machine(), "torch": torch.__version__}
                path.write_text(json.dumps(about | {"runs": found}, indent=1) + "\n")
            print(label, *found[label], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
