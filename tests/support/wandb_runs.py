"""What W&B has of a run: its offline files, and a local server that answers the client like W&B."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedtailor.reporting.trackers.wandb import offline_records


@dataclass
class WandbRun:
    """The content of a run in W&B."""

    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.history:
            for name, value in row.items():
                if isinstance(value, int | float):
                    found.setdefault(name, []).append((row["_step"], value))
        return found


def read_offline_run(path: Path) -> WandbRun:
    """Read the file of an offline run."""
    run = WandbRun()
    for record in offline_records(path):
        if record.HasField("run"):
            run.name, run.tags = record.run.display_name, list(record.run.tags)
            run.config = _values(record.run.config.update)
        elif record.HasField("history"):
            run.history.append(_values(record.history.item))
        run.summary |= _values(record.summary.update)
    return run


def _values(items: Any) -> dict[str, Any]:
    """Return names and values; a nested value, such as a histogram, is left in its parts."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


class _Handler(BaseHTTPRequestHandler):
    """The requests of W&B's client for creating, resuming, and writing a run."""

    server: "_Server"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        answer = self._query(body) if self.path == "/graphql" else self._write(body)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _query(self, body: dict[str, Any]) -> dict[str, Any]:
        given, entity = body.get("variables", {}), {"id": "e", "name": "me"}
        project = {"id": "p", "name": given.get("project"), "entity": entity}
        if body["operationName"] == "RunResumeStatus":
            return {"data": {"model": project | {"bucket": self._resume_status(given["name"])}}}
        if body["operationName"] == "UpsertBucket":
            is_new = given["name"] not in self.server.runs
            run = self.server.runs.setdefault(given["name"], WandbRun(given["displayName"]))
            run.config |= {name: part["value"] for name, part in json.loads(given["config"] or "{}").items()}
            run.tags = given["tags"] or run.tags
            bucket = {"id": given["name"], "name": given["name"], "displayName": run.name, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": is_new}}}
        if body["operationName"] == "CreateRunFiles":
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}}
        return {"data": {}}

    def _resume_status(self, key: str) -> dict[str, Any] | None:
        if (run := self.server.runs.get(key)) is None:
            return None
        return {
            "id": key, "name": key, "displayName": run.name, "summaryMetrics": json.dumps(run.summary), "notes": "",
            "historyLineCount": len(run.history), "historyTail": json.dumps([json.dumps(r) for r in run.history[-1:]]),
            "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t": {"1": [1]}}',
            "tags": run.tags,
            "config": json.dumps({name: {"value": value} for name, value in run.config.items()}),
        }  # fmt: skip

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        run = self.server.runs[self.path.split("/")[-2]]
        for name, part in body.get("files", {}).items():
            rows = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                self.server.sent += len(rows)
                run.history[part["offset"] :] = rows
            elif name == "wandb-summary.json":
                run.summary = rows[-1]
        return {}


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, WandbRun] = {}
        self.sent = 0  # rows of history, including repeated ones

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve_wandb() -> Iterator[_Server]:
    """Run a server with which W&B's client can create and resume runs."""
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
