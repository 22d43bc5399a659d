"""The state of a federation: processes that die, certificates that expire, full disks, metrics, and `status`."""

import errno
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import error_message, tiny_federation
from fedtailor.deploy import certificates, log_format
from fedtailor.deploy.client.server_certificate import certificate_warnings
from fedtailor.deploy.keys import make_keys, open_bundle, renew_server_certificate
from fedtailor.deploy.process_ends import exit_code
from fedtailor.deploy.server import superlink
from fedtailor.deploy.server.operator_folder import read_status, write_status
from fedtailor.deploy.server.state import server_record, supervisor
from fedtailor.deploy.server.state.metrics import Metric, metrics_of, to_text
from fedtailor.deploy.server.state.monitoring import serve_monitoring
from fedtailor.deploy.server.state.server_record import ServerRecord, write_server_record
from fedtailor.deploy.server.state.state import FORMAT, FederationState, read_state
from fedtailor.deploy.server.state.supervisor import Supervisor, supervised
from fedtailor.errors import DeployError
from fedtailor.experiments.deployment import Deployment, write_deployment
from fedtailor.runs import checkpoint
from fedtailor.runs.checkpoint import checkpoint_folders
from fedtailor.runs.files import folder_lock, write_and_sync
from support.federation_processes import free_port, wait_until
from support.flower_in_process import federate

