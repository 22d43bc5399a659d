"""Convolutional networks on many clients: where the time goes, and how much of it clients wait for each other.

python benchmarks/wide_convolutions.py                          # all rows: loops, engine alone, and ft.simulate
python benchmarks/wide_convolutions.py --rows resnet20-wide-20 --profile        # print the kernels of one round
python benchmarks/wide_convolutions.py --rows idle              # steps computed and needed by grouping, Dir(0.1)
python benchmarks/wide_convolutions.py --tiny --out /tmp        # try it, on any machine

Loops are hand-written: plain float32, and bfloat16 with channels last, each in its own process, also compiled with
`--compile`. "engine" is the training of all clients alone; "round" adds the server and the checks; "simulate" is what a
user sees: the median of the seconds in the records of `ft.simulate`, without the first rounds. All but the last
alternate, one round each. results/wide_convolutions-DEVICE.json is written after every row; earlier rows of the same
machine and torch are kept.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fedtailor as ft
from engines import LR, Contender, Row, alternate, describe_machine, engine_round, ratio
from fedtailor.core.precision import Precision
from fedtailor.core.system import deterministic, synchronize
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines.vectorized import make_chunks
from fedtailor.training.simulate import make_trainer
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from loops import PLAIN, LoopProcess, LoopStyle
from works import LENET, WORKLOADS, Workload

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
RESNET9 = Workload("ResNet-9 (32, 64, 128, 256 channels), 28×28, batch 16", "resnet9", 20, 320, 16)
NETWORKS: dict[str, Workload] = {
    "resnet20-wide": replace(WORKLOADS["w"], name="ResNet-20 (64, 128, 256 channels), 32×32, batch 64"),
    "resnet20": replace(WORKLOADS["c"], name="ResNet-20 (16, 32, 64 channels), 32×32, batch 64", samples=640),
    "resnet9": RESNET9,
    "lenet5": replace(LENET, name="LeNet-5, 28×28, batch 64"),
}
ROWS: dict[str, Workload] = {
    f"{key}-{clients}": replace(workload, name=f"{workload.name}, {clients} clients", clients=clients, targets={})
    for key, workload in NETWORKS.items()
    for clients in (20, 100)
}
BF16_LOOP = LoopStyle(bf16=True, channels_last=True)
SIMULATED_ROUNDS = 8
SKIPPED_ROUNDS = 3  # of a simulation, until memory and kernels have settled
GROUPINGS: dict[str, tuple[int | None, int]] = {  # name -> (chunk size, cost of a chunk in steps of one client)
    "as on a GPU": (None, 400),
    "as on a CPU": (None, 0),
    "at most 10": (10, 0),
    "at most 5": (5, 0),
    "at most 2": (2, 0),
}


def make_tiny(workload: Workload) -> Workload:
    groups = {"resnet20": 3, "resnet9": 4}.get(workload.network)
    settings = {"channels": (4,) * groups} if groups else {}
    return replace(workload, clients=2, samples=8, batch_size=4, epochs=1, settings=settings)


def build(workload: Workload, fed: ft.Federation, device: str, precision: Precision) -> Trainer[SimulatedClients]:
    """Build a run of FedAvg on the vectorized engine that has not started yet."""
    settings = TrainingConfig(
        rounds=1000, batch_size=workload.batch_size, engine="vectorized", device=device, precision=precision
    )
    return make_trainer(settings, ft.methods.FedAvg(lr=LR, epochs=workload.epochs), workload.model(fed), fed)[0]


def engine_only(trainer: Trainer[SimulatedClients], numbers: "count[int]") -> float:
    """Train all clients without the server and the checks of a round, and return the seconds."""
    clients, number = trainer.clients, next(numbers)
    everyone = range(clients.shared.num_clients)
    sent = trainer.server.send(trainer.server.state, list(everyone), number)
    with deterministic(clients.threads), torch.no_grad():
        return timed(lambda: clients.apply_train(clients.engine, number, everyone, sent), clients.device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def simulate_seconds(workload: Workload, fed: ft.Federation, device: str, precision: Precision) -> dict[str, float]:
    """Return the medians of what the records of a user's run say, and the peak memory of a GPU."""
    run = ft.simulate(
        ft.methods.FedAvg(lr=LR, epochs=workload.epochs), workload.model(fed), fed, rounds=SIMULATED_ROUNDS,
        batch_size=workload.batch_size, engine="vectorized", device=device, precision=precision, metrics=["accuracy"],
    )  # fmt: skip
    records = run.records[SKIPPED_ROUNDS:]
    names = ("seconds", "seconds_evaluating", "peak_memory", "peak_memory_reserved")
    return {name: statistics.median(r[name] for r in records) for name in names if name in records[0]}


