"""The sequential engine against a hand-written PyTorch loop that takes the same steps, side by side in one run.

FedAvg, LeNet-5, Fashion-MNIST, 20 clients, Dir(0.1), batches of 64, 2 epochs; training only. Both take turns, round by
round, and the medians are compared: timings on a shared machine drift, a ratio taken side by side does not.

    python benchmarks/sequential.py [--threads 2] [--rounds 7] [--data fashion-mnist]
"""

import argparse
import json
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
    print([round(t, 2) for t in ours], [round(t, 2) for t in hand])
    steps = int(sum(2 * -(-len(own) // 64) for own in fed.train))
    times = {"ours": statistics.median(ours[1:]), "hand_written": statistics.median(hand[1:])}  # the first warms up
    return times | {"ratio": times["ours"] / times["hand_written"], "steps_a_round": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", default="fashion-mnist")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    result = measure(settings.data, settings.rounds)
    print(f"{settings.data}, LeNet-5, 20 clients, Dir(0.1), batch 64, 2 epochs, {settings.threads} threads, a round:")
    print(f"  sequential engine {result['ours']:6.2f} s")
    print(f"  hand-written loop {result['hand_written']:6.2f} s")
    print(f"  ratio             {result['ratio']:6.3f}  (at most 1.15 is the aim)")
    machine = {"machine": platform.machine(), "threads": settings.threads, "torch": torch.__version__}
    line = {"date": datetime.now(UTC).date().isoformat(), **machine, "data": settings.data, **result}
    path = Path(__file__).parent / "results" / "sequential.json"
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*known, line], indent=1) + "\n")


if __name__ == "__main__":
    main()
