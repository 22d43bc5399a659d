"""Rounds, bytes, and seconds to reach a target score."""

from typing import Any

import pytest

import fedtailor as ft
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.analysis.target_costs import TargetCost, target_cost


def make_run(
    seed: int, received: list[float | None], higher_is_better: bool = True, ranked_by: str = "received"
) -> ft.Run:
    """Return a run in which a round sends 3 bytes up and 4 down in 2 seconds; None: the round was not evaluated."""
    records: list[dict[str, Any]] = []
    for number, score in enumerate(received, start=1):
        known = {"accuracy_received": {0: score}, "accuracy_trained": {0: 0.5}} if score is not None else {}
        losses = {"loss_received": {0: 1.0}, "loss_trained": {0: 1.0}} if known else {}
        records.append({"round": number, "clients": [0], "per_client": known | losses})
        records[-1] |= {"bytes_up": 3, "bytes_down": 4, "seconds": 2.0}
    info = {"score": "accuracy", "higher_is_better": higher_is_better, "ranked_by": ranked_by, "method_title": "FedAvg"}
    info |= {"clients": [{"name": "a", "train": 1, "test": 1, "validation": 0}], "initial_weights": "seed"}
    experiment = {"seed": seed, "method": {"name": "fedavg"}, "data": {"name": "example data"}}
    return ft.Run(experiment, info, records, {}, lambda client: {}, lambda client, moment: {})


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([make_run(0, [0.2, 0.7, 0.6, 0.9])], TargetCost(1, 1, 2, 14, 4.0)),  # the first time counts
        ([make_run(0, [0.2, None, None, 0.7])], TargetCost(1, 1, 4, 28, 8.0)),  # only evaluated rounds are known
        ([make_run(0, [0.7]), make_run(1, [0.2, 0.1, 0.9]), make_run(2, [0.1])], TargetCost(3, 2, 2, 14, 4.0)),
        ([make_run(0, [0.2, 0.69])], TargetCost(1, 0, None, None, None)),
        ([make_run(0, [0.9, 0.7, 0.1], higher_is_better=False)], TargetCost(1, 1, 2, 14, 4.0)),
        ([make_run(0, [0.9, 0.9], ranked_by="trained")], TargetCost(1, 0, None, None, None)),
    ],
)
def test_target_cost_is_that_of_the_first_evaluated_round_at_the_ranking_moment(
    runs: list[ft.Run], expected: TargetCost
) -> None:
    assert target_cost(compare_runs(runs), "FedAvg", 0.7) == expected
