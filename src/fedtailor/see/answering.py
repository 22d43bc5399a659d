"""What the live page asks its server for, and what it tells it to do; runs are known by their names in a list alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import Refused
from fedtailor.see import form, looking, one_client
from fedtailor.see.starting import Starter
from fedtailor.see.watching import Watcher

Query = Mapping[str, list[str]]  # what stands behind the question mark of an address


@dataclass(frozen=True)
class Known:
    """All that answers are made from."""

    root: Path
    first: str  # a run to be shown at once
    starter: Starter
    watcher: Watcher


def _runs(known: Known, query: Query) -> dict[str, Any]:
    return known.watcher.changes(_one(query, "since")) | {"folder": str(known.root), "first": known.first}


def _run(known: Known, query: Query) -> dict[str, Any]:
    return looking.opened(known.watcher.get(_one(query, "run")))


def _compared(known: Known, query: Query) -> dict[str, Any]:
    names = list(dict.fromkeys(query.get("run", [])))

    def compare() -> dict[str, Any]:
        looking.check_ticked(names)
        return looking.compared([known.watcher.get(name) for name in names])

    return _answered(compare)


def _clients(known: Known, query: Query) -> dict[str, Any]:
    sort, down = _one(query, "sort") or "number", _one(query, "down") == "1"
    return one_client.clients(
        known.watcher.get(_one(query, "run")), sort, down, _one(query, "find"), _whole(query, "page")
    )


def _client(known: Known, query: Query) -> dict[str, Any]:
    return one_client.client(known.watcher.get(_one(query, "run")), _whole(query, "client"))


def _form(known: Known, query: Query) -> dict[str, Any]:
    return form.form()


def _check(known: Known, told: Mapping[str, Any]) -> dict[str, Any]:
    values = told.get("values", {})

    def check() -> dict[str, Any]:
        form.read(values)
        return {"command": form.command(values, known.root)}

    return _answered(check)


def _start(known: Known, told: Mapping[str, Any]) -> dict[str, Any]:
    settings, experiment = form.check(told.get("values", {}))
    name = known.starter.start(experiment, settings)
    known.watcher.look_soon()
    return {"run": name}


def _stop(known: Known, told: Mapping[str, Any]) -> dict[str, Any]:
    return _on_run(known, told, known.starter.stop)


def _resume(known: Known, told: Mapping[str, Any]) -> dict[str, Any]:
    return _on_run(known, told, known.starter.resume)


def _forget(known: Known, told: Mapping[str, Any]) -> dict[str, Any]:
    return _on_run(known, told, known.starter.forget)


def _on_run(known: Known, told: Mapping[str, Any], act: Callable[[str], None]) -> dict[str, Any]:
    name = known.watcher.get(str(told.get("run", ""))).name
    act(name)
    known.watcher.look_soon()
    return {"run": name}


def _answered(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A question to which a refusal is an answer and no failure."""
    try:
        return question()
    except Refused as refusal:
        return {"refused": str(refusal)}


def _one(query: Query, name: str) -> str:
    return query.get(name, [""])[0][:4096]


def _whole(query: Query, name: str) -> int:
    text = _one(query, name) or "0"
    if not text.isdecimal() or len(text) > 9:
        raise Refused(f"'{name}' must be a whole number.")
    return int(text)


ASKED: dict[str, Callable[[Known, Query], dict[str, Any]]] = {
    "/api/runs": _runs, "/api/run": _run, "/api/compared": _compared, "/api/clients": _clients, "/api/client": _client,
    "/api/form": _form,
}  # fmt: skip
TOLD: dict[str, Callable[[Known, Mapping[str, Any]], dict[str, Any]]] = {
    "/api/check": _check, "/api/start": _start, "/api/stop": _stop, "/api/resume": _resume, "/api/forget": _forget,
}  # fmt: skip
