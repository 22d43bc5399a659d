"""Tests of unreliable clients: how often they are away, late, or drop out, and that their state is unchanged."""

import tomllib
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import METHOD_PARAMS, REPRESENTATIVE_METHODS, all_same, error_message, models, same, tiny_federation
from fedtailor.core.trees import flatten
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.methods import METHODS
from fedtailor.runs.toml import to_toml
from fedtailor.training.participation import make_schedule
from fedtailor.training.unreliable import read_trace

SIZES = (9, 4, 7, 1, 6, 3)  # training samples per client, 5 on average
HEAVY = ft.Unreliable(away=0.5, dropout=0.3, deadline=1.0, speeds=0.5, jitter=0.5)


def simulate(net: nn.Module, method: ft.Method, **settings: Any) -> ft.Run:
    defaults: dict[str, Any] = {"batch_size": 4, "dtype": torch.float64, "engine": "sequential", "device": "cpu"}
    return ft.simulate(method, net, tiny_federation(SIZES), **(defaults | settings))


def is_likely(count: float, draws: int, fraction: float) -> bool:
    """Whether a count of successes is within five standard deviations of the expected one."""
    return abs(count - draws * fraction) <= 5 * sqrt(draws * fraction * (1 - fraction))


# Availability


@pytest.mark.parametrize("participation", [1.0, 0.3, (0.2, 0.9)])
def test_schedule_default_is_plain_draw(participation: Any) -> None:
    low, high = participation if isinstance(participation, tuple) else (participation, participation)
    for number, clients in enumerate(make_schedule(20, 8, participation, seed=5, unreliable=ft.Unreliable())):
        random = np.random.default_rng([5, 4, number])
        count = max(1, round(random.uniform(low, high) * 20))
        assert clients == sorted(random.choice(20, count, replace=False).tolist())


@pytest.mark.parametrize("away", [0.1, 0.5, 0.9])
def test_away_at_random_has_given_fraction(away: float) -> None:
    unreliable, rounds, clients = ft.Unreliable(away=away), 200, 300
    available = np.zeros((rounds, clients), dtype=bool)
    for number in range(rounds):
        available[number, unreliable.available(clients, number + 1, seed=0)] = True
    assert is_likely(available.sum(), available.size, 1 - away)
    # Rounds are independent: an available client is available again as often as any other.
    again = (available[1:] & available[:-1]).sum()
    assert is_likely(again, available[1:].size, (1 - away) ** 2)
    assert 0 < available.mean(0).min() < available.mean(0).max() < 1  # no client is always away


@pytest.mark.parametrize(("away", "day"), [(0.25, 24), (0.5, 7), (0.9, 10), (0.02, 5)])
def test_away_by_day_is_one_interval_at_fixed_hour(away: float, day: int) -> None:
    unreliable, clients = ft.Unreliable(away=away, day=day), 400
    available = np.zeros((3 * day, clients), dtype=bool)
    for number in range(3 * day):
        available[number, unreliable.available(clients, number + 1, seed=1)] = True
    first, others = available[:day], available[day:]
    assert np.array_equal(np.concatenate([first, first]), others)  # every day is the same
    missing = (~first).sum(0)
    assert set(missing) <= {int(away * day), int(away * day) + 1}
    leaves = (first & ~np.roll(first, -1, axis=0)).sum(0)  # available in one round, away in the next
    assert leaves.max() == 1  # one interval
    assert is_likely((~first[0]).sum(), clients, away)  # the hours of clients differ
    if away * day > 1:
        assert len({tuple(pattern) for pattern in first.T.tolist()}) >= day  # in every round, some clients leave


def test_schedule_selects_from_available_clients() -> None:
    unreliable = ft.Unreliable(away=0.5)
    schedule = make_schedule(20, 200, participation=0.5, seed=3, unreliable=unreliable)
    counts = set()
    for number, clients in enumerate(schedule, start=1):
        available = unreliable.available(20, number, seed=3)
        assert set(clients) <= set(available) and clients == sorted(clients)
        assert len(clients) == min(10, len(available))
        counts.add(len(available) > 10)
    assert counts == {True, False}


def test_given_schedule_omits_unavailable_clients() -> None:
    unreliable = ft.Unreliable(trace=[[0, 2], [1]])
    schedule = [[2, 1, 0], [1, 2], [1, 3], [0]]
    assert make_schedule(4, schedule=schedule, unreliable=unreliable) == [[2, 0], [1], [], []]


