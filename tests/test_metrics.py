"""The papers' metrics: as scikit-learn has them; what becomes of them where they are undefined or a model diverged."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

import fedtailor as ft
from conftest import Loud, TinyNet, tiny_federation
from fedtailor.evaluation import largest_tenth, plain_mean, weighted_mean, worst_tenth
from fedtailor.metrics import accuracy, auc, macro_f1


@st.composite
def guesses(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Outputs with many ties, and targets that may lack some classes."""
    count, classes = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    cell = st.integers(-2, 2)
    rows = draw(st.lists(st.lists(cell, min_size=classes, max_size=classes), min_size=count, max_size=count))
    targets = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
    return torch.tensor(rows, dtype=draw(st.sampled_from([torch.float32, torch.float64]))), torch.tensor(targets)


def area(outputs: Tensor, targets: Tensor) -> float:
    """scikit-learn's, class by class."""
    scores, classes = outputs.double().softmax(1), targets.unique(sorted=True).tolist()  # type: ignore[no-untyped-call]
    return (
        float(np.mean([roc_auc_score(targets == c, scores[:, c]) for c in classes])) if len(classes) > 1 else math.nan
    )


@given(guesses())
def test_they_are_scikit_learns(made: tuple[Tensor, Tensor]) -> None:
    outputs, targets = made
    expected = f1_score(targets, outputs.argmax(1), average="macro", zero_division=0)
    assert float(macro_f1(outputs, targets)) == pytest.approx(expected)
    assert float(auc(outputs, targets)) == pytest.approx(area(outputs, targets), nan_ok=True)


def test_they_are_scikit_learns_with_many_samples() -> None:
    """In float32, where sums of ranks would no longer be exact."""
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(30_000, 5, generator=random).round(decimals=1)
    targets = torch.randint(0, 5, (30_000,), generator=random)
    assert float(auc(outputs, targets)) == pytest.approx(area(outputs, targets), abs=1e-12)
    f1 = f1_score(targets, outputs.argmax(1), average="macro")
    assert float(macro_f1(outputs, targets)) == pytest.approx(f1, abs=1e-12)


def test_with_all_classes_the_area_is_scikit_learns_ovr() -> None:
    random = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(60, 3, generator=random, dtype=torch.float64), torch.arange(60) % 3
    expected = roc_auc_score(targets, outputs.softmax(1), multi_class="ovr", average="macro")
    assert float(auc(outputs, targets)) == pytest.approx(expected)


def test_the_ends_of_the_scale() -> None:
    targets = torch.tensor([0, 1, 2, 1])
    right = torch.eye(3)[targets]
    assert [float(metric(right, targets)) for metric in (accuracy, macro_f1, auc)] == [1, 1, 1]
    assert float(auc(-right, targets)) == 0
    assert float(auc(torch.zeros(4, 3), targets)) == 0.5  # says the same of everyone
    masked = torch.cat([right, torch.full((4, 1), -math.inf)], 1)  # a class that the model was told is not there
    assert float(auc(masked, targets)) == 1


def test_no_area_with_one_class_or_without_numbers() -> None:
    assert math.isnan(auc(torch.randn(4, 3), torch.ones(4, dtype=torch.long)))
    assert math.isnan(auc(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 1])))


def test_classification_reports_them_and_accuracy_ranks(net: nn.Module) -> None:
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
        assert record["per_client"]["auc_trained"][client] == pytest.approx(area(outputs, targets))
        f1 = f1_score(targets, outputs.argmax(1), average="macro", zero_division=0)
        assert record["per_client"]["macro_f1_trained"][client] == pytest.approx(f1)
    means = run.numbers("trained")
    assert means is not None and means["metrics"].keys() == {"loss", "macro_f1", "auc"}
    assert means["metrics"]["auc"]["weighted"] == pytest.approx(record["auc_trained"])
    assert means["metrics"]["loss"]["mean"] == pytest.approx(record["loss_trained_mean"])


def lopsided() -> ft.Federation:
    """Two clients: the first one's test data hold a single class."""
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    return ft.Federation.from_arrays([(x, y, x[:4], np.zeros(4, dtype=int)), (x, y, x, y)], classes=3)


def test_a_client_without_an_area_is_left_out(net: nn.Module, tmp_path: Path) -> None:
    ft.simulate(ft.methods.FedAvg(), net, lopsided(), rounds=2, dtype=torch.float64, folder=tmp_path)
    run = ft.open(tmp_path)
    record = run.records[-1]
    for moment in ("received", "trained"):
        values = record["per_client"]
        assert values[f"auc_{moment}"].keys() == {1}
        assert values[f"accuracy_{moment}"].keys() == values[f"macro_f1_{moment}"].keys() == {0, 1}
        assert record[f"auc_{moment}"] == record[f"auc_{moment}_mean"] == values[f"auc_{moment}"][1]
        found = run.numbers(moment)
        assert found is not None and found["clients"] == found["metrics"]["loss"]["clients"] == 2
        alone = values[f"auc_{moment}"][1]
        assert found["metrics"]["auc"] == {"clients": 1, "weighted": alone, "mean": alone}
    assert run.scores("trained", score="auc").keys() == {1}


