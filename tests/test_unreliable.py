"""Clients that are away, late or break off: how often, which, and that to them the round did not happen."""

import json
import os
import tomllib
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import fedtailor as ft
from conftest import SOME_FAST, alike, models, refusal, same, tiny_federation
from fedtailor.experiment import make
from fedtailor.flags import read_flags
from fedtailor.methods import METHODS
from fedtailor.schedule import make_schedule
from fedtailor.toml import to_toml
from fedtailor.trees import flatten
from fedtailor.unreliable import check_trace, read_trace

SIZES = (9, 4, 7, 1, 6, 3)  # training samples; 5 on average
HEAVY = ft.Unreliable(away=0.5, dropout=0.3, deadline=1.0, speeds=0.5, jitter=0.5)
EVERY = pytest.mark.parametrize("name", METHODS)


def go(net: nn.Module, method: ft.Method, **settings: Any) -> ft.Run:
    shared: dict[str, Any] = {"batch_size": 4, "dtype": torch.float64, "engine": "sequential", "device": "cpu"}
    return ft.simulate(method, net, tiny_federation(SIZES), **(shared | settings))


def near(count: float, draws: int, share: float) -> bool:
    """Whether so many of independent draws came true as their share makes likely: within five standard deviations."""
    return abs(count - draws * share) <= 5 * sqrt(draws * share * (1 - share))


# who is away


@pytest.mark.parametrize("participation", [1.0, 0.3, (0.2, 0.9)])
def test_by_default_the_schedule_is_the_plain_draw(participation: Any) -> None:
    low, high = participation if isinstance(participation, tuple) else (participation, participation)
    for number, clients in enumerate(make_schedule(20, 8, participation, seed=5, unreliable=ft.Unreliable())):
        random = np.random.default_rng([5, 4, number])
        count = max(1, round(random.uniform(low, high) * 20))
        assert clients == sorted(random.choice(20, count, replace=False).tolist())


@pytest.mark.parametrize("away", [0.1, 0.5, 0.9])
def test_so_many_are_away_at_random(away: float) -> None:
    unreliable, rounds, clients = ft.Unreliable(away=away), 200, 300
    there = np.zeros((rounds, clients), dtype=bool)
    for number in range(rounds):
        there[number, unreliable.available(clients, number + 1, seed=0)] = True
    assert near(there.sum(), there.size, 1 - away)
    # a client that was there is there again as often as any other: the rounds do not know each other
    again = (there[1:] & there[:-1]).sum()
    assert near(again, there[1:].size, (1 - away) ** 2)
    assert 0 < there.mean(0).min() < there.mean(0).max() < 1  # nobody is always away


@pytest.mark.parametrize(("away", "day"), [(0.25, 24), (0.5, 7), (0.9, 10), (0.02, 5)])
def test_by_day_everyone_is_away_for_one_stretch_at_its_own_hour(away: float, day: int) -> None:
    unreliable, clients = ft.Unreliable(away=away, day=day), 400
    there = np.zeros((3 * day, clients), dtype=bool)
    for number in range(3 * day):
        there[number, unreliable.available(clients, number + 1, seed=1)] = True
    first, others = there[:day], there[day:]
    assert np.array_equal(np.concatenate([first, first]), others)  # every day alike
    missing = (~first).sum(0)
    assert set(missing) <= {int(away * day), int(away * day) + 1}
    leaves = (first & ~np.roll(first, -1, axis=0)).sum(0)  # there in one round, away in the next
    assert leaves.max() == 1  # one stretch
    assert near((~first[0]).sum(), clients, away)  # in any round the share is away: hours differ
    if away * day > 1:
        assert len({tuple(pattern) for pattern in first.T.tolist()}) >= day  # some begin in every round


def test_the_server_takes_as_many_as_it_wants_of_those_who_are_there() -> None:
    unreliable = ft.Unreliable(away=0.5)
    plan = make_schedule(20, 200, participation=0.5, seed=3, unreliable=unreliable)
    counts = set()
    for number, clients in enumerate(plan, start=1):
        there = unreliable.available(20, number, seed=3)
        assert set(clients) <= set(there) and clients == sorted(clients)
        assert len(clients) == min(10, len(there))
        counts.add(len(there) > 10)
    assert counts == {True, False}


