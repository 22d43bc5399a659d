"""LAG, FedLAG, FedExP, and pFedMe: literal versions, limiting cases, and errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import apply_mapped, error_message, same, tiny_federation
from fedtailor.core.trees import Tree, flatten
from fedtailor.methods import LAG, FedAvg, FedExP, FedLAG, FedPer, FedProx, Local, PFedMe, Scaffold
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulated_server import SimulatedServer
from support.literal_lag import Inner, LiteralFedAvg, LiteralFedExP, LiteralLAG, LiteralPFedMe, LiteralScaffold
from support.problem import FULL, PARTIAL, Problem, Weights, make_problem

EXACT = 1e-10
LAYERS = ("fc1", "fc2", "head")
LAYER_SIZES = (25, 24, 15)  # number of parameters of each layer
BOTH_SCHEDULES = pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])

Literal = Callable[[Problem], Inner]
INNER: dict[str, tuple[ft.Method, Literal]] = {
    "FedAvg": (FedAvg(lr=0.1, momentum=0.5), lambda p: LiteralFedAvg(p, 0.1, momentum=0.5)),
    "FedProx": (
        FedProx(lr=0.2, mu=0.5, weight_decay=0.01),
        lambda p: LiteralFedAvg(p, 0.2, mu=0.5, weight_decay=0.01),
    ),
    "Scaffold": (Scaffold(lr=0.1, server_lr=0.7), lambda p: LiteralScaffold(p, 0.1, server_lr=0.7)),
    "FedExP": (FedExP(lr=0.1), lambda p: LiteralFedExP(p, 0.1)),
    "PFedMe": (
        PFedMe(lr=0.03, inner_steps=3, steps=5, beta=0.5),
        lambda p: LiteralPFedMe(p, lr=0.03, inner_steps=3, steps=5, beta=0.5),
    ),
}
EACH_INNER = pytest.mark.parametrize("name", INNER)


# comparison with the literal versions


def inner_states(inner: Inner) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the server state and the client states of an inner method, with the names of the library."""
    clients = range(inner.problem.num_clients)
    if isinstance(inner, LiteralScaffold):
        return {"params": inner.w, "control": inner.c}, [{"control": inner.c_i[i]} for i in clients]
    if isinstance(inner, LiteralPFedMe):
        return {"params": inner.w}, [{"own": inner.theta[i]} for i in clients]
    if isinstance(inner, LiteralFedExP):
        return {"params": inner.w, "previous": inner.previous}, [{} for _ in clients]
    return {"params": inner.w}, [{} for _ in clients]


def assert_models(run: ft.Run, literal: LiteralLAG) -> None:
    for client in range(run.num_clients):
        assert same(run.personal(client, "trained"), literal.trained(client), EXACT)
        assert same(run.personal(client, "received"), literal.received(client), EXACT)


def assert_equals_literal(run: ft.Run, literal: LiteralLAG) -> None:
    """Compare all states, personal models, and method metrics."""
    server, clients = inner_states(literal.inner)
    models = {name: torch.stack([own[name] for own in literal.models]) for name in literal.inner.w}
    personal = torch.tensor([at in literal.L_p for at in range(len(LAYERS))])
    expected = {"inner": server, "models": models, "personal": personal, "conflicts": torch.tensor(literal.GC)}
    assert same(run.server, expected, EXACT)
    assert run.server["personal"].dtype == torch.bool
    for client in range(run.num_clients):
        state = {"inner": clients[client], "params": literal.models[client]}
        assert same(run.client(client), state, EXACT)
    assert_models(run, literal)
    assert_method_metrics(run, literal)


def assert_method_metrics(run: ft.Run, literal: LiteralLAG) -> None:
    for record, scores, chosen, gains in zip(run.records, literal.scores, literal.history, literal.gains, strict=True):
        if len(record["clients"]) > 1:  # one client has no pairs
            assert record["method_metrics"]["conflicts"] == scores
        assert record["method_metrics"]["personal"] == [int(at in chosen) for at in range(len(LAYERS))]
        found = record["per_client"]["gain_term"]
        assert found.keys() == gains.keys() and all(abs(found[u] - gains[u]) < EXACT for u in gains)


