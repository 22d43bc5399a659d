"""Tests of robust aggregation: every rule by hand, limiting cases, and one client that spoils everything."""

import math

import pytest
import torch
from torch import Tensor

from conftest import error_message, same
from fedtailor.core.robust import KINDS, Robust
from fedtailor.core.trees import Rows, Tree, mean
from fedtailor.core.updates import norms, updates

POINTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [1e6, -1e6]], dtype=torch.float64)
MEANS = [rule for rule in KINDS if rule != "norm_bound"]


def replaced_mean(kind: str, points: Tensor, fraction: float = 0.2) -> Tensor:
    found: Tensor = Robust(kind=kind, fraction=fraction).mean({"w": points})["w"]  # type: ignore[arg-type]
    return found


def test_median_is_the_middle_value_of_every_entry_or_the_mean_of_two() -> None:
    assert replaced_mean("median", POINTS).tolist() == [1.0, 0.0]
    assert replaced_mean("median", POINTS[:4]).tolist() == [0.5, 0.5]


def test_trimmed_mean_drops_one_value_at_either_end() -> None:
    assert replaced_mean("trimmed_mean", POINTS).tolist() == pytest.approx([2 / 3, 1 / 3])


def test_trimmed_mean_of_fraction_zero_is_the_mean() -> None:
    assert torch.equal(replaced_mean("trimmed_mean", POINTS, fraction=0), mean({"w": POINTS})["w"])


def test_multi_krum_is_the_mean_of_the_clients_with_the_closest_neighbors() -> None:
    """With n = 6 and f = 1, each score is the sum of the 3 smallest squared distances, and 5 clients are averaged."""
    points = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [20.0]], dtype=torch.float64)
    assert replaced_mean("multi_krum", points, fraction=1 / 6).tolist() == [2.0]


def test_geometric_median_is_the_fermat_point_of_a_triangle() -> None:
    """The sum of distances to the corners is minimal where all sides are seen at 120 degrees."""
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    center = replaced_mean("geometric_median", corners)
    a, b, c = (corners - center).unbind()
    for u, v in ((a, b), (b, c), (c, a)):
        assert math.degrees(math.acos(float(u @ v / u.norm() / v.norm()))) == pytest.approx(120, abs=0.01)


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("size", [1e6, 1e30])
def test_one_malicious_client_does_not_move_the_mean_far(kind: str, size: float) -> None:
    honest = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spoiled = torch.cat([honest, torch.full((1, 50), size, dtype=torch.float64)])
    assert float((replaced_mean(kind, spoiled) - honest.mean(0)).norm()) < 2.5  # the norm of an honest client is 7
    for dtype in (torch.float32, torch.float64):
        assert bool(replaced_mean(kind, spoiled.to(dtype)).isfinite().all())


@pytest.mark.parametrize("kind", MEANS)
def test_mean_of_equal_clients_is_their_value(kind: str) -> None:
    assert same({"w": replaced_mean(kind, torch.full((7, 3), 0.1))}, {"w": torch.full((3,), 0.1)}, 1e-7)


def test_norm_bound_scales_only_long_updates_and_every_part_by_itself() -> None:
    sent = {"params": {"w": torch.ones(3, 2)}}
    uploads: Tree = {
        "params": {"w": torch.tensor([[1.1, 1.0], [1.0, 1.3], [1.0, 31.0]])},  # norms 0.1, 0.3, 30
        "extra": torch.tensor([[2.0], [-7.0], [5.0]]),  # not sent, norms 2, 7, 5
    }
    found = Robust(kind="norm_bound", bound=1.2).bounded(uploads, sent)
    assert torch.equal(found["params"]["w"][:2], uploads["params"]["w"][:2])
    assert found["params"]["w"][2].tolist() == pytest.approx([1.0, 1.36])
    assert found["extra"].flatten().tolist() == pytest.approx([2.0, -6.0, 5.0])


def test_norm_bound_that_never_acts_keeps_every_bit() -> None:
    uploads = {"params": {"w": torch.randn(5, 4)}, "flags": torch.ones(5, 2, dtype=torch.bool)}
    found = Robust(kind="norm_bound", bound=100).bounded(uploads, {"params": {"w": torch.randn(5, 4)}})
    assert same(found, uploads)


def test_mean_upload_has_the_robust_mean_in_all_rows() -> None:
    """Clients that started from the same message, one part that was not sent, and one part without tensors."""
    sent = {"params": {"w": torch.tensor([[1.0]]).expand(3, 1)}}
    uploads = {"params": {"w": torch.tensor([[1.5], [2.0], [1e6]])}, "control": torch.tensor([[3.0], [4.0], [-1e9]])}
    found = Robust(kind="median").mean_upload(uploads | {"statistics": {}}, sent)
    assert found["params"]["w"].tolist() == [[2.0]] * 3 and found["control"].tolist() == [[3.0]] * 3
    assert found["statistics"] == {}


def test_mean_upload_of_clients_with_own_starts_withstands_an_outlier_among_them() -> None:
    sent = {"w": torch.tensor([[0.0], [1.0], [1e6]])}
    found = Robust(kind="median").mean_upload({"w": torch.tensor([[0.25], [1.5], [2e6]])}, sent)
    assert found["w"].flatten().tolist() == [1.5] * 3  # median start 1, median change 0.5


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_of_values_whose_squares_overflow_is_finite(dtype: torch.dtype, exact: bool) -> None:
    found = norms({"w": torch.tensor([[3e37, 4e37], [0.0, 0.0], [3.0, 4.0]], dtype=dtype)}, exact)
    assert found is not None and found.tolist() == pytest.approx([5e37, 0, 5])


@pytest.mark.parametrize("kind", ["median", "trimmed_mean"])
def test_rows_are_averaged_over_the_clients_that_have_them(kind: str) -> None:
    values = torch.tensor([[[1.0], [0.0]], [[3.0], [4.0]], [[1e6], [6.0]]])
    present = torch.tensor([[True, False], [True, True], [True, True]])
    found: Tree = Robust(kind=kind).mean({"table": Rows(values, present)})  # type: ignore[arg-type]
    assert found["table"].values.flatten().tolist() == [3.0, 5.0] and found["table"].present.tolist() == [True, True]
    nobody = Robust(kind=kind).mean({"table": Rows(values, torch.zeros_like(present))})  # type: ignore[arg-type]
    assert not nobody["table"].present.any() and bool(nobody["table"].values.isfinite().all())


def test_update_is_relative_to_the_message_of_the_same_name_and_shape() -> None:
    sent = {"params": {"w": torch.ones(1, 2), "other": torch.ones(1, 3)}}
    found = updates({"params": {"w": torch.full((1, 2), 3.0), "other": torch.full((1, 1), 3.0)}}, sent)
    assert found["params"]["w"].tolist() == [[2.0, 2.0]] and found["params"]["other"].tolist() == [[3.0]]


def test_settings_are_checked() -> None:
    assert "robust.fraction must be at least 0 and below 0.5" in error_message(lambda: Robust(fraction=0.5))
    assert "robust.kind must be 'none' or 'median'" in error_message(lambda: Robust(kind="mean"))  # type: ignore[arg-type]
