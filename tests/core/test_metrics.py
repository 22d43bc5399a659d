"""Metrics equal those of scikit-learn; summaries handle undefined metrics and diverged models."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import Tensor, nn

import fedtailor as ft
from conftest import DivergingNet, TinyNet, tiny_federation
from fedtailor.core.metrics import (
    accuracy,
    auc,
    auc_absent_zero,
    average_precision,
    balanced_accuracy,
    brier,
    ece,
    macro_f1,
    weighted_f1,
)
from fedtailor.core.regression_metrics import mae, r2, rmse
from fedtailor.runs.summaries import largest_tenth, plain_mean, weighted_mean, worst_tenth


@st.composite
def outputs_and_targets(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Generate outputs with many ties, and targets that may lack some classes."""
    count, classes = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    cell = st.integers(-2, 2)
    rows = draw(st.lists(st.lists(cell, min_size=classes, max_size=classes), min_size=count, max_size=count))
    targets = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
    return torch.tensor(rows, dtype=draw(st.sampled_from([torch.float32, torch.float64]))), torch.tensor(targets)


def sklearn_auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the AUC of scikit-learn, averaged over classes."""
    scores, classes = outputs.double().softmax(1), targets.unique(sorted=True).tolist()  # type: ignore[no-untyped-call]
    return (
        float(np.mean([roc_auc_score(targets == c, scores[:, c]) for c in classes])) if len(classes) > 1 else math.nan
    )


@given(outputs_and_targets())
def test_macro_f1_and_auc_equal_sklearn(made: tuple[Tensor, Tensor]) -> None:
    outputs, targets = made
    expected = f1_score(targets, outputs.argmax(1), average="macro", zero_division=0)
    assert float(macro_f1(outputs, targets)) == pytest.approx(expected)
    assert float(auc(outputs, targets)) == pytest.approx(sklearn_auc(outputs, targets), nan_ok=True)


@given(outputs_and_targets())
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
def test_balanced_accuracy_equals_sklearn(made: tuple[Tensor, Tensor]) -> None:
    outputs, targets = made
    expected = balanced_accuracy_score(targets, outputs.argmax(1))
    assert float(balanced_accuracy(outputs, targets)) == pytest.approx(expected)


@given(outputs_and_targets())
def test_weighted_f1_and_auc_with_absent_classes_as_zero_equal_sklearn(made: tuple[Tensor, Tensor]) -> None:
    outputs, targets = made
    expected = f1_score(targets, outputs.argmax(1), average="weighted", zero_division=0)
    assert float(weighted_f1(outputs, targets)) == pytest.approx(expected)
    scores = outputs.double().softmax(1)
    by_class = [
        float(roc_auc_score(targets == c, scores[:, c])) if 0 < int((targets == c).sum()) < len(targets) else 0.0
        for c in range(outputs.shape[1])
    ]  # 0 for a class without samples, and for one that all samples have
    assert float(auc_absent_zero(outputs, targets)) == pytest.approx(np.mean(by_class))


@given(outputs_and_targets())
def test_average_precision_equals_sklearn(made: tuple[Tensor, Tensor]) -> None:
    """Of class 1 if there are two outputs, and otherwise averaged over the classes that occur."""
    outputs, targets = made
    scores, present = outputs.double().softmax(1), sorted(set(targets.tolist()))
    classes = [c for c in present if outputs.shape[1] > 2 or c == 1]
    expected = [average_precision_score(targets == c, scores[:, c]) for c in classes]
    mean = float(np.mean(expected)) if expected else math.nan
    assert float(average_precision(outputs, targets)) == pytest.approx(mean, nan_ok=True)


@given(outputs_and_targets())
def test_calibration_error_equals_its_definition(made: tuple[Tensor, Tensor]) -> None:
    """Σ over 15 bins of (samples in the bin / all samples) · |accuracy in the bin − mean confidence in the bin|."""
    outputs, targets = made
    confidence, predicted = (column.numpy() for column in outputs.double().softmax(1).max(1))
    correct, expected = predicted == targets.numpy(), 0.0
    for low in np.arange(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert float(ece(outputs, targets)) == pytest.approx(expected)


@given(outputs_and_targets())
def test_brier_score_equals_sklearn(made: tuple[Tensor, Tensor]) -> None:
    outputs, targets = made
    scores, classes = outputs.double().softmax(1).numpy(), outputs.shape[1]
    if classes == 2:
        expected = brier_score_loss(targets, scores[:, 1], pos_label=1)
    else:
        expected = ((scores - np.eye(classes)[targets]) ** 2).sum(1).mean()
    assert float(brier(outputs, targets)) == pytest.approx(expected)


@pytest.mark.parametrize("metric", [average_precision, ece, brier, rmse, mae, r2])
def test_metrics_of_diverged_models_are_nan(metric: Any) -> None:
    outputs = torch.tensor([[math.nan, 1.0], [0.0, 1.0], [2.0, 1.0]])
    targets = torch.tensor([0, 1, 1]) if metric in (average_precision, ece, brier) else torch.rand(3, 2)
    assert math.isnan(float(metric(outputs, targets)))


def test_average_precision_of_rare_class_is_low_for_model_with_high_accuracy_and_auc() -> None:
    """Three of 100 are positive, and ten negatives rank above them: AUC 90 %, but precision at most 3/13."""
    targets, scores = torch.zeros(100, dtype=torch.int64), torch.linspace(-5, -1, 100)
    targets[87:90] = 1
    outputs = torch.stack([torch.zeros(100), scores], 1)
    assert float(accuracy(outputs, targets)) == pytest.approx(0.97)
    assert float(auc(outputs, targets)) == pytest.approx(87 / 97)
    assert float(average_precision(outputs, targets)) == pytest.approx((1 / 11 + 2 / 12 + 3 / 13) / 3)


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 3)])
def test_regression_metrics_equal_sklearn(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    y, noise = random.normal(size=shape), random.normal(size=shape)
    outputs, targets = torch.from_numpy((y + noise / 2).reshape(20, -1)), torch.from_numpy(y)
    flat = y.reshape(20, -1)
    assert float(mae(outputs, targets)) == pytest.approx(mean_absolute_error(flat, outputs))
    assert float(r2(outputs, targets)) == pytest.approx(r2_score(flat, outputs))
    if flat.shape[1] == 1:  # with several numbers, scikit-learn averages the roots
        assert float(rmse(outputs, targets)) == pytest.approx(root_mean_squared_error(flat, outputs))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1])
def test_r2_of_constant_targets_is_nan(value: float) -> None:
    assert math.isnan(float(r2(torch.randn(3, 1), torch.full((3,), value))))
    assert math.isnan(float(r2(torch.randn(1, 1), torch.tensor([2.0]))))


def test_macro_f1_and_auc_with_many_samples_equal_sklearn() -> None:
    """In float32, sums of ranks would no longer be exact."""
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(30_000, 5, generator=random).round(decimals=1)
    targets = torch.randint(0, 5, (30_000,), generator=random)
    assert float(auc(outputs, targets)) == pytest.approx(sklearn_auc(outputs, targets), abs=1e-12)
    f1 = f1_score(targets, outputs.argmax(1), average="macro")
    assert float(macro_f1(outputs, targets)) == pytest.approx(f1, abs=1e-12)


def test_auc_with_all_classes_equals_sklearn_ovr() -> None:
    random = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(60, 3, generator=random, dtype=torch.float64), torch.arange(60) % 3
    expected = roc_auc_score(targets, outputs.softmax(1), multi_class="ovr", average="macro")
    assert float(auc(outputs, targets)) == pytest.approx(expected)


def test_metrics_of_perfect_and_worst_outputs() -> None:
    targets = torch.tensor([0, 1, 2, 1])
    right = torch.eye(3)[targets]
    assert [float(metric(right, targets)) for metric in (accuracy, macro_f1, auc)] == [1, 1, 1]
    assert float(auc(-right, targets)) == 0
    assert float(auc(torch.zeros(4, 3), targets)) == 0.5  # equal scores for all samples
    masked = torch.cat([right, torch.full((4, 1), -math.inf)], 1)  # a masked class
    assert float(auc(masked, targets)) == 1


def test_auc_with_one_class_or_nan_is_nan() -> None:
    assert math.isnan(auc(torch.randn(4, 3), torch.ones(4, dtype=torch.long)))
    assert math.isnan(auc(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 1])))


def test_auc_with_absent_classes_as_zero_is_zero_for_one_class_and_nan_if_outputs_are() -> None:
    assert float(auc_absent_zero(torch.randn(4, 3), torch.ones(4, dtype=torch.long))) == 0
    for targets in (torch.ones(4, dtype=torch.long), torch.tensor([0, 1, 2, 1])):
        assert math.isnan(auc_absent_zero(torch.full((4, 3), math.nan), targets))
        assert math.isnan(auc_absent_zero(torch.full((4, 3), math.inf), targets))


def test_classification_records_all_metrics_and_ranks_by_accuracy(net: nn.Module) -> None:
    model = ft.wrap(net)
    assert list(model.metrics) == ["accuracy", "macro_f1", "auc"] and model.score == "accuracy"
    run, fed = (
        ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=2, dtype=torch.float64),
        tiny_federation(),
    )
    twin, record = TinyNet().double(), run.records[-1]
    for client in range(4):
        twin.load_state_dict(run.personal(client))
        outputs, targets = twin(fed.x[fed.test[client]]).detach(), fed.y[fed.test[client]]
        assert record["per_client"]["auc_trained"][client] == pytest.approx(sklearn_auc(outputs, targets))
        f1 = f1_score(targets, outputs.argmax(1), average="macro", zero_division=0)
        assert record["per_client"]["macro_f1_trained"][client] == pytest.approx(f1)
    means = run.summarize("trained")
    assert means is not None and means["metrics"].keys() == {"loss", "macro_f1", "auc"}
    assert means["metrics"]["auc"]["weighted"] == pytest.approx(record["auc_trained"])
    assert means["metrics"]["loss"]["mean"] == pytest.approx(record["loss_trained_mean"])


def make_federation_with_single_class_client() -> ft.Federation:
    """Return two clients; the test data of the first has a single class."""
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    return ft.Federation.from_arrays([(x, y, x[:4], np.zeros(4, dtype=int)), (x, y, x, y)], classes=3)


def test_summary_leaves_out_client_with_undefined_auc(net: nn.Module, tmp_path: Path) -> None:
    ft.simulate(
        ft.methods.FedAvg(),
        net,
        make_federation_with_single_class_client(),
        rounds=2,
        dtype=torch.float64,
        folder=tmp_path,
    )
    run = ft.load_run(tmp_path)
    record = run.records[-1]
    for moment in ("received", "trained"):
        values = record["per_client"]
        assert values[f"auc_{moment}"].keys() == {1}
        assert values[f"accuracy_{moment}"].keys() == values[f"macro_f1_{moment}"].keys() == {0, 1}
        assert record[f"auc_{moment}"] == record[f"auc_{moment}_mean"] == values[f"auc_{moment}"][1]
        found = run.summarize(moment)
        assert found is not None and found["clients"] == found["metrics"]["loss"]["clients"] == 2
        only = values[f"auc_{moment}"][1]
        assert found["metrics"]["auc"] == {"clients": 1, "weighted": only, "mean": only}
    assert run.scores("trained", score="auc").keys() == {1}


def test_summary_without_any_defined_auc_is_none(net: nn.Module) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.long)
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=3)
    run = ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, dtype=torch.float64)
    assert run.records[0]["auc_received"] is None and run.records[0]["accuracy_received"] is not None
    found = run.summarize("received")
    assert found is not None and found["metrics"]["auc"] == {"clients": 0, "weighted": None, "mean": None}


def test_summary_includes_diverged_clients(tmp_path: Path) -> None:
    """Otherwise, a method would score higher for each client that diverges."""
    method = ft.methods.Local(lr=1.0, epochs=1)
    ft.simulate(method, DivergingNet().double(), tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    run = ft.load_run(tmp_path)
    assert run.records[-1]["diverged"] == [0, 1, 2, 3]
    scores = run.scores("trained", score="auc")
    assert scores.keys() == {0, 1, 2, 3} and math.isnan(scores[0])
    found = run.summarize("trained")
    assert found is not None and found["metrics"]["auc"]["clients"] == 4
    assert math.isnan(found["metrics"]["auc"]["mean"]) and math.isnan(found["metrics"]["loss"]["weighted"])


def test_custom_metric_may_be_undefined(net: nn.Module) -> None:
    def twos_as_ones(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the fraction of the samples of class 2 that are predicted as class 1."""
        return (outputs.argmax(1)[targets == 2] == 1).double().mean()

    model = ft.wrap(net, metrics={"accuracy": accuracy, "twos": ft.Metric(twos_as_ones, higher_is_better=False)})
    record = ft.simulate(
        ft.methods.FedAvg(), model, make_federation_with_single_class_client(), rounds=1, dtype=torch.float64
    ).records[0]
    assert record["per_client"]["twos_received"].keys() == {1}
    assert record["twos_received"] == record["per_client"]["twos_received"][1]


