"""Commands of `fedtailor deploy` with which an operator recovers a federation: rollback, suspend, and reinstate."""

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import print_line
from fedtailor.deploy.server import suspension
from fedtailor.deploy.server.run_control import roll_back_run
from fedtailor.runs.rollback import REMOVED_FILE

Folder = Annotated[Path, typer.Argument(help="the operator's folder")]
Name = Annotated[str, typer.Argument(help="a client's name")]


def rollback(folder: Folder, round: Annotated[int, typer.Option(help="the last round to keep")]) -> None:
    """Undo all later rounds of a stopped or finished run. Clients go back to their states after that round as well."""
    found = roll_back_run(folder, round)
    print_line(
        f"The run is back after round {found.round}. The removed records are in '{folder / 'run' / REMOVED_FILE}'."
    )
    print_line(f"Continue with: fedtailor deploy resume {folder}")


def suspend(folder: Folder, name: Name, reason: Annotated[str, typer.Option(help="shown in the status")] = "") -> None:
    """Suspend a client, also while the run is running: it stays enrolled and connected, but is no longer selected."""
    suspension.suspend(folder, name, f"by the operator{f': {reason}' if reason else ''}")
    print_line(f"{name} is suspended. End this with: fedtailor deploy reinstate {folder} {name}")


def reinstate(folder: Folder, name: Name) -> None:
    """End the suspension of a client, which takes part from the next round on."""
    suspension.reinstate(folder, name)
    print_line(f"{name} is reinstated.")
