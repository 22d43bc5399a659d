"""Real federations, in one process: Flower's own messages and apps, and a grid that delivers at once."""

import json
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
from conftest import SOME_FAST, refusal, same, tiny_federation
from deployed import Federated, Tamper, federate, join
from fedtailor.deploy.example import preview
from fedtailor.deploy.folder import enrolled, leave_for_good, read_status
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.remote import Remote
from fedtailor.deploy.settings import Deployment, make_deployment, read_deployment
from fedtailor.deploy.site import Site
from fedtailor.deploy.trial import model
from fedtailor.deploy.worker import Asked, Worker
from fedtailor.packing import pack, unpack
from fedtailor.record import open_run
from fedtailor.run import MOMENTS, Run
from fedtailor.trees import Rows, Tree

SETTINGS = {"network": "mlp", "rounds": 3, "batch_size": 4, "dtype": "float64", "evaluate_every": 3}
NAMES = ("ann", "bob", "cleo")


def clients(count: int = 3) -> ft.Federation:
    fed = tiny_federation((9, 4, 7, 5)[:count])
    return replace(fed, names=("ann", "bob", "cleo", "dan")[:count])


def simulated(deployment: Deployment, fed: ft.Federation, schedule: Sequence[Sequence[int]] | None = None) -> Run:
    rounds = None if schedule else deployment.rounds
    return ft.simulate(
        deployment.method, deployment.model(), fed, rounds=rounds, batch_size=deployment.batch_size,
        dtype=torch.float64, engine="sequential", seed=deployment.seed, schedule=schedule,
        validation=deployment.validation, channel=deployment.channel, evaluate_every=deployment.evaluate_every,
    )  # fmt: skip


def check_same_models(real: Federated, run: Run) -> None:
    """Every client's own models, on its own disk, are the simulation's to the last bit."""
    for client, site in enumerate(real.sites.values()):
        for moment in MOMENTS:
            own, wanted = model(site, moment), run.personal(client, moment)
            assert own.keys() == wanted.keys() and own
            assert all(torch.equal(own[name], wanted[name]) for name in own), (site.name, moment)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Federated]:
    def build(fed: ft.Federation | None = None, **settings: Any) -> Federated:
        return federate(tmp_path, fed or clients(), SETTINGS | settings, monkeypatch)

    return build


@pytest.mark.parametrize("name", SOME_FAST)
def test_every_method_gives_the_same_models_as_a_simulation(name: str, begin: Callable[..., Federated]) -> None:
    real = begin(method=name, rounds=2)
    real.conduct()
    deployment = read_deployment(real.folder)
    run = simulated(deployment, clients())
    check_same_models(real, run)
    record = open_run(real.folder / "run")
    for moment in MOMENTS:
        assert record.scores(moment) == pytest.approx(run.scores(moment))
    assert [line["bytes_up"] for line in record.records] == [line["bytes_up"] for line in run.records]
    assert [line["bytes_down"] for line in record.records] == [line["bytes_down"] for line in run.records]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "fedapa", "variant": "code"}},  # clients take turns
        {"method": "fedavg", "validation": 0.3},
        {"method": "fedavg", "channel": {"quantise": "int8", "top": 0.2}},
        {"method": "fedavg", "channel": {"top": 0.01}},
        {"method": "fedrep", "channel": {"quantise": "float16"}},
    ],
    ids=["one by one", "validation", "int8", "top", "float16"],
)
def test_settings_give_the_same_models_as_a_simulation(
    settings: dict[str, Any], begin: Callable[..., Federated]
) -> None:
    real = begin(**settings)
    real.conduct()
    run = simulated(read_deployment(real.folder), clients())
    check_same_models(real, run)
    assert open_run(real.folder / "run").summary() == run.summary()


def spoil(change: Callable[[dict[str, Any], Tree], Any]) -> Callable[[str, Message, Message], Message]:
    """Bob's answer in round 2, changed."""

    def tamper(name: str, message: Message, reply: Message) -> Message:
        if name != "bob" or message.metadata.message_type != "train" or message.metadata.group_id != "2":
            return reply
        words, tree = from_record(reply.content, 10**9)
        changed = change(words, tree)
        content = changed if isinstance(changed, RecordDict) else to_record(*(changed or (words, tree)))
        return Message(content, reply_to=message)

    return tamper


