"""Real federations, in real processes, with all that happens to them."""

import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from cables import cable
from conftest import refusal, same
from deployed import Federated, federate
from federating import LONGEST, Federation, Party, federation, node_of, peak_memory, plan_of, redirected, until
from fedtailor.deploy import link
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.settings import write_deployment
from fedtailor.deploy.trial import model, trial
from fedtailor.packing import unpack
from fedtailor.run import MOMENTS
from fedtailor.trees import Tree

pytestmark = pytest.mark.slow
NAMES = ("ann", "bob", "cleo")
EVERYONE = [0, 1, 2]


def test_the_trial_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    trying = Party(["trial", "--clients", "3", "--folder", str(tmp_path / "trial")], tmp_path / "trial.log", {})
    assert trying.process.wait(LONGEST) == 0, trying.said()
    assert "fedapa on digits, 3 clients, 3 rounds" in trying.said() and trying.said().count(" equal ") == 3
    assert "Every personal model is the simulation's, bit for bit." in trying.said()
    assert trying.processes() == []


def test_a_trial_that_cannot_go_on_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("fedtailor.deploy.trial._free_port", lambda: taken.getsockname()[1])
        said = refusal(lambda: trial(clients=3, rounds=1, method="fedapa", folder=tmp_path / "trial", say=print))
    assert "The server did not start" in said and "cannot be used: Address already in use" in said


@pytest.mark.parametrize("method", ["fedapm", "fedlag", "selffl", "fedproto", "pfedhn"])
def test_the_models_of_a_simulation_come_out_of_real_processes(method: str, tmp_path: Path) -> None:
    found = trial(clients=3, rounds=2, method=method, folder=tmp_path, say=print)
    assert [row.equal for row in found.rows] == [True] * 3
    assert [row.deployed for row in found.rows] == pytest.approx([row.simulated for row in found.rows])


def begin(real: Federation, *names: str, port: int | None = None) -> None:
    """A server and its clients, and a run that has begun."""
    real.serve()
    for name in names:
        real.join(name, None if port is None else redirected(real.bundle(name), port))
    real.do("start")


def test_clients_that_miss_a_round_are_used_again_with_the_state_from_before(tmp_path: Path) -> None:
    with federation(tmp_path, NAMES, rounds=9, min_clients=2, deadline=60.0) as real:
        begin(real, *NAMES)

        lost_power = real.hold("cleo", after=1)
        real.parties["cleo"].kill()
        assert real.parties["cleo"].processes() == []
        real.let_go("cleo")
        cleo = real.join("cleo")

        lost_flower = real.hold("bob", after=lost_power)  # when cleo is back
        bob = real.parties["bob"]
        bob.send(signal.SIGKILL, "flower-supernode")
        until(lambda: not bob.processes("flwr-clientapp"), "what Flower started ends with it")
        real.let_go("bob")

        slow = real.hold("ann", after=lost_flower)  # when bob is back
        real.wait_for_round(slow)
        real.let_go("ann")  # and now it sends what is too late

        run = real.wait_for_end()
        plan, missed = plan_of(run), [line["missed"] for line in run.records]
        assert plan[lost_power - 1] == [0, 1] and missed[lost_power - 1].keys() == {2}
        assert plan[lost_flower - 1] == [0, 2] and missed[lost_flower - 1].keys() == {1}
        assert plan[slow - 1] == [1, 2] and missed[slow - 1] == {0: "late"}
        assert plan[-1] == EVERYONE and not any(line["failed"] for line in run.records)
        # to who missed a round, it did not happen: in the simulation they are not asked
        real.check_same(run)
        assert bob.process.poll() is None and cleo.process.poll() is None
        real.end()


