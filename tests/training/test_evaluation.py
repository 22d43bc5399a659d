"""Tests of a round's record after an evaluation."""

import pytest

from fedtailor.methods import FedAvg
from fedtailor.training.clients import Evaluation
from fedtailor.training.evaluation import TrainedValues, add_evaluation


def test_trained_values_cover_absent_clients_and_those_that_have_not_trained() -> None:
    held = TrainedValues()
    held.add_participants([0])
    first = held.complete(
        {
            "loss_trained": {0: 0.1},
            "auc_trained": {0: 0.9},
            "loss_received": {0: 2.0, 1: 3.0},
            "auc_received": {1: 0.5},
        },
        [0, 1],
    )
    assert first["loss_trained"] == {0: 0.1, 1: 3.0}  # client 1 has not trained: it holds what it would receive
    assert first["auc_trained"] == {0: 0.9, 1: 0.5}
    held.add_participants([1])
    second = held.complete({"loss_trained": {1: 0.4}, "loss_received": {0: 1.0, 1: 1.0}}, [0, 1])
    assert second["loss_trained"] == {0: 0.1, 1: 0.4}  # client 0 was absent and keeps its model
    assert second["auc_trained"] == {0: 0.9}  # client 1's is undefined now


def test_trained_values_of_client_that_trained_and_was_not_evaluated_are_absent() -> None:
    """A deployed client may be offline during an evaluation; its earlier value is not that of its current model."""
    held = TrainedValues()
    held.add_participants([0])
    held.complete({"loss_trained": {0: 0.1}}, [0])
    held.add_participants([0])
    assert held.complete({"loss_received": {}}, [0]).get("loss_trained", {}) == {}
    assert held.outdated == {0}


def test_trained_values_from_records_equal_those_of_uninterrupted_run() -> None:
    records = [
        {"clients": [0], "per_client": {"loss_trained": {0: 0.1, 1: 3.0}, "loss_received": {0: 2.0, 1: 3.0},
                                        "layers_trained": {0: 4.0}}},  # the last one is a metric of the method
        {"clients": [1], "per_client": {"bytes_up": {1: 8}}},  # not evaluated
    ]  # fmt: skip
    held = TrainedValues.from_records(records)
    assert held.outdated == {1}
    assert held.complete({"loss_trained": {1: 0.2}}, [0, 1]) == {"loss_trained": {0: 0.1, 1: 0.2}}


def test_add_evaluation_means_are_weighted_by_test_size_and_training_loss_covers_participants() -> None:
    record = {"round": 2, "clients": [1], "per_client": {}, "method_metrics": {}}
    values = {"accuracy_received": {0: 0.2, 1: 0.4}, "accuracy_trained": {0: 0.9, 1: 0.5}, "loss": {0: 9.0, 1: 1.0}}
    sizes = {"train": [1, 1], "validation": [0, 0], "test": [3, 1]}
    result = add_evaluation(record, Evaluation({}), values, sizes, FedAvg())
    assert result["accuracy_trained"] == pytest.approx((3 * 0.9 + 0.5) / 4)
    assert result["accuracy_received"] == pytest.approx((3 * 0.2 + 0.4) / 4)
    assert result["accuracy_received_mean"] == pytest.approx(0.3)
    values = {"held_out_accuracy_trained": {2: 0.9, 3: 0.1}, "common_accuracy_trained": {0: 0.2, 1: 0.4}}
    sizes |= {"test": [3, 1, 1, 4], "common": [7, 7]}  # held-out clients come last
    others = add_evaluation(record, Evaluation({}), values, sizes, FedAvg())
    assert others["held_out_accuracy_trained"] == pytest.approx((0.9 + 4 * 0.1) / 5)
    assert others["common_accuracy_trained"] == pytest.approx(0.3)
    assert result["loss"] == 1.0
