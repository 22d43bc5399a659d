"""The command: run, compare, sweep, resume, show, list, data. It reads flags, asks the library, and prints."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedtailor import resuming
from fedtailor.catalogue import catalogue
from fedtailor.channel import Channel
from fedtailor.data.datasets import DATASETS, Data
from fedtailor.errors import Refused, unknown
from fedtailor.experiment import Experiment, field_notes, from_toml, make
from fedtailor.flags import Flags, read_flags
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.record import check_same, free_folder, holds_run, is_finished, open_run, read_settings
from fedtailor.run import Run, name_of
from fedtailor.screen import bars, carry_out, err, going_on, hint, out, say, say_failures, watched
from fedtailor.see import commands as seeing
from fedtailor.simulate import describe
from fedtailor.sweeps.commands import show_sweep, try_out
from fedtailor.sweeps.sweep import read_plan
from fedtailor.sweeps.tuning import outcome
from fedtailor.table import comparison, listing, methods_table, other_metrics, run_table, verdict
from fedtailor.unreliable import Unreliable

app = typer.Typer(
    help="Personalised federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they hold data
)
_FREE = {"allow_extra_args": True, "ignore_unknown_options": True}  # flags come from the dataclasses' fields


def _flag_help() -> str:
    lines = ["Flags are the fields of an experiment:", ""]
    for prefix, kind in [("", Experiment), ("data.", Data), ("unreliable.", Unreliable), ("channel.", Channel)]:
        for name, (default, note) in field_notes(kind).items():
            if name not in ("method", "data", "network", "unreliable", "channel"):
                shown = f" ({default})" if default not in ("", "None") else ""
                lines += [f"--{prefix}{name.replace('_', '-')}{shown}  {note}", ""]
    lines += ["--method NAME, --method.FIELD, --network NAME, --network.FIELD: see fedtailor list methods|networks"]
    return "\n".join(lines)


@app.command(context_settings=_FREE, epilog=_flag_help())
def run(ctx: typer.Context) -> None:
    """Run one experiment: fedtailor run exp.toml, or fedtailor run --method fedavg --data digits --rounds 20; --out is
    the folder that runs are kept in (runs)."""
    flags = read_flags(ctx.args)
    folder = Path(flags.pop("out", "runs"))
    if len(flags.words) > 1:
        raise Refused(f"One experiment file at a time, not {len(flags.words)}.")
    experiment = make(flags.over(from_toml(Path(flags.words[0])) if flags.words else {}))
    with bars() as progress:
        label = f"{_label(experiment)}-{experiment.data.name}"
        finished = carry_out(experiment, experiment.load, free_folder(folder, label), label, progress)
    out.print(run_table(finished))
    say(f"The run lies in {finished.folder}")


@app.command(context_settings=_FREE, epilog=_flag_help())
def compare(ctx: typer.Context) -> None:
    """Compare methods: fedtailor compare fedavg fedper ditto --data digits --seeds 0,1,2 --out FOLDER. Training alone
    is always among them. --method.FIELD sets a field of every method that has it, --NAME.FIELD of one. --all compares
    every method there is. When one fails, the others go on. Stopped, it goes on with the same command and --out."""
    everything = "--all" in ctx.args
    flags = read_flags([word for word in ctx.args if word != "--all"])
    out_folder = flags.pop("out", "")
    seeds = list(dict.fromkeys(flags.pop_list("seeds", int, [0])))
    if "seed" in flags.settings:
        raise Refused("compare takes --seeds, one or several: --seeds 0,1,2.")
    if everything and flags.words:
        raise Refused("compare takes the names of methods, or --all, not both.")
    names = list(dict.fromkeys(["local", *(METHODS if everything else flags.words)]))
    failures: dict[str, str] = {}
    alone = make(_for_method("local", names, flags))
    folder = Path(out_folder or free_folder(Path("runs"), f"compare-{alone.data.name}"))
    feds = {seed: replace(alone, seed=seed).load() for seed in seeds}
    experiments = []
    for name in names:  # what does not fit is said before anything is trained
        with going_on(failures, name, Refused if everything else ()):
            experiment = make(_for_method(name, names, flags))
            experiment.check(feds[seeds[0]])
            experiments.append(experiment)
    seeded = [replace(experiment, seed=seed) for seed in seeds for experiment in experiments]
    _check_own(folder, {_label(experiment): experiment.describe(feds[experiment.seed]) for experiment in seeded})
    runs: list[Run] = []
    with bars() as progress, hint(f"The whole comparison goes on with the same command and --out {folder}"):
        for experiment in seeded:
            with going_on(failures, label := _label(experiment), Exception):
                load = partial(feds.__getitem__, experiment.seed)
                runs.append(carry_out(experiment, load, folder / label, label, progress))
    if runs:
        _show_runs(runs, brief=everything)
        say(f"The runs lie in {folder}")
    say_failures(failures)
    if failures:
        raise typer.Exit(1)


@app.command(context_settings=_FREE, epilog=_flag_help())
def sweep(ctx: typer.Context) -> None:
    """Try a grid of settings: fedtailor sweep exp.toml --method.rho 0.001,0.01,0.1 --seed 0,1,2 --validation 0.2. A
    flag with several values is an axis; of a field that takes a list (--network.hidden 64,32) the flag is repeated.
    The best is chosen on validation data, where some are held out, at the --moment trained or received. When a run
    fails, the others go on. Stopped, it goes on with the same command, to which values may be added. --out is the
    folder that its runs are kept in. --dry-run lists them."""
    try_out(ctx.args)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="a run's folder")]) -> None:
    """Go on with a run that was stopped, from its last checkpoint; a finished one is only shown."""
    with bars() as progress:
        rounds = read_settings(folder).get("rounds") if holds_run(folder) else None
        finished = watched(
            lambda advance: resuming.resume(folder, record=advance), folder, folder.name, rounds, progress
        )
    out.print(run_table(finished))
    say(f"The run lies in {finished.folder}")


@app.command()
def show(folder: Annotated[Path, typer.Argument(help="a run, or a folder of runs")]) -> None:
    """Print the table of a run, or of all runs in a folder, again."""
    if holds_run(folder):
        out.print(run_table(open_run(folder)))
        return
    plan = read_plan(folder)
    paths = sorted(path.parent for path in folder.glob("*/experiment.toml"))
    finished = [path for path in paths if is_finished(path)]
    if not finished:
        raise Refused(f"There is no finished run in '{folder}'.")
    if plan is not None:
        kept = [path for path in finished if path.name in plan.runs]
        show_sweep(plan, [outcome(open_run(path), plan.runs[path.name]) for path in kept])
    else:
        _show_runs([open_run(path) for path in finished])
    if len(finished) < len(paths):
        say(f"Not finished, so not shown: {', '.join(p.name for p in paths if p not in finished)}.")


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, data or networks")],
    name: Annotated[str, typer.Argument(help="of one method: its fields")] = "",
) -> None:
    """List what there is: methods, data, networks; fedtailor list methods fedprox shows one method's fields."""
    if what == "methods" and name:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
        out.print(listing("method", "about", {name: (METHODS[name].__doc__ or "", field_notes(METHODS[name]))}))
    elif what == "methods":
        out.print(methods_table(catalogue()))
    elif what == "networks":
        out.print(listing("network", "about", {n: (k.__doc__ or "", field_notes(k)) for n, k in NETWORKS.items()}))
    elif what == "data":
        about = {name: dataset.about for name, dataset in DATASETS.items()}
        about["folder"] = "your own clients: one .npz or one folder of pictures each (data.folder)"
        out.print(listing("data", "about", {name: (text, {}) for name, text in about.items()}))
    else:
        raise unknown("list", what, ["methods", "data", "networks"])


