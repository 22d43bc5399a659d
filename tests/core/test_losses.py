"""Class weights multiply the loss of an example; the contract of losses that depend on the batch."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

import fedtailor as ft
from conftest import METHOD_PARAMS, TinyNet, error_message, same, tiny_federation
from fedtailor.core.losses import balanced_weights, takes_sample_weight


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_balanced_weights_equal_sklearn(counts: list[int]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    present = np.unique(labels)
    expected = dict(zip(present, compute_class_weight("balanced", classes=present, y=labels), strict=True))
    weights = balanced_weights(counts)
    assert weights == pytest.approx([expected.get(label, 1.0) for label in range(len(counts))])
    assert sum(weights[label] for label in labels) / len(labels) == pytest.approx(1)  # the mean weight of a sample


def run(model: Any, fed: ft.Federation | None = None, method: str = "fedavg", **settings: Any) -> ft.Run:
    made = ft.methods.METHODS[method](**settings.pop("method_settings", {}))
    fed = tiny_federation() if fed is None else fed
    options: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64", "engine": "sequential"}
    return ft.simulate(made, model, fed, **options | settings)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_class_of_weight_2_counts_like_samples_that_occur_twice(engine: str, net: nn.Module) -> None:
    """In one step with all samples. A batch is averaged over its examples, so the rate depends on their number."""
    fed, lr = tiny_federation((9, 4, 7)), 0.1
    clients = []
    for train, test in zip(fed.train, fed.test, strict=True):
        twice = torch.cat([train, train[fed.y[train] == 1]])
        clients.append((fed.x[twice], fed.y[twice], fed.x[test], fed.y[test]))
    options: dict[str, Any] = {"rounds": 1, "engine": engine, "batch_size": 100, "method": "local"}
    weighted = run(net, fed, class_weights=[1, 2, 1], method_settings={"lr": lr, "epochs": 1}, **options)
    doubled = ft.Federation.from_arrays(clients, classes=3)
    for client, own in enumerate(clients):
        rate = lr * len(own[0]) / len(fed.train[client])
        repeated = run(net, doubled, method_settings={"lr": rate, "epochs": 1}, **options)
        assert same(weighted.personal(client), repeated.personal(client), tolerance=1e-12)


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_class_weights_of_1_change_no_bit_and_others_do(name: str, net: nn.Module) -> None:
    plain, ones, others = (run(net, method=name, class_weights=w) for w in (None, [1, 1, 1], [1.0, 30.0, 1.0]))
    assert all(same(plain.personal(client), ones.personal(client)) for client in range(4))
    if name != "fedaf":  # it trains on as many synthetic samples of each class
        assert not all(same(plain.personal(client), others.personal(client)) for client in range(4))


@pytest.mark.parametrize(
    ("name", "without_penalties"),
    [("gpfl", {"lam": 0.0, "mu": 0.0}), ("fedrod", {}), ("fedcp", {"lam": 0.0}), ("fedproto", {"lam": 0.0})],
)
def test_every_term_of_an_objective_that_sees_labels_is_weighted(
    name: str, without_penalties: dict[str, float], net: nn.Module
) -> None:
    """If all classes have weight 2, steps are those of twice the learning rate."""
    weighted, faster = (
        run(net, method=name, class_weights=weights, method_settings={"lr": lr, **without_penalties})
        for lr, weights in ((0.05, [2.0, 2.0, 2.0]), (0.1, None))
    )
    assert all(same(weighted.personal(client), faster.personal(client), tolerance=1e-12) for client in range(4))


def test_balanced_class_weights_are_those_of_all_training_samples_and_are_recorded(net: nn.Module) -> None:
    fed = tiny_federation()
    found = run(net, fed, class_weights="balanced", validation=0.25, held_out_clients=[1])
    counts = np.sum([client["classes"] for client in found.info["clients"]], axis=0)  # without validation samples
    assert found.info["class_weights"] == pytest.approx(balanced_weights(counts.tolist()))
    assert found.experiment["class_weights"] == "balanced"
    assert "class_weights" not in run(net).info


def test_class_weights_find_a_rare_class() -> None:
    """3 % of the samples are positive: without weights, the model never says so."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = (np.arange(count) % 33 == 0).astype(np.int64)
        return random.normal(size=(count, 2)) + y[:, None], y

    fed = ft.Federation.from_arrays([(*samples(330), *samples(330)) for _ in range(3)])
    model, metrics = ft.network("logistic", fed), ["balanced_accuracy", "average_precision"]
    plain, weighted = (
        run(model, fed, class_weights=weights, metrics=metrics, rounds=10, batch_size=32)
        for weights in (None, "balanced")
    )
    assert plain.records[-1]["balanced_accuracy_received"] < 0.55
    assert weighted.records[-1]["balanced_accuracy_received"] > 0.7


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "one number per class, 3 in all, got 2"),
        ([1.0, 2.0, -1.0], "finite numbers above 0"),
        ([1.0, 2.0, float("nan")], "finite numbers above 0"),
        ("auto", "'balanced'"),
        (3.0, "one number per class"),
    ],
)
def test_unfit_class_weights_are_named(weights: Any, message: str, net: nn.Module) -> None:
    assert message in error_message(lambda: run(net, class_weights=weights))