def set_first(value: float) -> Callable[[dict[str, Any], Tree], Any]:
    def change(words: dict[str, Any], tree: Tree) -> None:
        next(iter(tree["params"].values())).view(-1)[0] = value

    return change


def drop(tree: Tree) -> None:
    del tree["params"]["fc1.bias"]


MISDEEDS: dict[str, tuple[Callable[[dict[str, Any], Tree], Any], str]] = {
    "NaN": (set_first(float("nan")), "has NaN or infinity"),
    "infinity": (set_first(float("inf")), "has NaN or infinity"),
    "shape": (lambda words, tree: tree["params"].update({"fc1.bias": torch.zeros(3).double()}), "it must be"),
    "dtype": (lambda words, tree: tree["params"].update({"fc1.bias": torch.zeros(64)}), "it must be"),
    "extra name": (lambda words, tree: tree.update(extra=torch.zeros(2)), "'extra' is float32 (2,), it must be not"),
    "missing name": (lambda words, tree: drop(tree), "'params/fc1.bias' is not there"),
    "far too much": (lambda words, tree: tree.update(extra=torch.zeros(10**6)), "more than the"),
    "another's name": (lambda words, tree: words.update(name="ann"), "another client's name"),
    "another round": (lambda words, tree: words.update(round=1), "another round"),
    "another run": (lambda words, tree: words.update(run="x"), "another round"),
    "no words": (lambda words, tree: RecordDict(), "none of FedTailor's"),
    "no list": (lambda words, tree: RecordDict({"words": ConfigRecord({"words": "[1]"})}), "none of FedTailor's"),
    "no tree": (lambda words, tree: to_record(words), "is not there"),
    "garbage": (
        lambda words, tree: RecordDict(
            {**to_record(words), "tree": ArrayRecord({"tree": Array("uint8", (3,), "numpy.ndarray", b"abc")})}
        ),
        "hold no tensors",
    ),
    "control codes in a name": (lambda words, tree: tree.update({"\x1b[2J": torch.zeros(2)}), "cannot be printed"),
    "a name without end": (lambda words, tree: tree.update({"a" * 5000: torch.zeros(2)}), "too long"),
    "control codes": (lambda words, tree: ({"name": "bob", "refused": "\x1b[2J"}, None), "none of FedTailor's"),
}  # fmt: skip


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_bad_upload_is_refused_and_named_and_disturbs_nobody(misdeed: str, begin: Callable[..., Federated]) -> None:
    change, words = MISDEEDS[misdeed]
    real = begin(method="fedapa", min_clients=2)
    real.grid.tamper = spoil(change)
    real.conduct()
    lines = open_run(real.folder / "run").records
    assert words in lines[1]["failed"][1] and "\x1b" not in lines[1]["failed"][1]
    assert [line["clients"] for line in lines] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    # to bob the round did not happen: he goes back to the state from before it
    check_same_models(real, simulated(read_deployment(real.folder), clients(), [[0, 1, 2], [0, 2], [0, 1, 2]]))


@pytest.mark.parametrize("odd", ["mask", "at"])
def test_a_code_that_cannot_be_read_is_refused(odd: str, begin: Callable[..., Federated]) -> None:
    def change(words: dict[str, Any], tree: Tree) -> None:
        coded = tree["params"]["fc1.weight"]
        if odd == "mask":
            coded["coded.mask"][:] = True
        else:
            coded["coded.at"][:] = 2**15

    real = begin(method="fedavg", min_clients=2, channel={"top": 0.2 if odd == "mask" else 0.005})
    real.grid.tamper = spoil(change)
    real.conduct()
    assert "coded in a way" in open_run(real.folder / "run").records[1]["failed"][1]


def test_who_does_not_answer_is_late_and_goes_on_from_before(begin: Callable[..., Federated]) -> None:
    """Also when it is late several times: a state that counts is never thrown away for those that do not."""

    def lose(name: str, message: Message, reply: Message) -> Message | None:
        lost = name == "bob" and message.metadata.message_type == "train" and message.metadata.group_id in "234"
        return None if lost else reply

    real = begin(method="fedper", min_clients=2, rounds=5)
    real.grid.tamper = lose
    real.conduct()
    lines = open_run(real.folder / "run").records
    assert lines[1]["missed"] == {1: "late"} and lines[1]["failed"] == {}
    plan = [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2]]
    check_same_models(real, simulated(read_deployment(real.folder), clients(), plan))


