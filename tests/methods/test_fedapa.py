"""FedAPA compared with its literal version."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import take
from fedtailor.methods import FedAPA
from support import literal_fedapa as literal
from support.problem import FULL, PARTIAL, make_problem

SCHEDULES = {"full": FULL[:4], "partial": [*PARTIAL, [2, 1, 0]]}  # in the code variant, clients take turns in order
RAW = {"clip": False, "self_adjust": False, "normalize": False}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"weight_lr": 0.05},
    "momentum": {"weight_lr": 0.05, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "epochs": 3},
    "weight_momentum": {"weight_lr": 0.05, "weight_momentum": 0.5},
    "self_weight": {"weight_lr": 0.05, "self_weight": 0.2},
    "no_self_weight": {"weight_lr": 0.05, "self_weight": 0.0},  # Table 4; a row without other weights stays as it is
    "no_clip": {"weight_lr": 0.05, "clip": False},
    "no_self_adjust": {"weight_lr": 0.05, "self_adjust": False},
    "no_normalize": {"weight_lr": 0.05, "normalize": False},
    "raw": {"weight_lr": 0.01, **RAW},
    "share_all": {"weight_lr": 0.05, "share": "all"},
    "printed_sign": {"weight_lr": 0.05, "printed_sign": True},
    "printed_sign_raw_momentum": {"weight_lr": 0.01, "printed_sign": True, "weight_momentum": 0.5, **RAW},
    "large_steps": {"weight_lr": 5.0, "self_adjust": False},  # reaches both limits of the clipping
    "code": {"weight_lr": 0.05, "variant": "code"},
    "code_printed_sign": {"weight_lr": 0.05, "variant": "code", "printed_sign": True},
    "code_no_clip_printed_sign": {"weight_lr": 0.02, "variant": "code", "printed_sign": True, "clip": False},
    "code_no_normalize": {"weight_lr": 0.01, "variant": "code", "normalize": False},
    "code_share_all": {"weight_lr": 0.05, "variant": "code", "share": "all", "momentum": 0.9, "lr": 0.05},
}


PROBLEM = make_problem()


def near(found: Any, expected: literal.Matrix, tolerance: float = 1e-10) -> bool:
    left, right = (torch.as_tensor(matrix, dtype=torch.float64) for matrix in (found, expected))
    return torch.allclose(left, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_fedapa_equals_literal_version(case: str, schedule: str) -> None:
    fields, clients = {"lr": 0.1} | CASES[case], SCHEDULES[schedule]
    settings = literal.Settings(**fields)
    run, reference = PROBLEM.run(FedAPA(**fields), clients), literal.fedapa(PROBLEM, clients, settings)
    assert not near(reference.A, literal.initialize(PROBLEM, settings).A, 1e-3)  # A changes
    assert near(run.server["weights"], reference.A)
    assert near(run.server["velocity"], reference.V)
    for i in range(PROBLEM.num_clients):
        assert same(take(run.server["params"], i), reference.theta[i], 1e-10)
        assert same(run.client(i).get("head", {}), reference.phi[i], 1e-10)
        assert same(run.personal(i, "trained"), reference.trained[i], 1e-10)
        assert same(run.personal(i, "received"), reference.received[i], 1e-10)
    for r, record in enumerate(run.records):  # A and its entropies after each round, and J_i with the old and new row
        metrics, own = record["method_metrics"], record["per_client"]
        assert near(metrics["weights"], reference.weights[r])
        assert near([metrics["entropy"]], [[literal.entropy(row) for row in reference.weights[r]]])
        assert own["proxy_before"] == pytest.approx(reference.proxy_before[r], abs=1e-10)
        assert own["proxy_after"] == pytest.approx(reference.proxy_after[r], abs=1e-10)


def test_fedapa_row_without_positive_sum_keeps_previous_value() -> None:
    """Rows that clipping sets to zero, and rows with a negative sum, keep their previous values."""
    for extra in ({}, {"clip": False, "weight_momentum": 0.5}):
        fields: dict[str, Any] = {"lr": 0.1, "weight_lr": 5.0, "self_adjust": False, "printed_sign": True} | extra
        reference = literal.fedapa(PROBLEM, PARTIAL, literal.Settings(**fields))
        run = PROBLEM.run(FedAPA(**fields), PARTIAL)
        assert reference.unnormalized > 0
        assert near(run.server["weights"], reference.A) and near(run.server["velocity"], reference.V)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_fedapa_unchanged_models_leave_weights_unchanged(variant: Any) -> None:
    """With a vanishing learning rate, uploads equal the initial model: gradients are 0, and all values are finite."""
    run = PROBLEM.run(FedAPA(lr=1e-300, weight_lr=1e3, variant=variant), PARTIAL)
    assert torch.equal(run.server["weights"], torch.eye(5, dtype=torch.float64))
    assert all(same(run.personal(i, m), PROBLEM.start) for i in range(5) for m in ("received", "trained"))
    assert all(entropy == 0 for record in run.records for entropy in record["method_metrics"]["entropy"])


def test_fedapa_with_all_shared_accepts_model_without_head() -> None:
    headless = ft.wrap(PROBLEM.net, head=None)
    run = ft.simulate(FedAPA(share="all"), headless, PROBLEM.fed, schedule=[[0, 1]], batch_size=3)
    assert not run.client(0).get("head")
