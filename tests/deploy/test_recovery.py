"""An operator recovers a federation in one process: rollback, suspension, outliers, and refused replies."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from test_federation_in_process import (
    SETTINGS,
    after,
    check_same_models,
    clients,
    schedule_of,
    simulated,
)

from conftest import error_message
from fedtailor.core.trees import map_leaves
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.server.operator_folder import EnrolledClient, enroll, read_status
from fedtailor.deploy.server.proxy.refusals import write_refusal
from fedtailor.deploy.server.run_control import roll_back_run
from fedtailor.deploy.server.suspension import count_problems, reinstate, suspend, suspended_clients
from fedtailor.experiments.deployment import read_deployment
from fedtailor.runs.reader import load_run
from support.flower_in_process import InProcessFederation, Tamper, federate

NAMES = ("ann", "bob", "cleo", "dan")
ALL = [0, 1, 2, 3]


@pytest.fixture
def create(tmp_path: Path) -> Callable[..., InProcessFederation]:
    def build(**settings: Any) -> InProcessFederation:
        return federate(tmp_path, clients(4), SETTINGS | settings)

    return build


def change_upload(name: str, group: str, factor: float) -> Tamper:
    """Return a tamper function that scales a client's upload in one round."""

    def tamper(who: str, message: Message, reply: Message) -> Message:
        if (who, message.metadata.message_type, message.metadata.group_id) != (name, "train", group):
            return reply
        fields, tree = from_record(reply.content, 10**9)
        return Message(to_record(fields, map_leaves(lambda leaf: leaf * factor, tree)), reply_to=message)

    return tamper


def drop_replies(names: Collection[str], groups: str) -> Tamper:
    """Return a tamper function that loses the uploads of these clients in these rounds."""

    def tamper(who: str, message: Message, reply: Message) -> Message | None:
        lost = message.metadata.message_type == "train" and message.metadata.group_id in groups and who in names
        return None if lost else reply

    return tamper


def test_rollback_after_poisoned_upload_and_suspension_of_its_client_saves_the_run(
    create: Callable[..., InProcessFederation],
) -> None:
    """One finite upload × 1e6 is accepted in round 3, and later the others diverge."""
    federation = create(method="scaffold", rounds=6, evaluate_every=6)
    federation.grid.tamper = change_upload("bob", "3", 1e6)
    assert "has NaN or infinity" in error_message(federation.run)

    assert "checkpoints exist of rounds 1, 2, 3, 4." in error_message(lambda: roll_back_run(federation.folder, 6))
    suspend(federation.folder, "bob", "by the operator: poisoned round 3")
    assert roll_back_run(federation.folder, 2).round == 2
    removed = (federation.folder / "run" / "removed_rounds.jsonl").read_text().splitlines()
    assert len(removed) == 2 and '"warnings": {"1": "its upload \'control_delta\' changes' in removed[0]
    federation.run()

    schedule = [ALL, ALL, *[[0, 2, 3]] * 4]
    assert schedule_of(federation) == schedule
    expected = simulated(read_deployment(federation.folder), clients(4), schedule)
    del federation.client_folders["bob"]
    run = load_run(federation.folder / "run")
    assert run.scores("trained") == pytest.approx({c: expected.scores("trained")[c] for c in (0, 2, 3)})
    check_same_models_of(federation, expected)


def check_same_models_of(federation: InProcessFederation, expected: Any) -> None:
    """Check the models of the clients that are left in `federation.client_folders`."""
    from conftest import same
    from fedtailor.deploy.selftest import read_personal_model

    for name, folder in federation.client_folders.items():
        assert same(read_personal_model(folder, "trained"), expected.personal(NAMES.index(name), "trained")), name


@pytest.mark.parametrize("method", ["fedper", "fedapm"])
def test_rollback_of_finished_run_and_resume_gives_same_models(
    method: str, create: Callable[..., InProcessFederation]
) -> None:
    federation = create(method=method, rounds=5, evaluate_every=5, keep_checkpoints=4)
    federation.run()
    for number in (4, 2):
        assert roll_back_run(federation.folder, number).round == number
        assert read_status(federation.folder)["reason"] == f"rolled back to round {number}"
        federation.run()
    assert "checkpoints exist of rounds 2, 3, 4, 5." in error_message(lambda: roll_back_run(federation.folder, 1))
    check_same_models(federation, simulated(read_deployment(federation.folder), clients(4)))
    assert [line["round"] for line in load_run(federation.folder / "run").records] == [1, 2, 3, 4, 5]


def test_client_that_joined_after_the_round_of_a_rollback_starts_again(
    create: Callable[..., InProcessFederation],
) -> None:
    """Its state from the undone rounds must not come back, although it joins after the same number of rounds."""
    federation = create(method="fedapm", min_clients=3, rounds=4)
    federation.grid.offline = {"dan"}
    federation.grid.tamper = after("train", "1", "cleo", lambda: federation.grid.offline.clear())
    federation.run()
    roll_back_run(federation.folder, 1)
    federation.grid.messages.clear()
    federation.run()
    states = next((federation.client_folders["dan"] / "runs").glob("*/states"))
    assert len(list(states.glob("initial-*"))) == 2
    assert schedule_of(federation) == [[0, 1, 2], ALL, ALL, ALL]


