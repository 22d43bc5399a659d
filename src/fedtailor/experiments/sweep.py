"""Sweeps: one experiment over a grid of settings and seeds, in one folder.

sweep.toml      the axes of the grid, the fixed settings, and the values of each run
NAME/ ...       one run folder per point, see `runs/writer.py`
lock            held by the process that works on the sweep
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedtailor.analysis.formatting import format_value
from fedtailor.core.code_reference import short_name
from fedtailor.core.untrusted_input import check_settings, read_toml
from fedtailor.errors import ConfigError
from fedtailor.experiments.experiment import read_experiment_file
from fedtailor.experiments.grid import Point, Values, find_axes, fixed_settings, make_points, parse_grid
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent
from fedtailor.methods import METHODS
from fedtailor.runs.files import TEMPORARY_SUFFIX, folder_lock, safe_file_name, write_atomic, write_errors
from fedtailor.runs.reader import is_run_folder
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.toml import flatten_settings, to_toml
from fedtailor.tasks.choice import RUNNER_SETTINGS, choose_runner, fill_ray_address
from fedtailor.tasks.task import Runner

SWEEP_FILE = "sweep.toml"
_FORMAT = 1
RANKED = "ranked"  # the moment that ranks the method, see `Method.ranking_moment`


@dataclass(frozen=True)
class Plan:
    """The content of sweep.toml."""

    axes: tuple[str, ...]  # dotted names of settings; the seed is last
    moment: str  # whose scores are compared: received, trained, or ranked (each method at its own moment)
    fixed: Mapping[str, Any]  # nested settings that are the same in all runs
    runs: Mapping[str, Values]  # label -> values

    def is_same_sweep(self, other: "Plan") -> bool:
        """Return whether two plans differ at most in the values of their axes."""
        return self.axes == other.axes and to_toml(self.fixed) == to_toml(other.fixed)


@dataclass(frozen=True)
class Sweep:
    """A sweep as requested on the command line."""

    plan: Plan
    points: Sequence[Point]  # ordered by data and seed, so that all settings are covered early
    invalid: Mapping[str, str]  # label -> error message
    folder: Path | None  # None: a folder in runs/
    name: str
    runner: Runner

    def choose_folder(self) -> Path:
        """Return the requested folder, or the first one in runs/ that is unused or contains this sweep."""
        if self.folder is not None:
            return self.folder
        names = (f"sweep-{self.name}" + (f"-{number}" if number > 1 else "") for number in count(1))
        return next(path for name in names if self._is_usable(path := Path("runs") / name))

    def _is_usable(self, path: Path) -> bool:
        if not path.exists():
            return True
        plan = read_plan(path)
        return not _other_files(path) if plan is None else plan.is_same_sweep(self.plan)


def parse_sweep(words: Sequence[str], consent: CodeConsent = NO_CONSENT) -> Sweep:
    """Return the sweep that command-line arguments describe. Own code is imported only with the user's consent.

    >>> found = parse_sweep("--method fedprox --method.mu 0.1,1 --seed 0,1".split())
    >>> [point.label for point in found.points]
    ['fedprox-mu0.1-seed0', 'fedprox-mu1-seed0', 'fedprox-mu0.1-seed1', 'fedprox-mu1-seed1']
    """
    files, given = parse_grid(fill_ray_address(words))
    runner = choose_runner(**{name: given.pop(name)[-1] for name in RUNNER_SETTINGS if name in given})
    folder, moment = (given.pop(name, [default])[-1] for name, default in (("out", None), ("moment", RANKED)))
    if moment not in (*MOMENTS, RANKED):
        raise ConfigError(f"--moment must be 'received', 'trained', or 'ranked', got {reprlib.repr(moment)}.")
    if len(files) > 1 or (files and files[0] in METHODS):
        raise ConfigError(
            "sweep takes one experiment file; name methods with a flag: fedtailor sweep --method fedavg,fedprox."
        )
    base = read_experiment_file(Path(files[0])) if files else {}
    axes, single = find_axes(given, base, consent)
    points, invalid = make_points(axes, single, base, consent)
    if len(axes) == 1 and len(axes["seed"]) == 1:
        raise ConfigError(
            "The sweep has only one run; give a flag several values, such as --method.lr 0.05,0.1 or --seed 0,1,2."
        )
    fixed = fixed_settings(axes, single, base)
    plan = Plan(tuple(axes), moment, fixed, {point.label: point.values for point in points})
    first = points[0]
    name = Path(files[0]).stem if files else f"{short_name(first.method)}-{short_name(first.experiment.data.name)}"
    return Sweep(plan, points, invalid, None if folder is None else Path(folder), safe_file_name(name), runner)


def read_plan(folder: Path) -> Plan | None:
    """Return the plan in a folder's sweep.toml, or None if there is none."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return None
    found = read_toml(path, "The sweep")
    check_settings(found, "The sweep")
    if found.get("format") != _FORMAT:
        raise ConfigError(f"The sweep '{path}' was written by another version of FedTailor; open it with that version.")
    types = {"axes": list, "moment": str, "fixed": dict, "runs": dict}
    if not all(isinstance(found.get(name), kind) for name, kind in types.items()) or found["moment"] not in (
        *MOMENTS,
        RANKED,
    ):
        raise ConfigError(f"The sweep '{path}' is invalid: axes, moment, fixed, or runs is missing.")
    axes, runs = [str(axis) for axis in found["axes"]], found["runs"]
    if not all(Path(label).name == label and _are_values(values, axes) for label, values in runs.items()):
        raise ConfigError(f"The sweep '{path}' is invalid: the values of a run are missing.")
    return Plan(tuple(axes), found["moment"], found["fixed"], runs)