def make_run(scores: list[dict[int, float]], losses: list[dict[int, float]], train: tuple[int, ...]) -> ft.Run:
    values = [{"own_trained": s, "loss_trained": loss} for s, loss in zip(scores, losses, strict=True)]
    records: list[Any] = [{"round": number, "per_client": value} for number, value in enumerate(values, start=1)]
    clients = [{"name": str(i), "train": size, "test": 1, "validation": 0} for i, size in enumerate(train)]
    info = {"score": "own", "higher_is_better": True, "clients": clients}
    return ft.Run({}, info, records, {}, lambda client: {}, lambda client, moment: {})


def test_scores_undefined_in_last_round_are_not_taken_from_earlier_round() -> None:
    run = make_run([{0: 0.9, 1: 0.5}, {0: 0.4}], [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}], (1, 1))
    assert run.scores("trained") == {0: 0.4}


def test_summary_largest_and_worst_tenth() -> None:
    scores = {client: client / 20 for client in range(20)}
    run = make_run([scores], [scores], tuple(50 if client in (3, 7, 9) else client for client in range(20)))
    found = run.summarize("trained")
    assert found is not None
    assert found["largest_tenth"] == pytest.approx((3 + 7) / 2 / 20)  # the first two of three equally large clients
    assert found["worst_tenth"] == pytest.approx(0.5 / 20)
    assert largest_tenth({}, []) is None and worst_tenth({}) is None
    assert largest_tenth(scores, [50] * 20, [3, 1] + [9] * 18) == pytest.approx((3 * 0 + 1 / 20) / 4)  # by test samples


@given(st.dictionaries(st.integers(0, 30), st.floats(0, 1)), st.lists(st.integers(1, 9), min_size=31, max_size=31))
def test_largest_tenth_is_between_worst_and_best(values: dict[int, float], sizes: list[int]) -> None:
    worst, best = worst_tenth(values), worst_tenth(values, higher_is_better=False)
    largest = largest_tenth(values, sizes)
    if worst is None or best is None or largest is None:
        assert not values
        return
    assert worst - 1e-9 <= largest <= best + 1e-9
    mean = plain_mean(values)
    assert mean is not None and worst - 1e-9 <= mean <= best + 1e-9


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize("diverged", [0, 7, 19])
def test_means_with_diverged_client_are_nan(diverged: int, higher_is_better: bool) -> None:
    values = {client: math.nan if client == diverged else client / 20 for client in range(20)}
    for found in (worst_tenth(values, higher_is_better), plain_mean(values), weighted_mean(values, [1] * 20)):
        assert found is not None and math.isnan(found)