def test_suspended_client_is_left_out_at_once_and_continues_after_it_is_reinstated(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedper", rounds=5, evaluate_every=5)

    def tamper(who: str, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and who == "dan":
            if message.metadata.group_id == "2":  # its upload has already arrived
                suspend(federation.folder, "bob", "by the operator")
            if message.metadata.group_id == "3":
                reinstate(federation.folder, "bob")
        return reply

    federation.grid.tamper = tamper
    federation.run()
    schedule = [ALL, [0, 2, 3], [0, 2, 3], ALL, ALL]
    assert schedule_of(federation) == schedule
    assert load_run(federation.folder / "run").records[1]["missed"] == {1: "it was suspended or has left"}
    check_same_models(federation, simulated(read_deployment(federation.folder), clients(4), schedule))
    assert "is not suspended" in error_message(lambda: reinstate(federation.folder, "bob"))
    assert "no client 'bobby'" in error_message(lambda: suspend(federation.folder, "bobby", ""))


@pytest.mark.parametrize("problem", ["refused", "suspended"])
def test_round_does_not_wait_for_reply_that_was_refused(
    problem: str, create: Callable[..., InProcessFederation]
) -> None:
    federation = create(method="fedapa", min_clients=3, rounds=2, deadline=10**6)

    def refuse(who: str, message: Message, reply: Message) -> Message | None:
        if (who, message.metadata.message_type, message.metadata.group_id) != ("bob", "train", "1"):
            return reply
        write_refusal(federation.folder, "ann", message.metadata.message_id, "a client fails only its own rounds")
        if problem == "refused":
            write_refusal(federation.folder, "bob", message.metadata.message_id, "too large")
        else:
            suspend(federation.folder, "bob", "by the operator")
        return None

    federation.grid.tamper = refuse
    assert federation.run() < 10**5  # seconds on the grid's clock
    expected = {"refused": "its reply was refused: too large", "suspended": "it was suspended or has left"}
    assert load_run(federation.folder / "run").records[0]["missed"] == {1: expected[problem]}


def test_client_that_is_late_too_often_is_suspended_and_the_round_succeeds(
    create: Callable[..., InProcessFederation], caplog: pytest.LogCaptureFixture
) -> None:
    federation = create(method="fedapa", retry=3)  # every enrolled client must deliver
    federation.grid.tamper = drop_replies(["bob"], "2")
    federation.run()
    assert schedule_of(federation) == [ALL, [0, 2, 3], [0, 2, 3]]
    reason = "by the server after 3 rounds with problems in a row, the last one: late"
    assert suspended_clients(federation.folder) == {"bob": reason} and f"bob is suspended {reason}" in caplog.text


def test_outlier_is_reported_and_suspended(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedavg", suspend_after=1, rounds=1)
    federation.grid.tamper = change_upload("cleo", "1", 1e3)
    federation.run()
    warnings = load_run(federation.folder / "run").records[0]["warnings"]
    assert warnings.keys() == {2} and "times as much as the median" in warnings[2]
    assert read_status(federation.folder)["warnings"] == {"cleo": warnings[2]}
    assert suspended_clients(federation.folder).keys() == {"cleo"}


LATE = {"bob": "late"}


@pytest.mark.parametrize(
    ("rounds", "options", "suspended"),
    [
        ([LATE, LATE], {}, ["bob"]),
        ([LATE], {}, []),
        ([LATE, {}, LATE], {}, []),  # not in a row
        ([LATE, LATE], {"limit": 0}, []),
        ([LATE, LATE], {"min_active": 4}, []),
        ([{"bob": "late", "ann": "late"}] * 3, {}, []),  # half of the clients: probably the server's network
        ([LATE] * 2 + [{"cleo": "late"}] * 2, {}, ["bob", "cleo"]),
        ([LATE] * 2 + [{"cleo": "late"}] * 2 + [{"dan": "late"}] * 2, {}, ["bob", "cleo"]),  # one is no federation
    ],
)
def test_count_problems_suspends_after_limit_in_a_row(
    rounds: list[dict[str, str]], options: dict[str, Any], suspended: list[str], tmp_path: Path
) -> None:
    enroll(tmp_path, {name: EnrolledClient("key") for name in NAMES})
    for problems in rounds:
        selected = [name for name in NAMES if name not in suspended_clients(tmp_path)]
        count_problems(tmp_path, selected, problems, **{"limit": 2, "min_active": None} | options)
    assert list(suspended_clients(tmp_path)) == suspended


def test_changed_numbers_of_samples_are_reported(create: Callable[..., InProcessFederation]) -> None:
    """A client whose training samples changed is rejected; other changes are reported with every reply."""
    federation = create(method="fedavg", evaluate_every=1)

    def remove_test_sample() -> None:
        path = federation.client_folders["bob"] / "data.npz"
        with np.load(path) as arrays:
            fewer = {key: value[1:] if key.endswith("test") else value for key, value in arrays.items()}
        np.savez(path, **fewer)

    federation.grid.tamper = after("train", "1", "dan", remove_test_sample)
    federation.run()
    count = len(clients(4).test[1])
    expected = {1: f"it now has {count - 1} test samples instead of {count}"}
    assert [line["warnings"] for line in load_run(federation.folder / "run").records] == [expected] * 3
    assert read_status(federation.folder)["warnings"] == {"bob": expected[1]}


def test_reply_without_numbers_of_samples_is_rejected(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedavg", min_clients=3, rounds=1)

    def hide(who: str, message: Message, reply: Message) -> Message:
        if who != "bob" or message.metadata.message_type == "query":
            return reply
        fields, tree = from_record(reply.content, 10**9)
        return Message(to_record(fields | {"samples": {"train": 3}}, tree), reply_to=message)

    federation.grid.tamper = hide
    federation.run()
    failed = load_run(federation.folder / "run").records[0]["failed"]
    assert failed == {1: "its reply does not contain its numbers of samples"}
