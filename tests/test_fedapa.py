"""FedAPA against its literal version, the limits in which it must equal training alone, and what it records."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import fedtailor as ft
import literal_fedapa as literal
from conftest import refusal, same, tiny_federation
from fedtailor.methods import FedAPA, Local
from problem import FULL, PARTIAL, Problem, ThreeLayers, Weights, make_problem

Share = Literal["body", "all"]
Variant = Literal["paper", "code"]

SCHEDULES = {"full": FULL, "partial": PARTIAL}
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
    "large_steps": {"weight_lr": 5.0, "self_adjust": False},  # meets both ends of the clipping
    "code": {"weight_lr": 0.05, "variant": "code"},
    "code_printed_sign": {"weight_lr": 0.05, "variant": "code", "printed_sign": True},
    "code_no_clip_printed_sign": {"weight_lr": 0.02, "variant": "code", "printed_sign": True, "clip": False},
    "code_no_normalize": {"weight_lr": 0.01, "variant": "code", "normalize": False},
    "code_share_all": {"weight_lr": 0.05, "variant": "code", "share": "all", "momentum": 0.9, "lr": 0.05},
}
each_case = pytest.mark.parametrize("case", CASES)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_variant = pytest.mark.parametrize("variant", ["paper", "code"])


PROBLEM = make_problem()


@pytest.fixture
def problem() -> Problem:
    return PROBLEM


@cache
def both(case: str, schedule: str) -> tuple[ft.Run, literal.Outcome]:
    """The library's run and the literal version's."""
    fields, clients = {"lr": 0.1} | CASES[case], SCHEDULES[schedule]
    return PROBLEM.run(FedAPA(**fields), clients), literal.fedapa(PROBLEM, clients, literal.Settings(**fields))


def near(found: Weights, wanted: Weights, tolerance: float = 1e-10) -> bool:
    """Whether no entry of any tensor is further off."""
    assert found.keys() == wanted.keys()
    return all(float((found[name] - wanted[name]).abs().max()) <= tolerance for name in wanted)


def near_matrix(found: Any, wanted: literal.Matrix, tolerance: float = 1e-10) -> bool:
    found = torch.as_tensor(found, dtype=torch.float64)
    return near({"A": found}, {"A": torch.tensor(wanted, dtype=torch.float64)}, tolerance)


def near_numbers(found: dict[int, float], wanted: dict[int, float]) -> bool:
    assert found.keys() == wanted.keys()
    return all(abs(found[client] - wanted[client]) <= 1e-10 for client in wanted)


def body(run: ft.Run, client: int) -> Weights:
    return {name: stacked[client] for name, stacked in run.server["params"].items()}


def weights_of(run: ft.Run) -> Tensor:
    """A after every round, as recorded."""
    return torch.tensor([record["monitor"]["weights"] for record in run.records], dtype=torch.float64)


def equals_local(problem: Problem, run: ft.Run, schedule: Sequence[Sequence[int]], lr: float, tolerance: float) -> bool:
    alone = problem.run(Local(lr=lr, epochs=2), schedule)
    return all(
        same(run.personal(i, moment), alone.personal(i, moment), tolerance)
        for i in range(problem.num_clients)
        for moment in ("received", "trained")
    )


# the paper's algorithm


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_case
def test_equals_the_literal_version(case: str, schedule: str) -> None:
    run, told = both(case, schedule)
    start = literal.initialise(PROBLEM, literal.Settings(**{"lr": 0.1} | CASES[case]))
    assert not near_matrix(told.A, start.A, 1e-3)  # A moves
    assert near_matrix(run.server["weights"], told.A)
    assert near_matrix(run.server["velocity"], told.V)
    for i in range(PROBLEM.num_clients):
        assert near(body(run, i), told.theta[i])
        assert near(run.client(i).get("head", {}), told.phi[i])
        assert near(run.personal(i, "trained"), told.trained[i])
        assert near(run.personal(i, "received"), told.received[i])


def test_large_steps_meet_rows_that_cannot_be_divided(problem: Problem) -> None:
    """A row clipped to nothing, and one that sums to less than nothing, keep the value they had."""
    for extra in ({}, {"clip": False, "weight_momentum": 0.5}):
        fields: dict[str, Any] = {"lr": 0.1, "weight_lr": 5.0, "self_adjust": False, "printed_sign": True} | extra
        told = literal.fedapa(problem, PARTIAL, literal.Settings(**fields))
        run = problem.run(FedAPA(**fields), PARTIAL)
        assert told.kept > 0
        assert near_matrix(run.server["weights"], told.A) and near_matrix(run.server["velocity"], told.V)


@each_case
def test_every_field_matters(case: str) -> None:
    """Else the comparison with the literal version would not see the field."""
    usual, other = (both(name, "full")[0].server["weights"] for name in ("defaults", case))
    assert (float((usual - other).abs().max()) > 1e-4) == (case != "defaults")


@each_variant
def test_a_round_by_hand(problem: Problem, variant: Variant) -> None:
    """The raw step is the gradient of J_i by the row, as autograd finds it."""
    start = FULL[:2] if variant == "paper" else [*FULL[:1], [2]]
    code = variant == "code"  # which sets the own weight before the row is used
    method = FedAPA(lr=0.1, weight_lr=0.01, variant=variant, normalize=False, clip=False, self_adjust=code)
    before, after = problem.run(method, start[:1]), problem.run(method, start)
    row = before.server["weights"][2].clone()
    row[2] = 1 if code else row[2]
    row.requires_grad_()
    (slope,) = torch.autograd.grad(proxy(row, before.server["params"], after.server["params"], 2), row)
    carried = 0.9 * before.server["velocity"][2] if code else 0
    wanted = row.detach() - 0.01 * (slope + carried)
    assert float(slope.abs().max()) > 1e-3
    assert near({"A": after.server["weights"][2]}, {"A": wanted}, 1e-12)


# the proxy J_i falls


def proxy(row: Tensor, params: Weights, new: Weights, i: int) -> Tensor:
    """J_i = ½‖Σ_j A_ij θ_j − θ_i‖²."""
    parts = [(torch.tensordot(row, params[n], 1) - new[n][i]).square().sum() for n in params]
    return torch.stack(parts).sum() / 2


def largest_eigenvalue_of_gram(params: Weights) -> float:
    flat = torch.cat([stacked.flatten(1) for stacked in params.values()], 1)
    return float(torch.linalg.eigvalsh(flat @ flat.T)[-1])


@pytest.mark.parametrize("printed_sign", [False, True])
@each_schedule
def test_raw_steps_lower_the_proxy(problem: Problem, schedule: list[list[int]], printed_sign: bool) -> None:
    """J_i is quadratic in the row, so every step below 2/λ_max descends; with the printed sign every step climbs."""
    method = FedAPA(lr=0.1, weight_lr=0.02, printed_sign=printed_sign, clip=False, self_adjust=False, normalize=False)
    servers = [problem.run(method, schedule[:rounds]).server for rounds in range(1, len(schedule) + 1)]
    for (before, after), clients in zip(pairwise(servers), schedule[1:], strict=True):
        assert method.weight_lr < 2 / largest_eigenvalue_of_gram(before["params"])
        for i in clients:
            old, new = (float(proxy(s["weights"][i], before["params"], after["params"], i)) for s in (before, after))
            assert new > old if printed_sign else new < old


# limits


@each_variant
@each_schedule
def test_weights_that_do_not_learn_leave_everyone_alone(
    problem: Problem, schedule: list[list[int]], variant: Variant
) -> None:
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.0, variant=variant), schedule)
    assert equals_local(problem, run, schedule, 0.1, 0.0)
    assert torch.equal(run.server["weights"], torch.eye(5, dtype=torch.float64))


def test_weights_that_learn_do_not(problem: Problem) -> None:
    assert not equals_local(problem, problem.run(FedAPA(lr=0.1, weight_lr=0.05), FULL), FULL, 0.1, 1e-3)


@each_variant
def test_one_client_in_all_is_alone(variant: Variant) -> None:
    problem, schedule = make_problem((8,)), [[0]] * 4
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.05, variant=variant), schedule)
    assert equals_local(problem, run, schedule, 0.1, 0.0)
    if variant == "paper":  # the code normalises before it aggregates, not after it steps
        assert run.server["weights"].tolist() == [[1.0]]


def test_clients_alike_are_alone_whatever_the_weights() -> None:
    """Everyone has the same samples in one batch: all bodies are alike, and rows that sum to 1 give each its own."""
    own = tiny_federation((6,))
    x, y = own.x.numpy(), own.y.numpy()
    fed = ft.Federation.from_arrays([(x[:6], y[:6], x[6:], y[6:])] * 4, classes=3)
    torch.manual_seed(0)
    problem, schedule = Problem(fed, ThreeLayers().double(), batch_size=6), [[0, 1, 2, 3]] * 4
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.05), schedule)
    assert equals_local(problem, run, schedule, 0.1, 1e-10)
    A = run.server["weights"]
    others = A[~torch.eye(4, dtype=torch.bool)]
    assert float(others.min()) > 1e-3 and float(others.max() - others.min()) < 1e-10
    assert float(A.diagonal().max() - A.diagonal().min()) < 1e-10


@each_variant
def test_clients_that_do_not_move_leave_the_weights(problem: Problem, variant: Variant) -> None:
    """With a vanishing rate every upload is the start: the slopes are 0 and everything stays finite."""
    run = problem.run(FedAPA(lr=1e-300, weight_lr=1e3, variant=variant), PARTIAL)
    assert torch.equal(run.server["weights"], torch.eye(5, dtype=torch.float64))
    assert all(near(run.personal(i, m), problem.start, 0.0) for i in range(5) for m in ("received", "trained"))
    assert all(entropy == 0 for record in run.records for entropy in record["monitor"]["entropy"])


@each_variant
def test_a_client_that_never_takes_part_keeps_its_start(problem: Problem, variant: Variant) -> None:
    schedule = [[0, 1, 2, 3], [0, 3], [1, 2, 3], [0, 2]]
    run = problem.run(FedAPA(lr=0.1, weight_lr=0.05, variant=variant), schedule)
    assert run.server["weights"][4].tolist() == [0, 0, 0, 0, 1 if variant == "paper" else 0]
    assert near(body(run, 4), {name: w for name, w in problem.start.items() if not name.startswith("head.")}, 0.0)
    assert all(near(run.personal(4, moment), problem.start, 0.0) for moment in ("received", "trained"))
    assert float(run.server["weights"][:4, 4].max()) > 1e-3  # others may still borrow from it


@pytest.mark.parametrize("weight_lr", [0.05, 1.0, 100.0])
def test_rows_are_shares(problem: Problem, weight_lr: float) -> None:
    """Non-negative and summing to 1 after every round, however large the step."""
    A = weights_of(problem.run(FedAPA(lr=0.1, weight_lr=weight_lr), PARTIAL))
    assert float(A.min()) >= 0
    assert float((A.sum(2) - 1).abs().max()) < 1e-12
    assert float(A.diagonal(dim1=1, dim2=2).min()) < 0.999  # and not only because nothing moves


def test_rows_of_the_absent_never_change(problem: Problem) -> None:
    A = weights_of(problem.run(FedAPA(lr=0.1, weight_lr=0.05, weight_momentum=0.9), PARTIAL))
    for old, new, clients in zip(A, A[1:], PARTIAL[1:], strict=False):
        assert [not torch.equal(old[i], new[i]) for i in range(5)] == [i in clients for i in range(5)]


def test_momentum_of_the_code_moves_rows_of_the_absent(problem: Problem) -> None:
    A = weights_of(problem.run(FedAPA(lr=0.1, weight_lr=0.05, variant="code"), PARTIAL))
    assert 3 not in PARTIAL[3] and not torch.equal(A[2][3], A[3][3])


def test_turns_of_the_code_see_fresh_bodies(problem: Problem) -> None:
    """The order within a round matters there, and not in the paper's variant."""
    for variant, matters in (("paper", False), ("code", True)):
        fields: dict[str, Any] = {"lr": 0.1, "weight_lr": 0.05, "variant": variant}
        forth, back = ([*FULL[:3], order] for order in ([0, 1, 2], [2, 1, 0]))
        one, other = (problem.run(FedAPA(**fields), schedule) for schedule in (forth, back))
        assert near(one.server["params"], other.server["params"], 1e-12) != matters
        told = literal.fedapa(problem, back, literal.Settings(**fields))
        assert near_matrix(other.server["weights"], told.A)
        assert all(near(body(other, i), told.theta[i]) for i in range(problem.num_clients))


