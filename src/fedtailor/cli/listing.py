"""The commands list and data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedtailor.analysis.tables import new_table
from fedtailor.cli.output import out, print_line
from fedtailor.core.code_reference import is_reference
from fedtailor.core.method import Method
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.own_code import CodeConsent, parse_consent
from fedtailor.experiments.own_parts import build_data
from fedtailor.experiments.parsing import field_help, first_line
from fedtailor.methods import METHODS
from fedtailor.methods.catalog import catalog
from fedtailor.networks import NETWORKS, describe_network

ANY_FLAG = {"allow_extra_args": True, "ignore_unknown_options": True}  # flags come from the dataclasses' fields
_KNOWN: dict[str, Mapping[str, type[Any]]] = {"methods": METHODS, "data": DATASETS, "networks": NETWORKS}
_SINGULAR = {"methods": "method", "data": "data set", "networks": "network"}
_Fields = Mapping[str, tuple[str, str]]  # field -> (default, description)

data = typer.Typer(help="Download and convert data sets.", no_args_is_help=True)


def list_(
    what: Annotated[str, typer.Argument(help="methods, data, or networks")],
    name: Annotated[str, typer.Argument(help="show the fields of this method, data set, or network")] = "",
) -> None:
    """List the available methods, data sets, or networks.

    fedtailor list methods fedprox shows the fields of one method, also of your own
    (my_module:MyMethod); fedtailor list data mnist shows those of one data set.
    """
    if what not in _KNOWN:
        raise unknown_name("list", what, _KNOWN)
    if name:
        out.print(_fields_table(what, name))
    elif what == "methods":
        out.print(_methods_table())
    elif what == "networks":
        out.print(_table("network", {n: (describe_network(kind), field_help(kind)) for n, kind in NETWORKS.items()}))
    else:
        out.print(_data_table())


@data.command(context_settings=ANY_FLAG, options_metavar="NAME [OPTIONS]")
def get(ctx: typer.Context) -> None:
    """Download a data set, so that later runs need no network.

    fedtailor data get mnist
    fedtailor data get femnist --data.folder leaf/data/femnist converts LEAF's files.
    Variants of a data set are flags, as in fedtailor run: fedtailor list data NAME shows them.
    """
    flags = parse_overrides(ctx.args)
    if len(flags.positional) != 1:
        raise ConfigError("data get takes the name of one data set; fedtailor list data lists them.")
    name, settings = flags.positional[0], flags.apply_to({})
    if settings.keys() - {"data"}:
        raise ConfigError("data get takes the name of a data set and flags that start with --data.")
    chosen = build_data({**settings.get("data", {}), "name": name})
    path = chosen.download() if isinstance(chosen, Data) else None
    print_line(f"{name} needs no download." if path is None else f"{name} saved in {path}")


@data.command(context_settings=ANY_FLAG, options_metavar="FILE [OPTIONS]")
def convert(ctx: typer.Context) -> None:
    """Write a federation to one file, from which runs read only the samples that they need.

    fedtailor data convert mine.safetensors --data folder --data.folder my_clients
    fedtailor run --data file --data.file mine.safetensors
    The flags are --data and --data.FIELD, as in fedtailor run. A folder's clients are read
    one after another, so they may be larger than memory.
    """
    words, consent = parse_consent("data convert", ctx.args)
    flags = parse_overrides(words)
    settings = flags.apply_to({})
    if len(flags.positional) != 1 or settings.keys() - {"data"}:
        raise ConfigError("data convert takes one file name and the flags --data and --data.FIELD.")
    chosen = build_data(settings.get("data", {}), consent)
    path = Path(flags.positional[0])
    if isinstance(chosen, Data):
        chosen.convert(path)
    else:
        chosen.load().save(path)
    print_line(f"{Federation.from_file(path)!r} saved in {path}")


def flags_help(what: str, parts: Mapping[str, type[Any]], hidden: Sequence[str] = ()) -> str:
    """Return the help text on the flags that set the fields of these dataclasses, by their prefixes."""
    lines = [f"Every field of {what} is a flag:", ""]
    for prefix, kind in parts.items():
        for field, (default, text) in field_help(kind).items():
            if field not in ("method", "network", *parts, *hidden):
                name = ".".join(filter(None, [prefix, field.replace("_", "-")]))
                lines += [f"--{name}{f' ({default})' if default not in ('', 'None') else ''}  {text}", ""]
    if "method" in field_help(parts[""]):
        lines += ["--method NAME, --method.FIELD, --network NAME, --network.FIELD: see fedtailor list methods|networks"]
    if "data" in parts:
        lines += ["", "NAME can be your own code, such as my_module:MyMethod, also with --data; FIELD is its argument."]
        lines += ["", "--allow-code  import code that only a file names"]
    return "\n".join(lines)


def _fields_table(what: str, name: str) -> Table:
    """Return a table with the fields of one method, data set, or network."""
    known = _KNOWN[what]
    if what == "methods" and is_reference(name):
        kind: type[Any] = CodeConsent(everything=True).load_method("method", name)
    elif name in known:
        kind = known[name]
    else:
        raise unknown_name(_SINGULAR[what], name, known)
    title = kind.class_title() if issubclass(kind, Method) else ""
    about = kind.__doc__ or ""
    if issubclass(kind, Data) and kind.license:
        about = " ".join(filter(None, [about, _size(kind), _origin(kind)]))
    return _table(_SINGULAR[what], {name: (about, field_help(kind))}, title=title)


def _data_table() -> Table:
    """Return a table of all data sets: what they are, their size, where they come from, and whether they are here."""
    columns = [Column("name", no_wrap=True), Column("cached", no_wrap=True)]
    table = Table(*columns, "data, source, license", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, kind in DATASETS.items():
        available = kind().is_available
        about = [" ".join(filter(None, [first_line(kind), _size(kind)]))]
        about += [f"[dim]{escape(_origin(kind))}[/]"] if kind.license else []
        table.add_row(name, "" if available is None else "yes" if available else "no", "\n".join(about))
    return table


def _size(kind: type[Data]) -> str:
    """Return the numbers of samples and of natural clients as a sentence; empty if they are unknown."""
    size = ", ".join(filter(None, [f"{kind.samples} samples" if kind.samples else "", kind.owners]))
    return f"{size[0].upper()}{size[1:]}." if size else ""


def _origin(kind: type[Data]) -> str:
    """Return where a data set comes from, and its license."""
    source = str(getattr(kind, "source", None) or "")
    return "; ".join(filter(None, [kind.publisher, source, f"License: {kind.license}"]))


def _methods_table() -> Table:
    """Return a table of all methods by family."""
    columns = [Column("name", no_wrap=True), Column("method", no_wrap=True)]
    about = "paper, communication per round, client state"
    table = Table(*columns, about, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    family = ""
    for name, entry in catalog().items():
        if entry.family != family:
            family = entry.family
            table.add_row("", "", f"\n[bold]{family}[/]")
        state = f"client state: {entry.client_state}; personal: {'yes' if entry.personal else 'no'}"
        state += "; has a global model" if entry.personal and entry.has_global_model else ""
        details = f"down: {entry.download}; up: {entry.upload}; {state}\na newcomer starts with {entry.newcomer_start}"
        about = f"{escape(entry.paper)}\n[dim]{escape(details)}[/]"
        table.add_row(name, entry.display_name, about)
    return table


def _table(kind: str, rows: Mapping[str, tuple[str, _Fields]], title: str = "") -> Table:
    has_fields = any(fields for _, fields in rows.values())
    table = new_table(title, [kind, "description", "fields"][: 2 + has_fields], left=3)
    table.show_lines = has_fields
    for name, (text, fields) in rows.items():
        shown = [f"{field} = {default}" + (f"  {note}" if note else "") for field, (default, note) in fields.items()]
        table.add_row(name, " ".join(text.split()), *["\n".join(shown)][:has_fields])
    return table
