"""A sweep: one experiment over a grid of settings and seeds, in one folder.

sweep.toml      which fields are swept, what the others are, and which run has which values
NAME/ ...       a run each, see `record.py`
lock            held by the process that works on the sweep
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedtailor.errors import Refused
from fedtailor.experiment import from_toml
from fedtailor.files import WRITING, file_name, locked, write, writing
from fedtailor.methods import METHODS
from fedtailor.record import holds_run
from fedtailor.run import MOMENTS
from fedtailor.sweeps.grid import Point, Values, find_axes, fixed_settings, gather, make_points, text_of
from fedtailor.toml import flat, to_toml
from fedtailor.untrusted import check_plain, read_toml

FILE = "sweep.toml"
_FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What a sweep's file says."""

    axes: tuple[str, ...]  # dotted names, as flags have them; the seed is the last
    moment: str  # of which scores are compared: received or trained
    fixed: Mapping[str, Any]  # what was asked for and is the same in all runs, nested
    runs: Mapping[str, Values]  # label -> its values

    def is_same(self, other: "Plan") -> bool:
        """Whether two differ in their values alone."""
        return self.axes == other.axes and to_toml(self.fixed) == to_toml(other.fixed)


@dataclass(frozen=True)
class Sweep:
    """A sweep as it is asked for."""

    plan: Plan
    points: Sequence[Point]  # seed by seed, so that all settings are seen early, and data by data
    refused: Mapping[str, str]  # what cannot be: label -> why
    folder: Path | None  # None: one of its own in runs/
    name: str

    def place(self) -> Path:
        """Its folder: the one it was told, or the first in runs/ that is free or where just this sweep was begun."""
        if self.folder is not None:
            return self.folder
        names = (f"sweep-{self.name}" + (f"-{number}" if number > 1 else "") for number in count(1))
        return next(path for name in names if self._fits(path := Path("runs") / name))

    def _fits(self, path: Path) -> bool:
        if not path.exists():
            return True
        plan = read_plan(path)
        return not _others(path) if plan is None else plan.is_same(self.plan)


def read_sweep(words: Sequence[str]) -> Sweep:
    """The command's words as a sweep.

    >>> found = read_sweep("--method fedprox --method.mu 0.1,1 --seed 0,1".split())
    >>> [point.label for point in found.points]
    ['fedprox-mu0.1-seed0', 'fedprox-mu1-seed0', 'fedprox-mu0.1-seed1', 'fedprox-mu1-seed1']
    """
    files, given = gather(words)
    folder, moment = (given.pop(name, [default])[-1] for name, default in (("out", None), ("moment", "trained")))
    if moment not in MOMENTS:
        raise Refused(f"--moment is 'received' or 'trained', not {reprlib.repr(moment)}.")
    if len(files) > 1 or (files and files[0] in METHODS):
        raise Refused(
            "sweep takes one experiment file, and methods by a flag: fedtailor sweep --method fedavg,fedprox."
        )
    base = from_toml(Path(files[0])) if files else {}
    axes, single = find_axes(given, base)
    points, refused = make_points(axes, single, base)
    if len(axes) == 1 and len(axes["seed"]) == 1:
        raise Refused("Nothing is swept: give a flag several values, --method.lr 0.05,0.1 or --seed 0,1,2.")
    fixed = fixed_settings(axes, single, base)
    plan = Plan(tuple(axes), moment, fixed, {point.label: point.values for point in points})
    name = Path(files[0]).stem if files else f"{points[0].method}-{points[0].experiment.data.name}"
    return Sweep(plan, points, refused, None if folder is None else Path(folder), file_name(name))


def read_plan(folder: Path) -> Plan | None:
    """What a folder's file says of a sweep; None where there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    found = read_toml(path, "The sweep")
    check_plain(found, "The sweep")
    if found.get("format") != _FORMAT:
        raise Refused(f"The sweep '{path}' was written by another version of FedTailor; read it with that one.")
    kinds = {"axes": list, "moment": str, "fixed": dict, "runs": dict}
    if not all(isinstance(found.get(name), kind) for name, kind in kinds.items()) or found["moment"] not in MOMENTS:
        raise Refused(f"The sweep '{path}' does not say what is swept.")
    axes, runs = [str(axis) for axis in found["axes"]], found["runs"]
    if not all(Path(label).name == label and _is_own(values, axes) for label, values in runs.items()):
        raise Refused(f"The sweep '{path}' does not say which run has which values.")
    return Plan(tuple(axes), found["moment"], found["fixed"], runs)


def _is_own(values: Any, axes: Sequence[str]) -> bool:
    """Whether these are values of a run on these axes, each a number, a text or a list of such."""
    if not isinstance(values, dict) or not values.keys() <= {*axes} or type(values.get("seed")) is not int:
        return False
    parts = [part for value in values.values() for part in (value if isinstance(value, list) else [value])]
    return all(isinstance(part, str | int | float) for part in parts)


def check_goes_on(folder: Path, plan: Plan) -> None:
    """Refuse a folder in which another sweep was begun, or something else lies. More values are welcome."""
    before = read_plan(folder)
    if before is None:
        if folder.exists() and (not folder.is_dir() or _others(folder)):
            raise Refused(f"The folder '{folder}' holds other things and no sweep; name a new one with --out.")
        return
    if before.axes != plan.axes:
        shown = [", ".join(axes) for axes in (before.axes, plan.axes)]
        raise Refused(f"The sweep in '{folder}' is over {shown[0]}, not {shown[1]}; name a new folder with --out.")
    if not before.is_same(plan):
        name, old, new = _difference(before.fixed, plan.fixed)
        raise Refused(f"The sweep in '{folder}' has {name} {old}, not {new}; name a new folder with --out.")
    for label in before.runs:
        if label not in plan.runs and holds_run(folder / label):
            raise Refused(
                f"The sweep in '{folder}' has run {label} too; name all its values again, or remove that folder."
            )


@contextmanager
def begun(folder: Path, plan: Plan) -> Iterator[None]:
    """A sweep's folder with its file, held while it is worked on."""
    refused = f"The folder '{folder}' cannot be written"
    with writing(refused):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_goes_on(folder, plan)  # again, for now nobody else changes it
        said = {"format": _FORMAT, "moment": plan.moment, "axes": list(plan.axes), "fixed": plan.fixed}
        with writing(refused):
            write(folder / FILE, to_toml(said | {"runs": plan.runs}).encode())
        yield


def _others(folder: Path) -> list[str]:
    """What lies in a folder besides what a sweep that was stopped at once may have left."""
    return [path.name for path in folder.iterdir() if path.name != "lock" and not path.name.endswith(WRITING)]


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str]:
    """The first field that differs, by its dotted name, and its two values."""
    old, new = flat(before), flat(now)
    name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
    was, wanted = (text_of(found[name]) if name in found else "as by default" for found in (old, new))
    return name, was, wanted