# what crosses, and what is recorded


@each_variant
@pytest.mark.parametrize("share", ["body", "all"])
def test_one_shared_part_crosses_each_way(problem: Problem, share: Share, variant: Variant) -> None:
    run = problem.run(FedAPA(lr=0.1, share=share, variant=variant), PARTIAL)
    numbers = sum(w.numel() for w in literal.shared(problem.start, literal.Settings(lr=0.1, share=share)).values())
    for record, clients in zip(run.records, PARTIAL, strict=True):
        for way in ("bytes_up", "bytes_down"):
            assert record["per_client"][way] == dict.fromkeys(clients, 8 * numbers)


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_case
def test_records_equal_the_literal_versions(case: str, schedule: str) -> None:
    """The weights and their entropies after every round, and J_i with the row that was sent and with the new one."""
    run, told = both(case, schedule)
    for r, record in enumerate(run.records):
        assert isinstance(record["monitor"]["weights"], list) and isinstance(record["monitor"]["entropy"], list)
        assert near_matrix(record["monitor"]["weights"], told.weights[r])
        assert near_matrix([record["monitor"]["entropy"]], [[literal.entropy(row) for row in told.weights[r]]])
        assert near_numbers(record["per_client"]["proxy_before"], told.proxy_before[r])
        assert near_numbers(record["per_client"]["proxy_after"], told.proxy_after[r])


# refusals


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"weight_lr": -0.1}, "weight_lr"),
        ({"weight_lr": float("nan")}, "weight_lr"),
        ({"self_weight": 0.0}, "self_weight"),
        ({"self_weight": 1.5}, "self_weight"),
        ({"share": "head"}, "share"),
        ({"variant": "text"}, "variant"),
        ({"weight_momentum": 1.0}, "weight_momentum"),
        ({"weight_momentum": -0.1}, "weight_momentum"),
    ],
)
def test_senseless_fields_are_refused(fields: dict[str, Any], word: str) -> None:
    assert word in refusal(lambda: FedAPA(lr=0.1, **fields))


def test_a_model_without_a_head_has_no_body_to_share(problem: Problem) -> None:
    def go(share: Share) -> ft.Run:
        headless = ft.wrap(problem.net, head=None)
        return ft.simulate(FedAPA(lr=0.1, share=share), headless, problem.fed, schedule=[[0, 1]], batch_size=3)

    assert "head" in refusal(lambda: go("body"))
    assert not go("all").client(0).get("head")