def _are_values(values: Any, axes: Sequence[str]) -> bool:
    """Return whether these are a run's values on these axes: numbers, strings, or lists of them."""
    if not isinstance(values, dict) or not values.keys() <= {*axes} or type(values.get("seed")) is not int:
        return False
    parts = [part for value in values.values() for part in (value if isinstance(value, list) else [value])]
    return all(isinstance(part, str | int | float) for part in parts)


def check_can_resume(folder: Path, plan: Plan) -> None:
    """Raise an error if a folder contains other files or another sweep; the plan may add values to the sweep."""
    before = read_plan(folder)
    if before is None:
        if folder.exists() and (not folder.is_dir() or _other_files(folder)):
            raise ConfigError(f"The folder '{folder}' contains other files; use a new folder with --out.")
        return
    if before.axes != plan.axes:
        shown = [", ".join(axes) for axes in (before.axes, plan.axes)]
        raise ConfigError(f"The sweep in '{folder}' is over {shown[0]}, not {shown[1]}; use a new folder with --out.")
    if not before.is_same_sweep(plan):
        name, old, new = _difference(before.fixed, plan.fixed)
        raise ConfigError(f"The sweep in '{folder}' has {name} = {old}, not {new}; use a new folder with --out.")
    for label in before.runs:
        if label not in plan.runs and is_run_folder(folder / label):
            raise ConfigError(
                f"The sweep in '{folder}' also contains the run {label}; include its values, or remove that folder."
            )


@contextmanager
def open_sweep_folder(folder: Path, plan: Plan) -> Iterator[None]:
    """Create and lock a sweep's folder, and write its sweep.toml."""
    what = f"The folder '{folder}' cannot be written"
    with write_errors(what):
        folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        check_can_resume(folder, plan)  # again, now that no other process can change it
        content = {"format": _FORMAT, "moment": plan.moment, "axes": list(plan.axes), "fixed": plan.fixed}
        with write_errors(what):
            write_atomic(folder / SWEEP_FILE, to_toml(content | {"runs": plan.runs}).encode())
        yield


def _other_files(folder: Path) -> list[str]:
    """Return the files in a folder that an interrupted start of a sweep cannot have left."""
    return [path.name for path in folder.iterdir() if path.name != "lock" and not path.name.endswith(TEMPORARY_SUFFIX)]


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the dotted name of the first setting that differs, and its two values."""
    old, new = flatten_settings(before), flatten_settings(now)
    name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
    was, wanted = (format_value(found[name]) if name in found else "(the default)" for found in (old, new))
    return name, was, wanted
