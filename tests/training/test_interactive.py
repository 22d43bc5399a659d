"""Interrupted runs: what a script, a notebook, and a run without finished rounds get."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import MEASURED, TinyNet, all_same, models, same, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.runs.records import Record

pytestmark = pytest.mark.usefixtures("default_sigint")


def simulate(method: ft.Method | None = None, **settings: Any) -> ft.Run:
    """Run FedPer sequentially on the tiny federation."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"batch_size": 4, "dtype": torch.float64, "engine": "sequential"}
    return ft.simulate(method or ft.methods.FedPer(), TinyNet().double(), tiny_federation(), **(defaults | settings))


def press_ctrl_c(after: int, times: int = 1) -> Any:
    """Return a callback that interrupts the run in this round."""

    def interrupt(record: Record) -> None:
        for _ in range(times if record["round"] == after else 0):
            signal.raise_signal(signal.SIGINT)

    return interrupt


def comparable(run: ft.Run) -> list[Record]:
    return [{name: value for name, value in r.items() if not name.startswith(MEASURED)} for r in run.records]


@dataclass(frozen=True)
class Interrupting(ft.methods.FedAvg):
    """FedAvg that is stopped immediately at the start of a round, or when this round is evaluated."""

    training: int = 0
    evaluating: int = 0

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        if ctx.round == self.training:
            raise KeyboardInterrupt
        return super().train(ctx, state, message)

    def serve(self, server: Tree, clients: Any, round: int) -> Tree:
        if round == self.evaluating + 1:  # evaluation builds the models that start the next round
            raise KeyboardInterrupt
        return super().serve(server, clients, round)


@pytest.mark.parametrize("method", [ft.methods.FedPer(), ft.methods.FedAvgFT()])  # with client states; with fine-tuning
def test_interrupted_run_equals_a_run_of_the_finished_rounds(method: ft.Method) -> None:
    with pytest.raises(ft.Interrupted, match=r"Stopped after round 2 of 5\.") as stop:
        simulate(method, rounds=5, on_round_end=press_ctrl_c(after=2))
    partial, whole = stop.value.run, simulate(method, rounds=2)
    assert partial is not None and stop.value.code == 130
    assert comparable(partial) == comparable(whole) and partial.summary() == whole.summary()
    assert same(partial.server, whole.server) and same(partial.client(0), whole.client(0))
    for moment in ("trained", "received"):
        assert all_same(models(partial, moment), models(whole, moment))
    assert (partial.is_complete, whole.is_complete) == (False, True)
    assert "2 of 5 rounds" in repr(partial) and "2 rounds" in repr(whole)


def test_run_stopped_immediately_has_all_finished_rounds() -> None:
    """The round whose evaluation was interrupted is finished; its scores are unknown."""
    with pytest.raises(ft.Interrupted) as stop:
        simulate(Interrupting(evaluating=3), rounds=5)
    run = stop.value.run
    assert run is not None and stop.value.immediately
    assert [record["loss_trained"] is None for record in run.records] == [False, False, True]
    assert run.summary()["trained"]["last"]["round"] == 2
    assert all_same(models(run), models(simulate(Interrupting(), rounds=3)))
    with pytest.raises(ft.Interrupted) as stop:
        simulate(Interrupting(training=3), rounds=5)
    assert stop.value.run is not None and len(stop.value.run.records) == 2
    assert all_same(models(stop.value.run), models(simulate(Interrupting(), rounds=2)))


def test_interruption_before_first_round_is_finished_has_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(ft.Interrupted, match="before the end of round 1") as stop:
        simulate(Interrupting(training=1), rounds=2)
    assert stop.value.run is None


def test_interactive_session_gets_partial_run_after_one_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    folder = tmp_path / "run"
    run = simulate(rounds=4, folder=folder, on_round_end=press_ctrl_c(after=1))
    assert len(run.records) == 1
    assert f"returned with 1 of 4 rounds. Continue it with ft.resume({str(folder)!r})." in caplog.text
    settings: dict[str, Any] = {"method": ft.methods.FedPer(), "model": TinyNet().double(), "fed": tiny_federation()}
    run = ft.resume(folder, on_round_end=press_ctrl_c(after=3), **settings)
    assert [record["round"] for record in run.records] == [1, 2, 3] and not run.is_complete
    assert ft.resume(folder, **settings).is_complete
    with pytest.raises(ft.Interrupted):  # so that a second Ctrl-C ends a loop over runs
        simulate(rounds=3, on_round_end=press_ctrl_c(after=1, times=2))


def test_sigterm_of_run_in_memory_is_not_deferred() -> None:
    before, during = signal.getsignal(signal.SIGTERM), list[Any]()
    simulate(rounds=1, on_round_end=lambda record: during.append(signal.getsignal(signal.SIGTERM)))
    assert during == [before]
