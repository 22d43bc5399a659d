"""Serves the dashboard of a folder in a thread, and sends requests to it."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from conftest import TinyNet, tiny_federation
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.run_monitor import RunMonitor
from fedtailor.reporting.dashboard.run_view import RunView
from fedtailor.reporting.dashboard.server import DashboardServer

Response = tuple[int, dict[str, str], Any]


@contextmanager
def dashboard(root: Path, **options: Any) -> Iterator[DashboardServer]:
    """Serve the dashboard of a folder on a free port."""
    server = DashboardServer(root, port=0, **options)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def request(
    server: DashboardServer, method: str, path: str, body: str | None = None, **headers: str | None
) -> Response:
    """Send a request with the headers of the dashboard's page; `headers` override these, and None removes one."""
    host = f"127.0.0.1:{server.port}"
    sent: dict[str, str | None] = {"Host": host, "Cookie": f"fedtailor_{server.port}={server.token}"}
    if method == "POST":
        sent |= {"Origin": f"http://{host}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    data = body.encode() if body is not None else None
    if data is not None and "Content-Length" not in sent:
        sent["Content-Length"] = str(len(data))
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(data)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    is_json = response.headers.get_content_type() == "application/json" and text
    return response.status, dict(response.headers), json.loads(text) if is_json else text


def get(server: DashboardServer, path: str) -> Any:
    status, _, found = request(server, "GET", path)
    assert status == 200, found
    return found


def post(server: DashboardServer, action: str, **body: Any) -> Response:
    return request(server, "POST", f"/api/{action}", json.dumps(body))


def rows(server: DashboardServer) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in get(server, "/api/runs")["runs"]}


def wait_for_row(server: DashboardServer, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a run's row once the condition holds; fail if the run fails before."""

    def ready_row() -> dict[str, Any] | None:
        row = rows(server).get(name)  # None until the monitor has found the run
        if row is not None and condition(row):
            return row
        assert row is None or row["state"] not in ("failed", "unreadable"), row["message"]
        return None

    return wait_until_true(ready_row)  # type: ignore[no-any-return]


def wait_until_true(condition: Callable[[], Any]) -> Any:
    """Return the value of a condition once it is true; fail after two minutes."""
    deadline = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    return value


def make_run(
    folder: Path, rounds: int = 3, method: ft.Method | None = None, data_seed: int = 0, **options: Any
) -> ft.Run:
    """Train a run on tiny clients, saved in a folder."""
    torch.manual_seed(0)
    return ft.simulate(
        method or ft.methods.FedAvg(), TinyNet().double(), tiny_federation(seed=data_seed), rounds=rounds,
        dtype=torch.float64, folder=folder, engine="sequential", **options,
    )  # fmt: skip


def read_runs(root: Path) -> tuple[RunMonitor, dict[str, RunView]]:
    """Read all runs of a folder completely, without a thread."""
    monitor = RunMonitor(root, Launcher(root))
    while monitor.poll():
        pass
    return monitor, {row["name"]: monitor.get(row["name"]) for row in monitor.changes("")["runs"]}


def kill_all(root: Path) -> None:
    """Kill all experiments that were started in a folder and are still running."""
    launcher = Launcher(root)
    for name in launcher.names():
        if (pid := launcher.pid(name)) is not None:
            os.kill(pid, signal.SIGKILL)
