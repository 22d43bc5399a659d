"""`fedtailor deploy status`. It imports neither torch nor Flower, so that it takes less than a second."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedtailor.cli.output import out, print_line
from fedtailor.deploy.server.state.state import ClientState, FederationState, read_state
from fedtailor.errors import DeployError

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def _group() -> None:
    """Make `status` a subcommand of `deploy`, as in the whole command."""


deploy = typer.Typer(no_args_is_help=True)
app.add_typer(deploy, name="deploy")


@deploy.callback()
def _deploy() -> None:
    """Keep `status` a subcommand although it is the only one."""


@deploy.command()
def status(
    folder: Annotated[Path, typer.Argument(help="the operator's folder")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON; docs/deploy.md lists its fields")] = False,
) -> None:
    """Show the progress of the run, the state of all clients, and what is wrong or soon will be."""
    if not folder.is_dir():
        raise DeployError(f"There is no folder '{folder}'.")
    state = read_state(folder)
    if as_json:
        typer.echo(json.dumps(state.describe(), indent=1))
    else:
        _print_state(state)


def progress(run: dict[str, Any]) -> str:
    """Return the progress of a run in one line.

    >>> progress({"state": "running", "round": 3, "rounds": 7, "round_seconds": 2.0})
    'Running, 3 of 7 rounds done, 2.0 s per round'
    """
    rounds = f", {run['round']} of {run['rounds']} rounds done" if run.get("rounds") else ""
    seconds = f", {run['round_seconds']:.1f} s per round" if run.get("round_seconds") else ""
    reason = f": {run['reason']}" if run.get("reason") else ""
    return f"{str(run['state']).capitalize()}{rounds}{seconds}{reason}"


def _print_state(state: FederationState) -> None:
    print_line(progress(state.run))
    server = state.processes["server"]
    for problem in state.problems:
        if problem.startswith("The run is stopped"):  # is already in the first line
            continue
        print_line(problem)
    if not server.running:
        print_line(f"Start the server with: fedtailor deploy server {state.folder}")
    elif state.run["state"] == "stopped":
        hint = f"Resume with: fedtailor deploy resume {state.folder}"
        print_line("The server resumes the run." if state.resumes else hint)
    for warning in state.warnings:
        print_line(f"Warning: {warning}")
    table = Table("client", "connection", "in the run", "last round")
    for name, client in state.clients.items():
        table.add_row(*map(escape, (name, _connection(client), _membership(client), _problem(client))))
    out.print(table)


def _connection(client: ClientState) -> str:
    return f"{client.connection}, has not used its new key" if client.new_key else client.connection


def _problem(client: ClientState) -> str:
    return f"this round: {client.this_round}" if client.this_round else client.last_round or client.warning


def _membership(client: ClientState) -> str:
    if client.suspended:
        return f"suspended {client.suspended}"
    return "yes" if client.member else client.rejected or "not yet"