def test_of_an_explicit_schedule_those_who_are_away_are_not_asked() -> None:
    unreliable = ft.Unreliable(trace=[[0, 2], [1]])
    schedule = [[2, 1, 0], [1, 2], [1, 3], [0]]
    assert make_schedule(4, schedule=schedule, unreliable=unreliable) == [[2, 0], [1], [], []]


def test_a_longer_run_begins_the_same_and_another_seed_differs() -> None:
    for unreliable in (ft.Unreliable(away=0.4), ft.Unreliable(away=0.4, day=5)):
        plan = make_schedule(30, 10, 0.5, seed=2, unreliable=unreliable)
        assert make_schedule(30, 25, 0.5, seed=2, unreliable=unreliable)[:10] == plan
        assert make_schedule(30, 10, 1.0, seed=4, unreliable=unreliable) != make_schedule(
            30, 10, 1.0, seed=2, unreliable=unreliable
        )
    sizes = np.arange(1, 31)
    missed = [HEAVY.missed(range(30), sizes, 1, seed) for seed in range(5)]
    assert len({str(found) for found in missed}) == 5


def test_a_plan_in_which_nobody_is_ever_asked_is_refused(net: nn.Module) -> None:
    never = ft.Unreliable(trace=[[], []])
    assert "lower unreliable.away" in refusal(lambda: go(net, ft.methods.FedAvg(), rounds=3, unreliable=never))


# who is late, who drops out


def test_times_by_hand() -> None:
    """A client takes its samples over the mean, over its speed."""
    sizes = np.array(SIZES)
    assert ft.Unreliable().times(sizes, 1, seed=0).tolist() == [9 / 5, 4 / 5, 7 / 5, 1 / 5, 6 / 5, 3 / 5]
    missed = ft.Unreliable(deadline=1.2).missed([0, 2, 3, 4], sizes, 1, seed=0)
    assert missed == {0: "late", 2: "late"}  # 6/5 is just in time, and 1 and 5 were not asked


def test_speeds_are_log_normal_and_stay_all_run_long() -> None:
    sizes = np.arange(1, 3001)
    unreliable = ft.Unreliable(speeds=0.7, deadline=2.0)
    times = unreliable.times(sizes, 1, seed=0)
    speeds = np.log(sizes / sizes.mean() / times)
    assert abs(speeds.mean()) < 5 * 0.7 / sqrt(3000)
    assert abs(speeds.std() - 0.7) < 5 * 0.7 / sqrt(2 * 3000)
    assert all(np.array_equal(times, unreliable.times(sizes, number, seed=0)) for number in (2, 50))
    late = unreliable.missed(range(3000), sizes, 7, seed=0)
    assert sorted(late) == np.flatnonzero(times > 2.0).tolist() and set(late.values()) == {"late"}


def test_jitter_is_another_every_round_around_the_same_speed() -> None:
    sizes = np.full(500, 20)
    steady, shaken = ft.Unreliable(speeds=1.0, deadline=1.0), ft.Unreliable(speeds=1.0, jitter=0.3, deadline=1.0)
    changes = np.log([shaken.times(sizes, number, 0) / steady.times(sizes, number, 0) for number in range(1, 41)])
    assert abs(changes.mean()) < 5 * 0.3 / sqrt(changes.size)
    assert abs(changes.std() - 0.3) < 5 * 0.3 / sqrt(2 * changes.size)
    assert abs((changes[1:] * changes[:-1]).mean()) < 5 * 0.3**2 / sqrt(changes.size)  # no memory


