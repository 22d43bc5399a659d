"""The command compare."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from fedtailor.cli.console import print_failures, print_on_interrupt
from fedtailor.cli.output import print_line
from fedtailor.cli.show import print_comparison
from fedtailor.core.code_reference import is_reference, short_name
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.compare import compare as compare_methods
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import Overrides, parse_overrides
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent, check_distinct_names, parse_consent
from fedtailor.experiments.own_parts import part_types
from fedtailor.methods import METHODS
from fedtailor.runs.writer import unused_folder
from fedtailor.tasks.choice import RUNNER_SETTINGS, fill_ray_address
from fedtailor.training.config import TrainingConfig

_SWITCHES = {"--all", "--centralized", "--sampled-local"}


def compare(ctx: typer.Context) -> None:
    """Compare methods with each other and with local training.

    Example: fedtailor compare fedavg fedper --seeds 0,1,2 --out FOLDER
    --method.FIELD sets a field of all methods that have it; with --all, of all methods that allow it.
    --NAME.FIELD sets a field of one method.
    --repeats 10 splits the samples of every client anew, ten times, and shows an
    interval per client; --folds 5 does so by cross-validation.
    --all compares all methods.
    --centralized adds training on the pooled data of all clients.
    --sampled-local adds local training in the rounds of the other methods only.
    --target 0.9 shows the rounds, bytes, and seconds to reach a score.
    --parallel 4 trains four runs at once in processes of this machine, and
    --ray [ADDRESS] on a Ray cluster; --cpus-per-run 2 and --gpus-per-run 0.5 are
    the resources of each run (docs/cluster.md).
    --out is the folder for the runs. The same command with --out continues an
    interrupted comparison. If a run fails, the others continue.
    """
    words, consent = parse_consent("compare", ctx.args)
    given = _SWITCHES.intersection(words)
    flags = parse_overrides(fill_ray_address([word for word in words if word not in _SWITCHES]))
    runner = {name: flags.settings.pop(name, None) for name in RUNNER_SETTINGS}
    out_folder, target = flags.pop("out", ""), flags.settings.pop("target", None)
    seeds = flags.pop_list("seeds", int, [0])
    repeats, folds = (flags.settings.pop(name, None) for name in ("repeats", "folds"))
    if "seed" in flags.settings:
        raise ConfigError("compare takes --seeds instead of --seed, such as --seeds 0,1,2.")
    if "--all" in given and flags.positional:
        raise ConfigError("compare takes either method names or --all, not both.")
    if target is not None and not isinstance(target, (int, float)):
        raise ConfigError(f"--target must be a score such as 0.9, got {target!r}.")
    federated = [name for name in METHODS if name != "centralized"]
    names = ["local", *(federated if "--all" in given else flags.positional)]
    names = list(dict.fromkeys([*names, *(["centralized"] if "--centralized" in given else [])]))
    check_distinct_names(names)
    settings = [method_settings(name, names, flags, consent, skip_fixed="--all" in given) for name in names]
    experiments = [make_experiment(part, consent) for part in settings]
    local = experiments[0]
    folder = Path(out_folder or unused_folder(Path("runs"), f"compare-{short_name(local.data.name)}"))
    config = {f.name: getattr(local, f.name) for f in fields(TrainingConfig) if f.name != "seed"}
    with print_on_interrupt(f"To continue the comparison, run the same command with --out {folder}"):
        result = compare_methods(
            [experiment.method for experiment in experiments], lambda fed: local.model(fed),
            lambda seed: replace(local, seed=seed).load(), seeds=seeds, repeats=repeats, folds=folds,
            sampled_local="--sampled-local" in given, target=target, folder=folder, progress=True,
            skip_invalid="--all" in given, **runner, **config,
        )  # fmt: skip
    print_comparison(result, brief="--all" in given)
    print_line(f"Runs saved in {folder}")
    print_failures(result.failures)
    if result.failures:
        raise typer.Exit(1)


def method_settings(
    name: str, names: list[str], flags: Overrides, consent: CodeConsent = NO_CONSENT, skip_fixed: bool = False
) -> dict[str, Any]:
    """Return the settings of one of several methods: the common ones, and the ones set for this method only, by its
    name or by the name of the user's own class."""
    fields = {other: part_types("method", other, consent) for other in names}
    if name not in METHODS and not is_reference(name):
        raise unknown_name("method", name, METHODS)
    settings = flags.apply_to({})
    specific = {other: settings.pop(short_name(other), {}) for other in names}[name]
    common = settings.pop("method", {})
    if not isinstance(specific, dict):
        label = short_name(name)
        raise ConfigError(f"--{label} takes no value. Set one of its fields, such as --{label}.lr 0.1.")
    if not isinstance(common, dict):
        raise ConfigError("compare takes method names without a flag, such as fedtailor compare fedavg fedper.")
    known = [field for other in names for field in fields[other]]
    for setting in common:
        if setting not in known:
            raise unknown_name("field of these methods", setting, dict.fromkeys(known))
    fixed = METHODS[name].fixed_settings.keys() if name in METHODS else set()  # a method that is named says why
    allowed = fields[name].keys() - fixed if skip_fixed else fields[name].keys() | fixed
    shared = {key: value for key, value in common.items() if key in allowed}
    return settings | {"method": {"name": name} | shared | specific}
