"""Early stopping: when a run ends, and that everything that reads it accepts fewer rounds."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedtailor as ft
from conftest import MEASURED, TinyNet, error_message, same, tiny_federation
from fedtailor.experiments.deployment import make_deployment
from fedtailor.training.early_stopping import EarlyStopping
from support.simulation import simulate

SETTINGS: dict[str, Any] = {"rounds": 30, "validation": 0.3, "method": ft.methods.FedPer(lr=1.0)}


@pytest.mark.parametrize(
    ("scores", "higher", "patience", "stop"),
    [
        ([0.1, 0.2, 0.2, 0.3, 0.2, 0.3], True, 2, 6),  # an equal score is no improvement
        ([0.3, 0.2, 0.1, 0.2], False, 1, 4),
        ([0.5, None, 0.4, None, 0.4], True, 2, 5),  # rounds that are not evaluated do not count
        ([float("nan"), float("nan")], True, 2, 2),  # a diverged model does not improve
        ([0.1, 0.2, 0.3], True, 1, None),
    ],
)
def test_run_stops_after_evaluations_without_improvement(
    scores: list[float | None], higher: bool, patience: int, stop: int | None
) -> None:
    records = [{"validation_trained": score} for score in scores]
    stopping = EarlyStopping("validation_trained", higher, patience)
    assert next((i for i, record in enumerate(records, start=1) if stopping.add(record)), None) == stop
    half = len(records) // 2  # a resumed run has the records of earlier rounds
    resumed = EarlyStopping("validation_trained", higher, patience).restore(records[:half])
    assert next((i for i, record in enumerate(records[half:], half + 1) if resumed.add(record)), None) == stop


def test_stopped_run_has_the_first_rounds_of_the_whole_run(net: nn.Module, tmp_path: Path) -> None:
    """The run ends in the first round whose two predecessors are at least as good; its rounds do not change."""
    whole = simulate(net, **SETTINGS)
    run = simulate(net, patience=2, folder=tmp_path, **SETTINGS)
    rounds, scores = len(run.records), [record["validation_trained"] for record in whole.records]
    assert rounds < 30 and max(scores[: rounds - 2]) >= max(scores[rounds - 2 : rounds])
    assert run.stopped_early and not whole.stopped_early
    for record, expected in zip(run.records, whole.records, strict=False):
        same_keys = [name for name in expected if not name.startswith(MEASURED)]
        assert {name: record[name] for name in same_keys} == {name: expected[name] for name in same_keys}
    assert [bool(record.get("stopped_early")) for record in run.records] == [False] * (rounds - 1) + [True]
    loaded = ft.load_run(tmp_path)
    assert loaded.stopped_early and loaded.records == run.records
    assert all(same(loaded.personal(c, m), run.personal(c, m)) for c in range(4) for m in ("received", "trained"))
    shorter = simulate(net, patience=2, **SETTINGS | {"rounds": rounds})
    assert not shorter.stopped_early  # it has all of its rounds
    assert all(same(run.personal(c, "received"), shorter.personal(c, "received")) for c in range(4))


@pytest.mark.parametrize("kill_at_the_end", [False, True])
def test_resumed_run_stops_in_the_same_round(kill_at_the_end: bool, net: nn.Module, tmp_path: Path) -> None:
    expected = simulate(net, patience=2, **SETTINGS)
    last = len(expected.records)

    def stop(record: Any) -> None:
        if record["round"] == (last if kill_at_the_end else last - 1):
            raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        simulate(net, patience=2, folder=tmp_path, checkpoint_every=1, on_round_end=stop, **SETTINGS)
    assert "not finished" in error_message(lambda: ft.load_run(tmp_path))
    run = ft.resume(tmp_path, model=TinyNet().double(), fed=tiny_federation())
    assert len(run.records) == last and run.stopped_early and same(run.server, expected.server)
    assert ft.resume(tmp_path).stopped_early  # finished: loaded, not continued


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "patience needs validation data"),
        ({"validation": 0.2, "evaluate": "participants"}, "scores of the same clients"),
        ({"validation": 0.2, "patience": 0}, "patience must be"),
    ],
)
def test_invalid_patience_raises(settings: dict[str, Any], words: str, net: nn.Module) -> None:
    assert words in error_message(lambda: simulate(net, **{"patience": 2} | settings))


@pytest.mark.parametrize("settings", [{"patience": 2, "validation": 0.2}, {"held_out_clients": 2}])
def test_deployment_rejects_settings_of_simulations(settings: dict[str, Any]) -> None:
    assert "applies only to simulations" in error_message(lambda: make_deployment(settings))
