"""Federations in one process: Flower's messages and apps, and a grid that delivers messages immediately."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import fedtailor as ft
from conftest import METHOD_PARAMS, error_message, same, survival_federation, tiny_federation
from fedtailor.core.trees import Rows, Tree
from fedtailor.data.user_files.client_folders import read_client
from fedtailor.deploy.client import client_data
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.client.worker import RoundRequest, Worker
from fedtailor.deploy.client.worker_process import answer
from fedtailor.deploy.dummy_client import dummy_upload, preview_payload
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.selftest import read_personal_model
from fedtailor.deploy.server import flower_clients
from fedtailor.deploy.server.flower_clients import FlowerClients
from fedtailor.deploy.server.operator_folder import enrolled_clients, mark_as_left, read_status
from fedtailor.experiments.deployment import (
    Deployment,
    make_deployment,
    read_deployment,
    with_client_network,
    write_deployment,
)
from fedtailor.runs.reader import load_run
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.serialization import pack, unpack
from support.flower_in_process import APP, InProcessFederation, Tamper, enroll_in_process, federate

SETTINGS = {"network": "mlp", "rounds": 3, "batch_size": 4, "dtype": "float64", "evaluate_every": 3}
NAMES = ("ann", "bob", "cleo")


def clients(count: int = 3) -> ft.Federation:
    fed = tiny_federation((9, 4, 7, 5)[:count])
    return replace(fed, names=("ann", "bob", "cleo", "dan")[:count])


def simulated(
    deployment: Deployment, fed: ft.Federation, schedule: Sequence[Sequence[int]] | None = None, model: Any = None
) -> Run:
    rounds = None if schedule else deployment.rounds
    return ft.simulate(
        deployment.method, model or deployment.model(), fed, rounds=rounds, batch_size=deployment.batch_size,
        dtype=deployment.dtype, precision=deployment.precision, engine="sequential", seed=deployment.seed,
        schedule=schedule,
        validation=deployment.validation, channel=deployment.channel, evaluate_every=deployment.evaluate_every,
        augmentation=deployment.augmentation, metrics=deployment.metrics, evaluate_train=deployment.evaluate_train,
        evaluate_global=deployment.evaluate_global, robust=deployment.robust,
    )  # fmt: skip


def check_same_models(federation: InProcessFederation, run: Run) -> None:
    """Check that the models in the clients' folders are bit-identical to the simulation's."""
    for client, folder in enumerate(federation.client_folders.values()):
        for moment in MOMENTS:
            deployed, expected = read_personal_model(folder, moment), run.personal(client, moment)
            assert deployed.keys() == expected.keys() and deployed
            assert all(torch.equal(deployed[name], expected[name]) for name in deployed), (folder.name, moment)


@pytest.fixture
def create(tmp_path: Path) -> Callable[..., InProcessFederation]:
    def build(fed: ft.Federation | None = None, **settings: Any) -> InProcessFederation:
        return federate(tmp_path, fed or clients(), SETTINGS | settings)

    return build


def after(kind: str, group: str, name: str, action: Callable[[], object]) -> Tamper:
    """Return a tamper function that calls `action` when a client has replied to a message of a round."""

    def tamper(who: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id, who) == (kind, group, name):
            action()
        return reply

    return tamper


def schedule_of(federation: InProcessFederation) -> list[list[int]]:
    """Return the clients that delivered in each round."""
    return [list(line["clients"]) for line in load_run(federation.folder / "run").records]


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_run_of_each_method_gives_same_models_as_simulation(
    name: str, create: Callable[..., InProcessFederation]
) -> None:
    federation = create(method=name, rounds=2)
    federation.run()
    deployment = read_deployment(federation.folder)
    run = simulated(deployment, clients())
    check_same_models(federation, run)
    record = load_run(federation.folder / "run")
    for moment in MOMENTS:
        assert record.scores(moment) == pytest.approx(run.scores(moment))
    assert [line["bytes_up"] for line in record.records] == [line["bytes_up"] for line in run.records]
    assert [line["bytes_down"] for line in record.records] == [line["bytes_down"] for line in run.records]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_run_on_survival_times_gives_same_models_as_simulation(
    method: str, create: Callable[..., InProcessFederation]
) -> None:
    fed = replace(survival_federation((13, 5, 9)), names=NAMES)
    federation = create(fed, method=method, validation=0.3)
    federation.run()
    run = simulated(read_deployment(federation.folder), fed)
    check_same_models(federation, run)
    found = load_run(federation.folder / "run")
    assert found.info["score"] == "c_index" and found.summary() == run.summary()


def test_balanced_class_weights_are_rejected_because_the_server_sees_no_labels() -> None:
    assert "one number per class" in error_message(lambda: make_deployment({"class_weights": "balanced"}))
    assert "2 in all, got 3" in error_message(
        lambda: make_deployment({"class_weights": [1, 2, 3], "inputs": {"classes": 2}}).model()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "fedapa", "variant": "code"}},  # clients train one after another
        {"method": "fedavg", "validation": 0.3},
        {"method": "fedavg", "channel": {"quantize": "int8", "top": 0.2}},
        {"method": "fedavg", "channel": {"top": 0.01}},
        {"method": "fedrep", "channel": {"quantize": "float16"}},
        {"method": {"name": "fedper", "optimizer": "adam", "keep_optimizer_state": True, "lr_schedule": "cosine"}},
        {"method": {"name": "ditto", "momentum": 0.9, "keep_optimizer_state": True, "weights": "uniform"}},
        {"method": {"name": "apple", "limit": 1}},  # the state of a client has a row per client
        {"method": "ditto", "metrics": ["weighted_f1", "auc"], "evaluate_train": True, "evaluate_global": True},
        {"method": "fedavg", "class_weights": [1.0, 5.0, 0.5], "metrics": ["balanced_accuracy", "average_precision"]},
        {"method": "ditto", "dtype": "float32", "precision": "bf16"},
        {"method": "scaffold", "robust": {"kind": "median"}},
        {"method": "fedapa", "robust": {"kind": "norm_bound", "bound": 1.0}},
    ],
    ids=[
        "one by one",
        "validation",
        "int8",
        "top",
        "float16",
        "kept optimizer",
        "two kept optimizers",
        "rows",
        "extra evaluation",
        "class weights",
        "bfloat16",
        "median",
        "norm bound",
    ],
)
def test_run_with_other_settings_gives_same_models_as_simulation(
    settings: dict[str, Any], create: Callable[..., InProcessFederation]
) -> None:
    federation = create(**settings)
    federation.run()
    run = simulated(read_deployment(federation.folder), clients())
    check_same_models(federation, run)
    assert load_run(federation.folder / "run").summary() == run.summary()


def test_deployment_without_what_an_evaluation_needs_is_rejected() -> None:
    assert "stay with the clients" in error_message(lambda: make_deployment({"measure_drift": True}))
    message = error_message(lambda: make_deployment({"method": "fedper", "evaluate_global": True}))
    assert "FedPer has no global model" in message
    message = error_message(lambda: make_deployment({"min_clients": 2, "robust": {"kind": "median"}}))
    assert "min_clients=2" in message and "at least 3 clients" in message
    message = error_message(lambda: make_deployment({"metrics": ["f1"]}).model())
    assert "no metric 'f1'" in message


def test_run_with_augmentation_gives_same_models_as_simulation(create: Callable[..., InProcessFederation]) -> None:
    fed = clients()
    fed = replace(fed, x=fed.x.reshape(-1, 1, 2, 2))
    federation = create(fed, method="fedavg", augmentation={"flip": True, "crop": 1, "cutout": 1})
    federation.run()
    check_same_models(federation, simulated(read_deployment(federation.folder), fed))


@pytest.mark.parametrize("network", ["lstm", "transformer"])
def test_run_on_tokens_gives_same_models_as_simulation(
    network: str, create: Callable[..., InProcessFederation]
) -> None:
    fed = clients()
    fed = replace(fed, x=fed.x.abs().long().clamp(max=4))
    settings = {"name": network, "vocabulary": 5, "embedding": 4, "hidden": 5, "layers": 2, "dropout": 0.2}
    federation = create(fed, method="fedper", network=settings, rounds=2)
    federation.run()
    check_same_models(federation, simulated(read_deployment(federation.folder), fed))
    folder = next(iter(federation.client_folders.values()))
    assert ft.load_personal(folder)(fed.x[:2]).shape == (2, 3)


def test_client_with_its_own_network_and_mapped_data_gives_same_models_as_simulation(
    create: Callable[..., InProcessFederation],
) -> None:
    """The second client has another network, and its data are in a file that is mapped instead of read."""
    fed, small = clients(), {"name": "mlp", "hidden": [5]}
    federation = create(fed, method="fedproto", network={"name": "mlp", "hidden": [6, 5]}, rounds=3)
    folder = list(federation.client_folders.values())[1]
    fed.select([1]).save(folder / "data.safetensors")
    ClientFolder.create(folder, folder / "data.safetensors", device="cpu", network=small)
    federation.run()
    deployment = read_deployment(federation.folder)
    own = with_client_network(deployment, small).model()
    models = ft.client_models(lambda client: own if client == 1 else deployment.model(), fed)
    check_same_models(federation, simulated(deployment, fed, model=models))
    assert "network.fc2.weight" not in ft.load_personal(folder).state_dict()
    narrow = {"name": "mlp", "hidden": [4]}
    with pytest.raises(ft.ConfigError, match=r"FedProto exchanges 'prototypes/rows.values'"):
        ClientFolder.create(folder, folder / "data.safetensors", network=narrow)


def test_client_cannot_choose_a_network_if_the_method_exchanges_it(create: Callable[..., InProcessFederation]) -> None:
    folder = next(iter(create(method="fedavg").client_folders.values()))
    with pytest.raises(ft.ConfigError, match="FedAvg needs the same network for all clients"):
        ClientFolder.create(folder, folder / "data.npz", network="logistic")


def test_client_with_tokens_outside_of_the_vocabulary_cannot_join(create: Callable[..., InProcessFederation]) -> None:
    fed = clients()
    with pytest.raises(ft.FedTailorError, match=r"network\.vocabulary to at least 7"):
        create(replace(fed, x=fed.x.long().abs().clamp(max=4) * 2), network={"name": "lstm", "vocabulary": 5})


def spoil(change: Callable[[dict[str, Any], Tree], Any]) -> Callable[[str, Message, Message], Message]:
    """Return a tamper function that changes the reply of bob in round 2."""

    def tamper(name: str, message: Message, reply: Message) -> Message:
        if name != "bob" or message.metadata.message_type != "train" or message.metadata.group_id != "2":
            return reply
        fields, tree = from_record(reply.content, 10**9)
        changed = change(fields, tree)
        content = changed if isinstance(changed, RecordDict) else to_record(*(changed or (fields, tree)))
        return Message(content, reply_to=message)

    return tamper


def set_first(value: float) -> Callable[[dict[str, Any], Tree], Any]:
    def change(fields: dict[str, Any], tree: Tree) -> None:
        next(iter(tree["params"].values())).view(-1)[0] = value

    return change


def set_code(part: str, value: int) -> Callable[[dict[str, Any], Tree], Any]:
    def change(fields: dict[str, Any], tree: Tree) -> None:
        tree["params"]["fc1.weight"][part][:] = value

    return change


def drop(tree: Tree) -> None:
    del tree["params"]["fc1.bias"]


NO_FORMAT = "does not have FedTailor's format"
INVALID_REPLIES: dict[str, tuple[Callable[[dict[str, Any], Tree], Any], str]] = {
    "NaN": (set_first(float("nan")), "has NaN or infinity"),
    "infinity": (set_first(float("inf")), "has NaN or infinity"),
    "shape": (lambda fields, tree: tree["params"].update({"fc1.bias": torch.zeros(3).double()}), "expected float64"),
    "dtype": (lambda fields, tree: tree["params"].update({"fc1.bias": torch.zeros(64)}), "expected float64"),
    "extra name": (lambda fields, tree: tree.update(extra=torch.zeros(2)), "'extra' is float32 (2,), expected missing"),
    "missing name": (lambda fields, tree: drop(tree), "'params/fc1.bias' is missing"),
    "too large": (lambda fields, tree: tree.update(extra=torch.zeros(10**6)), "at most"),
    "another's name": (lambda fields, tree: fields.update(name="ann"), "another client's name"),
    "another round": (lambda fields, tree: fields.update(round=1), "another round"),
    "another run": (lambda fields, tree: fields.update(run="x"), "another round"),
    "no fields": (lambda fields, tree: RecordDict(), NO_FORMAT),
    "no list": (lambda fields, tree: RecordDict({"fields": ConfigRecord({"fields": "[1]"})}), NO_FORMAT),
    "no tree": (lambda fields, tree: to_record(fields), "is missing"),
    "garbage": (
        lambda fields, tree: RecordDict(
            {**to_record(fields), "tree": ArrayRecord({"tree": Array("uint8", (3,), "numpy.ndarray", b"abc")})}
        ),
        "contains no tensors",
    ),
    "control codes in a name": (lambda fields, tree: tree.update({"\x1b[2J": torch.zeros(2)}), "not printable"),
    "a long name": (lambda fields, tree: tree.update({"a" * 5000: torch.zeros(2)}), "too long"),
    "control codes": (lambda fields, tree: ({"name": "bob", "error": "\x1b[2J"}, None), NO_FORMAT),
    "mask": (set_code("coded.mask", True), "cannot be decoded"),
    "position": (set_code("coded.at", 2**15), "cannot be decoded"),
}  # fmt: skip
CHANNELS = {"mask": {"top": 0.2}, "position": {"top": 0.005}}


@pytest.mark.parametrize("kind", INVALID_REPLIES)
def test_invalid_reply_is_rejected_with_reason_and_does_not_affect_others(
    kind: str, create: Callable[..., InProcessFederation]
) -> None:
    change, text = INVALID_REPLIES[kind]
    federation = create(method="fedapa", min_clients=2, channel=CHANNELS.get(kind, {}))
    federation.grid.tamper = spoil(change)
    federation.run()
    failure = load_run(federation.folder / "run").records[1]["failed"][1]
    assert text in failure and "\x1b" not in failure
    schedule = schedule_of(federation)
    assert schedule == [[0, 1, 2], [0, 2], [0, 1, 2]]
    # bob continues from the state before the round that did not count
    check_same_models(federation, simulated(read_deployment(federation.folder), clients(), schedule))


def scale_upload(fields: dict[str, Any], tree: Tree) -> None:
    tree["params"] = {name: 1e200 * leaf for name, leaf in tree["params"].items()}


def test_upload_that_spoils_the_model_is_named_when_others_diverge_and_after_resume(
    create: Callable[..., InProcessFederation],
) -> None:
    """The upload is finite, so it is accepted; in the next round, all clients get NaN from the model they receive."""
    federation = create(method="fedavg", rounds=4)
    federation.grid.tamper = spoil(scale_upload)
    for _ in range(2):
        message = error_message(federation.run)
        assert "In round 3, 0 of 3 clients delivered (ann: it reported: Nothing is sent" in message
        assert "in round 2, the update of bob was" in message and "robust.kind" in message
        assert "in round 2, the update of bob was" in read_status(federation.folder)["reason"]


def test_robust_aggregation_withstands_an_upload_that_spoils_the_model(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedavg", rounds=4)
    before = read_deployment(federation.folder)
    write_deployment(federation.folder, replace(before, robust=ft.Robust(kind="median")))  # clients keep their bundles
    federation.grid.tamper = spoil(scale_upload)
    federation.run()
    records = load_run(federation.folder / "run").records
    norms = records[1]["per_client"]["update_norm"]
    assert norms[1] > 1e150 * norms[0] and records[-1]["clients"] == [0, 1, 2] and records[-1]["failed"] == {}
    assert all(leaf.abs().max() < 10 for leaf in load_run(federation.folder / "run").server["params"].values())


def test_client_without_reply_is_late_and_continues_from_state_before(
    create: Callable[..., InProcessFederation],
) -> None:
    """Also if it is late several times: a state that counts is never replaced by states that do not."""

    def lose(name: str, message: Message, reply: Message) -> Message | None:
        lost = name == "bob" and message.metadata.message_type == "train" and message.metadata.group_id in "234"
        return None if lost else reply

    federation = create(method="fedper", min_clients=2, rounds=5, suspend_after=0)
    federation.grid.tamper = lose
    federation.run()
    lines = load_run(federation.folder / "run").records
    assert lines[1]["missed"] == {1: "late"} and lines[1]["failed"] == {}
    schedule = [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2]]
    check_same_models(federation, simulated(read_deployment(federation.folder), clients(), schedule))


def test_run_with_too_few_clients_retries_stops_and_can_be_resumed(create: Callable[..., InProcessFederation]) -> None:
    selected: list[str] = []

    def lose(name: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            selected.append(name)
            return None if name == "bob" and len(selected) <= 9 else reply
        return reply

    federation = create(method="fedapa", retry=2, suspend_after=0)
    federation.grid.tamper = lose
    assert "2 of 3 clients delivered (bob: late)" in error_message(federation.run)
    assert selected == [*NAMES] * 3
    status = read_status(federation.folder)
    assert status["state"] == "stopped" and status["round"] == 1 and "bob: late" in status["reason"]
    federation.run()
    check_same_models(federation, simulated(read_deployment(federation.folder), clients()))
    assert read_status(federation.folder)["state"] == "finished"


class Killed(BaseException):
    """Simulates that the process is killed."""


def run_until_killed(federation: InProcessFederation, kill: Tamper) -> None:
    """Run until `kill`, which is called with each message, raises; then remove it."""
    federation.grid.tamper = kill
    with pytest.raises(Killed):
        federation.run()
    federation.grid.tamper = lambda name, message, reply: reply


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("place", range(3))
def test_resume_after_kill_gives_same_models(kind: str, place: int, create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedapa", evaluate_every=1)
    seen: list[str] = []

    def kill(name: str, message: Message, reply: Message) -> Message:
        seen.append(message.metadata.message_type)
        if seen.count(kind) == 4 + place and message.metadata.message_type == kind:  # in round 2
            raise Killed
        return reply

    run_until_killed(federation, kill)
    federation.run()
    run = simulated(read_deployment(federation.folder), clients())
    check_same_models(federation, run)
    assert [line["round"] for line in load_run(federation.folder / "run").records] == [1, 2, 3]
    assert load_run(federation.folder / "run").summary() == run.summary()


def test_client_that_joins_late_takes_part(create: Callable[..., InProcessFederation]) -> None:
    federation = create(clients(3), method="fedapa", min_clients=2, rounds=4)

    def add_client() -> None:
        federation.client_folders |= enroll_in_process(federation.folder, clients(4), ["dan"])
        node_id = enrolled_clients(federation.folder)["dan"].node_id
        assert node_id is not None
        federation.grid.folders = {**federation.grid.folders, node_id: federation.client_folders["dan"]}

    federation.grid.tamper = after("train", "2", "cleo", add_client)
    federation.run()
    run = load_run(federation.folder / "run")
    assert schedule_of(federation) == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [client["name"] for client in run.info["clients"]] == ["ann", "bob", "cleo", "dan"]
    # with FedAPA, a newcomer starts from the mean of the bodies that the others have sent
    two = simulated(replace(read_deployment(federation.folder), rounds=2), clients(3))
    mean = {name: leaf.mean(0) for name, leaf in two.server["params"].items()}
    node_id = enrolled_clients(federation.folder)["dan"].node_id
    messages = [message for message in federation.grid.messages if message.metadata.dst_node_id == node_id]
    received = next(message for message in messages if message.metadata.message_type == "train")
    params = from_record(received.content, 10**9)[1]["params"]
    assert all(torch.allclose(params[name], mean[name]) for name in mean)
    assert run.scores("trained").keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["fedadmm", "fedapm", "apple", "fedlag"])
def test_newcomer_whose_first_round_does_not_count_keeps_its_initial_state(
    name: str, create: Callable[..., InProcessFederation]
) -> None:
    """The first message initializes its copy of the shared variable, and the server relies on that.

    The states of the others have a row per client with some methods, and grow.
    """
    federation = create(method=name, min_clients=2, rounds=4)
    federation.grid.offline = {"cleo"}
    states: list[bytes] = []

    def connect(who: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return reply
        federation.grid.offline = set()
        if who == "cleo":
            (path,) = (federation.client_folders["cleo"] / "runs").glob("*/states/initial-*.safetensors")
            states.append(path.read_bytes())
        return None if who == "cleo" and message.metadata.group_id == "2" else reply

    federation.grid.tamper = connect
    federation.run()
    assert schedule_of(federation) == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert len(states) == 3 and len(set(states)) == 1


def test_resume_after_kill_keeps_clients_that_joined_late(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedapa", min_clients=2, rounds=4)
    federation.grid.offline = {"cleo"}
    rounds: list[str] = []

    def connect(name: str, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            rounds.append(message.metadata.group_id)
        if rounds == ["1"]:
            federation.grid.offline = set()
        if rounds[-1:] == ["3"] and rounds.count("3") == 2:
            raise Killed
        return reply

    run_until_killed(federation, connect)
    federation.run()
    assert schedule_of(federation) == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert load_run(federation.folder / "run").info["clients"][2]["name"] == "cleo"


def test_client_that_leaves_in_a_round_is_not_used_or_selected_anymore(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedapa")
    federation.grid.tamper = after("train", "1", "cleo", lambda: mark_as_left(federation.folder, "bob"))
    federation.run()
    assert schedule_of(federation) == [[0, 2]] * 3
    assert load_run(federation.folder / "run").records[0]["missed"] == {1: "it was suspended or has left"}


@pytest.mark.parametrize(("problem", "text"), [("bundle", "other training settings"), ("data", "There is no file")])
def test_client_that_cannot_join_is_rejected_and_not_queried_in_every_round(
    problem: str, text: str, create: Callable[..., InProcessFederation]
) -> None:
    federation = create(method="fedapa", min_clients=2)
    if problem == "bundle":
        change_batch_size(federation.client_folders["bob"] / "bundle")
    else:
        (federation.client_folders["bob"] / "data.npz").unlink()
    federation.run()
    assert text in read_status(federation.folder)["rejected"]["bob"]
    assert schedule_of(federation) == [[0, 1]] * 3  # ann and cleo
    messages = [message.metadata for message in federation.grid.messages]
    queries = [m for m in messages if m.message_type == "query" and not m.reply_to_message_id]
    # all three, then the remaining two because their indices changed; bob is not queried again before each round
    assert len(queries) == 5


def change_batch_size(folder: Path) -> None:
    settings = folder / "deployment.toml"
    settings.write_text(settings.read_text().replace("batch_size = 4", "batch_size = 8"))


@pytest.mark.parametrize(("number", "min_clients"), [("2", 3), ("3", 2)], ids=["round", "last evaluation"])
def test_server_waits_for_offline_client(
    number: str, min_clients: int, create: Callable[..., InProcessFederation]
) -> None:
    federation = create(method="fedapa", min_clients=min_clients, retry=1)
    node_ids, polls = federation.grid.get_node_ids, iter(range(20))

    def poll() -> list[int]:
        if next(polls, None) is None:  # it is online again after twenty polls
            federation.grid.offline = set()
        return node_ids()

    def reboot() -> None:
        federation.grid.offline = {"bob"}
        federation.grid.get_node_ids = poll  # type: ignore[method-assign]

    federation.grid.tamper = after("train", number, "cleo", reboot)
    federation.run()
    assert next(polls, None) is None
    check_same_models(federation, simulated(read_deployment(federation.folder), clients()))
    assert load_run(federation.folder / "run").scores("trained").keys() == {0, 1, 2}


def test_client_offline_during_last_evaluation_has_trained_model(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedapa", min_clients=2)
    federation.grid.tamper = after("train", "3", "cleo", lambda: federation.grid.offline.add("bob"))
    federation.run()
    expected = simulated(read_deployment(federation.folder), clients()).personal(1, "trained")
    assert same(read_personal_model(federation.client_folders["bob"], "trained"), expected)


def test_resume_with_changed_training_settings_or_as_simulation_is_rejected(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedapa")

    def kill() -> None:
        raise Killed

    run_until_killed(federation, after("train", "2", "ann", kill))
    path = federation.folder / "deployment.toml"
    before = path.read_text()
    change_batch_size(federation.folder)
    assert "has changed since this run started" in error_message(federation.run)
    assert "fedtailor deploy resume" in error_message(lambda: ft.resume(federation.folder / "run"))
    path.write_text(before.replace("retry = 0", "retry = 2"))  # does not affect clients
    federation.run()
    check_same_models(federation, simulated(read_deployment(federation.folder), clients()))


def test_client_of_another_version_does_not_train(create: Callable[..., InProcessFederation], monkeypatch: Any) -> None:
    federation = create(method="fedapa", min_clients=2)
    fields = FlowerClients._fields
    monkeypatch.setattr(FlowerClients, "_fields", lambda self, *args: fields(self, *args) | {"version": "0.0.1"})
    assert "another version" in error_message(federation.run)


@pytest.mark.parametrize(
    ("name", "value"),
    [("accuracy_trained", float("inf")), ("accuracy_trained", 1.01), ("loss_received", 1e308), ("loss", -1e39)],
)
def test_impossible_score_leaves_out_its_client_and_the_mean_is_that_of_the_others(
    name: str, value: float, create: Callable[..., InProcessFederation], caplog: pytest.LogCaptureFixture
) -> None:
    federation = create(method="fedavg")

    def lie(who: str, message: Message, reply: Message) -> Message:
        if who != "bob" or message.metadata.message_type != "evaluate":
            return reply
        fields, _ = from_record(reply.content, 0)
        return Message(to_record(fields | {"scores": fields["scores"] | {name: value}}), reply_to=message)

    federation.grid.tamper = lie
    federation.run()
    run = load_run(federation.folder / "run")
    expected = simulated(read_deployment(federation.folder), clients()).scores("trained")
    assert run.scores("trained") == pytest.approx({client: expected[client] for client in (0, 2)})
    assert math.isfinite(run.records[-1]["accuracy_trained"])
    assert f"bob is not evaluated: its {name} is not between" in caplog.text


def test_late_reply_is_removed_from_flower(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedapa", min_clients=2)
    late: list[Message] = []

    def delay(name: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and name == "bob" and message.metadata.group_id == "1":
            late.append(reply)
            return None
        if late and message.metadata.group_id == "2":  # deliver the late reply
            late_reply = late.pop()
            federation.grid.replies[late_reply.metadata.reply_to_message_id] = late_reply
        return reply

    federation.grid.tamper = delay
    federation.run()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(1.0)
    assert federation.grid.replies == {}


def test_client_record_counts_all_uploads(create: Callable[..., InProcessFederation]) -> None:
    pytest.importorskip("dp_accounting")
    federation = create(method="fedavg", channel={"clip": 1.0, "noise": 2.0})

    def record_of(name: str) -> Path:
        return next((federation.client_folders[name] / "runs").glob("*/rounds.jsonl"))

    def truncate() -> None:
        """Simulate that ann was killed while it wrote the record of another upload."""
        record_of("ann").write_bytes(record_of("ann").read_bytes() + b'{"round": 1, "byt')

    federation.grid.tamper = after("train", "1", "ann", truncate)
    federation.run()
    channel = read_deployment(federation.folder).channel
    on_server = [line["epsilon"] for line in load_run(federation.folder / "run").records]
    for name, sent in (("ann", (1, 3, 4)), ("bob", (1, 2, 3))):
        lines = record_of(name).read_text().splitlines()
        found = [json.loads(line)["epsilon"] for line in lines if line.endswith("}") and "epsilon" in line]
        assert found == [channel.privacy_spent(count)["epsilon"] for count in sent]
    assert found == on_server


def test_client_that_lost_its_states_continues_as_newcomer(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedper", rounds=2)

    def lose() -> None:
        for path in (federation.client_folders["bob"] / "runs").glob("*/states/*"):
            path.unlink()

    federation.grid.tamper = after("train", "1", "bob", lose)
    federation.run()
    assert schedule_of(federation)[1] == [0, 1, 2]


def test_noise_is_secret_and_differs_between_messages(create: Callable[..., InProcessFederation]) -> None:
    """The same noise on two uploads would reveal their difference."""
    pytest.importorskip("dp_accounting")
    federation = create(method="fedavg", channel={"clip": 1e-9, "noise": 1.0}, max_failures=1.0)
    folder = ClientFolder.open(federation.client_folders["ann"])
    request = RoundRequest("run", 0, 1, 3, [9, 4, 7], 1.0, 0)
    start = {"params": folder.deployment.model().init(0)}
    start = {"params": {name: leaf.double() for name, leaf in start["params"].items()}}

    def noise(message: Tree) -> torch.Tensor:
        upload = Worker(folder, request).train(message)[1]["params"]
        return torch.cat([upload[name].flatten() for name in upload]) / 1e-9

    first, again = noise(start), noise(start)
    other = noise({"params": {name: leaf + 1.0 for name, leaf in start["params"].items()}})
    assert torch.allclose(first, again, atol=1e-3)  # repeating a message reveals nothing new
    assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.1
    public = folder.deployment.channel.encode(
        {"w": torch.zeros(1, 50).double()}, {"w": torch.zeros(1, 50).double()}, [0], 1, 0
    )
    assert abs(float(first.std()) - 1) < 0.2 and not torch.allclose(public["w"][0, :8] / 1e-9, first[:8], atol=0.1)


def test_server_receives_exactly_what_the_preview_lists_and_no_personal_models(
    create: Callable[..., InProcessFederation],
) -> None:
    federation = create(method="fedapa")
    federation.run()
    preview = preview_payload(read_deployment(federation.folder), clients=3, num_samples=9)
    train = [m for m in federation.grid.messages if m.metadata.message_type == "train"]
    uploads = [from_record(m.content, 10**9)[1] for m in train if m.metadata.reply_to_message_id]
    for tree in uploads:
        assert {f"params/{name}": tuple(leaf.shape) for name, leaf in tree["params"].items()} == {
            tensor.name: tensor.shape for tensor in preview["up"]
        }
    assert not any("head" in tensor.name for tensor in preview["up"])
    run = load_run(federation.folder / "run")
    assert run.records[0]["bytes_up"] == 3 * sum(tensor.bytes for tensor in preview["up"])
    assert "on the client's machine" in error_message(lambda: run.personal(0))
    saved = unpack(next((federation.folder / "run" / "checkpoints").glob("*3/server.safetensors")).read_bytes())
    assert "head" not in json.dumps(sorted(saved["server"]["params"]))
    assert "finished" in error_message(federation.run)


def test_absent_rows_are_not_uploaded(create: Callable[..., InProcessFederation]) -> None:
    """FedAF computes samples of all classes, also of those that a client does not have."""
    fed = clients()
    y = fed.y.clone()
    y[fed.train[0]] = y[fed.train[0]].clamp(max=1)  # ann has no samples of class 2
    federation = create(replace(fed, y=y), method="fedaf", rounds=1)
    federation.run()
    uploads = [from_record(m.content, 10**9) for m in federation.grid.messages if m.metadata.reply_to_message_id]
    (samples,) = (tree["samples"] for fields, tree in uploads if tree and fields["name"] == "ann")
    assert samples.present.tolist() == [True, True, False] and not samples.values[2].any()


def test_unexpected_error_of_client_does_not_reveal_data(
    create: Callable[..., InProcessFederation], monkeypatch: Any
) -> None:
    federation = create(method="fedavg", min_clients=2)

    def fail(self: Worker, message: Tree) -> Any:
        if self._client.name == "bob":
            raise ValueError("the patient's name is Bob")
        return train(self, message)

    train = Worker.train
    monkeypatch.setattr(Worker, "train", fail)
    federation.run()
    assert load_run(federation.folder / "run").records[0]["failed"] == {1: "it reported: ValueError, see its log"}


def remove_sample(folder: Path) -> None:
    """Remove a training sample from a client's data."""
    with np.load(folder / "data.npz") as arrays:
        fewer = {key: value[1:] if key.endswith("train") else value for key, value in arrays.items()}
    np.savez(folder / "data.npz", **fewer)