def compare(workload: Workload, device: str, repeats: int, styles: Sequence[LoopStyle]) -> Row:
    """Compare loops, the engine alone, and whole rounds; then measure `ft.simulate`."""
    fed = workload.federation()
    contenders: dict[str, Contender] = {}
    with ExitStack() as stack:
        for style in styles:
            loop = stack.enter_context(LoopProcess(workload, LR, device, style))
            contenders[f"loop, {style}"] = Contender(partial(loop.seconds, 1, fed.num_clients))
        trainers = {precision: build(workload, fed, device, precision) for precision in PRECISIONS}
        for precision, trainer in trainers.items():
            everyone = range(fed.num_clients)
            contenders[f"engine, {precision}"] = Contender(partial(engine_only, trainer, count(1)), warm_up=2)
            contenders[f"round, {precision}"] = Contender(partial(engine_round, trainer, everyone, count(1)), warm_up=2)
        seconds = alternate(contenders, repeats)
    micro, baselines = 1e6 / workload.steps(fed), [f"loop, {style}" for style in styles]
    measured = {
        name: {
            "seconds": statistics.median(taken),
            "microseconds": micro * statistics.median(taken),
            "ratios": {base: ratio(seconds[base], taken) for base in baselines if base != name},
        }
        for name, taken in seconds.items()
    }
    simulated = {precision: simulate_seconds(workload, fed, device, precision) for precision in PRECISIONS}
    chunks = {precision: trainer.clients.engine_choice.chunk_size for precision, trainer in trainers.items()}
    return {
        "name": workload.name, "client_steps": workload.steps(fed), "measured": measured, "simulate": simulated,
        "chunk_size": chunks,
    }  # fmt: skip


