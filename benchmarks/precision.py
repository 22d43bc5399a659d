"""Accuracy and time of the papers' methods in float32, TF32, and bfloat16; the results are in docs/engines.md.

python benchmarks/precision.py accuracy --parallel 4  # 50 rounds on Fashion-MNIST, three seeds
python benchmarks/precision.py time                   # seconds per round; run it alone on the machine
python benchmarks/precision.py gradient               # error of the gradient of one batch, a few seconds
python benchmarks/precision.py show                   # print the tables
python benchmarks/precision.py accuracy time show --data digits --tiny --results tiny.jsonl   # try it

All precisions of a seed have the same split, initial weights, and order of batches. A row of its own, "noise", is
float32 with the same split and other initial weights and batches: what a precision changes is compared with what these
change. "float32" is without TF32 here, which PyTorch otherwise uses for convolutions on recent GPUs.

Every result is one line of benchmarks/results/precision.jsonl. Results that are there are not computed again, so the
script can be stopped at any time and started again.
"""

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.core.precision import Precision
from fedtailor.core.system import deterministic
from fedtailor.methods import METHODS
from fedtailor.papers import jobs
from fedtailor.progress import OnRoundEnd
from fedtailor.tasks.choice import choose_runner
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer

RESULTS = Path(__file__).parent / "results" / "precision.jsonl"
METHOD_NAMES = ("fedapa", "fedapm", "fedlag", "selffl")
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
SEEDS = (0, 1, 2)
NOISE = "noise"  # float32 with another seed for initial weights and batches
GRADIENTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # name -> network, its settings, input shape
    "LeNet-5": ("lenet5", {}, (1, 28, 28)),
    "ResNet-9, GroupNorm": ("resnet9", {}, (1, 28, 28)),
    "ResNet-20 (16, 32, 64), GroupNorm": ("resnet20", {"channels": (16, 32, 64)}, (3, 32, 32)),
    "ResNet-20 (16, 32, 64), BatchNorm": ("resnet20", {"channels": (16, 32, 64), "norm": "batch"}, (3, 32, 32)),
}
TIMED_ROUNDS = 9  # per precision, after warm-up rounds


@dataclass(frozen=True)
class Job:
    """One run, the time per round of one method in all precisions (precision "all"), or the gradient of a network."""

    stage: str  # accuracy, time, or gradient
    data: str
    method: str  # or a network of GRADIENTS
    precision: str
    seed: int
    rounds: int
    clients: int
    device: str

    @property
    def network(self) -> str:
        return "lenet5" if self.data == "fashion-mnist" else "mlp"

    def load(self) -> tuple[ft.Model, ft.Federation]:
        fed = ft.load(self.data, clients=self.clients, partition="dirichlet", alpha=0.1, seed=self.seed)
        return ft.network(self.network, fed), fed


def planned_jobs(stage: str, data: str, device: str, is_tiny: bool) -> Iterator[Job]:
    rounds, clients, seeds = (2, 4, SEEDS[:1]) if is_tiny else (50, 20, SEEDS)
    if stage == "gradient":
        for network in GRADIENTS:
            yield Job(stage, "random", network, "bf16", SEEDS[0], 0, 1, device)
        return
    for method in METHOD_NAMES:
        if stage == "time":
            yield Job(stage, data, method, "all", SEEDS[0], rounds, clients, device)
            continue
        for seed in seeds:
            for precision in (*PRECISIONS, NOISE):
                yield Job(stage, data, method, precision, seed, rounds, clients, device)


def run(job: Job, _: OnRoundEnd) -> dict[str, Any]:
    torch.set_num_threads(1)
    disable_tf32()
    try:
        found = {"accuracy": accuracy, "time": seconds_per_round, "gradient": gradient_errors}[job.stage](job)
    except ft.FedTailorError as error:
        found = {"error": str(error)}
    return asdict(job) | found | describe_machine(job.device)


def accuracy(job: Job) -> dict[str, Any]:
    """Return the accuracies of a run at every evaluation, at both moments, and the peak memory of a GPU."""
    model, fed = job.load()
    precision = cast(Precision, "float32" if job.precision == NOISE else job.precision)
    started = time.perf_counter()
    found = ft.simulate(
        METHODS[job.method](), model, fed, rounds=job.rounds, precision=precision, device=job.device,
        seed=job.seed + (1000 if job.precision == NOISE else 0), evaluate_every=10, metrics=["accuracy"],
        engine=engine_on(job.device),
    )  # fmt: skip
    moments = ("received", "trained")
    scores = {
        moment: [round(r[name], 5) for r in found.records if r.get(name := f"accuracy_{moment}") is not None]
        for moment in moments
    }
    memory = {"peak_memory": max(record.get("peak_memory", 0) for record in found.records)}
    seconds = {"seconds": round(time.perf_counter() - started, 1), "ranked_by": found.info["ranked_by"]}
    return scores | seconds | {name: value for name, value in memory.items() if value}


def seconds_per_round(job: Job) -> dict[str, Any]:
    """Return the seconds of training rounds of all precisions; the precisions alternate, in changing order."""
    model, fed = job.load()
    trainers = {}
    for precision in PRECISIONS:
        config = TrainingConfig(
            rounds=100, precision=precision, device=job.device, engine=engine_on(job.device), seed=job.seed
        )
        trainers[precision] = make_trainer(config, METHODS[job.method](), model, fed)[0]
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    warm_up, timed = (2, TIMED_ROUNDS) if job.rounds > 2 else (1, 1)
    for number in range(1, warm_up + timed + 1):
        for precision in PRECISIONS[:: -1 if number % 2 else 1]:
            trainer = trainers[precision]
            with deterministic(trainer.clients.threads):
                taken = trainer.train_round(number, range(fed.num_clients))["seconds"]
            seconds[precision] += [round(taken, 5)] if number > warm_up else []
    return {"seconds_per_round": seconds}


