"""The entry point of the `fedtailor` command. It imports only what a command needs, because torch takes a second."""

import sys

import typer
from rich.markup import escape

from fedtailor.cli.output import err
from fedtailor.errors import FedTailorError


def main() -> None:
    """Run the command; a `FedTailorError` is printed in one line and exits with code 2."""
    try:
        _find_app()()
    except FedTailorError as error:
        err.print(f"[bold red]fedtailor:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)


def _find_app() -> typer.Typer:
    """Return an app with the subcommand on the command line."""
    if sys.argv[1:3] == ["deploy", "status"]:
        from fedtailor.cli.deploy_status import app

        return app
    from fedtailor.cli.app import add_deploy, app

    if "deploy" in sys.argv[1:2] or len(sys.argv) < 2 or "--help" in sys.argv[1:2]:
        add_deploy()  # only if needed: importing Flower takes half a second
    return app


if __name__ == "__main__":
    main()
