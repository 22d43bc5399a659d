"""Federations of real processes in which clients, the server, and the network fail."""

import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from conftest import error_message, same
from fedtailor.core.trees import Tree
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.selftest import read_personal_model, run_selftest
from fedtailor.deploy.server import superlink
from fedtailor.deploy.server.operator_folder import enroll, enrolled_clients, read_status
from fedtailor.deploy.server.state.state import read_state
from fedtailor.experiments.deployment import write_deployment
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.serialization import unpack
from support.federation_processes import (
    TIMEOUT,
    DeployCommand,
    Federation,
    federation,
    node_id_of,
    peak_memory,
    redirect_bundle,
    schedule_of,
    wait_until,
)
from support.flaky_proxy import flaky_proxy
from support.flower_in_process import InProcessFederation, federate

pytestmark = pytest.mark.slow
NAMES = ("ann", "bob", "cleo")
ALL = [0, 1, 2]


def test_trial_succeeds_and_leaves_no_processes(tmp_path: Path) -> None:
    args = ["trial", "--clients", "3", "--rounds", "2", "--method", "fedproto", "--folder", str(tmp_path / "trial")]
    command = DeployCommand(args, tmp_path / "trial.log", {})
    assert command.process.wait(TIMEOUT) == 0, command.output()
    output = command.output()
    assert "FedProto on digits, 3 clients, 2 rounds" in output and output.count(" equal ") == 3
    assert "All personal models are bit-identical to the simulation's." in output
    assert command.processes() == []


def test_trial_that_fails_gives_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("fedtailor.deploy.selftest.free_address", lambda: f"127.0.0.1:{taken.getsockname()[1]}")
        message = error_message(lambda: run_selftest(3, 1, "fedapa", tmp_path / "trial", print))
    assert "The server did not start" in message and "cannot be used: Address already in use" in message


def start(deployed: Federation, *names: str, port: int | None = None) -> None:
    """Start the server, its clients, and the run."""
    deployed.start_server()
    for name in names:
        deployed.start_client(name, None if port is None else redirect_bundle(deployed.bundle(name), port))
    deployed.start_run()


def test_clients_that_miss_a_round_continue_from_state_before(tmp_path: Path) -> None:
    """In round 2, one client is slow, one loses its SuperNode, and one loses power.

    FedPer's messages have the same bits for any number of selected clients; FedAPA's mixtures differ in the last digit.
    """
    names = (*NAMES, "dan")
    with federation(tmp_path, names, method="fedper", rounds=4, min_clients=1) as deployed:
        for name in NAMES:
            deployed.hold(name, after=1)
        deployed.hold("dan", after=2)  # round 3 does not end before all clients are back
        start(deployed, *names)
        assert [deployed.block(name, after=1) for name in NAMES] == [2] * 3
        bob, cleo = deployed.commands["bob"], deployed.commands["cleo"]
        bob.send(signal.SIGKILL, "flower-supernode")
        cleo.kill()
        assert cleo.processes() == []
        wait_until(lambda: not bob.processes("executor.py"), "the executor ends with the SuperNode")

        deployed.give_up_on(*NAMES)
        deployed.wait_for_round(2)
        for name in NAMES:
            deployed.unblock(name)  # the reply of ann is late
        cleo = deployed.start_client("cleo")
        for command in (bob, cleo):
            wait_until(lambda command=command: command.output().count("Connected to") == 2, "the client is back")  # type: ignore[misc]
        deployed.unblock("dan")

        run = deployed.wait_for_end()
        schedule, missed = schedule_of(run), run.records[1]["missed"]
        assert schedule[0] == schedule[3] == [0, 1, 2, 3] and schedule[1] == [3]
        assert missed.keys() == {0, 1, 2} and missed[0] == "late"
        assert not any(line["failed"] for line in run.records)
        # in the simulation, clients that missed a round are not selected for it
        deployed.check_same_models(run)
        assert bob.process.poll() is None and cleo.process.poll() is None
        deployed.stop()


