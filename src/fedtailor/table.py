"""Tables and sentences for people, made from finished runs."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import mean, stdev
from typing import NoReturn

from rich import box
from rich.table import Table

from fedtailor.errors import Refused
from fedtailor.run import Run

_CHOICES = {"last": "last", "best_validation": "best on validation", "best_test": "best on test"}
_T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
)  # Student's t, 95 % two-sided, by degrees of freedom
Groups = dict[str, list[Run]]  # method -> its runs, one a seed


def run_table(run: Run) -> Table:
    """One run: both moments, every choice of round."""
    title = f"{_where(run)}; {_score(run)}"
    table = _table(title, ["moment", "round", "", "all samples", "mean of clients", "worst 10 %"], left=3)
    for moment, choices in run.summary().items():
        for choice, numbers in choices.items():
            if numbers is not None:
                shown = [_number(run, numbers[name]) for name in ("weighted", "mean", "worst_tenth")]
                table.add_row(moment, str(numbers["round"]), _CHOICES[choice], *shown)
    up, down = (run.total(name) / 1e6 for name in ("bytes_up", "bytes_down"))
    lost = run.records[-1].get("diverged", [])
    table.caption = f"{len(lost)} clients diverged: try a smaller lr. " if lost else ""
    table.caption += f"{run.total('seconds'):.1f} s of training; {up:.1f} MB up and {down:.1f} MB down in all. "
    table.caption += "Best on test is what most papers print, and optimistic."
    return table


def comparison(runs: Sequence[Run]) -> Table:
    """Several methods, ranked by the score as trained in the last round."""
    _check_comparable(runs)
    groups, first = _by_method(runs), runs[0]
    seeds = max(len(group) for group in groups.values())
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: differences may be chance"
    columns = ["method", "trained", "received", "worst 10 %", "> alone", "MB up", "MB down", "s"]
    table = _table(f"{_where(first, method=False)}; {_score(first)}; {over}", columns, left=1)
    for name in _ranked(groups):
        group = groups[name]
        wanted = [("trained", "weighted"), ("received", "weighted"), ("trained", "worst_tenth")]
        shown = [_spread(first, _over(group, *what)) for what in wanted]
        up, down, seconds = (mean(run.total(key) for run in group) for key in ("bytes_up", "bytes_down", "seconds"))
        alone = _share(group, groups.get("local", []), "better_than_alone") if name != "local" else ""
        table.add_row(name, *shown, alone, f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", f"{seconds:.1f}")
    table.caption = (
        "Last round, all test samples. trained: after local training, before averaging; received: after it. "
        "worst 10 %: mean of those clients, trained. > alone: clients that beat training alone, trained."
    )
    return table


def verdict(runs: Sequence[Run]) -> str:
    """What the comparison found, in words, and whether it is more than chance over the seeds."""
    groups, first = _by_method(runs), runs[0]
    ranked = _ranked(groups)
    unit = " %" if _in_percent(first) else ""
    shown = {name: _spread(first, _over(groups[name], "trained", "weighted")) + unit for name in ranked}
    best = ranked[0]
    if "local" not in groups or len(ranked) == 1:
        return f"Best here: {best} with {shown[best]}."
    other = best if best != "local" else ranked[1]
    better, worse = (_share(groups[other], groups["local"], f"{side}_than_alone") for side in ("better", "worse"))
    found = (
        f"Training alone is best here with {shown['local']}; of the federated methods {other} comes nearest with "
        if best == "local"
        else f"Training alone gets {shown['local']} here; {other} is best with "
    )
    clients = f"{better} of the clients do better with it than alone, {worse} worse"
    lost = [name for name in ranked if any(run.records[-1].get("diverged") for run in groups[name])]
    warning = f" Diverged, so try a smaller lr: {', '.join(lost)}." if lost else ""
    return f"{found}{shown[other]}: {clients}. {_chance(groups[other], groups['local'])}{warning}"


def _chance(group: Sequence[Run], local: Sequence[Run]) -> str:
    """Whether two methods differ by more than seeds do: a paired t-test at 95 %."""
    number = ("trained", "weighted")
    pairs = [(_over([run], *number), _over([alone], *number)) for run, alone in _pairs(group, local)]
    gaps = [ours[0] - theirs[0] for ours, theirs in pairs if ours and theirs]
    if len(gaps) < 2:
        return "This is one seed: the difference may be chance."
    limit = _T95[min(len(gaps) - 2, len(_T95) - 1)] * stdev(gaps) / len(gaps) ** 0.5
    return f"Over {len(gaps)} seeds the difference is {'more than' if abs(mean(gaps)) > limit else 'within'} chance."


def catalogue(kind: str, about: str, rows: Mapping[str, tuple[str, Mapping[str, tuple[str, str]]]]) -> Table:
    """Names with what they are and their fields, if they have any."""
    some = any(notes for _, notes in rows.values())
    table = _table("", [kind, about, "fields"][: 2 + some], left=3)
    table.show_lines = some
    for name, (text, notes) in rows.items():
        fields = [f"{field} = {default}" + (f"  {note}" if note else "") for field, (default, note) in notes.items()]
        table.add_row(name, " ".join(text.split()), *["\n".join(fields)][:some])
    return table


def _where(run: Run, method: bool = True) -> str:
    name = f"{run.experiment['method']['name']} on " if method else ""
    data = run.experiment["data"].get("name", "own data")
    return f"{name}{data}, {run.num_clients} clients, {len(run.records)} rounds"


def _score(run: Run) -> str:
    return f"{run.info['score']} in %" if _in_percent(run) else str(run.info["score"])


def _by_method(runs: Sequence[Run]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.experiment["method"]["name"], []).append(run)
    return groups


def _check_comparable(runs: Sequence[Run]) -> None:
    """Runs in one table differ in their method and seed alone, and are all different."""

    def refuse(why: str) -> NoReturn:
        raise Refused(f"These runs cannot be compared, for {why}; show them one by one.")

    for key in sorted(runs[0].experiment.keys() - {"method", "seed", "data"}):
        found = sorted({str(run.experiment.get(key)) for run in runs})
        if len(found) > 1:
            refuse(f"{key} is {' and '.join(found)}")
    if len({str({**run.experiment["data"], "seed": None}) for run in runs}) > 1:
        refuse("their data differ")
    seen = [(run.experiment["method"]["name"], run.experiment["seed"]) for run in runs]
    for name, seed in seen:
        if seen.count((name, seed)) > 1:
            refuse(f"{name} ran twice with seed {seed}")


def _ranked(groups: Groups) -> list[str]:
    """The best first; who diverged or was not evaluated, last."""
    sign = 1 if next(iter(groups.values()))[0].info["higher_is_better"] else -1

    def height(name: str) -> float:
        values = _over(groups[name], "trained", "weighted")
        return sign * mean(values) if values and all(map(isfinite, values)) else -inf

    return sorted(groups, key=height, reverse=True)


def _over(group: Sequence[Run], moment: str, number: str) -> list[float]:
    """A number of the last round, one for every seed."""
    summaries = [run.summary()[moment]["last"] for run in group]
    return [summary[number] for summary in summaries if summary is not None and summary[number] is not None]


def _pairs(group: Sequence[Run], local: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every run with the one of training alone on the same split."""
    partners = {run.experiment["seed"]: run for run in local}
    return [(run, partners[run.experiment["seed"]]) for run in group if run.experiment["seed"] in partners]


def _share(group: Sequence[Run], local: Sequence[Run], which: str) -> str:
    """The share of clients that do better, or worse, than alone, over all seeds."""
    found = [run.summary(alone)["trained"]["last"] for run, alone in _pairs(group, local)]
    known = [numbers[which] for numbers in found if numbers is not None and numbers[which] is not None]
    return f"{100 * mean(known):.0f} %" if known else ""


def _spread(run: Run, values: Sequence[float]) -> str:
    if not values:
        return ""
    return _number(run, mean(values)) + (f" ± {_number(run, stdev(values))}" if len(values) > 1 else "")


def _number(run: Run, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if _in_percent(run) else f"{value:.4g}"


def _in_percent(run: Run) -> bool:
    return bool(run.info["score"] == "accuracy")


def _table(title: str, columns: Sequence[str], left: int) -> Table:
    table = Table(title=title or None, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right", no_wrap=position >= left)
    return table
