"""Compare every engine with a hand-written PyTorch loop that takes the same steps.

python benchmarks/engines.py [--device cpu] [--rows d,e,f,g,h] [--repeats 5]

The loop and the engines alternate, one training round each, after warm-up rounds. The loop has its own process, so that
the memory settings of an engine do not affect it. A ratio is the median over pairs of rounds, because timings on a
shared machine drift and ratios of neighboring rounds drift less. On a CPU, two cores are used, and the engines are
compared with the faster of the loops with one and with two torch threads. Targets apply to `auto`, the default.
results/engines-DEVICE.json is written after every row.
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
from fedtailor.core.system import deterministic
from fedtailor.methods import FedAPA, FedAvg
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import ENGINES
from fedtailor.training.simulate import make_trainer
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from loops import LoopProcess
from works import OVERHEAD, SWEEPS, WORKLOADS, Target, Workload

LR = 0.01
CORES = 2  # cores and torch threads of the CPU rows
NUM_CLIENTS = (1, 2, 5, 10, 20, 50, 100, 200)
TIMED = ["sequential", "pool", "vectorized"]
ENGINE_COLUMNS = ("sequential", "pool", "vectorized", "auto")
Row = dict[str, Any]  # the results of a row, as written to the file


@dataclass(frozen=True)
class Contender:
    """A function that runs one round and returns its seconds."""

    round: Callable[[], float]
    warm_up: int = 1


def alternate(contenders: Mapping[str, Contender], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's rounds; the order is reversed after every repetition."""
    for contender in contenders.values():
        for _ in range(contender.warm_up):
            contender.round()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in list(contenders)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(contenders[name].round())
    return seconds


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median ratio over pairs of neighboring rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def fast_thread_counts(loop: LoopProcess, clients: int, threads: Sequence[int]) -> list[int]:
    """Return the thread counts that are worth a full round of the loop: with small steps on a busy machine, two threads
    can take a hundred times as long as one."""
    seconds = {n: min(loop.seconds(n, -(-clients // 20)) for _ in range(2)) for n in threads}
    return [n for n, taken in seconds.items() if taken <= 3 * min(seconds.values())]


def engine_round(trainer: Trainer[SimulatedClients], clients: Sequence[int], numbers: Iterator[int]) -> float:
    """Run one round of an engine with the number of threads that a run would use, and return its seconds."""
    if trainer.clients.device.type == "cuda":
        torch.cuda.synchronize()
    with deterministic(trainer.clients.threads):
        return float(trainer.train_round(next(numbers), clients)["seconds"])


def build(
    workload: Workload, fed: ft.Federation, engine: str, device: str, method: ft.Method | None = None
) -> Trainer[SimulatedClients]:
    """Build a run of FedAvg, or of another method, that has not started yet."""
    settings = TrainingConfig(rounds=100, batch_size=workload.batch_size, engine=engine, device=device)
    method = method or FedAvg(lr=LR, epochs=workload.epochs)
    return make_trainer(settings, method, workload.model(fed), fed)[0]


def contender(trainer: Trainer[SimulatedClients]) -> Contender:
    """Return rounds of all clients; a GPU needs two warm-up rounds, until memory and kernels have settled."""
    clients = trainer.clients
    run_round = partial(engine_round, trainer, range(clients.shared.num_clients), count(1))
    return Contender(run_round, warm_up=2 if clients.device.type == "cuda" else 1)


def engines_on(device: str) -> list[str]:
    """Return the engines to time; a pool of workers does not help on a single GPU."""
    return [name for name in TIMED if name in ENGINES and (device, name) != ("cuda", "pool")]


def compare(workload: Workload, device: str, repeats: int) -> Row:
    """Compare a round of the loop with a round of every engine."""
    fed = workload.federation()
    thread_counts = (1,) if device == "cuda" else (1, CORES)
    with LoopProcess(workload, LR, device) as loop:
        loops = {f"{n} thread{'s' * (n > 1)}": n for n in fast_thread_counts(loop, fed.num_clients, thread_counts)}
        trainers = {name: build(workload, fed, name, device) for name in [*engines_on(device), "auto"]}
        contenders = {name: Contender(partial(loop.seconds, n, fed.num_clients)) for name, n in loops.items()}
        seconds = alternate(contenders | {name: contender(trainer) for name, trainer in trainers.items()}, repeats)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    fastest_loop, best = min(loops, key=median.__getitem__), min(engines_on(device), key=median.__getitem__)
    micro = 1e6 / workload.steps(fed)  # seconds per round to microseconds per client step
    engines = {
        name: {
            "seconds": median[name],
            "microseconds": micro * median[name],
            "ratio": ratio(seconds[fastest_loop], seconds[name]),
            "engine_choice": str(trainer.clients.engine_choice),
            "threads": trainer.clients.threads,
        }
        for name, trainer in trainers.items()
    }
    auto_over_best = ratio(seconds["auto"], seconds[best])
    return {
        "client_steps": workload.steps(fed),
        "loop_seconds": {name: median[name] for name in loops},
        "loop_threads_tried": thread_counts,  # slow counts have no seconds (`fast_thread_counts`)
        "loop": {"threads": loops[fastest_loop], "microseconds": micro * median[fastest_loop]},
        "engines": engines,
        "best": best,
        "auto_over_best": auto_over_best,
        "auto_met": auto_over_best <= 1.1,
        "auto_why": trainers["auto"].clients.engine_reason,
    }


def one_step(workload: Workload, device: str, repeats: int) -> float:
    """Return the microseconds per client step with `auto`, without the fixed costs of a round."""
    fed, longer = workload.federation(), replace(workload, epochs=workload.epochs + 8)
    pair = {str(each.epochs): contender(build(each, fed, "auto", device)) for each in (workload, longer)}
    short, long = alternate(pair, repeats).values()
    extra_steps = longer.steps(fed) - workload.steps(fed)
    return 1e6 / extra_steps * statistics.median(b - a for a, b in zip(short, long, strict=True))


def measure(key: str, device: str, repeats: int) -> Row:
    """Measure one row."""
    if key == "g":
        return overhead(device, repeats)
    if key == "h":
        return sweep(device, repeats)
    workload = WORKLOADS[key]
    row = {"name": workload.name, **compare(workload, device, repeats)}
    target = workload.targets.get(device)
    if target is None:
        return row
    if target.unit == "µs":
        row["step_microseconds"] = one_step(workload, device, repeats)
        return row | target.verdict(row["step_microseconds"])
    return row | target.verdict(row["engines"]["auto"]["ratio"])


def overhead(device: str, repeats: int) -> Row:
    """Compare a round of FedAPA with a round of FedAvg, both on the engine that `auto` selects for FedAvg."""
    workload = OVERHEAD[device]
    fed = workload.federation()
    engine = build(workload, fed, "auto", device).clients.engine_choice.engine
    methods = [FedAvg(lr=LR, epochs=workload.epochs), FedAPA(lr=LR, epochs=workload.epochs)]
    pair = {type(m).__name__: contender(build(workload, fed, engine, device, m)) for m in methods}
    seconds = alternate(pair, 3 * repeats)  # the difference is much smaller than the noise of a round
    overheads = [100 * (apa / avg - 1) for avg, apa in zip(*seconds.values(), strict=True)]
    return {
        "name": f"FedAPA over FedAvg, {workload.name}",
        "engine": engine,
        "client_steps": workload.steps(fed),
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "percent": sorted(overheads),
        **Target(3, "%").verdict(statistics.median(overheads)),
    }


def sweep(device: str, repeats: int) -> Row:
    """Measure microseconds per client step over the number of clients in a round, for the figure in docs/engines.md."""
    row: Row = {"name": "cost over clients per round", "microseconds": {}}
    for workload in SWEEPS[device]:
        fed = workload.federation()
        steps = workload.steps(fed) // fed.num_clients
        for engine in engines_on(device):
            trainer, numbers = build(workload, fed, engine, device), count(1)
            row["microseconds"][f"{workload.name}, {engine}"] = {
                str(n): 1e6 / (n * steps) * median_round(partial(engine_round, trainer, range(n), numbers), repeats)
                for n in NUM_CLIENTS
                if n <= 20 or engine != "sequential"  # the sequential cost per client does not depend on n
            }
    return row


def median_round(run_round: Callable[[], float], repeats: int) -> float:
    """Return the median of `repeats` rounds after a warm-up round, or of fewer if they take over two seconds."""
    taken = [run_round()]
    while len(taken) <= repeats and (len(taken) == 1 or sum(taken[1:]) < 2):
        taken.append(run_round())
    return statistics.median(taken[1:] or taken)


def format_row(key: str, row: Row) -> list[str]:
    """Return the printed lines of a row."""
    if key == "h":
        head = f"{'clients per round':>24}" + "".join(f"{n:>8}" for n in NUM_CLIENTS)
        series = row["microseconds"].items()
        return [f"h  {row['name']}, µs per client step", head] + [
            f"{name:>24}" + "".join(f"{value:8,.0f}" for value in values.values()) for name, values in series
        ]
    verdict = f"{row['target']}: {'met' if row['met'] else 'missed'}" if "target" in row else "no target"
    if key == "g":
        taken = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in row["seconds"].items())
        spread = f"{row['value']:+.1f} % ({row['percent'][0]:+.1f} to {row['percent'][-1]:+.1f})"
        return [f"g  {row['name']}, {row['engine']}: {taken}; {spread}; {verdict}"]
    cells = {name: f"{each['ratio']:.2f} × {each['microseconds']:,.0f}" for name, each in row["engines"].items()}
    loop = f"{row['loop']['microseconds']:,.0f} ({row['loop']['threads']})"
    step = f"; one step {row['step_microseconds']:.1f} µs" if "step_microseconds" in row else ""
    auto = "met" if row["auto_met"] else "missed"
    return [
        f"{key}  {row['name']}",
        f"{loop:>14}" + "".join(f"{cells.get(name, '-'):>18}" for name in ENGINE_COLUMNS),
        f"   {verdict}{step}; auto ({row['engines']['auto']['engine_choice']}) takes {row['auto_over_best']:.2f} times "
        f"the time of the best engine ({row['best']}), at most 1.10: {auto}",
    ]


def describe_machine(device: str) -> Row:
    """Return the machine and its settings. On a GPU, loop and engines use torch's TF32 settings."""
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if device == "cpu":
        return {"machine": cpu, "torch": torch.__version__, "cores_used": CORES, "loop_threads": [1, CORES]}
    tf32 = {"convolution": torch.backends.cudnn.allow_tf32, "product": torch.backends.cuda.matmul.allow_tf32}
    return {"machine": f"{torch.cuda.get_device_name()}, {cpu}", "torch": torch.__version__, "tf32": tf32}


def limit_cores() -> None:
    """Use two cores and two threads, also on a larger machine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", help="comma-separated letters; default: the rows with a target on the device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", default=",".join(TIMED), help="comma-separated engines to time besides auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    TIMED[:] = options.engines.split(",")
    device, path = options.device, options.out / f"engines-{options.device}.json"
    if device == "cpu":
        limit_cores()
    default_rows = [*(key for key, each in WORKLOADS.items() if device in each.targets), *"gh"]
    rows = options.rows.split(",") if options.rows else default_rows
    if unknown := set(rows) - {*WORKLOADS, "g", "h"}:
        parser.error(f"unknown row {', '.join(sorted(unknown))}; the rows are {', '.join(WORKLOADS)}, g, h")
    machine = describe_machine(device)  # earlier rows are kept if machine and torch are the same
    before = json.loads(path.read_text()) if path.exists() else {}
    results = before.pop("rows", {}) if all(before.get(name) == value for name, value in machine.items()) else {}
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    print("loop: µs per client step; engines: speedup over the loop, and µs per client step")
    print(f"{'loop (threads)':>14}" + "".join(f"{name:>18}" for name in ENGINE_COLUMNS), flush=True)
    load, failed = os.getloadavg()[0], []
    if load > 0.5:
        print(f"The machine is busy (load {load:.1f}): these measurements are not reliable.")
    for key in rows:
        started = time.perf_counter()
        try:
            row = measure(key, device, options.repeats)
        except (ft.FedTailorError, RuntimeError) as error:  # such as out of memory: continue with the other rows
            print(f"{key}  failed: {error}", flush=True)
            failed.append(key)
            continue
        row |= {"date": datetime.now(UTC).date().isoformat(), "repeats": options.repeats, "load_at_start": load}
        results[key] = row | {"measured_in_seconds": time.perf_counter() - started}
        print("\n".join(format_row(key, row)), flush=True)
        path.write_text(
            json.dumps(machine | {"rows": dict(sorted(results.items()))}, indent=1, ensure_ascii=False) + "\n"
        )
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"These rows failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