def test_class_weights_need_classes_and_the_built_in_loss(net: nn.Module) -> None:
    x, y = torch.randn(6, 2), torch.randn(6)
    fed, model = ft.Federation.from_arrays([(x, y, x, y)]), ft.wrap(nn.Linear(2, 1), head=None, loss="regression")
    for weights in ("balanced", [1.0]):
        assert "needs classes" in error_message(lambda w=weights: run(model, fed, class_weights=w))  # type: ignore[misc]
    own = ft.wrap(net, loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
    assert "your own loss" in error_message(lambda: run(own, class_weights="balanced"))


def test_own_loss_receives_sample_weight_of_padding() -> None:
    """A loss of the deviation from the batch's mean: a client of 5 with batches of 4 has a padded batch under vmap."""

    def spread(outputs: Tensor, targets: Tensor, sample_weight: Tensor) -> Tensor:
        center = (outputs * sample_weight[:, None]).sum(0) / sample_weight.sum().clamp(min=1)
        return (outputs - center - 1.0 * (targets[:, None] == torch.arange(3))).square().sum(1)

    torch.manual_seed(0)
    model, fed = ft.wrap(TinyNet().double(), loss=spread), tiny_federation((9, 5, 7, 1))
    one, many = (run(model, fed, engine=engine, method="ditto") for engine in ("sequential", "vectorized"))
    assert all(same(one.personal(client), many.personal(client), tolerance=1e-12) for client in range(4))


def test_class_weights_of_torch_are_no_sample_weights() -> None:
    assert not takes_sample_weight(partial(F.cross_entropy, reduction="none"))
    assert not takes_sample_weight(nn.CrossEntropyLoss(reduction="none"))


def test_own_loss_with_buffers_has_the_dtype_of_the_run(net: nn.Module) -> None:
    """PyTorch's loss with weights gives the models of `class_weights`."""
    weights = [1.0, 5.0, 0.5]
    own = ft.wrap(net, loss=nn.CrossEntropyLoss(torch.tensor(weights), reduction="none"))
    one, other = run(own), run(net, class_weights=weights)
    assert all(same(one.personal(client), other.personal(client), tolerance=1e-12) for client in range(4))


def test_resumed_run_with_balanced_class_weights_is_identical(net: nn.Module, tmp_path: Any) -> None:
    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyError

    options: dict[str, Any] = {"class_weights": "balanced", "rounds": 3, "checkpoint_every": 1}
    whole = run(net, **options)
    with pytest.raises(KeyError):
        run(net, folder=tmp_path, on_round_end=stop, **options)
    resumed = ft.resume(tmp_path, model=net, fed=tiny_federation())
    assert all(same(whole.personal(client), resumed.personal(client)) for client in range(4))