def test_dropout_has_its_share_and_does_not_know_who_is_late() -> None:
    sizes, rounds = np.random.default_rng(0).integers(1, 100, 1000), range(1, 41)
    both = ft.Unreliable(dropout=0.3, deadline=0.9, speeds=0.5)
    alone, slow = ft.Unreliable(dropout=0.3), ft.Unreliable(deadline=0.9, speeds=0.5)
    late = set(slow.missed(range(1000), sizes, 1, seed=0))
    assert 200 < len(late) < 800
    dropped = {number: both.missed(range(1000), sizes, number, seed=0) for number in rounds}
    broke = {number: {c for c, why in missed.items() if why == "dropped out"} for number, missed in dropped.items()}
    assert near(sum(map(len, broke.values())), 1000 * len(rounds), 0.3)
    assert near(sum(len(found & late) for found in broke.values()), len(late) * len(rounds), 0.3)
    for number in rounds:
        assert broke[number] == set(alone.missed(range(1000), sizes, number, seed=0))
        assert dropped[number].keys() == broke[number] | late
    assert near(len(broke[1] & broke[2]), 1000, 0.3**2)
    there = {number: ft.Unreliable(away=0.5).available(1000, number, seed=0) for number in rounds}
    asked = sum(map(len, there.values()))
    assert near(sum(len(broke[number].intersection(there[number])) for number in rounds), asked, 0.3)


def test_who_misses_a_round_does_not_depend_on_who_else_is_asked() -> None:
    sizes = np.arange(1, 51)
    everyone = HEAVY.missed(range(50), sizes, 3, seed=1)
    some = HEAVY.missed([4, 30, 44], sizes, 3, seed=1)
    assert some == {client: why for client, why in everyone.items() if client in (4, 30, 44)}


# what a round does to those who miss it


def test_who_misses_a_round_is_sent_the_message_and_delivers_nothing(net: nn.Module) -> None:
    run = go(net, ft.methods.Scaffold(), rounds=4, unreliable=ft.Unreliable(dropout=0.4))
    down, up = 2 * 8 * 43, 2 * 8 * 43  # a model and a correction of 43 numbers
    assert any(record["missed"] for record in run.records)
    for record in run.records:
        assert sorted([*record["clients"], *record["missed"]]) == list(range(6))
        assert record["per_client"]["bytes_down"] == dict.fromkeys(range(6), down)
        assert record["per_client"]["bytes_up"] == dict.fromkeys(record["clients"], up)
        assert record["bytes_up"] == up * len(record["clients"]) and record["bytes_down"] == 6 * down


def test_who_misses_a_round_keeps_its_state_to_the_bit(net: nn.Module) -> None:
    unreliable = ft.Unreliable(dropout=0.5)
    before, after = (go(net, ft.methods.SelfFL(warmup=0), rounds=n, unreliable=unreliable) for n in (3, 4))
    assert before.records[2]["clients"] == after.records[2]["clients"]
    missed, here = after.records[3]["missed"], after.records[3]["clients"]
    assert missed and here
    for client in missed:
        assert same(before.client(client), after.client(client))
        assert same(before.personal(client), after.personal(client))
    assert not any(same(before.client(client), after.client(client)) for client in here)


@pytest.mark.parametrize("name", SOME_FAST)
def test_the_server_gets_what_it_would_if_only_the_others_had_been_asked(name: str, net: nn.Module) -> None:
    if name == "fedphp":
        pytest.skip("its clients reckon with the share that is asked, which is another here")
    run = go(net, METHODS[name](), rounds=5, seed=1, unreliable=ft.Unreliable(dropout=0.4), evaluate_every=5)
    delivered = [record["clients"] for record in run.records]
    assert sum(map(len, delivered)) < 30 and all(delivered)
    twin = go(net, METHODS[name](), schedule=delivered, seed=1, evaluate_every=5)
    # a mixture for many is one product of matrices, and how many rows it has may change its last bit
    mixes = name in ("fedapa", "fedamp", "fedcac", "pfedla", "pfedhn")
    tolerance = 1e-12 if mixes else 0.0
    assert same(run.server, twin.server, tolerance)
    for moment in ("trained", "received"):
        assert alike(models(run, moment), models(twin, moment), tolerance)
    assert alike([run.client(c) for c in range(6)], [twin.client(c) for c in range(6)], tolerance)


