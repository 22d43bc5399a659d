"""The command `fedtailor tables`: sites agree on a schema for their tables without moving rows."""

from dataclasses import fields
from pathlib import Path

import typer

from fedtailor.cli.listing import ANY_FLAG, flags_help
from fedtailor.cli.output import print_line
from fedtailor.data.tables.agreement import agree as agree_on_schema
from fedtailor.data.tables.loading import read_schema, read_summary, to_json
from fedtailor.data.tables.reading import read_table
from fedtailor.data.tables.settings import SiteSettings, TableSettings
from fedtailor.data.tables.site import open_site
from fedtailor.data.tables.summary import summarize as summarize_site
from fedtailor.errors import ConfigError
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.parsing import build_dataclass, parse_value
from fedtailor.runs.files import write_atomic, write_errors

tables = typer.Typer(help="Agree on a schema for the tables of several sites.", no_args_is_help=True)
_OF_SITES = tuple(field.name for field in fields(SiteSettings))
_SITE_HELP = flags_help("a site's table", {"": SiteSettings})
_AGREE_HELP = flags_help("the agreement", {"": TableSettings}, hidden=_OF_SITES)


@tables.command(context_settings=ANY_FLAG, epilog=_SITE_HELP, options_metavar="FILE --target COLUMN --out FILE.json")
def summarize(ctx: typer.Context) -> None:
    """Write what a site reports about its table: columns, frequent categories, counts, and sums, but no rows.

    fedtailor tables summarize a.csv --target outcome --out a.json
    --site NAME is the site's name (default: that of the file), which must be the client's name in a deployment,
    and --seed N draws the test rows, which are not summarized.
    """
    flags = parse_overrides(ctx.args)
    given = dict(flags.settings)
    out, seed = Path(str(given.pop("out", ""))), parse_value(int, given.pop("seed", 0), "seed")
    if len(flags.positional) != 1 or not out.name or not given.get("target"):
        raise ConfigError("tables summarize takes one file, --target COLUMN, and --out FILE.json.")
    file = Path(flags.positional[0])
    name = str(given.pop("site", file.stem))
    settings = build_dataclass(SiteSettings, given, "a site's table")
    site = open_site(name, read_table(file), settings, seed)
    summary = summarize_site(site, settings, seed)
    _write(out, to_json(summary))
    reported = f"{len(summary.columns)} columns of {summary.rows} training rows"
    print_line(
        f"Saved the summary of {name} to {out}: {reported}, and no row. Read it, and send it to the coordinator."
    )


@tables.command(context_settings=ANY_FLAG, epilog=_AGREE_HELP, options_metavar="SUMMARY.json... --out schema.json")
def agree(ctx: typer.Context) -> None:
    """Write the schema of several sites, given their summaries, and print what does not fit at which site.

    fedtailor tables agree a.json b.json --out schema.json
    """
    flags = parse_overrides(ctx.args)
    given = dict(flags.settings)
    out = Path(str(given.pop("out", "")))
    if not flags.positional or not out.name or given.keys() & set(_OF_SITES):
        raise ConfigError("tables agree takes summaries and --out schema.json; sites set how their tables are read.")
    summaries = [read_summary(Path(path)) for path in flags.positional]
    settings = build_dataclass(TableSettings, {**summaries[0].settings, **given}, "the agreement")
    schema, conflicts = agree_on_schema(summaries, settings)
    _write(out, to_json(schema))
    for conflict in sorted(conflicts, key=lambda conflict: (conflict.site == "", conflict.site)):
        print_line(f"{conflict}.")
    written = read_schema(out)  # as the sites will read it
    features = len(written.table_format({}).features)
    print_line(
        f"Saved the schema of {len(schema.sites)} sites with {features} features to {out}; send it to all sites."
    )
    classes = f"--inputs.classes {len(schema.classes or ())}"
    classes += f" --inputs.targets {len(schema.targets)}" if schema.classes is None else ""
    classes += " --inputs.survival true" if settings.survival else ""
    print_line(f"For fedtailor deploy init: --inputs.shape {features} {classes} --inputs.schema {written.checksum}")


def _write(path: Path, text: str) -> None:
    with write_errors(f"'{path}' cannot be written"):
        write_atomic(path, text.encode())