@BOTH_SCHEDULES
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("xi", [-0.1, 0.3, 0.9])
def test_fedlag_equals_literal_version(schedule: Sequence[Sequence[int]], k: int, xi: float) -> None:
    problem = make_problem()
    literal = LiteralLAG(LiteralFedAvg(problem, 0.1, by_size=False), k, xi).train(schedule)
    assert any(literal.history) and any(a != b for a, b in zip(literal.history, literal.history[1:], strict=False))
    assert_equals_literal(problem.run(FedLAG(lr=0.1, personal_layers=k, threshold=xi), schedule), literal)


@BOTH_SCHEDULES
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_fedlag_chooses_layers_after_warmup(schedule: Sequence[Sequence[int]], warmup: int) -> None:
    problem = make_problem()
    literal = LiteralLAG(LiteralFedAvg(problem, 0.1, by_size=False), 2, 0.3, warmup).train(schedule)
    first = max(warmup, 1)
    assert [bool(chosen) for chosen in literal.history[:first]] == [False] * (first - 1) + [True]
    assert_equals_literal(problem.run(FedLAG(lr=0.1, threshold=0.3, warmup=warmup), schedule), literal)


@BOTH_SCHEDULES
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_fedlag_with_fields_of_fedavg_equals_literal_version(schedule: Sequence[Sequence[int]], weights: Any) -> None:
    problem = make_problem()
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 3, "momentum": 0.9, "weight_decay": 0.01}
    literal = LiteralLAG(LiteralFedAvg(problem, **settings, by_size=weights == "size"), 1, 0.3).train(schedule)
    assert any(literal.history)
    assert_equals_literal(
        problem.run(FedLAG(**settings, weights=weights, personal_layers=1, threshold=0.3), schedule), literal
    )


@BOTH_SCHEDULES
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_fixed_layers_equal_literal_version(schedule: Sequence[Sequence[int]], k: int, which: Any) -> None:
    problem = make_problem()
    # most layers have no conflict at this threshold, which has no effect on fixed layers
    literal = LiteralLAG(LiteralFedAvg(problem, 0.1, by_size=False), k, -0.9, 2, which).train(schedule)
    method = FedLAG(lr=0.1, personal_layers=k, threshold=-0.9, warmup=2, layers=which)
    run = problem.run(method, schedule)
    assert_equals_literal(run, literal)
    expected = {"first": [1, 1, 0], "middle": [1, 1, 0], "last": [0, 1, 1]}[which]
    if k == 1:
        expected = {"first": [1, 0, 0], "middle": [0, 1, 0], "last": [0, 0, 1]}[which]
    assert [record["method_metrics"]["personal"] for record in run.records] == [[0, 0, 0]] + [expected] * (
        len(schedule) - 1
    )


@BOTH_SCHEDULES
@EACH_INNER
@pytest.mark.parametrize("k", [1, 2])
def test_lag_around_other_methods_equals_literal_version(schedule: Sequence[Sequence[int]], name: str, k: int) -> None:
    problem = make_problem()
    method, make_literal = INNER[name]
    literal = LiteralLAG(make_literal(problem), k, 0.5).train(schedule)
    assert any(literal.history)
    assert_equals_literal(problem.run(LAG(method, personal_layers=k, threshold=0.5), schedule), literal)


@BOTH_SCHEDULES
@pytest.mark.parametrize("fields", [{}, {"weights": "size", "momentum": 0.5, "average_last": False, "epsilon": 0.01}])
def test_lag_around_fedexp_with_other_fields_equals_literal_version(
    schedule: Sequence[Sequence[int]], fields: dict[str, Any]
) -> None:
    problem = make_problem()
    own = {name: value for name, value in fields.items() if name != "weights"}
    inner = LiteralFedExP(problem, 0.3, by_size="weights" in fields, **own)
    literal = LiteralLAG(inner, 2, 0.5).train(schedule)
    assert any(literal.history) and max(inner.steps) > 1
    assert_equals_literal(
        problem.run(LAG(FedExP(lr=0.3, **fields), personal_layers=2, threshold=0.5), schedule), literal
    )