def test_schedule_of_longer_run_starts_same_and_other_seed_differs() -> None:
    for unreliable in (ft.Unreliable(away=0.4), ft.Unreliable(away=0.4, day=5)):
        schedule = make_schedule(30, 10, 0.5, seed=2, unreliable=unreliable)
        assert make_schedule(30, 25, 0.5, seed=2, unreliable=unreliable)[:10] == schedule
        all_available = [make_schedule(30, 10, 1.0, seed=seed, unreliable=unreliable) for seed in (2, 4)]
        assert all_available[0] != all_available[1]
    sizes = np.arange(1, 31)
    missed = [HEAVY.missed(range(30), sizes, 1, seed) for seed in range(5)]
    assert len({str(found) for found in missed}) == 5


@pytest.mark.parametrize(
    ("trace", "words"),
    [([[], []], "lower unreliable.away"), ([[0], [6]], "client 6 in round 2; clients are numbered 0 to 5")],
)
def test_trace_without_clients_or_with_unknown_client_raises(
    trace: list[list[int]], words: str, net: nn.Module
) -> None:
    unreliable = ft.Unreliable(trace=trace)
    assert words in error_message(lambda: simulate(net, ft.methods.FedAvg(), rounds=3, unreliable=unreliable))


# Late clients and dropout


def test_times_match_manual_values() -> None:
    """A client's time is its samples over the mean, divided by its speed."""
    sizes = np.array(SIZES)
    assert ft.Unreliable().times(sizes, 1, seed=0).tolist() == [9 / 5, 4 / 5, 7 / 5, 1 / 5, 6 / 5, 3 / 5]
    missed = ft.Unreliable(deadline=1.2).missed([0, 2, 3, 4], sizes, 1, seed=0)
    assert missed == {0: "late", 2: "late"}  # 6/5 is just in time, and clients 1 and 5 were not selected
    sizes = np.arange(1, 51)
    all_missed = HEAVY.missed(range(50), sizes, 3, seed=1)
    some_missed = HEAVY.missed([4, 30, 44], sizes, 3, seed=1)
    assert some_missed == {client: why for client, why in all_missed.items() if client in (4, 30, 44)}


def test_speeds_are_log_normal_and_constant() -> None:
    sizes = np.arange(1, 3001)
    unreliable = ft.Unreliable(speeds=0.7, deadline=2.0)
    times = unreliable.times(sizes, 1, seed=0)
    speeds = np.log(sizes / sizes.mean() / times)
    assert abs(speeds.mean()) < 5 * 0.7 / sqrt(3000)
    assert abs(speeds.std() - 0.7) < 5 * 0.7 / sqrt(2 * 3000)
    assert all(np.array_equal(times, unreliable.times(sizes, number, seed=0)) for number in (2, 50))
    late = unreliable.missed(range(3000), sizes, 7, seed=0)
    assert sorted(late) == np.flatnonzero(times > 2.0).tolist() and set(late.values()) == {"late"}


def test_jitter_is_independent_between_rounds() -> None:
    sizes = np.full(500, 20)
    steady, shaken = ft.Unreliable(speeds=1.0, deadline=1.0), ft.Unreliable(speeds=1.0, jitter=0.3, deadline=1.0)
    changes = np.log([shaken.times(sizes, number, 0) / steady.times(sizes, number, 0) for number in range(1, 41)])
    assert abs(changes.mean()) < 5 * 0.3 / sqrt(changes.size)
    assert abs(changes.std() - 0.3) < 5 * 0.3 / sqrt(2 * changes.size)
    assert abs((changes[1:] * changes[:-1]).mean()) < 5 * 0.3**2 / sqrt(changes.size)  # uncorrelated


def test_dropout_has_given_fraction_and_is_independent_of_lateness() -> None:
    sizes, rounds = np.random.default_rng(0).integers(1, 100, 1000), range(1, 41)
    both = ft.Unreliable(dropout=0.3, deadline=0.9, speeds=0.5)
    dropout_only, slow = ft.Unreliable(dropout=0.3), ft.Unreliable(deadline=0.9, speeds=0.5)
    late = set(slow.missed(range(1000), sizes, 1, seed=0))
    assert 200 < len(late) < 800
    dropped = {number: both.missed(range(1000), sizes, number, seed=0) for number in rounds}
    broke = {number: {c for c, why in missed.items() if why == "dropped out"} for number, missed in dropped.items()}
    assert is_likely(sum(map(len, broke.values())), 1000 * len(rounds), 0.3)
    assert is_likely(sum(len(found & late) for found in broke.values()), len(late) * len(rounds), 0.3)
    for number in rounds:
        assert broke[number] == set(dropout_only.missed(range(1000), sizes, number, seed=0))
        assert dropped[number].keys() == broke[number] | late
    assert is_likely(len(broke[1] & broke[2]), 1000, 0.3**2)
    available = {number: ft.Unreliable(away=0.5).available(1000, number, seed=0) for number in rounds}
    selected = sum(map(len, available.values()))
    assert is_likely(sum(len(broke[number].intersection(available[number])) for number in rounds), selected, 0.3)