@EVERY
def test_every_method_copes_with_heavy_losses(name: str, net: nn.Module) -> None:
    """Among twelve rounds are some without anyone, the first among them."""
    run = go(net, METHODS[name](), rounds=12, seed=3, unreliable=HEAVY, evaluate_every=6)
    delivered = [record["clients"] for record in run.records]
    assert not delivered[0] and any(delivered)
    reasons = {why for record in run.records for why in record["missed"].values()}
    assert reasons == {"late", "dropped out"}
    trees = [run.server, *models(run), *models(run, "received"), *(run.client(client) for client in range(6))]
    assert all(leaf.isfinite().all() for tree in trees for leaf in flatten(tree).values())
    assert all(record["failed"] == {} for record in run.records)


def test_the_same_clients_are_lost_to_every_method_and_engine(net: nn.Module) -> None:
    runs = [
        go(net, method, rounds=6, seed=2, unreliable=HEAVY, engine=engine)
        for method in (ft.methods.Local(), ft.methods.FedAvg(), ft.methods.FedAPA())
        for engine in ("sequential", "vectorized", "pool")
        if engine != "pool" or not torch.accelerator.is_available()
    ]
    lost = [[(record["clients"], record["missed"]) for record in run.records] for run in runs]
    assert all(found == lost[0] for found in lost)
    each = len(runs) // 3
    for first in range(0, len(runs), each):
        plain, *others = runs[first : first + each]
        assert all(alike(models(plain), models(other), tolerance=1e-9) for other in others)


# rounds without anyone


@pytest.mark.parametrize("method", [ft.methods.FedAvg(), ft.methods.SelfFL(warmup=0)], ids=["fedavg", "selffl"])
def test_a_round_without_anyone_passes_and_changes_nothing(method: ft.Method, net: nn.Module) -> None:
    unreliable = ft.Unreliable(trace=[[0, 1], []])
    one, two = (go(net, method, rounds=rounds, unreliable=unreliable) for rounds in (1, 2))
    assert same(one.server, two.server) and alike(models(one), models(two))
    empty = two.records[1]
    assert (empty["clients"], empty["missed"], empty["bytes_up"], empty["bytes_down"]) == ([], {}, 0, 0)
    assert empty["accuracy_received"] == one.records[0]["accuracy_received"]  # all are still evaluated
    found, before = two.numbers("trained"), one.numbers("trained")
    assert found is not None and before is not None and found == before | {"round": 2}


def test_a_round_without_anyone_has_no_participants_to_evaluate(net: nn.Module, tmp_path: Path) -> None:
    run = go(
        net,
        ft.methods.FedAvg(),
        rounds=4,
        unreliable=ft.Unreliable(trace=[[0, 1], []]),
        evaluate="participants",
        validation=0.3,
    )
    assert [record["accuracy_received"] is None for record in run.records] == [False, True, False, True]
    assert [record["loss"] is None for record in run.records] == [False, True, False, True]
    for choice in ("last", "best_test", "best_validation"):
        numbers = run.numbers("received", choice)
        assert numbers is not None and numbers["round"] in (1, 3)


def test_a_run_in_which_nothing_ever_arrives_is_the_start(net: nn.Module) -> None:
    run = go(net, ft.methods.FedPer(), rounds=2, unreliable=ft.Unreliable(deadline=0.01))
    assert all(len(record["missed"]) == 6 and record["bytes_up"] == 0 for record in run.records)
    assert alike([*models(run), *models(run, "received")], [net.state_dict()] * 12)


# traces and settings