RUNNING = {"state": "running", "round": 3, "rounds": 7, "members": ["a", "b"], "round_seconds": 2.5, "bytes_sent": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An operator's folder with two clients."""
    write_deployment(tmp_path / "dir", Deployment(address="localhost:9092"))
    make_keys(tmp_path / "dir", ["a", "b"])
    for name in ("home", "run"):
        (tmp_path / "dir" / name).mkdir()
    return tmp_path / "dir"


@contextmanager
def running_server(folder: Path, **fields: Any) -> Iterator[None]:
    """Hold the lock of a server, whose SuperLink is this process."""
    with folder_lock(folder / "home"):
        write_server_record(folder, ServerRecord(superlink=os.getpid(), **fields))
        yield


@contextmanager
def run_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of the run, and write the status that it would write."""
    code = (
        "import sys, time, pathlib; from fedtailor.runs.files import folder_lock\n"
        "with folder_lock(pathlib.Path(sys.argv[1])): print('locked', flush=True); time.sleep(600)"
    )
    call = [sys.executable, "-c", code, str(folder / "run")]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        write_status(folder, RUNNING | {"pid": process.pid})
        try:
            yield process
        finally:
            process.kill()


# ---- processes


def test_run_whose_process_is_killed_is_stopped_with_the_signal(folder: Path) -> None:
    with running_server(folder), run_process(folder) as process:
        assert read_state(folder).run["state"] == "running" and read_state(folder).problems == []
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: exit_code(process.pid) is not None, "the process ends")  # nobody has asked for its exit code
        state = read_state(folder)
    assert state.run["state"] == "stopped" and not state.processes["run"].running
    assert state.run["reason"] == "its process was killed by signal 9 (SIGKILL)"
    assert read_status(folder)["state"] == "running"  # what the dead process left


def test_killed_by_the_system_for_lack_of_memory_is_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(folder, memory_kills=4), run_process(folder) as process:
        process.kill()
        wait_until(lambda: exit_code(process.pid) is not None, "the process ends")
        monkeypatch.setattr("fedtailor.deploy.server.state.state.memory_kills", lambda: 5)
        assert "killed by the system because memory ran out" in read_state(folder).run["reason"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ServerRecord(reason="Port 9092 cannot be used: Address already in use.", ended=1.0), "Port 9092 cannot be"),
        (ServerRecord(boot="another"), "the machine was restarted"),
        (ServerRecord(), "it was killed"),
    ],
)
def test_server_that_ended_is_reported_with_the_reason(folder: Path, record: ServerRecord, reason: str) -> None:
    write_status(folder, RUNNING)
    write_server_record(folder, record)
    state = read_state(folder)
    assert not any(process.running for process in state.processes.values())
    assert state.run["state"] == "stopped" and reason in state.run["reason"] and reason in state.problems[0]
    assert {client.connection for client in state.clients.values()} == {"unknown"}
    Supervisor(folder, print).settle()  # of the next server, before it is overwritten
    assert read_status(folder)["state"] == "stopped" and reason in read_status(folder)["reason"]


def test_server_that_does_not_respond_and_dead_superlink_are_problems(folder: Path) -> None:
    with running_server(folder):
        assert read_state(folder).problems == []
        long_ago = time.time() - 40
        os.utime(server_record.server_file(folder), (long_ago, long_ago))
        assert "has not responded for 40 s" in read_state(folder).problems[0]
        server_record.show_life(folder)
        assert read_state(folder).problems == []
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            wait_until(lambda: exit_code(ended.pid) is not None, "the process ends")
            write_server_record(folder, ServerRecord(superlink=ended.pid))
            assert "SuperLink is not running: it ended with exit code 0" in read_state(folder).problems[0]


def test_supervisor_ends_run_and_keeps_reason_until_it_can_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, ended = list[str](), list[str]()

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def check() -> None:
        watching.check({"a": "online"}, "", lambda: ended.append("Flower's run"))

    with folder_lock(folder / "home"), run_process(folder) as process:
        watching = Supervisor(folder, said.append)
        watching.started(os.getpid())
        check()
        assert said == ended == [] and read_state(folder).clients["a"].connection == "online"
        process.kill()
        wait_until(lambda: exit_code(process.pid) is not None, "the process ends")
        with monkeypatch.context() as full:
            full.setattr(supervisor, "write_status", fail)
            check()
        process.wait()  # now the exit code is gone
        check()
        check()
    assert "killed by signal 9" in read_status(folder)["reason"] and read_status(folder)["state"] == "stopped"
    assert len(ended) == 2  # not after the status was written
    assert said[0].startswith("Warning: The run is stopped: its process was killed")


def test_supervisor_repeats_a_problem_daily(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(folder, monkeypatch, days=10)
    said, now = list[str](), [0.0]
    monkeypatch.setattr("fedtailor.deploy.server.state.supervisor.time.monotonic", lambda: now[0])
    with folder_lock(folder / "home"):
        watching = Supervisor(folder, said.append)
        for seconds in (0, 1, 3600, 86_399, 86_401, 86_402):
            now[0] = float(seconds)
            watching.check({}, "", lambda: None)
    assert len(said) == 2 and said[0].startswith("Warning: The server's certificate expires in 9 days, on ")


def test_server_that_cannot_start_leaves_the_reason(folder: Path) -> None:
    def serve() -> None:
        with supervised(folder, print):
            raise DeployError("Port 9092 cannot be used: Address already in use. Is a server already running?")

    assert "Port 9092" in error_message(serve)
    assert "Port 9092 cannot be used: Address already in use" in read_state(folder).problems[0]
    with socket.create_server(("localhost", 0)) as taken:
        write_deployment(folder, Deployment(address=f"localhost:{taken.getsockname()[1]}"))
        assert "cannot be used" in error_message(lambda: superlink.serve(folder))
    assert "cannot be used" in read_state(folder).problems[0]


# ---- certificates


def shorten(folder: Path, monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Give the server a certificate that expires after so many days; its validity starts a day ago."""
    with monkeypatch.context() as context:
        context.setitem(certificates._VALIDITY, "server", timedelta(days=days))
        renew_server_certificate(folder)


def test_certificate_is_a_warning_for_30_days_and_then_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(folder):
        shorten(folder, monkeypatch, days=32.5)
        assert read_state(folder).warnings == []
        shorten(folder, monkeypatch, days=30.5)
        state = read_state(folder)
        assert state.problems == [] and "The server's certificate expires in " in state.warnings[0]
        assert f"fedtailor deploy renew {folder}" in state.warnings[0]
        later = replace(state, at=state.at + 30 * 86_400)
        assert later.warnings == [] and "The server's certificate expired on " in later.problems[0]


def test_server_with_expired_certificate_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(certificates, "_CLOCK_LAG", timedelta(days=40))
        context.setitem(certificates._VALIDITY, "server", timedelta(days=40, seconds=1))
        renew_server_certificate(folder)
    wait_until(lambda: read_state(folder).expires["server"] < time.time(), "it expires")
    write_deployment(folder, Deployment(address=f"localhost:{free_port()}"))
    message = error_message(lambda: superlink.serve(folder))
    assert "server.crt expired on" in message and f"fedtailor deploy renew {folder}" in message
    assert "server.crt expired on" in read_state(folder).problems[0]


def test_client_is_warned_of_its_authority(folder: Path, tmp_path: Path) -> None:
    bundle = open_bundle(folder / "bundles" / "a.tar", tmp_path / "client")
    assert certificate_warnings(bundle) == []  # also if the server cannot be reached
    (warning,) = certificate_warnings(bundle, now=time.time() + 3640 * 86_400)
    assert warning.startswith("The authority's certificate expires in 9 days") and "new bundle" in warning


# ---- disk


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_disk_is_a_warning_below_ten_checkpoints_and_then_a_problem(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = folder / "run" / "checkpoints" / "000002"
    saved.mkdir(parents=True)
    (saved / "server.safetensors").write_bytes(bytes(3_000_000))

    def state(free: int) -> FederationState:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
        return read_state(folder)

    with running_server(folder):
        assert (state(40_000_000).warnings, state(40_000_000).problems) == ([], [])
        assert "is almost full: 20 MB free, a checkpoint takes 3.0 MB" in state(20_000_000).warnings[0]
        full = state(3_500_000)
        assert full.warnings == [] and "is full: 3.5 MB free, a checkpoint takes 3.0 MB" in full.problems[0]


def test_run_on_full_disk_stops_with_reason_and_resumes_from_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = replace(tiny_federation((9, 4)), names=("ann", "bob"))
    federation = federate(tmp_path, fed, {"network": "mlp", "rounds": 4, "batch_size": 4, "method": "fedavg"})

    def fill(file: Any, data: bytes) -> None:
        """Write half of a file of the third checkpoint; then the disk is full."""
        if "000003" in str(file.name):
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write_and_sync(file, data)

    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write_and_sync", fill)
        error_message(federation.run)
    status = read_status(federation.folder)
    assert status["state"] == "stopped" and status["round"] == 3  # its record was written, its checkpoint was not
    assert status["reason"].startswith(f"The disk of '{federation.folder}' is full: ") and "resume" in status["reason"]
    run = federation.folder / "run"
    assert [path.name for path in checkpoint_folders(run)] == ["000001", "000002"]
    assert not list(run.rglob("*.writing"))  # what was written of the third one does not take space
    federation.run()
    status = read_status(federation.folder)
    assert status["state"] == "finished" and status["round"] == 4
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert status["bytes_received"] == sum(record["bytes_up"] for record in records) > 0
    assert status["round_seconds"] == records[-1]["seconds"]


# ---- metrics

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (NaN|[+-]Inf|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")


def parse_exposition(text: str) -> dict[tuple[str, ...], float]:
    """Parse text by the rules of Prometheus' text format 0.0.4; return samples by their name and label values."""
    assert text.endswith("\n")
    samples: dict[tuple[str, ...], float] = {}
    kinds: dict[str, str] = {}
    helps, group = set[str](), ""
    for line in text.splitlines():
        if match := re.fullmatch(rf"# HELP ({_NAME}) (?:[^\\\n]|\\\\|\\n)*", line):
            assert match[1] not in helps  # one per metric, before its samples
            helps.add(match[1])
        elif match := re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)", line):
            assert match[1] not in kinds
            kinds[match[1]], group = match[2], match[1]
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == group  # all samples of a metric form one group
            labels, end = list[str](), 0
            for label in _LABEL.finditer(match[2] or ""):
                assert label.start() == end
                labels.append(re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), label[2]))
                end = label.end()
            assert end == len(match[2] or "")
            key = (match[1], *labels)
            assert key not in samples
            samples[key] = float(match[3].replace("Inf", "inf"))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    return samples


