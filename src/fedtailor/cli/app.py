"""The `fedtailor` command with all its subcommands, except for `deploy`, which is added on request."""

from collections.abc import Callable
from typing import Annotated

import typer

from fedtailor.cli.compare import compare
from fedtailor.cli.environment import env
from fedtailor.cli.export import export, predict
from fedtailor.cli.listing import ANY_FLAG, data, flags_help, list_
from fedtailor.cli.paper import paper
from fedtailor.cli.reporting import live, report, track
from fedtailor.cli.run import resume, run
from fedtailor.cli.show import show
from fedtailor.cli.sweep import sweep
from fedtailor.cli.tables import tables
from fedtailor.core.augmentation import Augmentation
from fedtailor.core.robust import Robust
from fedtailor.data.dataset import PartitionedData
from fedtailor.errors import ConfigError
from fedtailor.experiments.experiment import Experiment
from fedtailor.training.channel.channel import Channel
from fedtailor.training.unreliable import Unreliable
from fedtailor.version import VERSION

_WITH_FLAGS: dict[Callable[..., None], str] = {  # with their arguments
    run: "[EXPERIMENT.toml]",
    compare: "METHOD...",
    sweep: "[EXPERIMENT.toml]",
}
_COMMANDS: list[Callable[..., None]] = [resume, show, list_, report, track, export, predict, live, env]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # local variables may contain private data
)
_parts = {
    "": Experiment,
    "data": PartitionedData,
    "augmentation": Augmentation,
    "unreliable": Unreliable,
    "channel": Channel,
    "robust": Robust,
}
_flags_help = flags_help("an experiment", _parts)
for _command, _arguments in _WITH_FLAGS.items():
    app.command(context_settings=ANY_FLAG, epilog=_flags_help, options_metavar=f"{_arguments} [OPTIONS]")(_command)
for _command in _COMMANDS:
    app.command(_command.__name__.removesuffix("_"))(_command)
app.add_typer(data, name="data")
app.add_typer(tables, name="tables")
app.add_typer(paper, name="paper")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedtailor {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Personalized federated learning."""


def add_deploy() -> None:
    """Add `fedtailor deploy`; without Flower, it only says how to install it."""
    try:
        from fedtailor.cli.deploy import deploy
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography"):
            raise

        @app.command(name="deploy", context_settings=ANY_FLAG)
        def without_flower() -> None:
            """Run a real federation with Flower. Requires: pip install 'fedtailor[flower]'."""
            raise ConfigError("fedtailor deploy requires Flower. Install it with: pip install 'fedtailor[flower]'.")
    else:
        app.add_typer(deploy, name="deploy")
