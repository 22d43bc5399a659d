"""Every engine against a hand-written PyTorch loop that takes the same steps, side by side in one run.

python benchmarks/engines.py [--device cpu] [--rows d,e,f,g,h] [--repeats 5]

Loop and engines take turns, round by round, training only; the first rounds warm up; the loop has a process of its own,
so that nothing an engine sets in its process (memory) helps or hinders it. A ratio is the median over pairs
of rounds: timings on a shared machine drift, a ratio taken side by side drifts less. On a CPU two cores are used, and
the loop that counts is the faster of those with one and with two torch threads. An aim is held against `auto`, which is
what users get. results/engines-DEVICE.json is written after every row.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from fedtailor.engines import ENGINES
from fedtailor.machine import repeatable
from fedtailor.methods import FedAPA, FedAvg
from fedtailor.rounds import Rounds
from fedtailor.settings import Settings
from loops import Apart
from works import OVERHEAD, SWEEPS, WORKS, Aim, Work

LR = 0.01
CORES = 2  # of the CPU rows, and torch's threads there
CLIENTS_AT_ONCE = (1, 2, 5, 10, 20, 50, 100, 200)
ASKED = ["sequential", "pool", "vectorized"]
ENGINE_COLUMNS = ("sequential", "pool", "vectorized", "auto")
Found = dict[str, Any]  # what a row found, as it is written


@dataclass(frozen=True)
class Contender:
    """Something that takes turns: a round, which says how many seconds it took."""

    round: Callable[[], float]
    warm_up: int = 1


def take_turns(contenders: Mapping[str, Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds of every contender's rounds; the order turns about, so that nobody always comes after the same one."""
    for contender in contenders.values():
        for _ in range(contender.warm_up):
            contender.round()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in list(contenders)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(contenders[name].round())
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over pairs of rounds that were run side by side."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def promising(loop: Apart, clients: int, threads: Sequence[int]) -> list[int]:
    """The numbers of threads with which the loop is worth a full round: where a step is small, two threads that wait
    for each other take up to a hundred times as long as one, on a busy machine."""
    tried = {n: min(loop.seconds(n, -(-clients // 20)) for _ in range(2)) for n in threads}
    return [n for n, taken in tried.items() if taken <= 3 * min(tried.values())]


def engine_round(rounds: Rounds, clients: Sequence[int], numbers: Iterator[int]) -> float:
    """One round of an engine, with as many threads as a run would use."""
    if rounds.device.type == "cuda":
        torch.cuda.synchronize()
    with repeatable(rounds.way.threads):
        return float(rounds.round(next(numbers), clients)["seconds"])


def build(work: Work, fed: ft.Federation, engine: str, device: str, method: ft.Method | None = None) -> Rounds:
    """A run of FedAvg, or of another method, that is about to begin."""
    settings = Settings(batch_size=work.batch_size, engine=engine, device=device)
    plan = [list(range(fed.num_clients))] * 100
    return Rounds.build(settings, method or FedAvg(lr=LR, epochs=work.epochs), work.model(fed), fed, plan)


def contend(rounds: Rounds) -> Contender:
    """Rounds of everyone; on a GPU two warm up, for memory and kernels settle in the second."""
    take_round = partial(engine_round, rounds, range(rounds.common.num_clients), count(1))
    return Contender(take_round, warm_up=2 if rounds.device.type == "cuda" else 1)


def engines_on(device: str) -> list[str]:
    """The engines there are; several workers are of no use to a single GPU."""
    return [name for name in ASKED if name in ENGINES and (device, name) != ("cuda", "pool")]


def compare(work: Work, device: str, repeats: int) -> Found:
    """A round by the loop and by every engine."""
    fed = work.federation()
    tried = (1,) if device == "cuda" else (1, CORES)
    with Apart(work, LR, device) as loop:
        loops = {f"{n} thread{'s' * (n > 1)}": n for n in promising(loop, fed.num_clients, tried)}
        built = {name: build(work, fed, name, device) for name in [*engines_on(device), "auto"]}
        by_hand = {name: Contender(partial(loop.seconds, n, fed.num_clients)) for name, n in loops.items()}
        seconds = take_turns(by_hand | {name: contend(rounds) for name, rounds in built.items()}, repeats)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    fastest_loop, best = min(loops, key=median.__getitem__), min(engines_on(device), key=median.__getitem__)
    micro = 1e6 / work.steps(fed)  # from seconds of a round to microseconds of a client-step
    engines = {
        name: {
            "seconds": median[name],
            "microseconds": micro * median[name],
            "ratio": ratio(seconds[fastest_loop], seconds[name]),
            "way": str(rounds.way),
            "threads": rounds.way.threads,
        }
        for name, rounds in built.items()
    }
    auto_over_best = ratio(seconds["auto"], seconds[best])
    return {
        "client_steps": work.steps(fed),
        "loop_seconds": {name: median[name] for name in loops},
        "loop_threads_tried": tried,  # one that took over three times as long on a few clients has no seconds
        "loop": {"threads": loops[fastest_loop], "microseconds": micro * median[fastest_loop]},
        "engines": engines,
        "best": best,
        "auto_over_best": auto_over_best,
        "auto_met": auto_over_best <= 1.1,
        "auto_why": built["auto"].why,
    }


def one_step(work: Work, device: str, repeats: int) -> float:
    """Microseconds of one client-step by `auto` without what a round costs once: long rounds less short ones."""
    fed, longer = work.federation(), replace(work, epochs=work.epochs + 8)
    pair = {str(each.epochs): contend(build(each, fed, "auto", device)) for each in (work, longer)}
    short, long = take_turns(pair, repeats).values()
    more = longer.steps(fed) - work.steps(fed)
    return 1e6 / more * statistics.median(b - a for a, b in zip(short, long, strict=True))


def measure(key: str, device: str, repeats: int) -> Found:
    """One row, whichever it is."""
    if key == "g":
        return overhead(device, repeats)
    if key == "h":
        return sweep(device, repeats)
    work = WORKS[key]
    found = {"name": work.name, **compare(work, device, repeats)}
    aim = work.aims.get(device)
    if aim is None:
        return found
    if aim.unit == "µs":
        found["step_microseconds"] = one_step(work, device, repeats)
        return found | aim.verdict(found["step_microseconds"])
    return found | aim.verdict(found["engines"]["auto"]["ratio"])


def overhead(device: str, repeats: int) -> Found:
    """A round of FedAPA against one of FedAvg, both on the engine that `auto` picks for FedAvg."""
    work = OVERHEAD[device]
    fed = work.federation()
    engine = build(work, fed, "auto", device).way.engine
    methods = [FedAvg(lr=LR, epochs=work.epochs), FedAPA(lr=LR, epochs=work.epochs)]
    pair = {type(m).__name__: contend(build(work, fed, engine, device, m)) for m in methods}
    seconds = take_turns(pair, 3 * repeats)  # the difference is far smaller than the noise of a round
    more = [100 * (apa / avg - 1) for avg, apa in zip(*seconds.values(), strict=True)]
    return {
        "name": f"FedAPA over FedAvg, {work.name}",
        "engine": engine,
        "client_steps": work.steps(fed),
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "percent": sorted(more),
        **Aim(3, "%").verdict(statistics.median(more)),
    }


def sweep(device: str, repeats: int) -> Found:
    """Microseconds a client-step against the number of clients at once; no aim, it is drawn."""
    kept: Found = {"name": "cost against clients at once", "microseconds": {}}
    for work in SWEEPS[device]:
        fed = work.federation()
        each = work.steps(fed) // fed.num_clients
        for engine in engines_on(device):
            rounds, numbers = build(work, fed, engine, device), count(1)
            kept["microseconds"][f"{work.name}, {engine}"] = {
                str(n): 1e6 / (n * each) * some_rounds(partial(engine_round, rounds, range(n), numbers), repeats)
                for n in CLIENTS_AT_ONCE
                if n <= 20 or engine != "sequential"  # one after another, a client costs what it costs
            }
    return kept


def some_rounds(take_round: Callable[[], float], repeats: int) -> float:
    """The median of so many rounds after one that warms up, of fewer if they take seconds."""
    taken = [take_round()]
    while len(taken) <= repeats and (len(taken) == 1 or sum(taken[1:]) < 2):  # a GPU compiles kernels in the first
        taken.append(take_round())
    return statistics.median(taken[1:] or taken)


def lines(key: str, found: Found) -> list[str]:
    """A row in words: of the table, or below it."""
    if key == "h":
        head = f"{'clients at once':>24}" + "".join(f"{n:>8}" for n in CLIENTS_AT_ONCE)
        series = found["microseconds"].items()
        return [f"h  {found['name']}, µs a client-step", head] + [
            f"{name:>24}" + "".join(f"{value:8,.0f}" for value in values.values()) for name, values in series
        ]
    verdict = f"{found['aim']}: {'met' if found['met'] else 'aim missed'}" if "aim" in found else "no aim"
    if key == "g":
        taken = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found["seconds"].items())
        spread = f"{found['value']:+.1f} % ({found['percent'][0]:+.1f} to {found['percent'][-1]:+.1f})"
        return [f"g  {found['name']}, {found['engine']}: {taken}; {spread}; {verdict}"]
    cells = {name: f"{each['ratio']:.2f} × {each['microseconds']:,.0f}" for name, each in found["engines"].items()}
    loop = f"{found['loop']['microseconds']:,.0f} ({found['loop']['threads']})"
    step = f"; one step {found['step_microseconds']:.1f} µs" if "step_microseconds" in found else ""
    auto = "met" if found["auto_met"] else "aim missed"
    return [
        f"{key}  {found['name']}",
        f"{loop:>14}" + "".join(f"{cells.get(name, '-'):>18}" for name in ENGINE_COLUMNS),
        f"   {verdict}{step}; auto ({found['engines']['auto']['way']}) takes {found['auto_over_best']:.2f} of the "
        f"best engine ({found['best']}), at most 1.10: {auto}",
    ]


def describe_machine(device: str) -> Found:
    """Where the figures hold. Convolutions on a GPU are in TF32 as torch sets it, for loop and engines alike."""
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if device == "cpu":
        return {"machine": cpu, "torch": torch.__version__, "cores_used": CORES, "loop_threads": [1, CORES]}
    tf32 = {"convolution": torch.backends.cudnn.allow_tf32, "product": torch.backends.cuda.matmul.allow_tf32}
    return {"machine": f"{torch.cuda.get_device_name()}, {cpu}", "torch": torch.__version__, "tf32": tf32}


def keep_to_cores() -> None:
    """Two cores and two threads, also on a larger machine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--rows", help="letters with commas; without it, those that have an aim on the device")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--engines", default=",".join(ASKED), help="those to time beside auto, with commas")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = options.parse_args()
    ASKED[:] = asked.engines.split(",")
    device, path = asked.device, asked.out / f"engines-{asked.device}.json"
    if device == "cpu":
        keep_to_cores()
    rows = asked.rows.split(",") if asked.rows else [*(k for k, work in WORKS.items() if device in work.aims), *"gh"]
    if unknown := set(rows) - {*WORKS, "g", "h"}:
        options.error(f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}, g, h")
    kept = describe_machine(device)  # rows that another run left stay if they are of the same machine and torch
    before = json.loads(path.read_text()) if path.exists() else {}
    results = before.pop("rows", {}) if all(before.get(name) == value for name, value in kept.items()) else {}
    print(", ".join(f"{name}: {value}" for name, value in kept.items()))
    print("µs a client-step; engines: times as fast as the loop")
    print(f"{'loop (threads)':>14}" + "".join(f"{name:>18}" for name in ENGINE_COLUMNS), flush=True)
    load, failed = os.getloadavg()[0], []
    if load > 0.5:
        print(f"Others are at work here (load {load:.1f}): do not trust these figures.")
    for key in rows:
        began = time.perf_counter()
        try:
            found = measure(key, device, asked.repeats)
        except (ft.Refused, RuntimeError) as error:  # such as too little memory: the other rows are still of use
            print(f"{key}  failed: {error}", flush=True)
            failed.append(key)
            continue
        found |= {"date": datetime.now(UTC).date().isoformat(), "repeats": asked.repeats, "load_at_start": load}
        results[key] = found | {"measured_in_seconds": time.perf_counter() - began}
        print("\n".join(lines(key, found)), flush=True)
        path.write_text(json.dumps(kept | {"rows": dict(sorted(results.items()))}, indent=1, ensure_ascii=False) + "\n")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"These rows failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
