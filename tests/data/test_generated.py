"""Generated data follow the models of the papers."""

from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.generated import gaussian, rectangles
from fedtailor.data.partition import partition_samples
from fedtailor.data.sample_table import SampleTable


def federation(table: SampleTable) -> ft.Federation:
    """Return the owners as clients, with the marked test samples."""
    assert table.owner is not None and table.is_test is not None and isinstance(table.x, np.ndarray)
    clients = []
    for client in range(len(table.owner_names)):
        train, test = ((table.owner == client) & (table.is_test == side) for side in (False, True))
        clients.append((table.x[train], table.y[train], table.x[test], table.y[test]))
    return ft.Federation.from_arrays(clients)


def test_gaussian_has_variances_of_both_levels() -> None:
    table = gaussian(clients=4000, center=1.6, between=0.25, within=0.1, sizes=(10, 20), scaled=False)
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
    fed, plain = (federation(gaussian(clients=3, sizes=(4, 9), scaled=scaled)) for scaled in (True, False))
    for client in range(3):
        ctx, params = ft.example_client(ft.network("logistic", fed, bias=False), fed, client)
        samples = plain.y[plain.train[client]]
        (grad,), (weight,) = ctx.full_grad(ctx.loss, params).values(), params.values()
        assert float(grad) == pytest.approx((float(weight) - float(samples.mean())) / (0.1 / len(samples)), rel=1e-4)


def test_gaussian_test_error_is_error_of_parameter() -> None:
    """Local training ends at the client's mean, and its error on the test sample is the distance to θ_m."""
    fed, plain = (federation(gaussian(clients=3, between=1.0, scaled=scaled)) for scaled in (True, False))
    method = ft.methods.Local(lr=1e-3, steps=100)
    run = ft.simulate(method, ft.network("logistic", fed, bias=False), fed, rounds=2, batch_size=20)
    splits = zip(plain.train, plain.test, strict=True)
    errors = [float((plain.y[train].mean() - plain.y[test]).abs()) for train, test in splits]
    assert run.records[-1]["mae_trained_mean"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_rectangles_have_common_and_own_boundaries() -> None:
    table = rectangles(samples=1000, noise=0.2)
    assert isinstance(table.x, np.ndarray) and table.owner is not None
    x, y = table.x.T
    assert abs(((y > 0) == (table.y == 1)).mean() - 0.8) < 0.04
    for user, (boundary, left) in enumerate([(-6, True), (-2, True), (2, False), (6, False)]):
        own = table.owner == user
        assert (((x[own] < boundary) == left) == (table.y[own] == 1)).all()
    assert abs(x).max() <= 8 and abs(y).max() <= 2


def test_rectangles_gradients_conflict_between_users_only() -> None:
    """Figure 2a: g_1 and g_3 conflict, and so do g_2 and g_4, but not if all users have the same distribution."""
    table = rectangles(samples=1000)
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


@pytest.mark.parametrize("make", [gaussian, rectangles])
def test_generated_data_depend_on_seed_only(make: Any) -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert np.array_equal(first.x, again.x) and np.array_equal(first.y, again.y)
    assert not np.array_equal(first.x, other.x)


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (gaussian, {"clients": 0}, "client"),
        (gaussian, {"sizes": (0, 3)}, "sizes"),
        (gaussian, {"sizes": (5, 3)}, "sizes"),
        (gaussian, {"between": -1.0}, "between"),
        (gaussian, {"within": 0.0}, "within"),
        (rectangles, {"samples": 1}, "samples"),
        (rectangles, {"noise": 1.5}, "noise"),
    ],
)
def test_generated_data_with_invalid_setting_name_it(make: Any, settings: dict[str, Any], named: str) -> None:
    assert named in error_message(lambda: make(**settings))
