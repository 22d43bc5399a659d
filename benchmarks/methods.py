"""The results in docs/methods: methods, their options, and their baselines on one data set.

python benchmarks/methods.py digits                                   # a few minutes on two cores
python benchmarks/methods.py fashion-mnist --parallel 16 --seeds 0     # for a larger machine

Each run has its own process with one torch thread, so that results do not depend on the number of parallel runs. They
are saved in benchmarks/results/methods-DATA.json, which keeps the groups that are not run again. `--show` prints the
tables from this file.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from fedtailor.methods import (
    LAG,
    Ditto,
    FedAPA,
    FedAPM,
    FedAvg,
    FedExP,
    FedLAG,
    FedPer,
    FedProx,
    Local,
    PFedMe,
    Scaffold,
    SelfFL,
)

SLOW = (FedAPM, PFedMe)
ALL_OFF: dict[str, Any] = {"adjust_start": False, "adjust_steps": False, "adjust_weights": False}
GROUPS: dict[str, dict[str, ft.Method]] = {
    "all": {
        "Local": Local(), "FedAvg": FedAvg(), "FedPer": FedPer(), "Ditto": Ditto(),
        "FedAPA": FedAPA(), "FedAPM": FedAPM(), "FedLAG": FedLAG(), "Self-FL": SelfFL(),
    },
    "fedapa": {
        "FedAPA": FedAPA(),
        "sign of Eq. 7 as printed": FedAPA(printed_sign=True),
        "authors' code": FedAPA(variant="code"),
        "no clipping": FedAPA(clip=False),
        "no own weight": FedAPA(self_adjust=False),
        "no normalization": FedAPA(normalize=False),
        "shared heads": FedAPA(share="all"),
    },
    "fedapm": {
        "FedAPM": FedAPM(),
        "the paper's ρ and μ": FedAPM(rho=0.01, accuracy_decay=0.9),
        "Eq. 9 as printed": FedAPM(printed_loss=True),
        "its minimizer: σ/M for σ": FedAPM(sigma=0.01 / 20),
        "no duals": FedAPM(duals=False),
        "first layer personal": FedAPM(split="input"),
        "no early stopping": FedAPM(accuracy_start=0.0),
    },
    "fedlag": {
        "FedLAG": FedLAG(),
        "first 2 layers": FedLAG(layers="first"),
        "middle 2 layers": FedLAG(layers="middle"),
        "last 2 layers": FedLAG(layers="last"),
        "k = 1": FedLAG(personal_layers=1),
        "warm-up of 10 rounds": FedLAG(warmup=10),
    },
    "lag": {
        "FedAvg": FedAvg(weights="uniform"), "LAG (FedAvg)": FedLAG(),
        "FedProx": FedProx(), "LAG (FedProx)": LAG(FedProx()),
        "SCAFFOLD": Scaffold(), "LAG (SCAFFOLD)": LAG(Scaffold()),
        "FedExP": FedExP(), "LAG (FedExP)": LAG(FedExP()),
        "pFedMe": PFedMe(), "LAG (pFedMe)": LAG(PFedMe()),
    },
    "selffl": {
        "Self-FL": SelfFL(),
        "no warm-up": SelfFL(warmup=0),
        "Eq. 8 as printed": SelfFL(likelihood="mean"),
        "Eq. 8 as printed, no warm-up": SelfFL(likelihood="mean", warmup=0),
        "forgetting 0.3": SelfFL(forgetting=0.3),
        "start only": SelfFL(**ALL_OFF | {"adjust_start": True}),
        "steps only": SelfFL(**ALL_OFF | {"adjust_steps": True}),
        "aggregation only": SelfFL(**ALL_OFF | {"adjust_weights": True}),
        "Algorithm 2 (minima, 40 steps)": SelfFL(augmented=True, minimum_steps=40),
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {"clients": 20, "alpha": 0.1, "rounds": 20, "batch_size": 16}
Case = tuple[str, str, int]  # group, name, seed


def measure(data: str, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run one case, and return the values that the pages show."""
    torch.set_num_threads(1)
    group, name, seed = case
    fed = ft.load(data, clients=settings["clients"], alpha=settings["alpha"], seed=seed)
    network = ft.network("mlp" if data == "digits" else "lenet5", fed)
    started = time.perf_counter()
    run = ft.simulate(
        GROUPS[group][name], network, fed, rounds=settings["rounds"], batch_size=settings["batch_size"], seed=seed,
        evaluate_every=settings["rounds"], engine="sequential",
        device="auto" if isinstance(GROUPS[group][name], SLOW) else "cpu",  # the slowest methods use a GPU if available
    )  # fmt: skip
    summaries = {moment: run.summarize(moment) for moment in ("trained", "received")}
    assert summaries["trained"] is not None and summaries["received"] is not None
    found = {
        "trained": summaries["trained"]["weighted"],
        "received": summaries["received"]["weighted"],
        "worst_tenth": summaries["trained"]["worst_tenth"],
        "kB": (run.total("bytes_up") + run.total("bytes_down")) / settings["rounds"] / fed.num_clients / 1000,
        "seconds": time.perf_counter() - started,
        "by_client": run.scores("trained"),
    }
    last = run.records[-1]
    if "weights" in last["method_metrics"]:
        weights = torch.as_tensor(last["method_metrics"]["weights"])
        found["borrowed"] = float(1 - (weights.diagonal() / weights.sum(1)).mean())
    if "steps" in last["per_client"]:
        found["steps"] = statistics.mean(last["per_client"]["steps"].values())
    if "drift" in last["per_client"]:
        found["drift"] = statistics.mean(last["per_client"]["drift"].values())
    return {name: value for name, value in found.items() if not isinstance(value, float) or math.isfinite(value)}


