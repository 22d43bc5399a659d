"""Memory does not grow with rounds: resident memory after 50 and after 500 rounds of a run.

python benchmarks/memory.py
"""

import resource

import torch

import fedtailor as ft


def main() -> None:
    torch.set_num_threads(1)
    fed = ft.load("digits", clients=20, alpha=0.1, seed=0)
    seen: dict[int, float] = {}

    def record(line: dict[str, object]) -> None:
        if line["round"] in (50, 500):
            seen[int(str(line["round"]))] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    ft.simulate(ft.methods.Ditto(), ft.network("mlp", fed), fed, rounds=500, evaluate_every=10, record=record)
    print(f"peak memory: {seen[50]:.0f} MiB after 50 rounds, {seen[500]:.0f} MiB after 500")


if __name__ == "__main__":
    main()
