"""The dashboard's API: GET routes return data, POST routes act. Requests identify runs by their names in the list."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import QueryParams

from fedtailor.errors import FedTailorError, RunError
from fedtailor.reporting.dashboard.client_view import client_details, client_list
from fedtailor.reporting.dashboard.form import check_form, equivalent_command, form_schema, parse_form
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.run_monitor import RunMonitor
from fedtailor.reporting.dashboard.views import check_selection, comparison, run_details

Body = Mapping[str, Any]  # a request's parsed JSON
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Everything that the routes need."""

    root: Path
    initial_run: str  # the run to show first, or ""
    launcher: Launcher
    monitor: RunMonitor


def _error_as_result(call: Callable[[Context, T], dict[str, Any]]) -> Callable[[Context, T], dict[str, Any]]:
    """Return errors as ordinary responses, for requests where an error is an expected result."""

    def respond(context: Context, request: T) -> dict[str, Any]:
        try:
            return call(context, request)
        except FedTailorError as error:
            return {"error": str(error)}

    return respond


def _runs(context: Context, query: QueryParams) -> dict[str, Any]:
    changes = context.monitor.changes(query.get("since", ""))
    return changes | {"folder": str(context.root), "initial_run": context.initial_run}


def _run(context: Context, query: QueryParams) -> dict[str, Any]:
    return run_details(context.monitor.get(query.get("run", "")))


@_error_as_result
def _comparison(context: Context, query: QueryParams) -> dict[str, Any]:
    names = list(dict.fromkeys(query.getlist("run")))
    check_selection(names)
    return comparison([context.monitor.get(name) for name in names])


def _clients(context: Context, query: QueryParams) -> dict[str, Any]:
    run, sort = context.monitor.get(query.get("run", "")), query.get("sort") or "number"
    descending = query.get("descending", "") == "1"
    return client_list(run, sort, descending, query.get("query", ""), _integer(query, "page"))


def _client(context: Context, query: QueryParams) -> dict[str, Any]:
    return client_details(context.monitor.get(query.get("run", "")), _integer(query, "client"))


@_error_as_result
def _check(context: Context, body: Body) -> dict[str, Any]:
    values = body.get("values", {})
    parse_form(values)
    return {"command": equivalent_command(values, context.root)}


def _start(context: Context, body: Body) -> dict[str, Any]:
    settings, experiment = check_form(body.get("values", {}))
    name = context.launcher.start(experiment, settings)
    context.monitor.refresh()
    return {"run": name}


def _act_on_run(action: str, context: Context, body: Body) -> dict[str, Any]:
    """Stop, resume, or remove a run."""
    name = context.monitor.get(str(body.get("run", ""))).name
    getattr(context.launcher, action)(name)
    context.monitor.refresh()
    return {"run": name}


def _integer(query: QueryParams, name: str) -> int:
    text = query.get(name) or "0"
    if not text.isdecimal() or len(text) > 9:
        raise RunError(f"'{name}' must be a non-negative integer.")
    return int(text)


GET_ROUTES: dict[str, Callable[[Context, QueryParams], dict[str, Any]]] = {
    "/api/runs": _runs, "/api/run": _run, "/api/comparison": _comparison, "/api/clients": _clients,
    "/api/client": _client, "/api/form": lambda context, query: form_schema(),
}  # fmt: skip
POST_ROUTES: dict[str, Callable[[Context, Body], dict[str, Any]]] = {
    "/api/check": _check,
    "/api/start": _start,
    **{f"/api/{action}": partial(_act_on_run, action) for action in ("stop", "resume", "remove")},
}