def test_a_server_that_dies_and_a_network_that_is_cut_change_nothing(tmp_path: Path) -> None:
    with federation(tmp_path, NAMES, rounds=4, deadline=90.0, retry=6) as real, cable(real) as wire:
        begin(real, *NAMES, port=wire.port)

        real.hold("ann", after=1)
        real.parties["server"].kill()
        assert real.parties["server"].processes() == []
        real.let_go("ann")
        real.serve()
        real.resume()

        real.hold("bob", after=2)
        real.parties["server"].send(signal.SIGKILL, "flwr-serverapp")
        real.let_go("bob")
        real.resume()

        real.hold("cleo", after=3)
        wire.cut()
        real.let_go("cleo")
        # longer than Flower waits for a sign of life, which is a minute
        until(lambda: set(link.nodes(real.operator).values()) == {"offline"}, "the server misses its clients")
        wire.mend()

        run = real.wait_for_end()
        assert plan_of(run) == [EVERYONE] * 4 and [line["round"] for line in run.records] == [1, 2, 3, 4]
        real.check_same(run)
        for name in NAMES:
            assert real.parties[name].process.poll() is None and "The connection is lost" in real.parties[name].said()
        real.end()


def misbehave() -> None:
    """Runs in every process of a hostile client before anything else: what it sends depends on the round."""
    import os
    import sys

    words = " ".join(sys.orig_argv)
    if "flwr-clientapp" in words:
        import torch
        from flwr.app import Array, ArrayRecord, RecordDict

        from fedtailor.deploy import client_app
        from fedtailor.deploy.messages import to_record as honest

        def raw(said: dict[str, Any], data: bytes) -> RecordDict:
            array = Array("uint8", (len(data),), "fedtailor.safetensors", data)
            return RecordDict({**honest(said), "tree": ArrayRecord({"tree": array})})

        def lie(said: dict[str, Any], tree: Any = None) -> RecordDict:
            number = said.get("round", 0) if tree is not None else 0
            if number == 2:
                tree["params"]["fc1.bias"][0] = float("nan")
            if number == 3:
                tree["params"]["fc1.bias"] = torch.zeros(63)
            if number == 4:
                tree["head"] = torch.zeros(2)
            if number == 5:
                said = said | {"name": "ann"}
            if number == 6:
                said = said | {"round": 5}
            if number == 7:
                return raw(said, os.urandom(25_000))
            if number in (9, 10):  # one piece, named two hundred times; pieces that are all different
                return raw(said, bytes(2**30) if number == 9 else os.urandom(2**30))
            return honest(said, tree)

        client_app.to_record = lie  # type: ignore[attr-defined, assignment]
    elif "flower-supernode" in words:
        from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
        from flwr.supernode.fleet_http_client import FleetHttpClient

        push = FleetHttpClient.PushMessages

        def forge(self: FleetHttpClient, request: PushMessagesRequest) -> PushMessagesResponse:
            if request.messages_list[0].metadata.group_id == "10":
                forged = PushMessagesRequest.FromString(request.SerializeToString())
                forged.messages_list[0].metadata.src_node_id = int(os.environ["VICTIM"])
                try:
                    push(self, forged)
                except Exception as error:
                    print("FORGED:", error, flush=True)
            return push(self, request)

        FleetHttpClient.PushMessages = forge  # type: ignore[method-assign]


REFUSALS = {
    2: "its upload 'params/fc1.bias' has NaN or infinity",
    3: "its upload 'params/fc1.bias' is float32 (63,), it must be float32 (64,)",
    4: "its upload 'head' is float32 (2,), it must be not there",
    5: "another client's name",
    6: "another round",
    7: "hold no tensors",
}


def test_a_hostile_client_is_refused_and_named_and_disturbs_nobody(tmp_path: Path) -> None:
    with federation(tmp_path, NAMES, rounds=10, min_clients=2, deadline=90.0) as real:
        server = real.serve()
        real.join("ann")
        real.join("bob")
        cleo = real.join("cleo", first=misbehave, VICTIM=str(node_of(real, "ann")))
        real.do("start")

        real.wait_for_round(1)
        stranger = join_uninvited(real)
        until(lambda: "does not know this client's key" in stranger.said(), "the stranger is refused")
        stranger.end()

        real.wait_for_round(9)
        assert holds_no_gigabyte(server)
        run = real.wait_for_end()
        assert holds_no_gigabyte(server)
        plan, failed, missed = plan_of(run), *([line[why] for line in run.records] for why in ("failed", "missed"))
        assert plan == [EVERYONE, *[[0, 1]] * 6, EVERYONE, [0, 1], [0, 1]]
        for number, words in REFUSALS.items():
            assert failed[number - 1].keys() == {2} and words in failed[number - 1][2]
        assert missed[8:] == [{2: "its answer is larger than may be expected"}, {2: "late"}]
        gate = (real.operator / "log" / "gate.log").read_text()
        assert "'cleo' answers in another client's name" in gate and "FORGED: " in log_of(real, "cleo")
        assert "'cleo' sends more than" in gate
        assert sum(path.stat().st_size for path in real.operator.glob("superlink.db*")) < 2**28
        real.check_same(run, clients=[0, 1])
        assert cleo.process.poll() is None
        real.end()