def test_server_failures_and_network_outage_do_not_change_models(tmp_path: Path) -> None:
    """The SuperLink is killed; later, the network fails for more than a minute, and the ServerApp is killed."""
    with federation(tmp_path, NAMES, rounds=3) as deployed, flaky_proxy(deployed) as proxy:
        start(deployed, *NAMES, port=proxy.port)

        deployed.block("ann", after=1)
        server = deployed.commands["server"]
        server.send(signal.SIGKILL, "flower-superlink")
        assert server.process.wait(TIMEOUT) != 0  # so that systemd restarts it
        assert "SuperLink was killed by signal 9 (SIGKILL)" in read_state(deployed.operator).problems[0]
        assert server.processes() == []
        deployed.unblock("ann")
        server = deployed.start_server()  # which resumes the run

        deployed.block("cleo", after=2)
        proxy.disconnect()
        deployed.unblock("cleo")
        deployed.give_up_on(*NAMES)
        wait_until(lambda: read_status(deployed.operator)["attempt"] == 2, "the round is repeated")
        server.send(signal.SIGKILL, "flwr-serverapp")
        wait_until(lambda: server.output().count("The run is resumed: ") == 2, "the run is resumed")
        assert "The run is resumed: its process was killed by signal 9 (SIGKILL)." in server.output()
        # longer than Flower's timeout of one minute
        wait_until(
            lambda: set(superlink.client_states(deployed.operator).values()) == {"offline"}, "clients are offline"
        )
        proxy.reconnect()

        run = deployed.wait_for_end()
        assert schedule_of(run) == [ALL] * 3 and [line["round"] for line in run.records] == [1, 2, 3]
        deployed.check_same_models(run)
        for name in NAMES:
            command = deployed.commands[name]
            assert command.process.poll() is None and "Lost the connection" in command.output()
        deployed.stop()


def misbehave() -> None:
    """Make a client malicious: what it sends depends on the round. Each of its processes calls this first."""
    import os
    import sys

    command_line = " ".join(sys.orig_argv)
    if "worker_process.py" in command_line:
        from fedtailor.deploy.client.worker import Worker
        from fedtailor.runs import serialization

        train, pack = Worker.train, serialization.pack

        def tamper(self: Worker, message: Any) -> Any:
            fields, tree = train(self, message)
            if fields["round"] == 1:
                return fields, bytes(2**30)  # one chunk that is listed 200 times
            if fields["round"] == 3:
                return fields, os.urandom(2**28)  # different chunks
            return fields, tree

        Worker.train = tamper  # type: ignore[method-assign]
        serialization.pack = lambda tree: tree if isinstance(tree, bytes) else pack(tree)
    elif "flower-supernode" in command_line:
        from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
        from flwr.supernode.fleet_http_client import FleetHttpClient

        push = FleetHttpClient.PushMessages

        def forge(self: FleetHttpClient, request: PushMessagesRequest) -> PushMessagesResponse:
            if request.messages_list[0].metadata.group_id == "4":
                forged = PushMessagesRequest.FromString(request.SerializeToString())
                forged.messages_list[0].metadata.src_node_id = int(os.environ["VICTIM"])
                try:
                    return push(self, forged)
                except Exception as error:
                    print("FORGED:", error, flush=True)
                    raise
            return push(self, request)

        FleetHttpClient.PushMessages = forge  # type: ignore[method-assign]


def test_malicious_client_is_rejected_and_does_not_affect_others(tmp_path: Path) -> None:
    """Rounds 3 and 4 do not wait for the deadline, although the client never completes its replies."""
    with federation(tmp_path, NAMES, rounds=4, min_clients=2) as deployed:
        server = deployed.start_server()
        deployed.start_client("ann")
        deployed.start_client("bob")
        cleo = deployed.start_client("cleo", setup=misbehave, VICTIM=str(node_id_of(deployed, "ann")))
        deployed.start_run()
        stranger = start_unknown_client(deployed)

        deployed.wait_for_round(2)
        assert stays_below_one_gigabyte(server)
        proxy_log = deployed.operator / "log" / "proxy.log"
        run = deployed.wait_for_end()
        assert stays_below_one_gigabyte(server)
        assert schedule_of(run) == [[0, 1], ALL, [0, 1], [0, 1]]
        missed = [line["missed"].get(2, "") for line in run.records]
        assert missed[:2] == ["its reply is larger than expected", ""]
        assert missed[2].startswith("its reply was refused: 'cleo' sends more than")
        assert missed[3] == "its reply was refused: 'cleo' replies in another client's name"
        assert "'cleo' sends more than" in proxy_log.read_text()
        assert "'cleo' replies in another client's name" in proxy_log.read_text()
        assert "FORGED: " in (deployed.client_folder("cleo") / "log" / "supernode.log").read_text()
        assert sum(path.stat().st_size for path in deployed.operator.glob("superlink.db*")) < 2**28
        deployed.check_same_models(run, clients=[0, 1])
        assert cleo.process.poll() is None
        wait_until(lambda: "does not know this client's key" in stranger.output(), "the unknown client is rejected")
        enroll(deployed.operator, enrolled_clients(deployed.folder / "elsewhere"))  # while the server runs
        wait_until(lambda: "Connected to" in stranger.output(), "the client connects after its enrollment")
        deployed.stop()


