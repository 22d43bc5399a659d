"""The server restarts its run after a crash, and only then; Flower is replaced by a fake."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_federation_in_process import Killed, clients, run_until_killed

from conftest import error_message
from fedtailor.deploy.server import superlink
from fedtailor.deploy.server.operator_folder import read_status, write_status
from fedtailor.deploy.server.run_control import RunSupervisor, roll_back_run, run_id, start_run, stop_run
from fedtailor.errors import DeployError
from fedtailor.runs.files import folder_lock
from support.flower_in_process import Clock, InProcessFederation, federate


class FakeFlower:
    """Counts the runs that were submitted; tests say when their processes end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitted, self.states = 0, dict[int, str]()
        for name in ("submit", "run_state", "stop_run", "stop_orphaned_runs"):
            monkeypatch.setattr(superlink, name, getattr(self, name))

    def submit(self, folder: Path) -> int:
        self.submitted += 1
        self.states[self.submitted] = "running"
        return self.submitted

    def run_state(self, folder: Path, run: int) -> str:
        return self.states[run]

    def stop_run(self, folder: Path, run: int) -> None:
        self.states[run] = "finished"

    def stop_orphaned_runs(self, folder: Path) -> None:
        self.states = dict.fromkeys(self.states, "finished")


class Supervised:
    """A started run with its supervisor."""

    def __init__(self, federation: InProcessFederation, flower: FakeFlower) -> None:
        self.folder, self.flower, self.clock = federation.folder, flower, Clock()
        self.said = list[str]()
        (self.folder / "run").mkdir()
        self.restart_server()
        start_run(self.folder)

    def restart_server(self) -> None:
        self.supervisor = RunSupervisor(self.folder, self.said.append, self.clock.read)

    def check(self, seconds: float = 0.0) -> int:
        """Let time pass, check once per second as the server does, and return how many runs were submitted so far."""
        for _ in range(1 + int(seconds)):
            self.supervisor.check()
            self.clock.sleep(1.0)
        return self.flower.submitted

    def work(self, **status: Any) -> None:
        """Let the process of the run start, write its status, and end in any way; Flower does not notice the end."""
        with folder_lock(self.folder / "run"):
            self.check()
            write_status(self.folder, {"state": "running", "round": 0} | status)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    settings = {"method": "fedavg", "network": "mlp", "rounds": 3, "batch_size": 4, "min_clients": 3}
    federation = federate(tmp_path, clients(), settings)
    (federation.folder / "home").mkdir(exist_ok=True)
    with folder_lock(federation.folder / "home"):  # the server runs
        yield Supervised(federation, FakeFlower(monkeypatch))


def test_supervisor_restarts_killed_run_at_once(run: Supervised) -> None:
    assert run.check(60) == 1  # Flower is still starting it
    run.work(round=2)
    assert run.check() == 2 and run.flower.states == {1: "finished", 2: "running"}
    status = read_status(run.folder)
    assert (status["state"], status["reason"], status["round"]) == ("starting", "", 2)
    assert run.said == ["The run is resumed: its process ended."] and run.check(60) == 2


def test_supervisor_of_restarted_server_resumes_run(run: Supervised) -> None:
    run.work()
    run.flower.states[1] = "finished"  # `superlink.serve` stops the runs of the server that crashed
    run.restart_server()
    assert run.check() == 2 and run_id(run.folder) == 2


@pytest.mark.parametrize(
    ("status", "restarts"),
    [
        ({"state": "finished"}, False),
        ({"state": "stopped", "reason": "try a smaller lr", "temporary": False}, False),
        ({"state": "stopped", "reason": "1 of 3 clients delivered", "temporary": True}, True),
    ],
)
def test_supervisor_does_not_repeat_an_error(run: Supervised, status: dict[str, Any], restarts: bool) -> None:
    run.work(**status)
    assert run.check(60) == (2 if restarts else 1)
    assert read_status(run.folder)["state"] == ("starting" if restarts else status["state"])


def test_supervisor_does_not_restart_run_that_operator_stopped_and_resume_does(run: Supervised) -> None:
    run.work()
    stop_run(run.folder)
    assert run.check(60) == 1 and read_status(run.folder)["reason"] == "the operator stopped it"
    assert "No run in" in error_message(lambda: stop_run(run.folder))
    start_run(run.folder)
    assert run.check(60) == 2
    assert "is active" in error_message(lambda: start_run(run.folder))


def test_supervisor_gives_up_after_five_restarts_without_a_new_round(run: Supervised) -> None:
    run.work(round=1)
    assert run.check() == 2
    run.work(round=2)  # so the next restart is the first one again
    for restart, pause in enumerate([0, 10, 20, 40, 80], start=2):
        assert pause == 0 or run.check(pause - 2) == restart
        assert run.check(2) == restart + 1
        run.work(round=2)
    assert run.check(1000) == 7 and "after 5 restarts without a new round" in read_status(run.folder)["reason"]
    assert "fedtailor deploy resume" in run.said[-1]


def test_stop_without_server_prevents_that_it_resumes_the_run(run: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> str:
        raise DeployError("The server is not running.")

    run.work()
    with monkeypatch.context() as patch:
        patch.setattr(superlink, "run_state", fail)
        stop_run(run.folder)
    run.restart_server()
    assert run.check(60) == 1


def test_rollback_of_run_that_was_not_started_or_runs_is_rejected(tmp_path: Path) -> None:
    settings = {"method": "fedavg", "network": "mlp", "rounds": 3, "batch_size": 4, "min_clients": 3}
    federation = federate(tmp_path, clients(), settings)
    assert "has not been started" in error_message(lambda: roll_back_run(federation.folder, 1))

    def kill(name: str, message: Any, reply: Any) -> Any:
        if message.metadata.group_id == "3":
            assert "first stop it with: fedtailor deploy stop" in error_message(
                lambda: roll_back_run(federation.folder, 1)
            )
            raise Killed
        return reply

    run_until_killed(federation, kill)
    assert roll_back_run(federation.folder, 1).round == 1
