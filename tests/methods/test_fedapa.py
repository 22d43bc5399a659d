"""FedAPA compared with its literal version, cases in which it equals local training, and its metrics."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import error_message, same
from fedtailor.methods import FedAPA, Local
from support import literal_fedapa as literal
from support.problem import FULL, PARTIAL, Problem, Weights, make_identical_clients, make_problem

Variant = Literal["paper", "code"]

SCHEDULES = {"full": FULL[:4], "partial": PARTIAL}
RAW = {"clip": False, "self_adjust": False, "normalize": False}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"weight_lr": 0.05},
    "momentum": {"weight_lr": 0.05, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "epochs": 3},
    "weight_momentum": {"weight_lr": 0.05, "weight_momentum": 0.5},
    "self_weight": {"weight_lr": 0.05, "self_weight": 0.2},
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
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_variant = pytest.mark.parametrize("variant", ["paper", "code"])


PROBLEM = make_problem()


def near(found: Weights, expected: Weights, tolerance: float = 1e-10) -> bool:
    """Return whether all entries of all tensors agree within the tolerance."""
    assert found.keys() == expected.keys()
    return all(float((found[name] - expected[name]).abs().max()) <= tolerance for name in expected)


def near_matrix(found: Any, expected: literal.Matrix, tolerance: float = 1e-10) -> bool:
    found = torch.as_tensor(found, dtype=torch.float64)
    return near({"A": found}, {"A": torch.tensor(expected, dtype=torch.float64)}, tolerance)


def body(run: ft.Run, client: int) -> Weights:
    return {name: stacked[client] for name, stacked in run.server["params"].items()}


def recorded_weights(run: ft.Run) -> Tensor:
    """Return A after each round, as recorded."""
    return torch.tensor([record["method_metrics"]["weights"] for record in run.records], dtype=torch.float64)


def equals_local(problem: Problem, run: ft.Run, schedule: Sequence[Sequence[int]], lr: float, tolerance: float) -> bool:
    local = problem.run(Local(lr=lr, epochs=2), schedule)
    return all(
        same(run.personal(i, moment), local.personal(i, moment), tolerance)
        for i in range(problem.num_clients)
        for moment in ("received", "trained")
    )


# comparison with the literal version


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_fedapa_equals_literal_version(case: str, schedule: str) -> None:
    fields, clients = {"lr": 0.1} | CASES[case], SCHEDULES[schedule]
    run, reference = (
        PROBLEM.run(FedAPA(**fields), clients),
        literal.fedapa(PROBLEM, clients, literal.Settings(**fields)),
    )
    start = literal.initialize(PROBLEM, literal.Settings(**fields))
    assert not near_matrix(reference.A, start.A, 1e-3)  # A changes
    assert near_matrix(run.server["weights"], reference.A)
    assert near_matrix(run.server["velocity"], reference.V)
    for i in range(PROBLEM.num_clients):
        assert near(body(run, i), reference.theta[i])
        assert near(run.client(i).get("head", {}), reference.phi[i])
        assert near(run.personal(i, "trained"), reference.trained[i])
        assert near(run.personal(i, "received"), reference.received[i])
    for r, record in enumerate(run.records):  # A and its entropies after each round, and J_i with the old and new row
        metrics, own = record["method_metrics"], record["per_client"]
        assert near_matrix(metrics["weights"], reference.weights[r])
        assert near_matrix([metrics["entropy"]], [[literal.entropy(row) for row in reference.weights[r]]])
        assert own["proxy_before"] == pytest.approx(reference.proxy_before[r], abs=1e-10)
        assert own["proxy_after"] == pytest.approx(reference.proxy_after[r], abs=1e-10)


def test_fedapa_row_without_positive_sum_keeps_previous_value() -> None:
    """Rows that clipping sets to zero, and rows with a negative sum, keep their previous values."""
    for extra in ({}, {"clip": False, "weight_momentum": 0.5}):
        fields: dict[str, Any] = {"lr": 0.1, "weight_lr": 5.0, "self_adjust": False, "printed_sign": True} | extra
        reference = literal.fedapa(PROBLEM, PARTIAL, literal.Settings(**fields))
        run = PROBLEM.run(FedAPA(**fields), PARTIAL)
        assert reference.unnormalized > 0
        assert near_matrix(run.server["weights"], reference.A) and near_matrix(run.server["velocity"], reference.V)


@each_variant
def test_fedapa_raw_step_equals_autograd_gradient(variant: Variant) -> None:
    """The raw step follows the gradient of J_i with respect to the row, computed by autograd."""
    start = FULL[:2] if variant == "paper" else [*FULL[:1], [2]]
    code = variant == "code"  # sets the own weight before the row is used
    method = FedAPA(lr=0.1, weight_lr=0.01, variant=variant, normalize=False, clip=False, self_adjust=code)
    before, after = PROBLEM.run(method, start[:1]), PROBLEM.run(method, start)
    row = before.server["weights"][2].clone()
    row[2] = 1 if code else row[2]
    row.requires_grad_()
    (grad,) = torch.autograd.grad(proxy(row, before.server["params"], after.server["params"], 2), row)
    momentum = 0.9 * before.server["velocity"][2] if code else 0
    expected = row.detach() - 0.01 * (grad + momentum)
    assert float(grad.abs().max()) > 1e-3
    assert near({"A": after.server["weights"][2]}, {"A": expected}, 1e-12)


# the proxy J_i decreases


def proxy(row: Tensor, params: Weights, new: Weights, i: int) -> Tensor:
    """Return J_i = ½‖Σ_j A_ij θ_j − θ_i‖²."""
    parts = [(torch.tensordot(row, params[n], 1) - new[n][i]).square().sum() for n in params]
    return torch.stack(parts).sum() / 2


def largest_eigenvalue_of_gram(params: Weights) -> float:
    flat = torch.cat([stacked.flatten(1) for stacked in params.values()], 1)
    return float(torch.linalg.eigvalsh(flat @ flat.T)[-1])


@pytest.mark.parametrize("printed_sign", [False, True])
@each_schedule
def test_fedapa_raw_steps_decrease_proxy(schedule: list[list[int]], printed_sign: bool) -> None:
    """J_i is quadratic in the row: each step below 2/λ_max decreases it, or increases it with the printed sign."""
    method = FedAPA(lr=0.1, weight_lr=0.02, printed_sign=printed_sign, clip=False, self_adjust=False, normalize=False)
    servers = [PROBLEM.run(method, schedule[:rounds]).server for rounds in range(1, len(schedule) + 1)]
    for (before, after), clients in zip(pairwise(servers), schedule[1:], strict=True):
        assert method.weight_lr < 2 / largest_eigenvalue_of_gram(before["params"])
        for i in clients:
            old, new = (float(proxy(s["weights"][i], before["params"], after["params"], i)) for s in (before, after))
            assert new > old if printed_sign else new < old


# limiting cases


@each_variant
@each_schedule
def test_fedapa_zero_weight_lr_equals_local_training(schedule: list[list[int]], variant: Variant) -> None:
    run = PROBLEM.run(FedAPA(lr=0.1, weight_lr=0.0, variant=variant), schedule)
    assert equals_local(PROBLEM, run, schedule, 0.1, 0.0)
    assert torch.equal(run.server["weights"], torch.eye(5, dtype=torch.float64))


@each_variant
def test_fedapa_single_client_equals_local_training(variant: Variant) -> None:
    problem, schedule = make_problem((8,)), [[0]] * 4
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.05, variant=variant), schedule)
    assert equals_local(problem, run, schedule, 0.1, 0.0)
    if variant == "paper":  # the code normalizes before aggregation, not after the step
        assert run.server["weights"].tolist() == [[1.0]]


def test_fedapa_identical_clients_equal_local_training() -> None:
    """If all clients have the same samples in one batch, all bodies are equal, and any mixture equals each of them."""
    problem, schedule = make_identical_clients(4), [[0, 1, 2, 3]] * 4
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.05), schedule)
    assert equals_local(problem, run, schedule, 0.1, 1e-10)
    others = run.server["weights"][~torch.eye(4, dtype=torch.bool)]
    assert float(others.min()) > 1e-3 and float(others.max() - others.min()) < 1e-10


@each_variant
def test_fedapa_unchanged_models_leave_weights_unchanged(variant: Variant) -> None:
    """With a vanishing learning rate, uploads equal the initial model: gradients are 0, and all values are finite."""
    run = PROBLEM.run(FedAPA(lr=1e-300, weight_lr=1e3, variant=variant), PARTIAL)
    assert torch.equal(run.server["weights"], torch.eye(5, dtype=torch.float64))
    assert all(near(run.personal(i, m), PROBLEM.start, 0.0) for i in range(5) for m in ("received", "trained"))
    assert all(entropy == 0 for record in run.records for entropy in record["method_metrics"]["entropy"])


@each_variant
def test_fedapa_client_without_participation_keeps_initial_state(variant: Variant) -> None:
    schedule = [[0, 1, 2, 3], [0, 3], [1, 2, 3], [0, 2]]
    run = PROBLEM.run(FedAPA(lr=0.1, weight_lr=0.05, variant=variant), schedule)
    assert run.server["weights"][4].tolist() == [0, 0, 0, 0, 1 if variant == "paper" else 0]
    assert near(body(run, 4), {name: w for name, w in PROBLEM.start.items() if not name.startswith("head.")}, 0.0)
    assert all(near(run.personal(4, moment), PROBLEM.start, 0.0) for moment in ("received", "trained"))
    assert float(run.server["weights"][:4, 4].max()) > 1e-3  # other clients may use its body


@pytest.mark.parametrize("weight_lr", [0.05, 1.0, 100.0])
def test_fedapa_rows_are_nonnegative_and_sum_to_one(weight_lr: float) -> None:
    """This holds after each round for any step size."""
    A = recorded_weights(PROBLEM.run(FedAPA(lr=0.1, weight_lr=weight_lr), PARTIAL))
    assert float(A.min()) >= 0
    assert float((A.sum(2) - 1).abs().max()) < 1e-12
    assert float(A.diagonal(dim1=1, dim2=2).min()) < 0.999  # weights have changed


def test_fedapa_code_variant_momentum_changes_rows_of_absent_clients() -> None:
    A = recorded_weights(PROBLEM.run(FedAPA(lr=0.1, weight_lr=0.05, variant="code"), PARTIAL))
    assert 3 not in PARTIAL[3] and not torch.equal(A[2][3], A[3][3])


def test_fedapa_code_variant_depends_on_order_of_clients() -> None:
    """In the code variant, clients see bodies of the same round; in the paper's variant, they do not."""
    for variant, matters in (("paper", False), ("code", True)):
        fields: dict[str, Any] = {"lr": 0.1, "weight_lr": 0.05, "variant": variant}
        forward, backward = ([*FULL[:3], order] for order in ([0, 1, 2], [2, 1, 0]))
        one, other = (PROBLEM.run(FedAPA(**fields), schedule) for schedule in (forward, backward))
        assert near(one.server["params"], other.server["params"], 1e-12) != matters
        reference = literal.fedapa(PROBLEM, backward, literal.Settings(**fields))
        assert near_matrix(other.server["weights"], reference.A)
        assert all(near(body(other, i), reference.theta[i]) for i in range(PROBLEM.num_clients))


def test_fedapa_model_without_head_requires_share_all() -> None:
    def simulate(share: Any) -> ft.Run:
        headless = ft.wrap(PROBLEM.net, head=None)
        return ft.simulate(FedAPA(lr=0.1, share=share), headless, PROBLEM.fed, schedule=[[0, 1]], batch_size=3)

    assert "head" in error_message(lambda: simulate("body"))
    assert not simulate("all").client(0).get("head")
