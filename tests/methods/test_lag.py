"""LAG and FedLAG: literal versions, limiting cases, and the choice of layers."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import error_message, same, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.methods import LAG, FedAvg, FedExP, FedLAG, PFedMe, Scaffold
from support.literal_lag import INNER, LiteralFedAvg, LiteralLAG
from support.problem import FULL, PARTIAL, Problem, Weights, assert_finite, make_identical_clients, make_problem

PROBLEM = make_problem()
EXACT = 1e-10
LAYERS = ("fc1", "fc2", "head")
LAYER_SIZES = (25, 24, 15)  # number of parameters of each layer
BOTH_SCHEDULES = pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
EACH_INNER = pytest.mark.parametrize("name", INNER)


# comparison with the literal versions


def assert_equals_literal(run: ft.Run, literal: LiteralLAG) -> None:
    """Compare all states, personal models, and method metrics."""
    models = {name: torch.stack([own[name] for own in literal.models]) for name in literal.inner.w}
    personal = torch.tensor([at in literal.L_p for at in range(len(LAYERS))])
    owns = torch.tensor([[at in owned for at in range(len(LAYERS))] for owned in literal.owned])
    own = {"models": models, "personal": personal, "conflicts": torch.tensor(literal.GC)}
    own |= {"common": literal.common, "owns": owns}
    assert same(run.server, {"inner": literal.inner.server_state(), **own}, EXACT)
    assert run.server["personal"].dtype == torch.bool
    for client in range(run.num_clients):
        state = {"inner": literal.inner.client_state(client), "params": literal.models[client]}
        assert same(run.client(client), state, EXACT)
        assert same(run.personal(client, "trained"), literal.trained(client), EXACT)
        assert same(run.personal(client, "received"), literal.received(client), EXACT)
    for record, scores, chosen, gains in zip(run.records, literal.scores, literal.history, literal.gains, strict=True):
        if len(record["clients"]) > 1:  # one client has no pairs
            assert record["method_metrics"]["conflicts"] == scores
        assert record["method_metrics"]["personal"] == [int(at in chosen) for at in range(len(LAYERS))]
        found = record["per_client"]["gain_term"]
        assert found.keys() == gains.keys() and all(abs(found[u] - gains[u]) < EXACT for u in gains)


@BOTH_SCHEDULES
@pytest.mark.parametrize("missing", ["common", "own"])
@pytest.mark.parametrize(
    ("lag", "inner"),
    [
        ({"threshold": -0.1, "personal_layers": 1}, {}),
        ({"threshold": 0.9, "personal_layers": 2}, {"epochs": 3, "momentum": 0.9, "weight_decay": 0.01}),
        ({"threshold": 0.3, "personal_layers": 2, "warmup": 0}, {"weights": "size"}),
        ({"threshold": 0.3, "personal_layers": 2, "warmup": 3}, {}),
    ],
    ids=["k=1", "k=2", "no warm-up", "warm-up"],
)
def test_fedlag_equals_literal_version(
    schedule: Sequence[Sequence[int]], missing: Any, lag: dict[str, Any], inner: dict[str, Any]
) -> None:
    """FedLAG is also LAG around FedAvg with uniform weights; layers are chosen after the warm-up."""
    warmup, weights = lag.get("warmup", 1), inner.get("weights", "uniform")
    sgd = {name: value for name, value in inner.items() if name != "weights"}
    fedavg = LiteralFedAvg(PROBLEM, 0.1, **sgd, by_size=weights == "size")
    literal = LiteralLAG(fedavg, lag["personal_layers"], lag["threshold"], warmup, missing=missing).train(schedule)
    assert any(a != b for a, b in pairwise(literal.history))
    first = max(warmup, 1)
    assert [bool(chosen) for chosen in literal.history[:first]] == [False] * (first - 1) + [True]
    lag = lag | {"missing": missing}
    run = PROBLEM.run(FedLAG(lr=0.1, **lag, **inner), schedule)
    assert_equals_literal(run, literal)
    nested = PROBLEM.run(LAG(FedAvg(lr=0.1, weights=weights, **sgd), **lag), schedule)
    assert_equal_runs(run, nested, wrapped=False)


@pytest.mark.parametrize(
    ("which", "k", "expected"),
    [
        ("first", 1, [1, 0, 0]),
        ("first", 2, [1, 1, 0]),
        ("middle", 1, [0, 1, 0]),
        ("middle", 2, [1, 1, 0]),
        ("last", 1, [0, 0, 1]),
        ("last", 2, [0, 1, 1]),
    ],
)
def test_fedlag_with_fixed_layers_equals_literal_version(which: Any, k: int, expected: list[int]) -> None:
    """Fixed layers need neither conflicts, which are rare at this threshold, nor pairs of clients in round 2."""
    schedule = [[0, 1, 2], [3], [0, 3, 4], [1]]
    literal = LiteralLAG(LiteralFedAvg(PROBLEM, 0.1, by_size=False), k, -0.9, 2, which).train(schedule)
    run = PROBLEM.run(FedLAG(lr=0.1, personal_layers=k, threshold=-0.9, warmup=2, layers=which), schedule)
    assert_equals_literal(run, literal)
    assert [record["method_metrics"]["personal"] for record in run.records] == [[0, 0, 0]] + [expected] * 3


@BOTH_SCHEDULES
@EACH_INNER
def test_lag_around_other_methods_equals_literal_version(schedule: Sequence[Sequence[int]], name: str) -> None:
    method, make_literal = INNER[name]
    literal = LiteralLAG(make_literal(PROBLEM), 2, 0.5).train(schedule)
    assert any(literal.history)
    assert_equals_literal(PROBLEM.run(LAG(method, personal_layers=2, threshold=0.5), schedule), literal)


def test_fedlag_client_without_version_of_personal_layer_uses_last_common_one() -> None:
    """The head is personal after round 3; client 4 never trains, and clients 0 and 1 do in round 3."""
    schedule = [[0, 1], [2, 3], [0, 1], [2, 3]]

    def run(rounds: int, missing: Any = "common") -> ft.Run:
        method = FedLAG(lr=0.1, personal_layers=1, layers="last", warmup=3, missing=missing)
        return PROBLEM.run(method, schedule[:rounds])

    def head(found: ft.Run, client: int) -> torch.Tensor:
        return found.personal(client, "received")["head.weight"]

    last_common = run(2).server["inner"]["params"]["head.weight"]  # sent in round 3
    assert torch.equal(head(run(4), 4), last_common)
    assert torch.equal(head(run(4, "own"), 4), PROBLEM.start["head.weight"])
    assert run(4).records[3]["per_client"]["bytes_down"][2] == 8 * sum(
        LAYER_SIZES
    )  # it trained before the head changed
    for missing in ("common", "own"):
        assert torch.equal(head(run(4, missing), 0), run(3).personal(0, "trained")["head.weight"])


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


LIMITS: dict[str, tuple[dict[str, Any], Problem, Sequence[Sequence[int]]]] = {
    "no personal layers": ({"personal_layers": 0}, PROBLEM, PARTIAL),
    "no possible conflict": ({"threshold": -1.0}, PROBLEM, PARTIAL),
    "warm-up longer than run": ({"threshold": 0.9, "warmup": len(PARTIAL) + 1}, PROBLEM, PARTIAL),
    "single client": ({"threshold": 0.9}, make_problem((5,)), [[0]] * 3),
    "identical clients": ({"threshold": 0.999}, make_identical_clients(4, 3), [[0, 1, 2, 3]] * 3),
}


@pytest.mark.parametrize(
    ("limit", "name"), [("no personal layers", name) for name in INNER] + [(limit, "scaffold") for limit in LIMITS][1:]
)
def test_lag_in_limiting_case_equals_inner_method(limit: str, name: str) -> None:
    (fields, problem, schedule), method = LIMITS[limit], INNER[name][0]
    lag = problem.run(LAG(method, **fields), schedule)
    assert_equal_runs(lag, problem.run(method, schedule))
    assert not lag.server["personal"].any()


def test_lag_around_method_without_params_upload_raises() -> None:
    @dataclass(frozen=True)
    class DeltaUpload(FedAvg):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return state, {"delta": message["params"]}

        def trained(self, ctx: ft.ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
            params: Tree = message["params"]
            return params

    message = error_message(lambda: PROBLEM.run(LAG(DeltaUpload()), [[0, 1]]))
    assert "whole model, 'params'" in message and "DeltaUpload" in message


# the choice of layers for given changes

Vectors = Sequence[Sequence[float]]  # one per client


def choose(method: ft.Method, changes: dict[str, Vectors]) -> tuple[list[int], list[int]]:
    """Return the conflicts and the personal layers after round 1.

    In round 1, clients change the first entries of some parameters by the given vectors.
    """
    net = PROBLEM.net
    model, start = ft.wrap(net), {name: weight.detach() for name, weight in net.named_parameters()}
    count = len(next(iter(changes.values())))
    clients, sizes = list(range(count)), torch.ones(count, dtype=torch.long)
    server = method.init_server(ft.Setup(model, start, count, sizes, rounds=5, seed=0))
    trained = {name: weight.repeat(count, *[1] * weight.ndim) for name, weight in start.items()}
    for name, vectors in changes.items():
        for client, vector in enumerate(vectors):
            trained[name][client].view(-1)[: len(vector)] += torch.tensor(vector, dtype=torch.float64)
    sent = method.send(server, clients, 1)
    server = method.receive(
        server, ft.Exchange(1, clients, count, sizes, model, sent, {"params": trained}, sizes.sum())
    )
    return server["conflicts"].tolist(), [int(own) for own in server["personal"]]


FC1, FC2, HEAD = "fc1.weight", "fc2.weight", "head.weight"
ALIGNED: Vectors = [(1.0, 0.0), (2.0, 0.0), (0.5, 0.0)]  # cosines 1, 1, 1
OPPOSED: Vectors = [(1.0, 0.0), (-3.0, 0.0), (0.0, 1.0)]  # cosines −1, 0, 0
STAR: Vectors = [(1.0, 0.0), (-0.5, 0.75**0.5), (-0.5, -(0.75**0.5))]  # cosines −1/2 each
FAN: Vectors = [(1.0, 0.0), (0.6, 0.8), (-0.28, 0.96)]  # cosines 0.6, −0.28, 0.6


ONE_UNCHANGED: Vectors = [(1.0, 0.0), (0.0, 0.0), (0.5, 0.75**0.5)]  # cosine 1/2 and two undefined ones
THREE = {FC1: ALIGNED, FC2: OPPOSED, HEAD: STAR}
EQUAL = {FC1: OPPOSED, FC2: OPPOSED, HEAD: OPPOSED}
CHOICES: list[tuple[float, int | None, dict[str, Vectors], list[int], list[int]]] = [
    # threshold, personal_layers (by default, two of three layers), changes, conflicts, personal layers
    (-0.1, 1, THREE, [0, 1, 3], [0, 0, 1]),
    (-0.1, None, THREE, [0, 1, 3], [0, 1, 1]),
    (-0.6, None, THREE, [0, 1, 0], [0, 1, 0]),  # a layer without conflicts is not chosen
    (0.1, 1, THREE, [0, 3, 3], [0, 0, 1]),
    (0.1, None, THREE, [0, 3, 3], [0, 1, 1]),
    (-1.0, None, THREE, [0, 0, 0], [0, 0, 0]),
    # equal scores: the lower mean cosine, here −1/2 compared with −1/3, then the later layer
    (0.1, 1, {FC1: STAR, FC2: OPPOSED, HEAD: ALIGNED}, [3, 3, 0], [1, 0, 0]),
    (0.1, 1, EQUAL, [3, 3, 3], [0, 0, 1]),
    (0.1, 2, EQUAL, [3, 3, 3], [0, 1, 1]),
    # a client without change has no conflicts at any threshold, and its cosines count as 0 in the mean (1/6 and 0.31)
    (0.9, None, {FC1: ONE_UNCHANGED, FC2: ALIGNED}, [1, 0, 0], [1, 0, 0]),
    (1.0, None, {FC1: [(0.0, 0.0)] * 3}, [0, 0, 0], [0, 0, 0]),
    (0.55, 1, {FC1: ONE_UNCHANGED, FC2: FAN}, [1, 1, 0], [1, 0, 0]),
    # weight and bias of a layer: cosines (9 − 1) / 10 and (9 − 81) / 90
    (-0.1, None, {FC1: [(3.0,), (3.0,)], "fc1.bias": [(1.0,), (-1.0,)]}, [0, 0, 0], [0, 0, 0]),
    (-0.1, None, {FC1: [(3.0,), (3.0,)], "fc1.bias": [(9.0,), (-9.0,)]}, [1, 0, 0], [1, 0, 0]),
]


@pytest.mark.parametrize(("threshold", "k", "changes", "conflicts", "personal"), CHOICES)
def test_lag_chooses_layers_with_most_conflicts(
    threshold: float, k: int | None, changes: dict[str, Vectors], conflicts: list[int], personal: list[int]
) -> None:
    assert choose(FedLAG(lr=0.1, personal_layers=k, threshold=threshold), changes) == (conflicts, personal)


def test_lag_opposite_changes_are_not_below_threshold_of_minus_one() -> None:
    """Rounding errors do not move a cosine out of [−1, 1]."""
    random = np.random.default_rng(0)
    for _ in range(50):
        h = random.normal(size=12)
        vectors = [h.tolist(), (-h).tolist(), (-3 * h).tolist()]
        assert choose(FedLAG(lr=0.1, threshold=-1.0), {FC1: vectors, FC2: vectors}) == ([0, 0, 0], [0, 0, 0])


# method metrics and payloads


def test_lag_does_not_send_control_variates_of_personal_layers() -> None:
    """Uploads contain all layers."""
    run = PROBLEM.run(LAG(Scaffold(), threshold=0.5, missing="own"), PARTIAL)
    personal, saved = [0] * len(LAYERS), 0
    for record in run.records:
        omitted = sum(count for count, own in zip(LAYER_SIZES, personal, strict=True) if own)
        for client in record["clients"]:
            assert record["per_client"]["bytes_down"][client] == 8 * 2 * (sum(LAYER_SIZES) - omitted)
            assert record["per_client"]["bytes_up"][client] == 8 * 2 * sum(LAYER_SIZES)
        saved += omitted
        personal = record["method_metrics"]["personal"]
    assert saved > 0


# edge cases


@pytest.mark.parametrize(
    ("which", "inner"),
    [
        ("conflict", FedExP(lr=1e-300)),
        ("last", Scaffold(lr=1e-300)),
        ("last", PFedMe(lr=1e-300, personal_lr=1e-300, steps=2)),
    ],
)
def test_lag_with_zero_changes_gives_finite_results(which: Any, inner: ft.Method) -> None:
    run = PROBLEM.run(LAG(inner, threshold=1.0, layers=which), PARTIAL)
    assert_finite(run)
    assert not run.server["conflicts"].any()
    assert run.server["personal"].tolist() == ([False] * 3 if which == "conflict" else [False, True, True])
    assert same(run.personal(0, "received"), PROBLEM.start, 1e-12)


def test_lag_normalization_layers_are_never_personal() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        OrderedDict(fc=nn.Linear(4, 6), batch=nn.BatchNorm1d(6), group=nn.GroupNorm(2, 6), head=nn.Linear(6, 3))
    )
    run = Problem(tiny_federation(), net.double()).run(FedLAG(lr=0.1, threshold=0.9), [[0, 1, 2, 3]] * 3)
    assert_finite(run)
    assert len(run.server["personal"]) == 2 and run.server["personal"].sum() == 1  # one of fc and head
    assert {name.split(".")[0] for name in run.server["models"]} == {"fc", "head"}
    first, second = run.personal(0, "received"), run.personal(1, "received")
    for name in first:
        layer = name.split(".")[0]
        own = layer in ("fc", "head") and bool(run.server["personal"][("fc", "head").index(layer)])
        assert torch.equal(first[name], second[name]) != own