def test_too_few_are_tried_again_and_then_the_run_stops_and_can_be_resumed(begin: Callable[..., Federated]) -> None:
    asked: list[str] = []

    def lose(name: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            asked.append(name)
            return None if name == "bob" and len(asked) <= 9 else reply
        return reply

    real = begin(method="fedapa", retry=2)
    real.grid.tamper = lose
    assert "2 of 3 clients delivered (bob: late)" in str(refused(real))
    assert asked == [*NAMES] * 3
    status = read_status(real.folder)
    assert status["state"] == "stopped" and status["round"] == 1 and "bob: late" in status["why"]
    real.conduct()
    check_same_models(real, simulated(read_deployment(real.folder), clients()))
    assert read_status(real.folder)["state"] == "finished"


def refused(real: Federated) -> ft.Refused:
    with pytest.raises(ft.Refused) as caught:
        real.conduct()
    return caught.value


class Killed(BaseException):
    """As if the process ended here."""


def conduct_until_killed(real: Federated, kill: Tamper) -> None:
    """Conduct it while `kill` looks at all messages, until it raises; afterwards nobody does."""
    real.grid.tamper = kill
    with pytest.raises(Killed):
        real.conduct()
    real.grid.tamper = lambda name, message, reply: reply


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("place", range(3))
def test_a_killed_server_goes_on_to_the_same_bits(kind: str, place: int, begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", evaluate_every=1)
    seen: list[str] = []

    def kill(name: str, message: Message, reply: Message) -> Message:
        seen.append(message.metadata.message_type)
        if seen.count(kind) == 4 + place and message.metadata.message_type == kind:  # in round 2
            raise Killed
        return reply

    conduct_until_killed(real, kill)
    real.conduct()
    run = simulated(read_deployment(real.folder), clients())
    check_same_models(real, run)
    assert [line["round"] for line in open_run(real.folder / "run").records] == [1, 2, 3]
    assert open_run(real.folder / "run").summary() == run.summary()


def test_a_client_that_joins_late_takes_part(begin: Callable[..., Federated]) -> None:
    fed = clients(4)
    real = begin(clients(3), method="fedapa", min_clients=2, rounds=4)
    received: list[Tree] = []

    def enter(name: str, message: Message, reply: Message) -> Message:
        kind, group = message.metadata.message_type, message.metadata.group_id
        if (kind, group, name) == ("train", "2", "cleo"):
            real.sites |= join(real.folder, fed, ["dan"])
            node = enrolled(real.folder)["dan"].node
            assert node is not None
            real.grid.sites = {**real.grid.sites, node: real.sites["dan"]}
        if (kind, group, name) == ("train", "3", "dan"):
            received.append(from_record(message.content, 10**9)[1])
        return reply

    real.grid.tamper = enter
    real.conduct()
    run = open_run(real.folder / "run")
    assert [line["clients"] for line in run.records] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [client["name"] for client in run.info["clients"]] == ["ann", "bob", "cleo", "dan"]
    # a new client of FedAPA starts from the mean of the bodies that the others had sent by then
    two = simulated(replace(read_deployment(real.folder), rounds=2), clients(3))
    mean = {name: leaf.mean(0) for name, leaf in two.server["params"].items()}
    assert received and all(torch.allclose(received[0]["params"][name], mean[name]) for name in mean)
    assert run.scores("trained").keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["fedadmm", "fedapm"])
def test_a_newcomer_whose_first_round_does_not_count_begins_where_it_began(
    name: str, begin: Callable[..., Federated]
) -> None:
    """Its first message is where its copy of the common variable begins, and the server counts on that."""
    real = begin(method=name, min_clients=2, rounds=4)
    real.grid.away = {"cleo"}
    states: list[bytes] = []

    def come(who: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return reply
        real.grid.away = set()
        if who == "cleo":
            (kept,) = (real.sites["cleo"] / "runs").glob("*/states/000000.safetensors")
            states.append(kept.read_bytes())
        return None if who == "cleo" and message.metadata.group_id == "2" else reply

    real.grid.tamper = come
    real.conduct()
    lines = open_run(real.folder / "run").records
    assert [line["clients"] for line in lines] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert len(states) == 3 and len(set(states)) == 1


def test_a_killed_server_remembers_who_joined_late(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2, rounds=4)
    real.grid.away = {"cleo"}
    rounds: list[str] = []

    def come(name: str, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            rounds.append(message.metadata.group_id)
        if rounds == ["1"]:
            real.grid.away = set()
        if rounds[-1:] == ["3"] and rounds.count("3") == 2:
            raise Killed
        return reply

    conduct_until_killed(real, come)
    real.conduct()
    run = open_run(real.folder / "run")
    assert [line["clients"] for line in run.records] == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert run.info["clients"][2]["name"] == "cleo"


def test_who_leaves_for_good_is_not_asked_any_more(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa")

    def go(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.group_id, name) == ("1", "cleo"):
            leave_for_good(real.folder, "bob")
        return reply

    real.grid.tamper = go
    real.conduct()
    assert [line["clients"] for line in open_run(real.folder / "run").records] == [[0, 1, 2], [0, 2], [0, 2]]


def test_a_client_with_another_bundle_is_not_let_in(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2)
    bundle = real.sites["bob"] / "bundle" / "deployment.toml"
    bundle.write_text(bundle.read_text().replace("batch_size = 4", "batch_size = 8"))
    real.conduct()
    assert "another method, network or data" in read_status(real.folder)["refused"]["bob"]
    assert open_run(real.folder / "run").records[0]["clients"] == [0, 1]  # ann and cleo


def test_who_may_not_join_is_not_asked_in_every_round(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2)
    (real.sites["bob"] / "data.npz").unlink()
    real.conduct()
    asked = [m for m in real.grid.crossed if m.metadata.message_type == "query" and not m.metadata.reply_to_message_id]
    # all three; the two that are left, whose numbers changed; and bob not again before each of three rounds
    assert len(asked) == 5
    assert "There is no file" in read_status(real.folder)["refused"]["bob"]


def test_who_is_away_at_the_end_is_waited_for(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2, retry=1)
    nodes, away = real.grid.get_node_ids, iter(range(20))

    def go(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id, name) == ("train", "3", "cleo"):
            real.grid.away = {"bob"}
            # it reboots: twenty looks later it is there again
            real.grid.get_node_ids = lambda: nodes() if next(away, None) is not None else come_back()  # type: ignore[method-assign]
        return reply

    def come_back() -> list[int]:
        real.grid.away = set()
        return nodes()

    real.grid.tamper = go
    real.conduct()
    check_same_models(real, simulated(read_deployment(real.folder), clients()))
    assert open_run(real.folder / "run").scores("trained").keys() == {0, 1, 2}


def test_who_stays_away_at_the_end_has_its_model_as_it_trained(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2)

    def lose(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id, name) == ("train", "3", "cleo"):
            real.grid.away = {"bob"}
        return reply

    real.grid.tamper = lose
    real.conduct()
    wanted = simulated(read_deployment(real.folder), clients()).personal(1, "trained")
    assert same(model(real.sites["bob"], "trained"), wanted)


def test_a_run_goes_on_with_what_it_began_with_or_not_at_all(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa")

    def kill(name: str, message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2":
            raise Killed
        return reply

    conduct_until_killed(real, kill)
    path = real.folder / "deployment.toml"
    before = path.read_text()
    path.write_text(before.replace("batch_size = 4", "batch_size = 8"))
    assert "not what this run began with" in str(refused(real))
    path.write_text(before.replace("retry = 0", "retry = 2"))  # which clients need not know
    real.conduct()
    check_same_models(real, simulated(read_deployment(real.folder), clients()))


def test_a_client_of_another_version_does_not_train(begin: Callable[..., Federated], monkeypatch: Any) -> None:
    real = begin(method="fedapa", min_clients=2)
    words = Remote._words
    monkeypatch.setattr(Remote, "_words", lambda self, *which: words(self, *which) | {"version": "0.0.1"})
    assert "another version" in str(refused(real))


def test_what_comes_too_late_does_not_stay_with_flower(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", min_clients=2)
    late: list[Message] = []

    def delay(name: str, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and name == "bob" and message.metadata.group_id == "1":
            late.append(reply)
            return None
        if late and message.metadata.group_id == "2":  # now it comes
            once = late.pop()
            real.grid.replies[once.metadata.reply_to_message_id] = once
        return reply

    real.grid.tamper = delay
    real.conduct()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(1.0)
    assert real.grid.replies == {}


def test_half_a_line_in_a_clients_record_costs_privacy_and_no_more(begin: Callable[..., Federated]) -> None:
    pytest.importorskip("dp_accounting")
    real = begin(method="fedavg", channel={"clip": 1.0, "noise": 2.0})

    def tear(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id, name) == ("train", "1", "ann"):
            (record,) = (real.sites["ann"] / "runs").glob("*/rounds.jsonl")
            record.write_bytes(record.read_bytes() + b'{"round": 1, "byt')  # it was about to send once more
        return reply

    real.grid.tamper = tear
    real.conduct()
    (record,) = (real.sites["ann"] / "runs").glob("*/rounds.jsonl")
    lines = record.read_text().splitlines()
    found = [json.loads(line)["epsilon"] for line in lines if line.endswith("}") and "epsilon" in line]
    wanted = [read_deployment(real.folder).channel.spent(sent)["epsilon"] for sent in (1, 3, 4)]
    assert found == wanted


def test_a_client_that_lost_its_disk_begins_anew(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedper", rounds=2)

    def lose(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id, name) == ("train", "1", "bob"):
            for path in (real.sites["bob"] / "runs").glob("*/states/*"):
                path.unlink()
        return reply

    real.grid.tamper = lose
    real.conduct()
    assert open_run(real.folder / "run").records[1]["clients"] == [0, 1, 2]


def test_noise_is_secret_and_new_for_every_message(begin: Callable[..., Federated]) -> None:
    """With equal noise on two uploads, their difference would show what it hides."""
    pytest.importorskip("dp_accounting")
    real = begin(method="fedavg", channel={"clip": 1e-9, "noise": 1.0}, max_failures=1.0)
    site = Site.open(real.sites["ann"])
    asked = Asked("run", 0, 1, 3, (9, 4, 7), 1.0, 0)
    start = {"params": site.deployment.model().init(0)}
    start = {"params": {name: leaf.double() for name, leaf in start["params"].items()}}

    def noise(message: Tree) -> torch.Tensor:
        upload = Worker(site, asked).train(message)[1]["params"]
        return torch.cat([upload[name].flatten() for name in upload]) / 1e-9

    first, again = noise(start), noise(start)
    other = noise({"params": {name: leaf + 1.0 for name, leaf in start["params"].items()}})
    assert torch.allclose(first, again, atol=1e-3)  # the same message again: nothing new is given away
    assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.1
    public = site.deployment.channel.encode(
        {"w": torch.zeros(1, 50).double()}, {"w": torch.zeros(1, 50).double()}, [0], 1, 0
    )
    assert abs(float(first.std()) - 1) < 0.2 and not torch.allclose(public["w"][0, :8] / 1e-9, first[:8], atol=0.1)


def test_a_clients_own_record_counts_all_it_ever_sent(begin: Callable[..., Federated]) -> None:
    pytest.importorskip("dp_accounting")
    real = begin(method="fedavg", channel={"clip": 1.0, "noise": 2.0})
    real.conduct()
    (record,) = (real.sites["ann"] / "runs").glob("*/rounds.jsonl")
    own = [line for line in map(json.loads, record.read_text().splitlines()) if "bytes_up" in line]
    served = [line["epsilon"] for line in open_run(real.folder / "run").records]
    assert [line["epsilon"] for line in own] == served


def test_what_is_shown_before_joining_is_what_crosses(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa")
    real.conduct()
    shown = preview(read_deployment(real.folder), clients=3, own_size=9)
    train = [m for m in real.grid.crossed if m.metadata.message_type == "train"]
    ups = [from_record(m.content, 10**9)[1] for m in train if m.metadata.reply_to_message_id]
    for tree in ups:
        assert {f"params/{name}": tuple(leaf.shape) for name, leaf in tree["params"].items()} == {
            sent.name: sent.shape for sent in shown["up"]
        }
    assert not any("head" in sent.name for sent in shown["up"])
    record = open_run(real.folder / "run").records[0]
    assert record["bytes_up"] == 3 * sum(sent.bytes for sent in shown["up"])


def test_a_clients_error_says_nothing_of_its_data(begin: Callable[..., Federated], monkeypatch: Any) -> None:
    real = begin(method="fedavg", min_clients=2)

    def fail(self: Worker, message: Tree) -> Any:
        if self._site.name == "bob":
            raise ValueError("the patient's name is Bob")
        return own(self, message)

    own = Worker.train
    monkeypatch.setattr(Worker, "train", fail)
    real.conduct()
    assert open_run(real.folder / "run").records[0]["failed"] == {1: "it refused: ValueError, see its log"}


def test_data_that_changed_are_noticed(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedavg", min_clients=2)

    def cut(name: str, message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, name) == ("query", "bob"):
            with np.load(real.sites["bob"] / "data.npz") as arrays:
                fewer = {key: value[1:] if key.endswith("train") else value for key, value in arrays.items()}
            np.savez(real.sites["bob"] / "data.npz", **fewer)
        return reply

    real.grid.tamper = cut
    real.conduct()
    assert "The data changed" in open_run(real.folder / "run").records[0]["failed"][1]


def test_a_real_clients_model_is_not_on_the_server(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa")
    real.conduct()
    run = open_run(real.folder / "run")
    assert "on its own disk" in refusal(lambda: run.personal(0))
    kept = unpack(next((real.folder / "run" / "checkpoints").glob("*3/server.safetensors")).read_bytes())
    assert "head" not in json.dumps(sorted(kept["server"]["params"]))
    assert "finished" in str(refused(real))


def test_resume_of_a_simulation_leads_to_the_right_command(begin: Callable[..., Federated]) -> None:
    real = begin(method="fedapa", retry=0)
    real.grid.tamper = lambda name, message, reply: None if message.metadata.group_id == "2" else reply
    refused(real)
    with pytest.raises(ft.Refused, match="fedtailor deploy resume"):
        ft.resume(real.folder / "run")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": "nowhere"}, "host:port"),
        ({"address": "x:0"}, "host:port"),
        ({"deadline": 0}, "deadline"),
        ({"min_clients": 0}, "min_clients"),
        ({"retry": -1}, "retry"),
        ({"engine": "pool"}, "for simulations"),
        ({"inputs": {"shape": []}}, "inputs.shape"),
        ({"inputs": {"classes": 1}}, "inputs.classes"),
        ({"method": "nothing"}, "nothing"),
    ],
)
def test_deployments_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: make_deployment(settings))


def test_a_message_is_read_as_it_was_written() -> None:
    tree: Tree = {
        "a": {"b": torch.arange(6).reshape(2, 3)},
        "empty": {},
        "rows": Rows(torch.ones(2, 1), torch.ones(2) > 0),
    }
    words, back = from_record(to_record({"round": 3}, tree), 10**6)
    assert words == {"round": 3} and pack(back) == pack(tree)
    assert same(back["a"], tree["a"])
    assert "may be expected" in refusal(lambda: from_record(to_record({}, tree), 100))


@pytest.mark.parametrize(
    "change",
    [
        {"index": 5}, {"index": -1}, {"index": 1.5}, {"counted": 3}, {"round": "2"}, {"sizes": [1, "x"]}, {"sizes": 3},
        {"run": "../../etc"}, {"run": "x" * 100}, {"participation": 2.0}, {"last": "yes"}, {"rounds": None},
    ],
)  # fmt: skip
def test_a_server_that_asks_for_nonsense_is_refused(change: dict[str, Any]) -> None:
    good = {"run": "ab12", "index": 1, "round": 2, "rounds": 3, "sizes": [1, 2], "participation": 1.0, "counted": 1}
    assert Asked.read(good).sizes == (1, 2)
    assert "does not say what" in refusal(lambda: Asked.read(good | change))
