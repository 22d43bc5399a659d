"""Comparisons with a run whose process is killed in the middle, for runners in other processes."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import fedtailor as ft
from conftest import MEASURED, TinyNet, tiny_federation
from fedtailor.core.trees import Tree

SETTINGS: dict[str, Any] = {"rounds": 4, "batch_size": 4, "dtype": "float64", "engine": "sequential"}


@dataclass(frozen=True)
class Killed(ft.methods.FedAvg):
    """A method whose process is killed in round 3, unless it was killed in that round `times` times before."""

    log: Annotated[str, "file to which each round is appended when it starts on the server"] = ""
    times: Annotated[int, "how often the process is killed"] = 1

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        with Path(self.log).open("a") as file:
            print(exchange.round, file=file)
        if exchange.round == 3 and Path(self.log).read_text().split().count("3") <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive(server, exchange)


def compare(folder: Path, methods: Sequence[ft.Method], **runner: Any) -> ft.ComparisonResult:
    """Compare on two splits, with a checkpoint after every round."""
    return ft.compare(
        methods, TinyNet, lambda seed: tiny_federation(seed=seed), seeds=[0, 1], folder=folder, checkpoint_every=1,
        **SETTINGS, **runner,
    )  # fmt: skip


def numbers(result: ft.ComparisonResult) -> list[Any]:
    """Return all records without times, and the bits of all models."""
    found: list[Any] = []
    for run in result.runs:
        assert run.folder is not None
        models = [path.read_bytes() for path in sorted(run.folder.glob("personal/*/*.safetensors"))]
        records = [{k: v for k, v in r.items() if not k.startswith(MEASURED)} for r in run.records]
        found.append((run.folder.name, run.info["fingerprint"], records, models))
    return found


def killed(tmp_path: Path, times: int = 1) -> tuple[Killed, Path]:
    """Return a method and its log."""
    log = tmp_path / f"killed-{times}"
    return Killed(log=str(log), times=times), log