def stays_below_one_gigabyte(server: DeployCommand) -> bool:
    """Return whether no process of the server ever used as much memory as the reply that was too large.

    Imports use a third of it, and Flower copies the sixteenth of the reply that it received a few times.
    """
    return max(map(peak_memory, server.processes())) < 2**30


def start_unknown_client(deployed: Federation) -> DeployCommand:
    """Start a client with a valid bundle except that its key is not enrolled."""
    elsewhere = deployed.folder / "elsewhere"
    shutil.copytree(
        deployed.operator, elsewhere, ignore=shutil.ignore_patterns("home", "log", "run", "superlink*", ".*")
    )
    make_keys(elsewhere, ["stranger"])
    shutil.copy(deployed.folder / "ann.npz", deployed.folder / "stranger.npz")
    return deployed.start_client("stranger", elsewhere / "bundles" / "stranger.tar")


def test_client_joins_late_and_leaves(tmp_path: Path) -> None:
    with federation(tmp_path / "deployed", ("ann", "bob"), spare=1, rounds=5, min_clients=2) as deployed:
        start(deployed, "ann", "bob")
        server = deployed.commands["server"]

        deployed.block("ann", after=0, selected=2)
        deployed.run_command("stop")
        write_deployment(deployed.operator, replace(deployed.deployment, retry=5))
        deployed.unblock("ann")
        deployed.wait_until_unblocked("ann")  # otherwise it would be blocked again in the round that was stopped
        deployed.resume()

        deployed.block("ann", after=0, selected=2)
        deployed.run_command("keys", "--clients", "newcomer-0")
        late = deployed.start_client("newcomer-0")
        wait_until(lambda: "Connected to" in late.output(), "the newcomer is online")
        deployed.unblock("ann")
        joined = deployed.block("newcomer-0", after=1)
        deployed.unblock("newcomer-0")
        deployed.wait_for_round(joined)
        deployed.run_command("leave", "newcomer-0")
        wait_until(lambda: "does not know this client's key" in late.output(), "the client that left is rejected")

        run = deployed.wait_for_end()
        schedule = schedule_of(run)
        assert schedule[0] == schedule[-1] == [0, 1] and schedule[joined - 1] == ALL
        assert server.process.poll() is None and deployed.commands["server"] is server
        assert superlink.client_states(deployed.operator)["newcomer-0"] == "left"
        check_same_as_in_process(deployed, schedule, tmp_path / "one")
        deployed.stop()


def check_same_as_in_process(deployed: Federation, schedule: list[list[int]], folder: Path) -> None:
    """Compare with a federation in one process, because clients cannot join a simulation late."""
    settings = {"method": "fedapa", "network": "mlp", "batch_size": 16, "evaluate_every": 1000, "min_clients": 2}
    in_process = federate(folder, deployed.fed, {**settings, "rounds": len(schedule)})
    set_online(in_process, deployed.names, schedule[0])

    def follow(name: str, message: Message, reply: Message) -> Message:
        number = int(message.metadata.group_id or 0)
        if message.metadata.message_type == "train" and number < len(schedule):
            set_online(in_process, deployed.names, schedule[number])
        return reply

    in_process.grid.tamper = follow
    in_process.run()
    for name in deployed.names[:2]:
        for moment in MOMENTS:
            folders = deployed.client_folder(name), in_process.client_folders[name]
            model, expected = (read_personal_model(folder, moment) for folder in folders)
            assert model and same(model, expected), (name, moment)
    last = max(number for number, clients in enumerate(schedule, start=1) if 2 in clients)
    assert same(
        state_of(deployed.client_folder(deployed.names[2]), last),
        state_of(in_process.client_folders[deployed.names[2]], last),
    )


def state_of(folder: Path, number: int) -> Tree:
    """Return the client state and the trained model that a client saved after a round."""
    (path,) = (folder / "runs").glob(f"*/states/{number:06d}.safetensors")
    return unpack(path.read_bytes())


def set_online(in_process: InProcessFederation, names: tuple[str, ...], online: list[int]) -> None:
    in_process.grid.offline = {name for client, name in enumerate(names) if client not in online}