data = typer.Typer(help="Data sets.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command()
def get(name: Annotated[str, typer.Argument(help="fashion-mnist, mnist or cifar10")]) -> None:
    """Fetch a data set, so that later runs need no network."""
    from fedtailor.data import fetch

    if name == "digits":
        say("digits is inside scikit-learn: there is nothing to fetch.")
        return
    say(f"{name} lies in {fetch.get(name)}")


seeing.add_to(app)


def _add_deploy() -> None:
    """`fedtailor deploy`, where Flower is installed; elsewhere a sentence says how it is."""
    try:
        from fedtailor.deploy.commands import deploy
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography"):
            raise

        @app.command(name="deploy", context_settings=_FREE)
        def without_flower() -> None:
            """Real federations on Flower; needs: pip install 'fedtailor[flower]'."""
            raise Refused("Real federations need Flower: pip install 'fedtailor[flower]'.")
    else:
        app.add_typer(deploy, name="deploy")


def main() -> None:
    """What the installed command calls: a refusal is one sentence and exit code 2."""
    try:
        if "deploy" in sys.argv[1:2] or len(sys.argv) < 2 or "--help" in sys.argv[1:2]:
            _add_deploy()  # only then: Flower takes half a second to import
        app()
    except Refused as refusal:
        err.print(f"[bold red]fedtailor:[/] {escape(str(refusal))}", soft_wrap=True, highlight=False)
        sys.exit(2)


def _visible(folder: Path) -> list[Path]:
    """What lies in a folder, but for what the live page keeps there."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _check_own(folder: Path, described: Mapping[str, Any]) -> None:
    """A comparison goes on in its own folder, and begins in an empty one."""
    if folder.is_dir() and any(path.name not in described for path in _visible(folder)):
        raise Refused(f"The folder '{folder}' holds other things; runs never overwrite each other, name a new one.")
    for label, experiment in described.items():
        if holds_run(folder / label):
            check_same(folder / label, experiment)


def _label(experiment: Experiment) -> str:
    return f"{name_of(describe(experiment.method))}-seed{experiment.seed}".replace("(", "-").replace(")", "")


def _for_method(name: str, names: list[str], flags: Flags) -> dict[str, Any]:
    """The settings of one method among several."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    settings = flags.over({})
    own = {other: settings.pop(other, {}) for other in names}[name]
    common = settings.pop("method", {})
    if not isinstance(own, dict):
        raise Refused(f"--{name} has fields, such as --{name}.lr 0.1, and no value of its own.")
    if not isinstance(common, dict):
        raise Refused("compare takes the methods' names without a flag: fedtailor compare fedavg fedper.")
    known = {field for other in names if other in METHODS for field in field_notes(METHODS[other])}
    for setting in common:
        if setting not in known:
            raise unknown("field of these methods", setting, known)
    shared = {key: value for key, value in common.items() if key in field_notes(METHODS[name])}
    return settings | {"method": {"name": name} | shared | own}


def _show_runs(runs: list[Run], brief: bool = False) -> None:
    out.print(comparison(runs))
    if not brief:
        out.print(other_metrics(runs))
    out.print(verdict(runs), highlight=False)


if __name__ == "__main__":
    main()
