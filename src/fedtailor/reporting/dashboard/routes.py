"""The dashboard's API: GET routes return data, POST routes act. Requests identify runs by their names in the list."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams

from fedtailor.errors import FedTailorError, RunError
from fedtailor.reporting.dashboard.client_view import client_details, client_list
from fedtailor.reporting.dashboard.form import check_form, equivalent_command, form_schema, parse_form
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.run_monitor import RunMonitor
from fedtailor.reporting.dashboard.views import check_selection, comparison, run_details

Body = Mapping[str, Any]  # a request's parsed JSON


@dataclass(frozen=True)
class Context:
    """Everything that the routes need."""

    root: Path
    initial_run: str  # the run to show first, or ""
    launcher: Launcher
    monitor: RunMonitor


def _runs(context: Context, query: QueryParams) -> dict[str, Any]:
    changes = context.monitor.changes(_parameter(query, "since"))
    return changes | {"folder": str(context.root), "initial_run": context.initial_run}


def _run(context: Context, query: QueryParams) -> dict[str, Any]:
    return run_details(context.monitor.get(_parameter(query, "run")))


def _comparison(context: Context, query: QueryParams) -> dict[str, Any]:
    names = list(dict.fromkeys(query.getlist("run")))

    def compare() -> dict[str, Any]:
        check_selection(names)
        return comparison([context.monitor.get(name) for name in names])

    return _error_as_result(compare)


def _clients(context: Context, query: QueryParams) -> dict[str, Any]:
    run, sort = context.monitor.get(_parameter(query, "run")), _parameter(query, "sort") or "number"
    descending = _parameter(query, "descending") == "1"
    return client_list(run, sort, descending, _parameter(query, "query"), _integer(query, "page"))


def _client(context: Context, query: QueryParams) -> dict[str, Any]:
    return client_details(context.monitor.get(_parameter(query, "run")), _integer(query, "client"))


def _form(context: Context, query: QueryParams) -> dict[str, Any]:
    return form_schema()


def _check(context: Context, body: Body) -> dict[str, Any]:
    values = body.get("values", {})

    def check() -> dict[str, Any]:
        parse_form(values)
        return {"command": equivalent_command(values, context.root)}

    return _error_as_result(check)


def _start(context: Context, body: Body) -> dict[str, Any]:
    settings, experiment = check_form(body.get("values", {}))
    name = context.launcher.start(experiment, settings)
    context.monitor.wake()
    return {"run": name}


def _stop(context: Context, body: Body) -> dict[str, Any]:
    return _act_on_run(context, body, context.launcher.stop)


def _resume(context: Context, body: Body) -> dict[str, Any]:
    return _act_on_run(context, body, context.launcher.resume)


def _remove(context: Context, body: Body) -> dict[str, Any]:
    return _act_on_run(context, body, context.launcher.remove)


def _act_on_run(context: Context, body: Body, act: Callable[[str], None]) -> dict[str, Any]:
    name = context.monitor.get(str(body.get("run", ""))).name
    act(name)
    context.monitor.wake()
    return {"run": name}


def _error_as_result(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an error as an ordinary response, for requests where an error is an expected result."""
    try:
        return call()
    except FedTailorError as error:
        return {"error": str(error)}


def _parameter(query: QueryParams, name: str) -> str:
    return query.get(name, "")[:4096]


def _integer(query: QueryParams, name: str) -> int:
    text = _parameter(query, name) or "0"
    if not text.isdecimal() or len(text) > 9:
        raise RunError(f"'{name}' must be a non-negative integer.")
    return int(text)


GET_ROUTES: dict[str, Callable[[Context, QueryParams], dict[str, Any]]] = {
    "/api/runs": _runs, "/api/run": _run, "/api/comparison": _comparison, "/api/clients": _clients,
    "/api/client": _client, "/api/form": _form,
}  # fmt: skip
POST_ROUTES: dict[str, Callable[[Context, Body], dict[str, Any]]] = {
    "/api/check": _check, "/api/start": _start, "/api/stop": _stop, "/api/resume": _resume, "/api/remove": _remove,
}  # fmt: skip
