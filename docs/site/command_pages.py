"""The page of the command line on the documentation site, from the commands' own help."""

from collections.abc import Iterator

import click
import typer

from fedtailor.cli.app import app
from fedtailor.cli.deploy import deploy

_INTRODUCTION = """# Command line

`fedtailor COMMAND --help` prints the same. Every field of a method, a network, a data set, or an experiment is a flag,
such as `--method.lr 0.05`. `fedtailor list methods NAME`, `... networks NAME`, and `... data NAME`
show them.
"""


def command_page() -> str:
    """Return the page with all subcommands, their help, and their flags."""
    root = typer.main.get_command(app)
    federation = typer.main.get_command(deploy)
    commands = [*_commands(root, ["fedtailor"]), *_commands(federation, ["fedtailor", "deploy"])]
    return _INTRODUCTION + "".join(_section(path, command) for path, command in commands)


def _commands(group: click.Command, path: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    """Yield all commands of a group and of the groups in it."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    for name, command in group.commands.items():
        if name != "deploy":
            yield from _commands(command, [*path, name])


def _section(path: list[str], command: click.Command) -> str:
    name = " ".join(path)
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    text = f"\n## {name}\n\n```text\n{usage}\n```\n\n```text\n{command.help or ''}\n```\n"
    options = [record for option in command.params if (record := option.get_help_record(context))]
    if options:
        text += "\n| argument | description |\n|---|---|\n"
        text += "".join(f"| `{flag}` | {_cell(about)} |\n" for flag, about in options)
    if command.epilog:
        text += _flags([line for line in command.epilog.splitlines() if line.strip()])
    return text


def _flags(lines: list[str]) -> str:
    """Return a table of lines such as "--rounds (20)  number of rounds", and the other lines as text."""
    flags = [line.split("  ", 1) for line in lines if line.startswith("--") and "  " in line]
    others = [line for line in lines if not (line.startswith("--") and "  " in line)]
    table = "".join(f"| `{flag}` | {_cell(about)} |\n" for flag, about in flags)
    return f"\n| flag (default) | description |\n|---|---|\n{table}\n```text\n" + "\n".join(others[1:]) + "\n```\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("<", "\\<").strip()