def test_where_nobody_has_an_area_there_is_none(net: nn.Module) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.long)
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=3)
    run = ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, dtype=torch.float64)
    assert run.records[0]["auc_received"] is None and run.records[0]["accuracy_received"] is not None
    found = run.numbers("received")
    assert found is not None and found["metrics"]["auc"] == {"clients": 0, "weighted": None, "mean": None}


def test_who_diverged_is_not_left_out(tmp_path: Path) -> None:
    """Else a method would look better for every client it loses."""
    method = ft.methods.Local(lr=1.0, epochs=1)
    ft.simulate(method, Loud().double(), tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    run = ft.open(tmp_path)
    assert run.records[-1]["diverged"] == [0, 1, 2, 3]
    areas = run.scores("trained", score="auc")
    assert areas.keys() == {0, 1, 2, 3} and math.isnan(areas[0])
    found = run.numbers("trained")
    assert found is not None and found["metrics"]["auc"]["clients"] == 4
    assert math.isnan(found["metrics"]["auc"]["mean"]) and math.isnan(found["metrics"]["loss"]["weighted"])


def test_a_metric_of_ones_own_may_be_undefined(net: nn.Module) -> None:
    def share_of_ones(outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the samples of class 2, those taken for class 1."""
        return (outputs.argmax(1)[targets == 2] == 1).double().mean()

    model = ft.wrap(net, metrics={"accuracy": accuracy, "twos": share_of_ones})
    record = ft.simulate(ft.methods.FedAvg(), model, lopsided(), rounds=1, dtype=torch.float64).records[0]
    assert record["per_client"]["twos_received"].keys() == {1}
    assert record["twos_received"] == record["per_client"]["twos_received"][1]


def handmade(scores: list[dict[int, float]], losses: list[dict[int, float]], train: tuple[int, ...]) -> ft.Run:
    values = [{"own_trained": s, "loss_trained": loss} for s, loss in zip(scores, losses, strict=True)]
    records: list[Any] = [{"round": number, "per_client": value} for number, value in enumerate(values, start=1)]
    clients = [{"name": str(i), "train": size, "test": 1, "validation": 0} for i, size in enumerate(train)]
    info = {"score": "own", "higher_is_better": True, "clients": clients}
    return ft.Run({}, info, records, {}, lambda client: {}, lambda client, moment: {})


def test_a_score_that_is_undefined_now_is_not_taken_from_before() -> None:
    run = handmade([{0: 0.9, 1: 0.5}, {0: 0.4}], [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}], (1, 1))
    assert run.scores("trained") == {0: 0.4}
    absent = handmade([{0: 0.9, 1: 0.5}, {0: 0.4}], [{0: 1.0, 1: 1.0}, {0: 1.0}], (1, 1))
    assert absent.scores("trained") == {0: 0.4, 1: 0.5}


def test_the_summary_knows_the_largest_clients() -> None:
    scores = {client: client / 20 for client in range(20)}
    run = handmade([scores], [scores], tuple(50 if client in (3, 7, 9) else client for client in range(20)))
    found = run.numbers("trained")
    assert found is not None
    assert found["largest_tenth"] == pytest.approx((3 + 7) / 2 / 20)  # of three as large as each other the first two
    assert found["worst_tenth"] == pytest.approx(0.5 / 20)
    assert largest_tenth({}, []) is None and worst_tenth({}) is None


@given(st.dictionaries(st.integers(0, 30), st.floats(0, 1)), st.lists(st.integers(1, 9), min_size=31, max_size=31))
def test_a_tenth_lies_between_the_worst_and_the_best(values: dict[int, float], sizes: list[int]) -> None:
    worst, best = worst_tenth(values), worst_tenth(values, higher_is_better=False)
    largest = largest_tenth(values, sizes)
    if worst is None or best is None or largest is None:
        assert not values
        return
    assert worst - 1e-9 <= largest <= best + 1e-9
    mean = plain_mean(values)
    assert mean is not None and worst - 1e-9 <= mean <= best + 1e-9


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize("lost", range(20))
def test_wherever_it_stands_a_diverged_client_is_the_worst(lost: int, higher_is_better: bool) -> None:
    values = {client: math.nan if client == lost else client / 20 for client in range(20)}
    for found in (worst_tenth(values, higher_is_better), plain_mean(values), weighted_mean(values, [1] * 20)):
        assert found is not None and math.isnan(found)