def run_all(data: str, cases: list[Case], parallel: int, settings: Mapping[str, Any]) -> Iterator[tuple[Case, Any]]:
    """Yield every case with its results as it completes; the slowest methods start first."""
    cases = sorted(cases, key=lambda case: not isinstance(GROUPS[case[0]][case[1]], SLOW))
    with ProcessPoolExecutor(parallel, get_context("spawn")) as pool:
        futures = {pool.submit(measure, data, case, settings): case for case in cases}
        for done in as_completed(futures):
            yield futures[done], done.result()


def table(results: Mapping[str, Any], local: Mapping[str, Any] | None) -> str:
    """Return a Markdown table of means over seeds; with results of Local, also the fraction of clients that beat it."""
    extra = [n for n in ("borrowed", "steps", "drift") if any(n in s for r in results.values() for s in r.values())]
    headings = {"borrowed": "weight of others", "steps": "mean steps", "drift": "drift"}
    head = [
        "",
        "trained",
        "received",
        "worst 10 %",
        *(["better than local"] if local else []),
        *(headings[n] for n in extra),
        "kB",
    ]
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for name, seeds in results.items():
        percent = [f"{100 * _mean(seeds, key):.1f}" for key in ("trained", "received", "worst_tenth")]
        fraction = [f"{100 * _fraction_better(seeds, local):.0f} %"] if local else []
        shown = [f"{_mean(seeds, key):.3g}" if all(key in s for s in seeds.values()) else "" for key in extra]
        lines.append("| " + " | ".join([name, *percent, *fraction, *shown, f"{_mean(seeds, 'kB'):.0f}"]) + " |")
    return "\n".join(lines)


def _mean(seeds: Mapping[str, Any], key: str) -> float:
    return float(statistics.mean(found[key] for found in seeds.values()))


def _fraction_better(seeds: Mapping[str, Any], local: Mapping[str, Any]) -> float:
    wins = [
        score > local[seed]["by_client"][client]
        for seed, found in seeds.items()
        for client, score in found["by_client"].items()
    ]
    return float(statistics.mean(wins))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=["digits", "fashion-mnist", "cifar10"])
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--names", default="", help="names of runs within the groups, separated by ;")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=SETTINGS["rounds"])
    parser.add_argument("--batch-size", type=int, default=SETTINGS["batch_size"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    path = options.out / f"methods-{options.data}.json"
    if not options.show:
        settings = SETTINGS | {"rounds": options.rounds, "batch_size": options.batch_size}
        seeds, groups = [int(seed) for seed in options.seeds.split(",")], options.groups.split(",")
        gpu = f", {torch.cuda.get_device_name()} (for {SLOW[0].__name__})" if torch.cuda.is_available() else ""
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}{gpu}, torch {torch.__version__.split('+')[0]}"
        about = {"date": str(date.today()), "machine": machine, "data": options.data, "seeds": seeds, **settings}
        results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
        chosen = [
            (group, name)
            for group in groups
            for name in GROUPS[group]
            if not options.names or name in options.names.split(";")
        ]
        for group, name in chosen:
            results.setdefault(group, {})[name] = {}
        cases = [(group, name, seed) for group, name in chosen for seed in seeds]
        for (group, name, seed), found in run_all(options.data, cases, options.parallel, settings):
            print(f"{group}: {name}, seed {seed}: {found['trained']:.3f} in {found['seconds']:.0f} s", flush=True)
            results[group][name][str(seed)] = found
            path.write_text(json.dumps(about | {"results": results}, indent=1, ensure_ascii=False) + "\n")
    saved = json.loads(path.read_text())
    local = saved["results"].get("all", {}).get("Local")
    print({name: value for name, value in saved.items() if name != "results"})
    for group, results in saved["results"].items():
        ordered = {name: results[name] for name in GROUPS[group] if name in results}
        print(f"\n{group}\n{table(ordered, local)}")


if __name__ == "__main__":
    main()
