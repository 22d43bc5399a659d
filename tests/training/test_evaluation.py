"""Tests of a round's record after an evaluation."""

import pytest

from fedtailor.methods import FedAvg
from fedtailor.training.clients import Evaluation
from fedtailor.training.evaluation import add_evaluation


def test_trained_values_in_record_cover_only_participants() -> None:
    """Absent clients kept an older model, so only `last_trained` contains their values."""
    record = {"round": 2, "clients": [1], "per_client": {}, "method_metrics": {}}
    found = Evaluation({"accuracy_trained": {1: 0.5, 0: 0.9}, "accuracy_received": {0: 0.2, 1: 0.4}})
    sizes = {"train": [1, 1], "validation": [0, 0], "test": [3, 1]}
    result = add_evaluation(record, found, sizes, FedAvg(), is_last=True)
    assert result["per_client"]["accuracy_trained"] == {1: 0.5} and result["accuracy_trained"] == 0.5
    assert result["last_trained"] == {"accuracy": {1: 0.5, 0: 0.9}}
    assert result["accuracy_received"] == pytest.approx((3 * 0.2 + 0.4) / 4)
    assert result["accuracy_received_mean"] == pytest.approx(0.3)