# Effect on clients that miss a round


def test_missed_client_receives_message_and_uploads_nothing(net: nn.Module) -> None:
    run = simulate(net, ft.methods.Scaffold(), rounds=4, unreliable=ft.Unreliable(dropout=0.4))
    down, up = 2 * 8 * 43, 2 * 8 * 43  # a model and a control of 43 values each
    assert any(record["missed"] for record in run.records)
    for record in run.records:
        assert sorted([*record["clients"], *record["missed"]]) == list(range(6))
        assert record["per_client"]["bytes_down"] == dict.fromkeys(range(6), down)
        assert record["per_client"]["bytes_up"] == dict.fromkeys(record["clients"], up)
        assert record["bytes_up"] == up * len(record["clients"]) and record["bytes_down"] == 6 * down


def test_missed_client_keeps_state_to_the_bit(net: nn.Module) -> None:
    unreliable = ft.Unreliable(dropout=0.5)
    before, after = (simulate(net, ft.methods.SelfFL(warmup=0), rounds=n, unreliable=unreliable) for n in (3, 4))
    assert before.records[2]["clients"] == after.records[2]["clients"]
    missed, here = after.records[3]["missed"], after.records[3]["clients"]
    assert missed and here
    for client in missed:
        assert same(before.client(client), after.client(client))
        assert same(before.personal(client), after.personal(client))
    assert not any(same(before.client(client), after.client(client)) for client in here)


@pytest.mark.parametrize("name", REPRESENTATIVE_METHODS)
def test_server_with_missed_clients_matches_schedule_without_them(name: str, net: nn.Module) -> None:
    run = simulate(net, METHODS[name](), rounds=5, seed=1, unreliable=ft.Unreliable(dropout=0.4), evaluate_every=5)
    delivered = [record["clients"] for record in run.records]
    assert sum(map(len, delivered)) < 30 and all(delivered)
    twin = simulate(net, METHODS[name](), schedule=delivered, seed=1, evaluate_every=5)
    # These methods mix models with one matrix product, whose last bit may depend on its number of rows.
    tolerance = 1e-12 if name in ("fedapa", "pfedhn") else 0.0
    assert same(run.server, twin.server, tolerance)
    for moment in ("trained", "received"):
        assert all_same(models(run, moment), models(twin, moment), tolerance)
    assert all_same([run.client(c) for c in range(6)], [twin.client(c) for c in range(6)], tolerance)


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_method_with_many_missed_clients_stays_finite(name: str, net: nn.Module) -> None:
    """Some of the twelve rounds, such as the first, have no clients."""
    method = ft.methods.Local(sampled=True) if name == "local" else METHODS[name]()  # otherwise it misses no round
    run = simulate(net, method, rounds=12, seed=3, unreliable=HEAVY, evaluate_every=6)
    delivered = [record["clients"] for record in run.records]
    assert not delivered[0] and any(delivered)
    reasons = {why for record in run.records for why in record["missed"].values()}
    assert reasons == {"late", "dropped out"}
    trees = [run.server, *models(run), *models(run, "received"), *(run.client(client) for client in range(6))]
    assert all(leaf.isfinite().all() for tree in trees for leaf in flatten(tree).values())
    assert all(record["failed"] == {} for record in run.records)


def test_missed_clients_are_same_for_all_methods_and_engines(net: nn.Module) -> None:
    fedavg, local, vectorized = (
        simulate(net, method, rounds=6, seed=2, unreliable=HEAVY, engine=engine)
        for method, engine in (
            (ft.methods.FedAvg(), "sequential"), (ft.methods.Local(sampled=True), "sequential"),
            (ft.methods.FedAvg(), "vectorized")
        )
    )  # fmt: skip
    lost = [[(record["clients"], record["missed"]) for record in run.records] for run in (fedavg, local, vectorized)]
    assert lost[0] == lost[1] == lost[2]
    assert all_same(models(fedavg), models(vectorized), tolerance=1e-9)


# Rounds without clients


@pytest.mark.parametrize("method", [ft.methods.FedAvg(), ft.methods.SelfFL(warmup=0)], ids=["fedavg", "selffl"])
def test_round_without_clients_changes_nothing(method: ft.Method, net: nn.Module) -> None:
    unreliable = ft.Unreliable(trace=[[0, 1], []])
    one, two = (simulate(net, method, rounds=rounds, unreliable=unreliable) for rounds in (1, 2))
    assert same(one.server, two.server) and all_same(models(one), models(two))
    empty = two.records[1]
    assert (empty["clients"], empty["missed"], empty["bytes_up"], empty["bytes_down"]) == ([], {}, 0, 0)
    assert empty["accuracy_received"] == one.records[0]["accuracy_received"]  # all clients are still evaluated
    found, before = two.summarize("trained"), one.summarize("trained")
    assert found is not None and before is not None and found == before | {"round": 2}