def holds_no_gigabyte(server: Party) -> bool:
    """Whether none of its processes ever took as much memory as the answer that was too large. Imports take a third of
    it, and what Flower was let have of the answer, which is a sixteenth, it copies a few times."""
    return max(map(peak_memory, server.processes())) < 2**30


def log_of(real: Federation, name: str) -> str:
    """What a client's Flower said."""
    return (real.site(name) / "log" / "supernode.log").read_text()


def join_uninvited(real: Federation) -> Any:
    """A client with a key of its own making, and all else as it should be."""
    elsewhere = real.folder / "elsewhere"
    shutil.copytree(real.operator, elsewhere, ignore=shutil.ignore_patterns("home", "log", "run", "superlink*", ".*"))
    make_keys(elsewhere, ["stranger"])
    shutil.copy(real.folder / "ann.npz", real.folder / "stranger.npz")
    return real.join("stranger", elsewhere / "bundles" / "stranger.tar")


def test_a_client_joins_late_and_leaves_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"rounds": 9, "min_clients": 2}
    with federation(tmp_path / "real", ("ann", "bob"), spare=1, deadline=60.0, **settings) as real:
        begin(real, "ann", "bob")
        server = real.parties["server"]

        real.hold("ann", after=0, asked=2)
        real.do("stop")
        write_deployment(real.operator, replace(real.deployment, retry=5))
        real.let_go("ann")
        real.resume()

        real.hold("ann", after=0, asked=2)
        real.do("keys", "--clients", "newcomer-0")
        late = real.join("newcomer-0")
        real.let_go("ann")
        joined = real.hold("newcomer-0", after=1)
        real.let_go("newcomer-0")
        real.wait_for_round(joined)
        real.do("leave", "newcomer-0")
        until(lambda: "does not know this client's key" in late.said(), "who has left is refused")

        run = real.wait_for_end()
        plan = plan_of(run)
        assert plan[0] == plan[-1] == [0, 1] and plan[joined - 1] == EVERYONE
        assert server.process.poll() is None and real.parties["server"] is server
        assert link.nodes(real.operator)["newcomer-0"] == "left"
        check_same_in_one_process(real, plan, tmp_path / "one", monkeypatch)
        real.end()


def check_same_in_one_process(
    real: Federation, plan: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No simulation lets clients join late; but a federation in one process does."""
    settings = {"method": "fedapa", "network": "mlp", "batch_size": 16, "evaluate_every": 1000, "min_clients": 2}
    beside = federate(folder, real.fed, {**settings, "rounds": len(plan)}, monkeypatch)
    be_away(beside, real.names, plan[0])

    def follow(name: str, message: Message, reply: Message) -> Message:
        number = int(message.metadata.group_id or 0)
        if message.metadata.message_type == "train" and number < len(plan):
            be_away(beside, real.names, plan[number])
        return reply

    beside.grid.tamper = follow
    beside.conduct()
    for name in real.names[:2]:
        for moment in MOMENTS:
            own, other = model(real.site(name), moment), model(beside.sites[name], moment)
            assert own and same(own, other), (name, moment)
    last = max(number for number, clients in enumerate(plan, start=1) if 2 in clients)
    assert same(state_of(real.site(real.names[2]), last), state_of(beside.sites[real.names[2]], last))


def state_of(site: Path, number: int) -> Tree:
    """What a client kept after a round, and its model as it trained."""
    (found,) = (site / "runs").glob(f"*/states/{number:06d}.safetensors")
    return unpack(found.read_bytes())


def be_away(beside: Federated, names: tuple[str, ...], there: list[int]) -> None:
    beside.grid.away = {name for client, name in enumerate(names) if client not in there}
