"""The numbers on the pages of docs/methods: methods, their switches and their baselines on one data set.

python benchmarks/methods.py digits                          # a few minutes on two cores
python benchmarks/methods.py fashion-mnist --workers 16 --seeds 0     # for a larger machine

One process a run, one torch thread each, so that results do not depend on how many run at once. Everything is kept in
benchmarks/results/methods-DATA.json, where groups that are not run again stay; `--show` prints the tables from there.
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
only: dict[str, Any] = {"adjust_start": False, "adjust_steps": False, "adjust_weights": False}
GROUPS: dict[str, dict[str, ft.Method]] = {
    "all": {
        "Local": Local(), "FedAvg": FedAvg(), "FedPer": FedPer(), "Ditto": Ditto(),
        "FedAPA": FedAPA(), "FedAPM": FedAPM(), "FedLAG": FedLAG(), "Self-FL": SelfFL(),
    },
    "fedapa": {
        "FedAPA": FedAPA(),
        "sign of Eq. 7 as printed": FedAPA(printed_sign=True),
        "the authors' code": FedAPA(variant="code"),
        "no clipping": FedAPA(clip=False),
        "no own weight": FedAPA(self_adjust=False),
        "no normalising": FedAPA(normalize=False),
        "heads shared too": FedAPA(share="all"),
    },
    "fedapm": {
        "FedAPM": FedAPM(),
        "the paper's ρ and μ": FedAPM(rho=0.01, accuracy_decay=0.9),
        "Eq. 9 as printed": FedAPM(printed_loss=True),
        "its minimiser: σ/M for σ": FedAPM(sigma=0.01 / 20),
        "no duals": FedAPM(duals=False),
        "first layer personal": FedAPM(split="input"),
        "never stopping early": FedAPM(accuracy_start=0.0),
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
        "FedAvg": FedAvg(weights="uniform"), "LAG(FedAvg)": FedLAG(),
        "FedProx": FedProx(), "LAG(FedProx)": LAG(FedProx()),
        "Scaffold": Scaffold(), "LAG(Scaffold)": LAG(Scaffold()),
        "FedExP": FedExP(), "LAG(FedExP)": LAG(FedExP()),
        "PFedMe": PFedMe(), "LAG(PFedMe)": LAG(PFedMe()),
    },
    "selffl": {
        "Self-FL": SelfFL(),
        "no warm-up": SelfFL(warmup=0),
        "Eq. 8 as printed": SelfFL(likelihood="mean"),
        "Eq. 8 as printed, no warm-up": SelfFL(likelihood="mean", warmup=0),
        "forgetting 0.3": SelfFL(forgetting=0.3),
        "only the start": SelfFL(**only | {"adjust_start": True}),
        "only the steps": SelfFL(**only | {"adjust_steps": True}),
        "only the aggregation": SelfFL(**only | {"adjust_weights": True}),
        "Algorithm 2 (minima)": SelfFL(augmented=True, minimum_steps=40),
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {"clients": 20, "alpha": 0.1, "rounds": 20, "batch_size": 16}
Case = tuple[str, str, int]  # group, name, seed


def measure(data: str, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One run, and what the pages say of it."""
    torch.set_num_threads(1)
    group, name, seed = case
    fed = ft.load(data, clients=settings["clients"], alpha=settings["alpha"], seed=seed)
    network = ft.network("mlp" if data == "digits" else "lenet5", fed)
    started = time.perf_counter()
    run = ft.simulate(
        GROUPS[group][name], network, fed, rounds=settings["rounds"], batch_size=settings["batch_size"], seed=seed,
        evaluate_every=settings["rounds"], engine="sequential",
        device="auto" if isinstance(GROUPS[group][name], SLOW) else "cpu",  # the longest on a GPU, if there is one
    )  # fmt: skip
    numbers = {moment: run.numbers(moment) for moment in ("trained", "received")}
    assert numbers["trained"] is not None and numbers["received"] is not None
    found = {
        "trained": numbers["trained"]["weighted"],
        "received": numbers["received"]["weighted"],
        "worst_tenth": numbers["trained"]["worst_tenth"],
        "kB": (run.total("bytes_up") + run.total("bytes_down")) / settings["rounds"] / fed.num_clients / 1000,
        "seconds": time.perf_counter() - started,
        "by_client": run.scores("trained"),
    }
    last = run.records[-1]
    if "weights" in last["monitor"]:
        weights = torch.as_tensor(last["monitor"]["weights"])
        found["borrowed"] = float(1 - (weights.diagonal() / weights.sum(1)).mean())
    if "steps" in last["per_client"]:
        found["steps"] = statistics.mean(last["per_client"]["steps"].values())
    if "drift" in last["per_client"]:
        found["drift"] = statistics.mean(last["per_client"]["drift"].values())
    return {name: value for name, value in found.items() if not isinstance(value, float) or math.isfinite(value)}