def test_round_without_clients_evaluates_no_participants(net: nn.Module) -> None:
    settings: dict[str, Any] = {"evaluate": "participants", "validation": 0.3}
    unreliable = ft.Unreliable(trace=[[0, 1], []])
    run = simulate(net, ft.methods.FedAvg(), rounds=4, unreliable=unreliable, **settings)
    for name in ("accuracy_received", "loss"):
        assert [record[name] is None for record in run.records] == [False, True, False, True]
    for choice in ("last", "best_test", "best_validation"):
        numbers = run.summarize("received", choice)
        assert numbers is not None and numbers["round"] in (1, 3)


def test_run_without_uploads_keeps_initial_models(net: nn.Module) -> None:
    run = simulate(net, ft.methods.FedPer(), rounds=2, unreliable=ft.Unreliable(deadline=0.01))
    assert all(len(record["missed"]) == 6 and record["bytes_up"] == 0 for record in run.records)
    assert all_same([*models(run), *models(run, "received")], [net.state_dict()] * 12)


# Traces and settings


def test_trace_is_read_once_and_repeated(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "a, trace.json"
    path.write_text("[[1, 0], [2], []]")
    unreliable = ft.Unreliable(trace=path, dropout=0.0, deadline=2.0)
    words = ["--unreliable.dropout", "0", "--unreliable.deadline=2", "--unreliable.trace", str(path)]
    assert make_experiment(parse_overrides(words).apply_to({})).unreliable == unreliable
    assert unreliable == ft.Unreliable(trace=[[0, 1], [2], []], deadline=2.0)
    path.unlink()  # the run contains the trace
    run = simulate(net, ft.methods.FedAvg(), rounds=5, unreliable=unreliable)
    assert [record["clients"] for record in run.records] == [[0, 1], [2], [], [0, 1], [2]]
    settings = tomllib.loads(to_toml({"unreliable": run.experiment["unreliable"]}))
    assert make_experiment(settings).unreliable == unreliable


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"away": 1.0}, "unreliable.away must be at least 0 and below 1"),
        ({"away": "much"}, "unreliable.away"),
        ({"dropout": -0.1}, "unreliable.dropout must be at least 0"),
        ({"dropout": float("nan")}, "unreliable.dropout"),
        ({"day": 1, "away": 0.5}, "at least 2 rounds"),
        ({"day": 2.5}, "unreliable.day"),
        ({"deadline": 0.0}, "above 0"),
        ({"deadline": True}, "above 0"),
        ({"deadline": float("inf")}, "above 0 and at most 1e9, or none"),
        ({"deadline": 10**400}, "above 0 and at most 1e9, or none"),
        ({"deadline": 1.0, "speeds": -1.0}, "unreliable.speeds must be from 0"),
        ({"deadline": 1.0, "jitter": 1e300}, "unreliable.jitter must be from 0"),
        ({"speeds": 1.0}, "need a deadline"),
        ({"jitter": 1.0}, "need a deadline"),
        ({"trace": [[0]], "away": 0.1}, "omit away"),
        ({"trace": [[0]], "day": 3}, "omit away and day"),
        ({"trace": []}, "such as [[0, 1], [2]]"),
        ({"trace": [0, 1]}, "Round 1 of unreliable.trace must list"),
        ({"trace": [[0], [True]]}, "Round 2 of unreliable.trace must list"),
        ({"trace": [[0], [-1]]}, "Round 2 of unreliable.trace must list"),
        ({"trace": [[0.0]]}, "Round 1 of unreliable.trace must list"),
        ({"trace": [[0, 0]]}, "names a client twice"),
        ({"trace": "long" * 2000}, "cannot be read: File name too long"),
        ({"trace": "nowhere.json"}, "The trace 'nowhere.json' cannot be read"),
    ],
)
def test_unreliable_with_invalid_field_raises(fields: dict[str, Any], message: str) -> None:
    assert message in error_message(lambda: ft.Unreliable(**fields))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 200_000, "not a JSON list"),
        (b"[[" + b"9" * 4000 + b"]]", "by number"),
        (b"[[NaN]]", "by number"),
        (b'{"0": [1]}', "such as [[0, 1], [2]]"),
        (b"[[0]" + b" " * 2**22 + b"]", "the limit is"),
    ],
    ids=["deep", "huge", "nan", "table", "large"],
)
def test_read_trace_with_untrusted_content_raises(data: bytes, message: str, tmp_path: Path) -> None:
    """tests/core/test_untrusted_input.py tests the readers of text and JSON with other content."""
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    assert message in error_message(lambda: read_trace(path))
