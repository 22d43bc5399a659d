"""Flower's processes: subprocesses, and the SuperNode's output."""

import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message as FlowerMessage
from flwr.proto.node_pb2 import NodeInfo

from conftest import error_message, tiny_federation
from fedtailor.deploy import executor
from fedtailor.deploy.app_bundle import build_app
from fedtailor.deploy.client import supernode, worker_process
from fedtailor.deploy.client.client_folder import worker_file
from fedtailor.deploy.keys import Bundle, renew_client_key
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.server import registration, superlink
from fedtailor.deploy.server.operator_folder import EnrolledClient, enrolled_clients, mark_as_left
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.deploy.subprocesses import (
    Subprocess,
    find_processes,
    flower_environment,
    keep_running,
    skip_repeats,
    stop_all,
)
from fedtailor.runs.files import folder_lock
from support.federation_processes import TIMEOUT, wait_until
from support.flower_in_process import federate
from support.proxied_superlink import prepare

# ---- subprocesses

_WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
_WITH_FAILING_THREAD = """
import threading, time
threading.Thread(target=lambda: 1 / 0).start()
time.sleep(600)
"""
_PARENT = """
import sys, time
from pathlib import Path
from fedtailor.deploy.subprocesses import Subprocess, flower_environment
home, script = Path(sys.argv[1]), sys.argv[2]
Subprocess(home, [script], flower_environment(home), home / "log", lambda line: print(line, flush=True))
time.sleep(600)
"""


def script(home: Path, text: str) -> str:
    home.mkdir(exist_ok=True)
    (home / "script.py").write_text(text)
    return str(home / "script.py")


def run_script(home: Path, text: str, on_line: Callable[[str], None] | None = None) -> Subprocess:
    return Subprocess(home, [script(home, text)], flower_environment(home), home.parent / "log", on_line)


def test_subprocess_stop_ends_all_descendants(tmp_path: Path) -> None:
    home, lines = tmp_path / "home", list[str]()
    process = run_script(home, _WITH_CHILD, lines.append)
    wait_until(lambda: lines, "the subprocess prints a line")
    assert process.returncode is None and len(find_processes(home)) == 2
    process.stop()
    assert process.returncode is not None and find_processes(home) == []
    assert lines == ["started"] and "started" in (tmp_path / "log").read_text()


def test_subprocess_does_not_outlive_killed_parent(tmp_path: Path) -> None:
    home = tmp_path / "home"
    call = [sys.executable, "-c", _PARENT, str(home), script(home, _WITH_CHILD)]
    parent = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # a process in another session is found and stopped by the next start
    wait_until(lambda: len(find_processes(home)) <= 1, "the subprocess ends")
    stop_all(home)
    assert find_processes(home) == []


def test_subprocess_ends_when_a_thread_fails(tmp_path: Path) -> None:
    process = run_script(tmp_path / "home", _WITH_FAILING_THREAD)
    wait_until(lambda: process.returncode is not None, "the subprocess ends")
    process.stop()
    assert process.returncode == 1 and "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_keep_running_starts_command_again_until_stopped(tmp_path: Path) -> None:
    home, stop, ended = tmp_path / "home", threading.Event(), list[Subprocess]()

    def watch(process: Subprocess) -> bool:
        wait_until(lambda: process.returncode is not None, "the subprocess ends")
        ended.append(process)
        if len(ended) == 2:
            stop.set()
        return True

    keep_running(lambda: run_script(home, "raise SystemExit(3)"), watch, stop)
    assert [process.returncode for process in ended] == [3, 3] and find_processes(home) == []


def test_worker_answers_messages_until_it_ends_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"network": "mlp", "rounds": 1, "batch_size": 4, "method": "fedavg"}
    federation = federate(tmp_path, replace(tiny_federation((9, 4)), names=("ann", "bob")), settings)
    folder, home = federation.client_folders["ann"], tmp_path / "home"
    monkeypatch.setattr(executor, "_START_TIMEOUT", TIMEOUT)

    def start() -> Subprocess:
        command = [worker_process.__file__, str(folder)]
        return Subprocess(home, command, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "log")

    def ask(kind: str, app: bytes = build_app()) -> dict[str, Any]:
        message = FlowerMessage(to_record({"index": 0}), 1, kind)
        return from_record(executor.answer(message, app, worker_file(folder)).content, 0)[0]

    worker = start()
    assert ask("query")["train"] == 9  # also while the worker is starting
    assert ask("train")["error"].startswith("The server addresses this client by another")
    assert ask("query", app=b"another app")["error"].startswith("The server's app (SHA-256 ")
    worker.stop()
    monkeypatch.setattr(executor, "_START_TIMEOUT", 0.0)
    with pytest.raises(RuntimeError, match="the worker ended"):
        ask("query")
    monkeypatch.setattr(executor, "_START_TIMEOUT", TIMEOUT)
    worker = start()
    assert ask("query")["train"] == 9
    worker.stop()


