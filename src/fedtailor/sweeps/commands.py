"""`fedtailor sweep` at work: it says what does not fit, carries out the others, and shows what they found."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path

import typer

from fedtailor.data.datasets import Data
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.record import check_same, holds_run, is_finished
from fedtailor.screen import bars, carry_out, err, going_on, hint, out, say, say_failures
from fedtailor.sweeps.sweep import Plan, Sweep, begun, check_goes_on, read_sweep
from fedtailor.sweeps.tuning import Outcome, contests, outcome, sweep_table, sweep_verdict

_Loads = dict[tuple[Data, int | None], Callable[[], Federation]]  # where data come from, by what they are known


def try_out(words: Sequence[str]) -> None:
    """The command with such words."""
    asked = read_sweep([word for word in words if word != "--dry-run"])
    folder = asked.place()
    check_goes_on(folder, asked.plan)
    if "--dry-run" in words:
        _list_runs(folder, asked)
        return
    failures = dict(asked.refused)
    loads: _Loads = {point.source: cache(point.experiment.load) for point in asked.points}
    unfit = _unfit(folder, asked, loads, failures)
    with begun(folder, asked.plan), bars() as progress, hint("The whole sweep goes on with the same command."):
        outcomes, whole = list[Outcome](), progress.add_task("all runs", total=len(asked.points), score="")
        for point, following in zip_longest(asked.points, asked.points[1:]):
            if point.setting not in unfit or is_finished(folder / point.label):
                with going_on(failures, point.label, Exception):
                    finished = carry_out(
                        point.experiment, loads[point.source], folder / point.label, point.label, progress
                    )
                    outcomes.append(outcome(finished, point.values))
            progress.advance(whole)
            if following is None or following.source != point.source:
                del loads[point.source]  # data lie in memory only while they are needed
    if outcomes:
        show_sweep(asked.plan, outcomes)
        say(f"The runs lie in {folder}")
    say_failures(failures)
    if failures:
        raise typer.Exit(1)


def _unfit(folder: Path, asked: Sweep, loads: _Loads, failures: dict[str, str]) -> set[str]:
    """Settings that do not fit together, said before anything is trained; refused if there are no others."""
    seen, unfit = set[str](), set[str]()
    for point in asked.points:
        if is_finished(folder / point.label) or point.setting in seen:
            continue
        seen.add(point.setting)
        found: dict[str, str] = {}
        with going_on(found, point.label, Exception):
            fed = loads[point.source]()
            point.experiment.check(fed)
            if holds_run(folder / point.label):
                check_same(folder / point.label, point.experiment.describe(fed))
        failures |= found
        unfit |= {point.setting} if found else set()
    if all(point.setting in unfit for point in asked.points):
        raise Refused(next(iter(failures.values())))
    for name, why in failures.items():
        err.print(f"{name} is left out: {why}", markup=False, highlight=False, soft_wrap=True)
    return unfit


def _list_runs(folder: Path, asked: Sweep) -> None:
    for point in asked.points:
        there = folder / point.label
        say(f"{point.label}: {'finished' if is_finished(there) else 'begun' if holds_run(there) else 'to do'}")
    say(f"{len(asked.points)} runs in {folder}")
    say_failures(asked.refused)


def show_sweep(plan: Plan, outcomes: list[Outcome]) -> None:
    """A sweep's table, and what it says."""
    found = contests(plan.axes, outcomes, plan.moment)
    out.print(sweep_table(found))
    out.print(sweep_verdict(found), markup=False, highlight=False)
