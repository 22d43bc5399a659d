"""How the operator and the clients of a deployment see and allow its own code."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedtailor.cli.output import out, print_line
from fedtailor.core.code_reference import find_references
from fedtailor.errors import DeployError
from fedtailor.experiments.deployed_code import (
    InstalledCode,
    NamedCode,
    format_consent,
    freeze_packages,
    is_allowed,
    named_code,
    read_consent,
    save_consent,
)
from fedtailor.experiments.deployment import (
    Deployment,
    make_deployment,
    read_deployment_file,
    read_own_parts,
    write_deployment,
)
from fedtailor.experiments.installed_packages import check_package, find_package
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.own_code import parse_consent
from fedtailor.runs.toml import flatten_settings

_SHOWN_FILES = 20
AllowPackages = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code", metavar="PACKAGE@HASH", help="allow the deployment's own code, one option per package"
    ),
]


def deployment_from_words(words: Sequence[str]) -> Deployment:
    """Return the deployment that the flags of a command describe. Own code that they name is imported from installed
    packages, whose versions and hashes become settings."""
    _, typed = parse_consent("deploy init", words)
    flags = parse_overrides(words)
    if flags.positional:
        raise DeployError(f"init expects one folder and flags, got '{flags.positional[0]}'.")
    return make_deployment(flags.apply_to({}), InstalledCode(typed.named, how=typed.how)).freeze_code()


def freeze_code(folder: Path, given: Sequence[str]) -> None:
    """Write the versions and hashes of the packages on the operator's machine to deployment.toml, and allow them."""
    settings = read_deployment_file(folder)
    references = find_references(settings)
    packages = freeze_packages(references.values())
    if not packages:
        raise DeployError(f"The deployment in '{folder}' names no code of its own; leave out --allow-code.")
    if not is_allowed(packages, given):
        raise DeployError(f"The deployment in '{folder}' also needs {_options(packages)}; pass it.")
    consent = InstalledCode(frozenset(references.values()), packages=packages)
    deployment = replace(make_deployment(settings, consent), code={}).freeze_code()
    save_consent(folder, named_code(deployment.describe()))
    write_deployment(folder, deployment)
    print_line(f"deployment.toml contains the versions and hashes of {', '.join(packages)}.")


def confirm_code(folder: Path, given: Sequence[str], may_ask: bool) -> None:
    """Show the own code of a deployment to a client and remember that it is allowed; without consent, raise an error.

    Nothing is imported.
    """
    code = named_code(read_deployment_file(folder / "bundle"))
    if not code.references:
        return
    for name, version in code.packages.items():
        check_package(name, version)
    is_known = read_consent(folder, code, "").named == frozenset(code.references.values())
    show_code(folder / "bundle", code)
    if is_allowed(code.packages, given):
        save_consent(folder, code)
    elif is_known:
        print_line("You have allowed this code before.")
    elif not may_ask:
        fix = f"look at it, and allow exactly these files with: {_options(code.packages)}"
        raise DeployError(
            f"This federation runs code that is not part of FedTailor, which --yes alone does not allow; {fix}."
        )
    elif typer.confirm("Look at these files before you answer. Run this code on this machine, with your data?"):
        save_consent(folder, code)
    else:
        raise typer.Exit(1)


def show_code(folder: Path, code: NamedCode) -> None:
    """Print which own code a deployment runs, with its settings, and where it is installed."""
    print_line("This federation runs code that is not part of FedTailor:")
    table = Table("part", "name", "settings")
    for part, settings in read_own_parts(folder).items():
        flat = flatten_settings({name: value for name, value in settings.items() if name != "name"})
        fields = ", ".join(f"{name}={value}" for name, value in flat.items())
        table.add_row(part, escape(str(settings["name"])), escape(fields))
    out.print(table)
    packages = Table(
        "package", "version", "SHA-256", Column("files", justify="right"), Column("installed in", overflow="fold")
    )
    for name in code.packages:
        found = find_package(name)
        row = (name, found.version.version, found.version.short_hash, str(len(found.files)), str(found.location))
        packages.add_row(*map(escape, row))
    out.print(packages)
    for name in code.packages:
        files = find_package(name).files
        more = f", and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
        print_line(f"Files of {name}: {', '.join(files[:_SHOWN_FILES])}{more}")


def _options(packages: Iterable[str]) -> str:
    return " ".join(f"--allow-code {format_consent(name)}" for name in packages)