def test_text_format_escapes_labels_and_represents_all_numbers() -> None:
    awkward = 'a\\b "c"\nd, e={"f"}'
    metric = Metric("x", "gauge", "Back\\slash\nand line.", [({"of": awkward}, math.inf), ({"of": "1"}, 1e-7)])
    missing = Metric("y", "gauge", "Nothing yet.", [({}, None)])
    samples = parse_exposition(to_text([metric, missing]))
    assert samples == {("x", awkward): math.inf, ("x", "1"): 1e-7}


def test_metrics_and_health_are_served_over_http(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"

    def get(path: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, response.headers["content-type"], text

    status = RUNNING | {"last_round": {"a": "late"}, "this_round": {"b": "it reported: NaN"}, "bytes_received": 2**40}
    with serve_monitoring(folder, address), running_server(folder, connections={"a": "online", "b": "offline"}):
        with run_process(folder) as process:
            write_status(folder, status | {"pid": process.pid})
            assert get("/health")[::2] == (200, "running\n")
            code, kind, text = get("/metrics")
        write_status(folder, status | {"state": "stopped", "reason": "bob: late"})
        assert get("/health")[::2] == (503, "The run is stopped: bob: late.\n")
        assert get("/")[0] == 404
        clients_file, said = (folder / "clients.json").read_text(), list[str]()
        (folder / "clients.json").write_text("damaged")
        assert get("/health")[0] == 503 and "is not a valid list of clients" in get("/health")[2]
        Supervisor(folder, said.append).check({}, "", lambda: None)  # does not end the server
        assert "is not a valid list of clients" in said[0]
        (folder / "clients.json").write_text(clients_file)
    assert code == 200 and kind.startswith("text/plain; version=0.0.4")
    found = {(name.removeprefix("fedtailor_"), *labels): n for (name, *labels), n in parse_exposition(text).items()}
    clients = {key[1]: number for key, number in found.items() if key[0] == "clients"}
    assert clients == {"enrolled": 2, "online": 1, "late": 1, "failed": 1, "suspended": 0}
    expected = {
        ("rounds_done",): 3, ("rounds",): 7, ("round_seconds",): 2.5, ("sent_bytes_total",): 10, ("healthy",): 1,
        ("received_bytes_total",): 2**40, ("run_state", "running"): 1, ("run_state", "stopped"): 0,
        ("process_up", "run"): 1, ("process_up", "superlink"): 1, ("process_up", "proxy"): 1,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert 823 < found["certificate_days_left", "server"] <= 825 and found[("disk_free_bytes",)] > 0
    assert read_state(folder).processes["server"].running is False
    samples = parse_exposition(to_text(metrics_of(read_state(folder))))
    assert samples["fedtailor_process_up", "server"] == 0 and samples[("fedtailor_healthy",)] == 0


def test_monitoring_address_in_use_is_an_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        def serve() -> None:
            with serve_monitoring(folder, address):
                pass

        assert f"The address {address} for monitoring cannot be used" in error_message(serve)
    for invalid in ("x", "127.0.0.1", "127.0.0.1:99999", "a b:1"):
        assert "monitoring must be" in error_message(lambda invalid=invalid: Deployment(monitoring=invalid))  # type: ignore[misc]


# ---- the command


def test_status_as_json_has_its_documented_fields_and_imports_neither_torch_nor_flower(folder: Path) -> None:
    write_status(folder, RUNNING | {"rejected": {"b": "its bundle is old"}, "members": ["a"]})
    code = (
        "import sys; from fedtailor.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'flwr', 'numpy', 'httpx', 'pydantic'} & sys.modules.keys()"
    )
    call = [sys.executable, "-c", code, "deploy", "status", str(folder)]
    described = json.loads(subprocess.run([*call, "--json"], capture_output=True, check=True).stdout)
    assert described["format"] == FORMAT and not described["healthy"] and described["problems"]
    assert described["run"]["state"] == "stopped" and described["run"]["rounds"] == 7
    documented = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    section = documented[documented.index("### Status as JSON") :].partition("\n## ")[0]
    for name in field_names(described) - {"a", "b"}:
        assert f"`{name}`" in section, name
    assert described["clients"]["b"]["rejected"] == "its bundle is old" and described["clients"]["a"]["member"]
    text = subprocess.run(call, capture_output=True, check=True, text=True, env=os.environ | {"COLUMNS": "150"}).stdout
    assert text.startswith("Stopped, 3 of 7 rounds done, 2.5 s per round: its server is not running")
    assert "its bundle is old" in text and "fedtailor deploy server" in text


def field_names(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return set(value) | {name for inner in value.values() for name in field_names(inner)}


# ---- logs


def test_json_logs_have_one_object_per_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_format, "_chosen", ["json"])
    say = log_format.printer("server", lambda text: pytest.fail("plain"))
    say('Serving "here".\nNow.')
    say("Warning: The disk is almost full.")
    log_format.print_json("It failed.", "server", "error")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", 'Serving "here".\nNow.'), ("warning", "The disk is almost full."), ("error", "It failed."),
    ]  # fmt: skip
    assert all(line.keys() == {"time", "level", "process", "message"} for line in lines)