def gradient_errors(job: Job) -> dict[str, Any]:
    """Return the errors of the gradient in bfloat16 relative to its norm: of a run, and of a loop with autocast."""
    name, settings, shape = GRADIENTS[job.method]
    generator, device = torch.Generator().manual_seed(job.seed), torch.device(job.device)
    x, y = torch.randn(16, *shape, generator=generator), torch.randint(10, (16,), generator=generator)
    model = ft.network(name, ft.Federation.from_arrays([(x, y, x, y)], classes=10), **settings)
    model, x, y = model.to(device, torch.float32), x.to(device), y.to(device)
    params = {name: p.to(device) for name, p in model.init(job.seed).items()}

    def gradient(precision: Precision) -> Tensor:
        own = model.with_precision(precision)
        found = torch.func.grad(lambda p: own.losses(own.logits(p, x), y).mean())(params)
        return torch.cat([found[name].flatten() for name in model.trainable(params)])

    def autocast_gradient() -> Tensor:
        live = {name: p.clone().requires_grad_() for name, p in params.items()}
        with torch.autocast(device.type, torch.bfloat16):
            outputs = torch.func.functional_call(model.module, live, (x,))
        trained = [live[name] for name in model.trainable(params)]
        found = torch.autograd.grad(model.losses(outputs.float(), y).mean(), trained)
        return torch.cat([part.flatten() for part in found])

    exact = gradient("float32")
    found = {"bf16": gradient("bf16"), "autocast": autocast_gradient()}
    return {"errors": {name: round(float((one - exact).norm() / exact.norm()), 4) for name, one in found.items()}}


def engine_on(device: str) -> str:
    """Return the engine: `auto` would choose anew in every run, and may choose differently in each precision."""
    return "vectorized" if device == "cuda" else "sequential"


def disable_tf32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def describe_machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    return {"date": str(date.today()), "machine": name, "torch": torch.__version__}


def read_results(path: Path) -> dict[Job, Any]:
    return {Job(**{f.name: one[f.name] for f in fields(Job)}): one for one in jobs.read_results(path)}


def show(done: dict[Job, Any]) -> None:
    """Print the accuracy in the last round, its change from float32 for each seed, and the time per round."""
    scores: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for job, result in done.items():
        if job.stage == "accuracy" and "error" not in result:
            last = 100 * result[result["ranked_by"]][-1]
            scores[job.data, job.method][job.precision][job.seed] = last
    columns = ("float32", "tf32 − float32", "bf16 − float32", "noise: other initial weights and batches")
    print(f"| | {' | '.join(columns)} |\n|---|---|---|---|---|")
    for (data, method), found in scores.items():
        exact = found["float32"]
        cells = [spread(list(exact.values()))]
        for precision in (*PRECISIONS[1:], NOISE):
            changes = [score - exact[seed] for seed, score in sorted(found[precision].items()) if seed in exact]
            cells.append(signed(changes))
        print(f"| {METHODS[method].class_title()}, {data} | {' | '.join(cells)} |")
    print("\n| error of the gradient | bf16 | a loop with torch.autocast |\n|---|---|---|")
    for job, result in done.items():
        if job.stage == "gradient" and "error" not in result:
            cells = [f"{100 * result['errors'][name]:.1f} %" for name in ("bf16", "autocast")]
            print(f"| {job.method}, {result['machine']} | {' | '.join(cells)} |")
    print("\n| seconds per round | float32 | tf32 | bf16 | float32 : bf16 |\n|---|---|---|---|---|")
    for job, result in done.items():
        if job.stage == "time" and "error" not in result:
            print(f"| {METHODS[job.method].class_title()}, {job.data}, {result['machine']} | {time_cells(result)} |")
    for job, result in done.items():
        if "error" in result:
            print(f"{job} failed: {result['error']}")


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation over seeds in %."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else "–"


def signed(changes: list[float]) -> str:
    """Return the mean change in percentage points, and the changes of all seeds."""
    if not changes:
        return "–"
    return f"{statistics.mean(changes):+.2f} ({', '.join(f'{change:+.2f}' for change in changes)})"


def time_cells(result: dict[str, Any]) -> str:
    seconds = result["seconds_per_round"]
    medians = [f"{statistics.median(seconds[precision]):.4f}" for precision in PRECISIONS]
    ratios = sorted(a / b for a, b in zip(seconds["float32"], seconds["bf16"], strict=True))
    return " | ".join([*medians, f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["accuracy", "time", "gradient", "show"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time, for the stage accuracy")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--tiny", action="store_true", help="two rounds with four clients, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for stage in options.stages:
        done = read_results(options.results)
        if stage == "show":
            show(done)
            continue
        planned = list(planned_jobs(stage, options.data, options.device, options.tiny))
        missing = [job for job in planned if job not in done]
        print(f"{stage}: {len(planned) - len(missing)} of {len(planned)} results are there")
        runner = choose_runner(options.parallel if stage == "accuracy" else 1, cpus_per_run=1)
        print(f"{jobs.run_jobs(run, missing, options.results, runner, options.seconds)} results were added")


if __name__ == "__main__":
    main()