def assert_equals_unwrapped(run: ft.Run, literal: LiteralLAG) -> None:
    """Compare a method without LAG; its literal version has no personal layers."""
    server, clients = inner_states(literal.inner)
    assert same(run.server, server, EXACT)
    assert all(same(run.client(client), clients[client], EXACT) for client in range(run.num_clients))
    assert_models(run, literal)


@BOTH_SCHEDULES
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("epsilon", [0.001, 10.0])
@pytest.mark.parametrize("average_last", [True, False])
def test_fedexp_equals_literal_version(
    schedule: Sequence[Sequence[int]], weights: Any, epsilon: float, average_last: bool
) -> None:
    problem = make_problem()
    settings: dict[str, Any] = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01, "epsilon": epsilon}
    inner = LiteralFedExP(problem, by_size=weights == "size", average_last=average_last, **settings)
    literal = LiteralLAG(inner, 0).train(schedule)
    assert (max(inner.steps) > 1) == (epsilon < 1)  # the server extrapolates unless ε is large
    assert_equals_unwrapped(
        problem.run(FedExP(weights=weights, average_last=average_last, **settings), schedule), literal
    )


@BOTH_SCHEDULES
@pytest.mark.parametrize(
    "fields",
    [
        {
            "lr": 0.005,
            "personal_lr": 0.09,
            "lam": 15.0,
            "inner_steps": 5,
            "steps": 20,
            "beta": 1.0,
        },  # values of the paper
        {"lr": 0.1, "personal_lr": 0.05, "lam": 2.0, "inner_steps": 3, "steps": 7, "beta": 0.5},
    ],
)
def test_pfedme_equals_literal_version(schedule: Sequence[Sequence[int]], fields: dict[str, Any]) -> None:
    problem = make_problem()
    literal = LiteralLAG(LiteralPFedMe(problem, **fields), 0).train(schedule)
    assert_equals_unwrapped(problem.run(PFedMe(**fields), schedule), literal)


# limiting cases


def models(run: ft.Run) -> list[Weights]:
    return [run.personal(client, moment) for client in range(run.num_clients) for moment in ("received", "trained")]


def assert_equal_runs(lag: ft.Run, inner: ft.Run, wrapped: bool = True) -> None:
    """Compare server, models, and records bit by bit, except for times and the metrics of LAG."""
    assert same(lag.server["inner"] if wrapped else lag.server, inner.server)
    assert all(same(a, b) for a, b in zip(models(lag), models(inner), strict=True))
    for one, other in zip(lag.records, inner.records, strict=True):
        assert one["accuracy_received"] is not None and one["accuracy_trained"] is not None
        for name in other.keys() - {"seconds", "seconds_evaluating", "method_metrics", "per_client"}:
            assert one[name] == other[name], name
        for name in other["per_client"]:
            assert one["per_client"][name] == other["per_client"][name], name


@BOTH_SCHEDULES
@EACH_INNER
def test_lag_without_personal_layers_equals_inner_method(schedule: Sequence[Sequence[int]], name: str) -> None:
    problem, method = make_problem(), INNER[name][0]
    assert_equal_runs(problem.run(LAG(method, personal_layers=0), schedule), problem.run(method, schedule))


@EACH_INNER
def test_lag_without_possible_conflict_equals_inner_method(name: str) -> None:
    problem, method = make_problem(), INNER[name][0]
    assert_equal_runs(problem.run(LAG(method, threshold=-1.0), PARTIAL), problem.run(method, PARTIAL))