def test_new_key_replaces_old_one_when_it_is_first_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said, nodes = prepare(tmp_path / "operator", ["a", "b"]), list[str](), dict[bytes, NodeInfo]()

    def call(folder: Path, name: str, request: Any, response_type: Any, timeout: float = 0.0) -> Any:
        """Answer like Flower."""
        if name == "register-node":
            node = NodeInfo(node_id=len(nodes) + 1, name=request.name, public_key=request.public_key)
            nodes[request.public_key] = node
            return response_type(node_id=node.node_id)
        if name == "unregister-node":
            (node,) = (node for node in nodes.values() if node.node_id == request.node_id)
            node.status = "unregistered"
        return response_type()

    monkeypatch.setattr(registration, "call_flower", call)
    monkeypatch.setattr(registration, "list_nodes", lambda folder: list(nodes.values()))
    proxy, registered = Proxy("127.0.0.1:1", ssl.create_default_context()), dict[str, EnrolledClient]()

    def register() -> tuple[EnrolledClient, list[str]]:
        """Return what is known about a, and what the server says."""
        nonlocal registered
        said.clear()
        registered = registration.register_clients(folder, proxy, registered, said.append)
        return enrolled_clients(folder)["a"], said

    old, _ = register()
    assert (old.node_id, len(proxy._keys)) == (1, 2)
    renew_client_key(folder, "a")
    renewed, said = register()
    assert (renewed.node_id, renewed.public_key, len(proxy._keys)) == (1, old.public_key, 3)
    assert said == ["'a' can connect with its new key."] and register()[1] == []
    nodes[registration._encode_key(str(renewed.next_key))].status = "online"
    used, said = register()
    assert (used.node_id, used.public_key, used.next_key, len(proxy._keys)) == (3, renewed.next_key, None, 2)
    assert said == ["'a' uses its new key.", "The old key of 'a' is revoked."]
    assert nodes[registration._encode_key(old.public_key)].status == "unregistered"
    renew_client_key(folder, "a", at_once=True)
    register()
    last, _ = register()
    assert last.node_id == 4 and len(proxy._keys) == 2
    assert nodes[registration._encode_key(used.public_key)].status == "unregistered"
    mark_as_left(folder, "a")
    assert register()[1] == ["'a' has left."] and len(proxy._keys) == 1


def test_executor_reports_why_the_worker_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / executor.WORKER_END_FILE).write_text("the worker was killed by signal 9 (SIGKILL)")
    assert executor._worker_end(tmp_path / "address", since=0.0) == "the worker was killed by signal 9 (SIGKILL)"
    monkeypatch.setattr(executor, "_END_TIMEOUT", 0.2)
    assert (
        executor._worker_end(tmp_path / "address", since=time.time() + 60) == "the worker ended"
    )  # the file is about an earlier one


def test_server_of_folder_cannot_be_started_twice(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "operator", ["a"])
    (folder / "home").mkdir()
    with folder_lock(folder / "home"):
        assert "is already running" in error_message(lambda: superlink.serve(folder))


# ---- the SuperNode's output, and when it stalls


def make_connection(tmp_path: Path) -> tuple[supernode._Connection, list[str]]:
    reports: list[str] = []
    bundle = Bundle("a", "here:1", tmp_path)
    return supernode._Connection(bundle, tmp_path, skip_repeats(reports.append)), reports


_REPORTS = {
    "WARNING :   Connection attempt failed, retrying in 0.88 seconds": "No server responds at here:1;",
    "INFO :      SuperNode ID: 123": "Connected to here:1 as 'a'.",
    "WARNING :   Connection attempt failed, retrying in 2.88 seconds": "Lost the connection to here:1;",
    "INFO :      Connection successful after 3.1 seconds and 3 tries.": "Connected to here:1 as 'a'.",
    "[code: 0] The server does not know this client's key; ask the operator.": "The server does not know",
    "[code: 1004] Failed to activate SuperNode.": "'a' seems to be connected already;",
    "ERROR : Failed to send message 1: Client error '413 Request'": "The server did not accept a reply;",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to": "The server at here:1 is not this",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired": "The certificate of the",
    "_ssl.c:989: The handshake operation timed out": "Lost the connection to here:1;",
}


def test_supernode_output_is_reported_once(tmp_path: Path) -> None:
    connection, reports = make_connection(tmp_path)
    for line, sentence in _REPORTS.items():
        for _ in range(2):
            connection.read_line(line)
            connection.report_loss()
        assert reports.pop().startswith(sentence) and reports == []
    assert (tmp_path / "node").read_text() == "123"


def test_stalled_supernode_is_detected(tmp_path: Path) -> None:
    connection, _ = make_connection(tmp_path)

    def stalls(after: float, **last_seen: float) -> bool:
        """Return whether it stalls `after` seconds from the start; processes not given were just seen."""
        start = connection.busy_since or 0.0
        times = {process: start + last_seen.get(process, after) for process in ("supernode", "executor")}
        return supernode._find_stall(connection, supernode._LastSeen(**times), start + after, 1000.0) is not None

    assert not stalls(10_000) and not stalls(10_000, executor=0)
    assert stalls(91, supernode=0) and not stalls(89, supernode=0)
    connection.read_line("INFO :      Receiving: train message (ID: 1)")
    assert not stalls(80, executor=-500) and stalls(91, executor=-500)  # no executor has fetched it
    assert not stalls(900) and stalls(1000, executor=900)  # the executor has ended
    connection.read_line("INFO :      Sending: train message (ID: 2)")
    assert not stalls(2000, executor=100) and stalls(2091, executor=100)  # a slow network, or too late
    connection.read_line("INFO :      Sent successfully")
    assert not stalls(10_000, executor=0)
