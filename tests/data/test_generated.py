"""Generated data follow the models of the papers."""

from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.generated import Gaussian, Rectangles
from fedtailor.data.splits.partition import partition_samples


def test_gaussian_has_variances_of_both_levels() -> None:
    table = Gaussian(clients=4000, between=0.25, scaled=False).read()
    assert table.owner is not None and table.is_test is not None
    theta, samples, own = table.y[table.is_test], table.y[~table.is_test], table.owner[~table.is_test]
    assert abs(theta.mean() - 1.6) < 0.05 and abs(theta.var() - 0.25) < 0.03, "about six standard errors"
    assert abs((samples - theta[own]).var() - 0.1) < 0.004
    counts = np.bincount(own)
    assert set(counts) == set(range(10, 21)) and abs(counts.mean() - 15) < 0.3
    means = np.bincount(own, samples) / counts
    assert abs(((means - theta) ** 2 * counts / 0.1).mean() - 1) < 0.15, "a client's mean has the variance within / N_m"


def test_gaussian_gradient_is_that_of_paper() -> None:
    """Equation 5: the gradient of the local objective is (θ − θ_m^(L)) / σ_m² with σ_m² = 0.1 / N_m."""
    fed, plain = (ft.load("gaussian", clients=3, largest=30, scaled=scaled) for scaled in (True, False))
    for client in range(3):
        ctx, params = ft.example_client(ft.network("logistic", fed, bias=False), fed, client)
        samples = plain.y[plain.train[client]]
        (grad,), (weight,) = ctx.full_grad(ctx.loss, params).values(), params.values()
        assert float(grad) == pytest.approx((float(weight) - float(samples.mean())) / (0.1 / len(samples)), rel=1e-4)


def test_gaussian_test_error_is_error_of_parameter() -> None:
    """Local training ends at the client's mean, and its error on the test sample is the distance to θ_m."""
    fed, plain = (ft.load("gaussian", clients=3, between=1.0, scaled=scaled) for scaled in (True, False))
    method = ft.methods.Local(lr=1e-3, steps=100)
    run = ft.simulate(method, ft.network("logistic", fed, bias=False), fed, rounds=2, batch_size=20)
    splits = zip(plain.train, plain.test, strict=True)
    errors = [float((plain.y[train].mean() - plain.y[test]).abs()) for train, test in splits]
    assert run.records[-1]["mae_trained_mean"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_gaussian_common_target_is_the_common_parameter() -> None:
    fed = ft.load("gaussian", clients=3, between=1.0, target="common")
    method = ft.methods.Ditto(lr=1e-4, steps=5)
    model = ft.network("logistic", fed, bias=False)
    run = ft.simulate(method, model, fed, rounds=2, batch_size=20, metrics=["mae"], evaluate_global=True)
    error = abs(float(run.server["params"]["head.weight"]) - 1.6)
    assert run.records[-1]["global_mae_received"] == pytest.approx(error, rel=1e-5)


def test_rectangles_have_common_and_own_boundaries() -> None:
    table = Rectangles(points=1000).read()
    assert isinstance(table.x, np.ndarray) and table.owner is not None
    x, y = table.x.T
    assert abs(((y > 0) == (table.y == 1)).mean() - 0.8) < 0.04
    for user, (boundary, left) in enumerate([(-6, True), (-2, True), (2, False), (6, False)]):
        own = table.owner == user
        assert (((x[own] < boundary) == left) == (table.y[own] == 1)).all()
    assert abs(x).max() <= 8 and abs(y).max() <= 2


def test_rectangles_gradients_conflict_between_users_only() -> None:
    """Figure 2a: g_1 and g_3 conflict, and so do g_2 and g_4, but not if all users have the same distribution."""
    table = Rectangles(points=1000).read()
    assert isinstance(table.x, np.ndarray) and table.owner is not None
    inputs = np.column_stack([table.x, np.ones(table.num_samples)])

    def cosines(owned: list[Any]) -> Any:
        """Return the cosines of the gradients of logistic regression at (w_1, w_2, b) = 0."""
        grads = np.array([((0.5 - table.y[own])[:, None] * inputs[own]).mean(0) for own in owned])
        grads /= np.linalg.norm(grads, axis=1, keepdims=True)
        return grads @ grads.T

    own = cosines([np.flatnonzero(table.owner == user) for user in range(4)])
    assert own[0, 2] < -0.1 and own[1, 3] < -0.1 and own[0, 1] > 0 and own[2, 3] > 0
    assert cosines(partition_samples(table.y, 4, "iid")).min() > 0.3


def test_rectangles_are_users_or_pooled() -> None:
    assert ft.load("rectangles").names == ("1", "2", "3", "4")
    pooled = ft.load("rectangles", partition="iid", clients=4)
    for train in pooled.train:
        x = pooled.x[train, 0]
        assert float(x.min()) < -6 and float(x.max()) > 6, "each client has points of all users"


@pytest.mark.parametrize("name", ["gaussian", "rectangles"])
def test_generated_data_depend_on_seed(name: str) -> None:
    first, again, other = (ft.load(name, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert not torch.equal(first.y, other.y) or not torch.equal(first.x, other.x)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("gaussian", {"clients": 0}, "data.clients"),
        ("gaussian", {"smallest": 0}, "data.smallest"),
        ("gaussian", {"smallest": 30}, "data.smallest must be at most data.largest"),
        ("gaussian", {"between": -1.0}, "data.between"),
        ("gaussian", {"within": 0.0}, "data.within"),
        ("rectangles", {"points": 0}, "data.points"),
        ("rectangles", {"noise": 1.5}, "data.noise"),
        ("rectangles", {"clients": 5}, "4 owners"),
    ],
)
def test_generated_data_with_invalid_setting_name_it(name: str, settings: dict[str, Any], named: str) -> None:
    assert named in error_message(lambda: ft.load(name, **settings))
