"""The live page of a folder, and requests to it, for tests."""

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
from fedtailor.see.live import Live
from fedtailor.see.starting import Starter
from fedtailor.see.watched import Watched
from fedtailor.see.watching import Watcher

Answer = tuple[int, dict[str, str], Any]


@contextmanager
def page(root: Path, **how: Any) -> Iterator[Live]:
    """The page of a folder, on any free port."""
    live = Live(root, port=0, **how)
    thread = threading.Thread(target=live.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield live
    finally:
        live.shutdown()
        live.server_close()
        thread.join()


def ask(live: Live, method: str, path: str, body: str | None = None, **headers: str | None) -> Answer:
    """One request as the page itself would make it, but for what is given otherwise; None leaves a header out."""
    host = f"127.0.0.1:{live.port}"
    own: dict[str, str | None] = {"Host": host, "Cookie": f"fedtailor_{live.port}={live.token}"}
    if method == "POST":
        own |= {"Origin": f"http://{host}", "Content-Type": "application/json"}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", live.port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    data = body.encode() if body is not None else None
    if data is not None and "Content-Length" not in own:
        own["Content-Length"] = str(len(data))
    for name, value in own.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(data)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json" and text
    return answer.status, dict(answer.headers), json.loads(text) if is_json else text


def get(live: Live, path: str) -> Any:
    status, _, found = ask(live, "GET", path)
    assert status == 200, found
    return found


def tell(live: Live, what: str, **told: Any) -> Answer:
    return ask(live, "POST", f"/api/{what}", json.dumps(told))


def rows(live: Live) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in get(live, "/api/runs")["runs"]}


def until(live: Live, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A run's row once it is as wanted; a run that failed meanwhile says so."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        row = rows(live).get(name)  # None: the page has not looked since it was started
        if row is not None and holds(row):
            return row
        assert row is None or row["state"] not in ("failed", "unreadable"), row["words"]
        threading.Event().wait(0.05)
    raise AssertionError(f"{name} stayed {row}")


def made(folder: Path, rounds: int = 3, method: ft.Method | None = None, **how: Any) -> ft.Run:
    """A real run on tiny clients, in a folder."""
    torch.manual_seed(0)
    return ft.simulate(
        method or ft.methods.FedAvg(), TinyNet().double(), tiny_federation(), rounds=rounds, dtype=torch.float64,
        folder=folder, engine="sequential", **how,
    )  # fmt: skip


def watched(root: Path) -> tuple[Watcher, dict[str, Watched]]:
    """The runs of a folder, read to their ends, without a thread."""
    watcher = Watcher(root, Starter(root))
    while watcher.look():
        pass
    return watcher, {row["name"]: watcher.get(row["name"]) for row in watcher.changes("")["runs"]}


def end_all(root: Path) -> None:
    """End what was started in a folder and still goes on."""
    starter = Starter(root)
    for name in starter.known():
        if (pid := starter.process(name)) is not None:
            os.kill(pid, signal.SIGKILL)