def idle_share(batches: Sequence[int], chunks: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the client steps that a grouping computes per step that is needed, and the length of its longest path.

    >>> idle_share([4, 2], [[0, 1]])
    {'chunks': 1, 'computed': 8, 'needed': 6, 'idle': 0.25, 'sequential_steps': 4}
    """
    longest = [max(batches[position] for position in chunk) for chunk in chunks]
    computed = sum(steps * len(chunk) for steps, chunk in zip(longest, chunks, strict=True))
    needed = sum(batches)
    idle = round(1 - needed / computed, 4)
    return {
        "chunks": len(chunks),
        "computed": computed,
        "needed": needed,
        "idle": idle,
        "sequential_steps": sum(longest),
    }


def measure_idle(device: str, is_tiny: bool, repeats: int) -> Row:
    """Return the idle share of each grouping of the clients of Dir(0.1), and the seconds of a round by chunk size."""
    found: Row = {"name": "idle share of unequal clients, Dir(0.1), batch 64", "data": {}}
    cases = [("digits", 20)] if is_tiny else [("cifar10", 20), ("cifar10", 100), ("fashion-mnist", 20)]
    for data, clients in cases:
        fed = ft.load(data, clients=clients, alpha=0.1, seed=0)
        batches = tuple(-(-len(own) // 64) for own in fed.train)
        groups = {
            name: idle_share(batches, make_chunks(batches, size or clients, cost))
            for name, (size, cost) in GROUPINGS.items()
        }
        groups = {"all at once": idle_share(batches, [list(range(clients))])} | groups
        own: Row = {"batches": sorted(batches), "groupings": groups}
        if device == "cuda" or is_tiny:
            network = "lenet5" if data != "digits" else "mlp"
            own["seconds_by_chunk_size"] = {
                str(size): chunk_seconds(ft.network(network, fed), fed, size, device, repeats)
                for size in (clients, 10, 5)
            }
        found["data"][f"{data}, {clients} clients"] = own
    return found


def chunk_seconds(model: ft.Model, fed: ft.Federation, size: int, device: str, repeats: int) -> float:
    """Return the median seconds of training all clients in chunks of at most this size."""
    config = TrainingConfig(rounds=1000, engine="vectorized", chunk_size=size, device=device)
    trainer, numbers = make_trainer(config, ft.methods.FedAvg(lr=LR, epochs=2), model, fed)[0], count(1)
    return statistics.median([engine_only(trainer, numbers) for _ in range(repeats + 2)][2:])


def print_profile(workload: Workload, device: str, precision: Precision, rows: int) -> None:
    """Print the kernels that take most of the time of the engine in one round."""
    trainer, numbers = build(workload, workload.federation(), device, precision), count(1)
    for _ in range(3):
        engine_only(trainer, numbers)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        engine_only(trainer, numbers)
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(f"\n{workload.name}, {precision}")
    print(found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=70))


def format_row(key: str, row: Row) -> list[str]:
    """Return the printed lines of a row."""
    lines = [f"{key}  {row['name']}"]
    for data, own in row.get("data", {}).items():
        lines += [f"   {data}: {own['batches'][0]} to {own['batches'][-1]} batches per client"]
        for name, found in own["groupings"].items():
            path = (
                f"{found['chunks']} chunk{'s' * (found['chunks'] > 1)}, {found['sequential_steps']} steps in sequence"
            )
            lines.append(f"   {name:>14}: {100 * found['idle']:5.1f} % idle, {path}")
        taken = own.get("seconds_by_chunk_size", {})
        lines += [f"   seconds by chunk size: {', '.join(f'{n}: {s:.4f}' for n, s in taken.items())}"] if taken else []
    for name, found in row.get("measured", {}).items():
        ratios = ", ".join(f"{value:.2f} × {base}" for base, value in found["ratios"].items())
        lines.append(f"   {name:>24}: {found['microseconds']:9,.1f} µs per client step; {ratios}")
    for precision, found in row.get("simulate", {}).items():
        values = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
        lines.append(f"   {f'simulate, {precision}':>24}: {values}")
    return lines


def write_row(path: Path, machine: Mapping[str, Any], key: str, row: Row) -> None:
    """Add a row to the file, which keeps earlier rows of the same machine and torch."""
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before.pop("rows", {}) if all(before.get(name) == value for name, value in machine.items()) else {}
    rows[key] = row | {"date": datetime.now(UTC).date().isoformat()}
    text = json.dumps({**machine, "rows": dict(sorted(rows.items()))}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default=",".join([*ROWS, "idle"]), help="comma-separated rows; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also time compiled loops, which takes minutes")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one round instead of timing rows")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of the profile")
    parser.add_argument("--kernels", type=int, default=25, help="rows of the profile")
    parser.add_argument("--tiny", action="store_true", help="two clients with narrow networks, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := set(chosen) - {*ROWS, "idle"}:
        parser.error(f"unknown row {', '.join(sorted(unknown))}; the rows are {', '.join(ROWS)}, idle")
    styles = [PLAIN, BF16_LOOP, *([replace(BF16_LOOP, compiled=True)] if options.compile else [])]
    machine, repeats = describe_machine(options.device), 1 if options.tiny else options.repeats
    for key in chosen:
        workload = None if key == "idle" else make_tiny(ROWS[key]) if options.tiny else ROWS[key]
        if options.profile:
            for precision in options.precisions.split(","):
                if workload is not None:
                    print_profile(workload, options.device, precision, options.kernels)
            continue
        if workload is None:
            row = measure_idle(options.device, options.tiny, repeats)
        else:
            row = compare(workload, options.device, repeats, styles)
        print("\n".join(format_row(key, row)), flush=True)
        write_row(options.out / f"wide_convolutions-{options.device}.json", machine, key, row)
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
