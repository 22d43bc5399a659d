"""The sequential engine against a hand-written PyTorch loop that takes the same steps, side by side in one run.

FedAvg, LeNet-5, Fashion-MNIST, 20 clients, Dir(0.1), batches of 64, 2 epochs; training only. Both take turns, round by
round, with torch pinned to one thread and to two, and the ratio is the median over pairs of rounds: timings on a
shared machine drift, a ratio taken side by side drifts less.

    python benchmarks/sequential.py [--rounds 7] [--data fashion-mnist]
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

import fedtailor as ft
from fedtailor.rounds import Rounds
from fedtailor.settings import Settings


def hand_written_round(net: nn.Module, start: dict[str, torch.Tensor], x: torch.Tensor, fed: ft.Federation) -> None:
    """What a researcher would write: one resident network, torch.optim, index batches, a running weighted sum."""
    total = sum(len(own) for own in fed.train)
    average = {name: torch.zeros_like(p) for name, p in start.items()}
    for own in fed.train:
        net.load_state_dict(start)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(2):
            order = own[torch.randperm(len(own))]
            for batch in torch.split(order, 64):
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(net(x[batch]), fed.y[batch])
                torch.autograd.backward(loss)
                optimiser.step()
        for name, p in net.state_dict().items():
            average[name] += p * (len(own) / total)
    start.update(average)


def measure(data: str, rounds: int) -> dict[str, float]:
    """Median seconds of a round, ours and the hand-written one."""
    fed = ft.load(data, clients=20, alpha=0.1, seed=0)
    method, model = ft.methods.FedAvg(lr=0.05, epochs=2), ft.network("lenet5", fed)
    plan = [list(range(20))] * (rounds + 1)
    cpu, kind = torch.device("cpu"), torch.float32
    loop = Rounds.build(Settings(batch_size=64, engine="sequential", device="cpu"), method, model, fed, plan)
    assert model.build is not None
    net = model.build()
    start = {name: p.clone() for name, p in net.state_dict().items()}
    x = fed.preparation(kind, cpu)(fed.x)  # the loop gets its pictures as floats, prepared once
    ours, hand = [], []
    for number, clients in enumerate(plan, start=1):
        ours.append(loop.round(number, clients)["seconds"])
        began = time.perf_counter()
        hand_written_round(net, start, x, fed)
        hand.append(time.perf_counter() - began)
    steps = int(sum(2 * -(-len(own) // 64) for own in fed.train))
    pairs = list(zip(ours, hand, strict=True))[1:]  # the first round warms up
    return {
        "ours": statistics.median(ours for ours, _ in pairs),
        "hand_written": statistics.median(hand for _, hand in pairs),
        "ratio": statistics.median(ours / hand for ours, hand in pairs),
        "steps_a_round": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", default="fashion-mnist")
    settings = parser.parse_args()
    print(f"{settings.data}, LeNet-5, 20 clients, Dir(0.1), batch 64, 2 epochs; median seconds a round")
    print("threads  sequential  hand-written  ratio (at most 1.15 is the aim)")
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = measure(settings.data, settings.rounds)
        print(f"{threads:7}  {times['ours']:10.2f}  {times['hand_written']:12.2f}  {times['ratio']:5.2f}", flush=True)
        found.append({"threads": threads} | times)
    machine = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "torch": torch.__version__}
    result = {"date": datetime.now(UTC).date().isoformat(), **machine, "data": settings.data, "results": found}
    path = Path(__file__).parent / "results" / "sequential.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