@EACH_INNER
def test_lag_with_warmup_longer_than_run_equals_inner_method(name: str) -> None:
    problem, method = make_problem(), INNER[name][0]
    lag = LAG(method, threshold=0.9, warmup=len(PARTIAL) + 1)
    assert_equal_runs(problem.run(lag, PARTIAL), problem.run(method, PARTIAL))


@EACH_INNER
def test_lag_with_single_client_equals_inner_method(name: str) -> None:
    problem, method = make_problem((5,)), INNER[name][0]
    lag = problem.run(LAG(method, threshold=0.9), [[0]] * 3)
    assert_equal_runs(lag, problem.run(method, [[0]] * 3))
    assert not lag.server["personal"].any()


def test_fixed_layers_need_no_pairs() -> None:
    """In rounds of one client, the last layer is personal, too."""
    run = make_problem().run(FedLAG(lr=0.2, layers="last", personal_layers=1), [[0], [1], [2], [0]])
    assert run.server["personal"].tolist() == [False, False, True]
    heads = [run.personal(client, "received")["head.weight"] for client in range(3)]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


def test_lag_around_method_without_params_upload_raises() -> None:
    @dataclass(frozen=True)
    class DeltaUpload(FedAvg):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return state, {"delta": message["params"]}

        def trained(self, ctx: ft.ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
            params: Tree = message["params"]
            return params

    message = error_message(lambda: make_problem().run(LAG(DeltaUpload()), [[0, 1]]))
    assert "whole model, 'params'" in message and "DeltaUpload" in message


@BOTH_SCHEDULES
@pytest.mark.parametrize("fields", [{}, {"momentum": 0.9, "weight_decay": 0.01, "epochs": 1}])
def test_fedlag_equals_lag_around_uniform_fedavg(schedule: Sequence[Sequence[int]], fields: dict[str, Any]) -> None:
    problem = make_problem()
    flat = problem.run(FedLAG(lr=0.2, threshold=0.3, **fields), schedule)
    nested = problem.run(LAG(FedAvg(lr=0.2, weights="uniform", **fields), threshold=0.3), schedule)
    assert any(any(record["method_metrics"]["personal"]) for record in flat.records)
    assert_equal_runs(flat, nested, wrapped=False)
    assert all(a["method_metrics"] == b["method_metrics"] for a, b in zip(flat.records, nested.records, strict=True))


def test_fedlag_with_size_weights_equals_lag_around_fedavg() -> None:
    problem = make_problem()
    flat = problem.run(FedLAG(lr=0.2, threshold=0.3, weights="size"), FULL)
    assert_equal_runs(flat, problem.run(LAG(FedAvg(lr=0.2), threshold=0.3), FULL), wrapped=False)
    assert not same(flat.server["inner"], problem.run(FedLAG(lr=0.2, threshold=0.3), FULL).server["inner"], 1e-6)


def test_fedlag_with_personal_last_layer_equals_fedper() -> None:
    """The layer is chosen after round 1, so no client starts from an averaged head."""
    problem = make_problem()
    lag = problem.run(FedLAG(lr=0.1, personal_layers=1, layers="last", weights="size"), PARTIAL)
    per = problem.run(FedPer(lr=0.1), PARTIAL)
    assert all(same(a, b, 1e-12) for a, b in zip(models(lag), models(per), strict=True))


def test_fedexp_with_large_epsilon_equals_fedavg() -> None:
    problem = make_problem()
    exp = problem.run(FedExP(lr=0.2, epsilon=1e9), PARTIAL)
    assert same(exp.server["params"], problem.run(FedAvg(lr=0.2, weights="uniform"), PARTIAL).server["params"], 1e-12)


def test_pfedme_with_one_inner_step_and_full_move_equals_fedavg() -> None:
    """With ηλ ≈ 1, w_i moves to θ̃, and the proximal term is 0 in the only step: SGD with learning rate η_p."""
    problem, schedule = make_problem((6, 4, 5)), [[0, 1, 2], [0, 2], [1, 2]]  # two batches per epoch for all clients
    me = problem.run(PFedMe(lr=0.25 - 1e-14, lam=4.0, personal_lr=0.1, inner_steps=1, steps=6), schedule)
    assert same(me.server["params"], problem.run(FedAvg(lr=0.1, epochs=3), schedule).server["params"], EXACT)


@EACH_INNER
def test_lag_under_vmap_equals_sequential(name: str) -> None:
    """Sequential and vectorized execution agree while layers are personal."""
    problem, clients = make_problem(), [0, 1, 2, 3, 4]
    settings = TrainingConfig(batch_size=3, engine="sequential", device="cpu", dtype="float64")
    method = LAG(INNER[name][0], threshold=0.5)
    simulated = SimulatedServer.build(settings, method, ft.wrap(problem.net), problem.fed, FULL)
    simulated.train_round(1, clients)
    assert simulated.state["personal"].any()
    states, sent = simulated.states.get(clients, simulated.device), method.send(simulated.state, clients, 2)
    for function in (simulated._train, method.personalize):
        sequential = simulated.engine.apply(function, 2, clients, states, sent)
        assert same(
            sequential,
            apply_mapped(simulated.shared, simulated.train, function, 2, clients, states, sent),
            1e-9,
        )


# the choice of layers for given changes

Vectors = Sequence[Sequence[float]]  # one per client


def choose(method: ft.Method, changes: dict[str, Vectors]) -> tuple[list[int], list[int]]:
    """Return the conflicts and the personal layers after round 1.

    In round 1, clients change the first entries of some parameters by the given vectors.
    """
    net = make_problem().net
    model, start = ft.wrap(net), {name: weight.detach() for name, weight in net.named_parameters()}
    count = len(next(iter(changes.values())))
    clients, sizes = list(range(count)), torch.ones(count, dtype=torch.long)
    server = method.init_server(ft.Setup(model, start, count, sizes, rounds=5, seed=0))
    trained = {name: weight.repeat(count, *[1] * weight.ndim) for name, weight in start.items()}
    for name, vectors in changes.items():
        for client, vector in enumerate(vectors):
            trained[name][client].view(-1)[: len(vector)] += torch.tensor(vector, dtype=torch.float64)
    sent = method.send(server, clients, 1)
    server = method.receive(server, ft.Exchange(1, clients, count, sizes, model, sent, {"params": trained}))
    return server["conflicts"].tolist(), [int(own) for own in server["personal"]]


FC1, FC2, HEAD = "fc1.weight", "fc2.weight", "head.weight"
ALIGNED: Vectors = [(1.0, 0.0), (2.0, 0.0), (0.5, 0.0)]  # cosines 1, 1, 1
OPPOSED: Vectors = [(1.0, 0.0), (-3.0, 0.0), (0.0, 1.0)]  # cosines −1, 0, 0
STAR: Vectors = [(1.0, 0.0), (-0.5, 0.75**0.5), (-0.5, -(0.75**0.5))]  # cosines −1/2 each
FAN: Vectors = [(1.0, 0.0), (0.6, 0.8), (-0.28, 0.96)]  # cosines 0.6, −0.28, 0.6


@pytest.mark.parametrize(
    ("threshold", "conflicts", "one", "two"),
    [
        (-0.1, [0, 1, 3], [0, 0, 1], [0, 1, 1]),
        (-0.6, [0, 1, 0], [0, 1, 0], [0, 1, 0]),  # a layer without conflicts is not chosen
        (0.1, [0, 3, 3], [0, 0, 1], [0, 1, 1]),
        (-1.0, [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_layers_with_most_conflicts_are_chosen(
    threshold: float, conflicts: list[int], one: list[int], two: list[int]
) -> None:
    changes = {FC1: ALIGNED, FC2: OPPOSED, HEAD: STAR}
    assert choose(FedLAG(lr=0.1, personal_layers=1, threshold=threshold), changes) == (conflicts, one)
    assert choose(FedLAG(lr=0.1, threshold=threshold), changes) == (conflicts, two)  # by default, two of three layers


def test_equal_scores_prefer_lower_mean_cosine_then_later_layer() -> None:
    one = FedLAG(lr=0.1, personal_layers=1, threshold=0.1)
    assert choose(one, {FC1: STAR, FC2: OPPOSED, HEAD: ALIGNED}) == ([3, 3, 0], [1, 0, 0])  # −1/2 compared with −1/3
    assert choose(one, {FC1: OPPOSED, FC2: OPPOSED, HEAD: OPPOSED}) == ([3, 3, 3], [0, 0, 1])
    two = FedLAG(lr=0.1, personal_layers=2, threshold=0.1)
    assert choose(two, {FC1: OPPOSED, FC2: OPPOSED, HEAD: OPPOSED}) == ([3, 3, 3], [0, 1, 1])


def test_client_without_change_has_no_conflicts() -> None:
    """This holds for any threshold."""
    one_unchanged: Vectors = [(1.0, 0.0), (0.0, 0.0), (0.5, 0.75**0.5)]
    assert choose(FedLAG(lr=0.1, threshold=0.9), {FC1: one_unchanged, FC2: ALIGNED}) == ([1, 0, 0], [1, 0, 0])
    assert choose(FedLAG(lr=0.1, threshold=1.0), {FC1: [(0.0, 0.0)] * 3}) == ([0, 0, 0], [0, 0, 0])


def test_mean_cosine_counts_undefined_pairs_as_zero() -> None:
    one_unchanged: Vectors = [
        (1.0, 0.0),
        (0.0, 0.0),
        (0.5, 0.75**0.5),
    ]  # mean cosine 1/6; without undefined pairs, it would be 1/2
    method = FedLAG(lr=0.1, threshold=0.55, personal_layers=1)
    assert choose(method, {FC1: one_unchanged, FC2: FAN}) == ([1, 1, 0], [1, 0, 0])  # 1/6 is below FAN's 0.31


def test_conflict_uses_weight_and_bias_of_layer() -> None:
    method = FedLAG(lr=0.1)
    for size, conflicts in ((1.0, 0), (9.0, 1)):  # cosines (9 − 1) / 10 and (9 − 81) / 90
        changes: dict[str, Vectors] = {FC1: [(3.0,), (3.0,)], "fc1.bias": [(size,), (-size,)]}
        assert choose(method, changes) == ([conflicts, 0, 0], [conflicts, 0, 0])


def test_opposite_changes_are_not_below_threshold_of_minus_one() -> None:
    """Rounding errors do not move a cosine out of [−1, 1]."""
    random = np.random.default_rng(0)
    for _ in range(50):
        h = random.normal(size=12)
        vectors = [h.tolist(), (-h).tolist(), (-3 * h).tolist()]
        assert choose(FedLAG(lr=0.1, threshold=-1.0), {FC1: vectors, FC2: vectors}) == ([0, 0, 0], [0, 0, 0])


# method metrics and payloads


@BOTH_SCHEDULES
@EACH_INNER
def test_mean_gain_term_is_never_positive(schedule: Sequence[Sequence[int]], name: str) -> None:
    """Lemma 5.1 holds for the mean over clients, not for each client."""
    run = make_problem().run(LAG(INNER[name][0], threshold=0.5), schedule)
    means = []
    for record in run.records:
        gains = record["per_client"]["gain_term"]
        assert sorted(gains) == sorted(record["clients"])
        means.append(sum(gains.values()) / len(gains))
        if not any(record["method_metrics"]["personal"]) or len(gains) == 1:
            assert all(abs(gain) < EXACT for gain in gains.values())
    assert max(means) < 1e-12 and min(means) < -1e-6


@BOTH_SCHEDULES
@pytest.mark.parametrize(("method", "trees"), [(FedAvg(weights="uniform"), 1), (Scaffold(), 2)])
def test_personal_layers_are_not_sent(schedule: Sequence[Sequence[int]], method: ft.Method, trees: int) -> None:
    """The control variate of a personal layer is not sent either; uploads contain all layers."""
    run = make_problem().run(LAG(method, threshold=0.5), schedule)
    personal, saved = [0] * len(LAYERS), 0
    for record in run.records:
        omitted = sum(count for count, own in zip(LAYER_SIZES, personal, strict=True) if own)
        for client in record["clients"]:
            assert record["per_client"]["bytes_down"][client] == 8 * trees * (sum(LAYER_SIZES) - omitted)
            assert record["per_client"]["bytes_up"][client] == 8 * trees * sum(LAYER_SIZES)
        saved += omitted
        personal = record["method_metrics"]["personal"]
    assert saved > 0


# edge cases


def assert_finite(run: ft.Run) -> None:
    trees = [run.server, *(run.client(client) for client in range(run.num_clients)), *models(run)]
    assert all(bool(torch.isfinite(leaf).all()) for tree in trees for leaf in flatten(tree).values())
    gains = [gain for record in run.records for gain in record["per_client"]["gain_term"].values()]
    assert gains and bool(torch.isfinite(torch.tensor(gains)).all())


@EACH_INNER
def test_client_without_participation_keeps_initial_personal_layers(name: str) -> None:
    problem, method = make_problem(), LAG(INNER[name][0], threshold=0.9)
    run = problem.run(method, [[0, 1, 2], [0, 2, 4], [1, 2, 4]])
    assert_finite(run)
    layers = [layer for layer, own in zip(LAYERS, run.server["personal"], strict=True) if own]
    assert len(layers) == 2
    for parameter, weight in problem.start.items():
        assert torch.equal(run.server["models"][parameter][3], weight)
        assert torch.equal(run.client(3)["params"][parameter], weight)
        if parameter.split(".")[0] in layers:
            assert torch.equal(run.personal(3, "received")[parameter], weight)


def make_identical_clients(count: int) -> Problem:
    """Create clients with the same three samples in one batch, so that their changes are equal."""
    one = tiny_federation((3,))
    x, y = one.x[one.train[0]].numpy(), one.y[one.train[0]].numpy()
    torch.manual_seed(0)
    return Problem(ft.Federation.from_arrays([(x, y, x, y)] * count, classes=3), make_problem().net)


@EACH_INNER
def test_identical_clients_have_no_conflicts(name: str) -> None:
    problem, method = make_identical_clients(4), INNER[name][0]
    schedule = [[0, 1, 2, 3]] * 3
    run = problem.run(LAG(method, threshold=0.999), schedule)
    assert_finite(run)
    assert not run.server["conflicts"].any() and not run.server["personal"].any()
    assert_equal_runs(run, problem.run(method, schedule))


@pytest.mark.parametrize("which", ["conflict", "last"])
@pytest.mark.parametrize("inner", [FedAvg, FedProx, Scaffold, FedExP, PFedMe])
def test_zero_changes_give_finite_results(which: Any, inner: type[ft.Method]) -> None:
    problem = make_problem()
    small: dict[str, Any] = {"lr": 1e-300} | ({"personal_lr": 1e-300, "steps": 2} if inner is PFedMe else {})
    run = problem.run(LAG(inner(**small), threshold=1.0, layers=which), PARTIAL)
    assert_finite(run)
    assert not run.server["conflicts"].any()
    assert run.server["personal"].tolist() == ([False] * 3 if which == "conflict" else [False, True, True])
    assert same(run.personal(0, "received"), problem.start, 1e-12)


class NormalizedNet(nn.Module):
    """Two linear layers with batch normalization and group normalization between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.batch = nn.BatchNorm1d(6)
        self.group = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.group(self.batch(self.fc(x)))))  # type: ignore[no-any-return]


def test_normalization_layers_are_never_personal() -> None:
    torch.manual_seed(0)
    run = ft.simulate(
        FedLAG(lr=0.1, threshold=0.9), NormalizedNet().double(), tiny_federation(), schedule=[[0, 1, 2, 3]] * 3,
        batch_size=3, dtype=torch.float64,
    )  # fmt: skip
    assert_finite(run)
    assert len(run.server["personal"]) == 2 and run.server["personal"].sum() == 1  # one of fc and head
    assert {name.split(".")[0] for name in run.server["models"]} == {"fc", "head"}
    first, second = run.personal(0, "received"), run.personal(1, "received")
    for name in first:
        layer = name.split(".")[0]
        own = layer in ("fc", "head") and bool(run.server["personal"][("fc", "head").index(layer)])
        assert torch.equal(first[name], second[name]) != own


def test_model_with_one_layer_has_no_personal_layers() -> None:
    torch.manual_seed(0)
    net, fed = ft.wrap(nn.Sequential(nn.Linear(4, 3)).double(), head="0"), tiny_federation()
    settings: dict[str, Any] = {"schedule": [[0, 1, 2, 3]] * 2, "dtype": torch.float64}
    lag = ft.simulate(FedLAG(lr=0.1, threshold=0.9), net, fed, **settings)
    assert_equal_runs(lag, ft.simulate(FedAvg(lr=0.1, weights="uniform"), net, fed, **settings))
    assert "personal_layers" in error_message(
        lambda: ft.simulate(FedLAG(lr=0.1, personal_layers=1), net, fed, **settings)
    )


# errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedLAG(lr=0.1, personal_layers=3), "personal_layers"),
        (lambda: FedLAG(lr=0.1, personal_layers=7), "personal_layers"),
        (lambda: LAG(FedAvg(), personal_layers=3), "personal_layers"),
        (lambda: FedLAG(lr=0.1, personal_layers=-1), "personal_layers"),
        (lambda: LAG(FedAvg(), personal_layers=1.5), "personal_layers"),  # type: ignore[arg-type]
        (lambda: FedLAG(lr=0.1, threshold=1.1), "threshold"),
        (lambda: FedLAG(lr=0.1, threshold=-1.1), "threshold"),
        (lambda: LAG(FedAvg(), threshold=float("nan")), "threshold"),
        (lambda: FedLAG(lr=0.1, warmup=-1), "warmup"),
        (lambda: LAG(FedAvg(), warmup=-1), "warmup"),
        (lambda: FedLAG(lr=0.1, layers="outer"), "layers"),  # type: ignore[arg-type]
        (lambda: LAG(FedAvg(), layers="outer"), "layers"),  # type: ignore[arg-type]
        (lambda: FedLAG(lr=0.1, weights="equal"), "weights"),  # type: ignore[arg-type]
        (lambda: FedLAG(lr=0.0), "lr"),
        (lambda: LAG("fedavg"), "inner"),  # type: ignore[arg-type]
        (lambda: LAG(FedAvg), "inner"),  # type: ignore[arg-type]
        (lambda: LAG(Local()), "Local"),
        (lambda: LAG(FedPer()), "FedPer"),
        (lambda: LAG(LAG(FedAvg())), "LAG"),
        (lambda: FedExP(epsilon=-1.0), "epsilon"),
        (lambda: FedExP(weights="equal"), "weights"),  # type: ignore[arg-type]
        (lambda: PFedMe(lam=-1.0), "lam"),
        (lambda: PFedMe(personal_lr=0.0), "personal_lr"),
        (lambda: PFedMe(inner_steps=0), "inner_steps"),
        (lambda: PFedMe(steps=0), "steps"),
        (lambda: PFedMe(beta=-0.5), "beta"),
    ],
)
def test_invalid_fields_raise_before_round_1(make: Callable[[], ft.Method], message: str) -> None:
    """Some errors are raised by the constructor, others when the number of layers is known."""
    records: list[Any] = []
    problem = make_problem()

    def simulate() -> None:
        ft.simulate(make(), problem.net, problem.fed, schedule=FULL, on_round_end=records.append)

    assert message in error_message(simulate)
    assert not records