def test_changed_data_are_rejected(create: Callable[..., InProcessFederation]) -> None:
    federation = create(method="fedavg", min_clients=2)
    federation.grid.tamper = after("query", "", "bob", lambda: remove_sample(federation.client_folders["bob"]))
    federation.run()
    assert "The data changed" in load_run(federation.folder / "run").records[0]["failed"][1]


def test_worker_rereads_data_and_settings_only_if_they_change(
    create: Callable[..., InProcessFederation], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create(method="fedavg").client_folders["bob"]
    reads: list[Path] = []

    def count_reads(path: Path, *args: Any, **options: Any) -> Any:
        reads.append(path)
        return read_client(path, *args, **options)

    monkeypatch.setattr(client_data, "read_client", count_reads)

    def query() -> dict[str, Any]:
        return dict(json.loads(answer(folder, APP, "query", '{"index": 1}', b"")[0]))

    first = query()
    assert query() == first and len(reads) == 1
    remove_sample(folder)
    assert query()["train"] == first["train"] - 1 and len(reads) == 2
    change_batch_size(folder / "bundle")
    assert query()["digest"] != first["digest"] and len(reads) == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"address": "nowhere"}, "host:port"),
        ({"address": "x:0"}, "host:port"),
        ({"deadline": 0}, "deadline"),
        ({"min_clients": 0}, "min_clients"),
        ({"retry": -1}, "retry"),
        ({"engine": "pool"}, "only to simulations"),
        ({"inputs": {"shape": []}}, "inputs.shape"),
        ({"inputs": {"classes": 1}}, "inputs.classes"),
        ({"method": "nothing"}, "nothing"),
    ],
)
def test_invalid_deployment_is_rejected(settings: dict[str, Any], text: str) -> None:
    assert text in error_message(lambda: make_deployment(settings))


def test_message_round_trip_preserves_fields_and_tree() -> None:
    tree: Tree = {
        "a": {"b": torch.arange(6).reshape(2, 3)},
        "empty": {},
        "rows": Rows(torch.ones(2, 1), torch.ones(2) > 0),
    }
    fields, back = from_record(to_record({"round": 3}, tree), 10**6)
    assert fields == {"round": 3} and pack(back) == pack(tree)
    assert same(back["a"], tree["a"])
    assert "at most 100 are allowed" in error_message(lambda: from_record(to_record({}, tree), 100))


def test_dummy_client_trains_only_if_structure_of_uploads_is_unknown(
    create: Callable[..., InProcessFederation], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    def count_calls(*args: Any) -> Tree:
        rounds.append(args[4])
        return dummy_upload(*args)

    monkeypatch.setattr(flower_clients, "dummy_upload", count_calls)
    create(method="dbe", rounds=4).run()  # its upload is larger in round 1
    assert rounds == [1, 2]