def test_a_trace_is_read_once_and_repeated(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "a, trace.json"
    path.write_text("[[1, 0], [2], []]")
    unreliable = ft.Unreliable(trace=path)
    assert unreliable == ft.Unreliable(trace=str(path)) == ft.Unreliable(trace=[[0, 1], [2], []])
    path.unlink()  # a run keeps what was in it
    run = go(net, ft.methods.FedAvg(), rounds=5, unreliable=unreliable)
    assert [record["clients"] for record in run.records] == [[0, 1], [2], [], [0, 1], [2]]
    settings = tomllib.loads(to_toml({"unreliable": run.experiment["unreliable"]}))
    assert make(settings).unreliable == unreliable


def test_flags_and_tables_set_it(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[[0]]")
    words = ["--unreliable.dropout", "0.2", "--unreliable.deadline=2", "--unreliable.speeds", "1"]
    made = make(read_flags([*words, "--unreliable.trace", str(tmp_path / "trace.json")]).over({}))
    assert made.unreliable == ft.Unreliable(dropout=0.2, deadline=2.0, speeds=1.0, trace=[[0]])
    table = tomllib.loads("[unreliable]\naway = 0.3\nday = 24\n")
    assert make(table).unreliable == ft.Unreliable(away=0.3, day=24)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"away": 1.0}, "unreliable.away must be a share from 0 to below 1"),
        ({"away": "much"}, "unreliable.away"),
        ({"dropout": -0.1}, "unreliable.dropout must be a share"),
        ({"dropout": float("nan")}, "unreliable.dropout"),
        ({"day": 1, "away": 0.5}, "at least 2 rounds"),
        ({"day": 2.5}, "unreliable.day"),
        ({"deadline": 0.0}, "above 0"),
        ({"deadline": True}, "above 0"),
        ({"deadline": float("inf")}, "above 0, or none"),
        ({"deadline": 10**400}, "above 0, or none"),
        ({"deadline": 1.0, "speeds": -1.0}, "unreliable.speeds must be from 0"),
        ({"deadline": 1.0, "jitter": 1e300}, "unreliable.jitter must be from 0"),
        ({"speeds": 1.0}, "without a deadline"),
        ({"jitter": 1.0}, "without a deadline"),
        ({"trace": [[0]], "away": 0.1}, "leave out away"),
        ({"trace": [[0]], "day": 3}, "leave out away and day"),
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
def test_nonsense_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: ft.Unreliable(**fields))


def test_a_trace_of_strangers_is_refused_before_anyone_trains(net: nn.Module) -> None:
    stranger = ft.Unreliable(trace=[[0], [6]])
    text = refusal(lambda: go(net, ft.methods.FedAvg(), rounds=2, unreliable=stranger))
    assert "client 6 in round 2" in text and "0 to 5" in text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 200_000, "no JSON"),
        (b"[[" + b"9" * 5000 + b"]]", "no JSON"),
        (b"[[" + b"9" * 4000 + b"]]", "by number"),
        (b"[[NaN]]", "by number"),
        (b"\xff\xfe\x00", "no text"),
        (b"", "no JSON"),
        (b'{"0": [1]}', "such as [[0, 1], [2]]"),
        (b"[[0]" + b" " * 2**22 + b"]", "are the most"),
    ],
    ids=["deep", "endless", "huge", "nan", "no-text", "empty", "table", "large"],
)
def test_hostile_traces_are_refused_in_words(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    assert words in refusal(lambda: read_trace(path))


def test_what_is_no_file_is_no_trace(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert "it is no file" in refusal(lambda path=path: read_trace(path))  # type: ignore[misc]


_VALID = json.dumps([[0, 1, 2], [], [12, 3]]).encode()
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    """A good trace in which bytes are cut out and others put in."""
    start = draw(st.integers(0, len(_VALID)))
    end = draw(st.integers(start, len(_VALID)))
    return (
        _VALID[:start] + draw(st.binary(max_size=6) | st.sampled_from([b"[", b"]", b",", b"-1", b"1e9"])) + _VALID[end:]
    )


@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(_VALID)
@given(data=_spoilt() | _VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_any_bytes_are_a_trace_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    try:
        trace = read_trace(path)
    except ft.Refused as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 200 + len(str(path))
        return
    assert trace and check_trace(trace) == trace
    wanted = [sorted(int(client) for client in there) for there in json.loads(data)]
    assert trace == wanted and all(type(client) is int for there in trace for client in there)