def run_all(data: str, cases: list[Case], workers: int, settings: Mapping[str, Any]) -> Iterator[tuple[Case, Any]]:
    """Every case with what was found, as it comes; the longest begin first."""
    cases = sorted(cases, key=lambda case: not isinstance(GROUPS[case[0]][case[1]], SLOW))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(measure, data, case, settings): case for case in cases}
        for done in as_completed(futures):
            yield futures[done], done.result()


def table(results: Mapping[str, Any], alone: Mapping[str, Any] | None) -> str:
    """Markdown: means over seeds; shares of clients better than alone where Local was run."""
    extra = [n for n in ("borrowed", "steps", "drift") if any(n in s for r in results.values() for s in r.values())]
    words = {"borrowed": "weight of others", "steps": "mean steps", "drift": "drift"}
    head = [
        "",
        "trained",
        "received",
        "worst 10 %",
        *(["better than alone"] if alone else []),
        *(words[n] for n in extra),
        "kB",
    ]
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for name, seeds in results.items():
        percent = [f"{100 * _mean(seeds, key):.1f}" for key in ("trained", "received", "worst_tenth")]
        share = [f"{100 * _better(seeds, alone):.0f} %"] if alone else []
        shown = [f"{_mean(seeds, key):.3g}" if all(key in s for s in seeds.values()) else "" for key in extra]
        lines.append("| " + " | ".join([name, *percent, *share, *shown, f"{_mean(seeds, 'kB'):.0f}"]) + " |")
    return "\n".join(lines)


def _mean(seeds: Mapping[str, Any], key: str) -> float:
    return float(statistics.mean(found[key] for found in seeds.values()))


def _better(seeds: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    wins = [
        score > alone[seed]["by_client"][client]
        for seed, found in seeds.items()
        for client, score in found["by_client"].items()
    ]
    return float(statistics.mean(wins))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("data", choices=["digits", "fashion-mnist", "cifar10"])
    options.add_argument("--groups", default=",".join(GROUPS))
    options.add_argument("--names", default="", help="some of the groups, with ; between them")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--workers", type=int, default=os.cpu_count())
    options.add_argument("--rounds", type=int, default=SETTINGS["rounds"])
    options.add_argument("--batch-size", type=int, default=SETTINGS["batch_size"])
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options.add_argument("--show", action="store_true")
    asked = options.parse_args()
    path = asked.out / f"methods-{asked.data}.json"
    if not asked.show:
        settings = SETTINGS | {"rounds": asked.rounds, "batch_size": asked.batch_size}
        seeds, groups = [int(seed) for seed in asked.seeds.split(",")], asked.groups.split(",")
        gpu = f", {torch.cuda.get_device_name()} (for {SLOW[0].__name__})" if torch.cuda.is_available() else ""
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}{gpu}, torch {torch.__version__.split('+')[0]}"
        kept = {"date": str(date.today()), "machine": machine, "data": asked.data, "seeds": seeds, **settings}
        results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}  # others stay
        chosen = [
            (group, name)
            for group in groups
            for name in GROUPS[group]
            if not asked.names or name in asked.names.split(";")
        ]
        for group, name in chosen:
            results.setdefault(group, {})[name] = {}
        cases = [(group, name, seed) for group, name in chosen for seed in seeds]
        for (group, name, seed), found in run_all(asked.data, cases, asked.workers, settings):
            print(f"{group}: {name}, seed {seed}: {found['trained']:.3f} in {found['seconds']:.0f} s", flush=True)
            results[group][name][str(seed)] = found
            path.write_text(json.dumps(kept | {"results": results}, indent=1, ensure_ascii=False) + "\n")
    kept = json.loads(path.read_text())
    alone = kept["results"].get("all", {}).get("Local")
    print({name: value for name, value in kept.items() if name != "results"})
    for group, results in kept["results"].items():
        ordered = {name: results[name] for name in GROUPS[group] if name in results}
        print(f"\n{group}\n{table(ordered, alone)}")


if __name__ == "__main__":
    main()
