"""Tables and sentences for people, made from finished runs."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import mean, stdev
from typing import NoReturn

from rich import box
from rich.markup import escape
from rich.table import Table

from fedtailor.catalogue import Entry
from fedtailor.chance import LIMIT, student
from fedtailor.errors import Refused
from fedtailor.run import MOMENTS, Run
from fedtailor.scale import SHARES, Scale

_CHOICES = {"last": "last", "best_validation": "best on\nvalidation", "best_test": "best on\ntest"}
_NUMBERS = {
    "weighted": "all samples",
    "mean": "mean of clients",
    "worst_tenth": "worst 10 %",
    "largest_tenth": "largest 10 %",
}
Groups = dict[str, list[Run]]  # method -> its runs, one a seed


def run_table(run: Run) -> Table:
    """One run: both moments, every choice of round; then the other metrics."""
    chosen = {(m, c): numbers for m, choices in run.summary().items() for c, numbers in choices.items() if numbers}
    headings = [f"{moment}\n{_CHOICES[choice]}" for moment, choice in chosen]
    table = new_table(f"{_where(run)}; {_scale(run).in_words}", ["", *headings], left=1)
    table.add_row("round", *(str(numbers["round"]) for numbers in chosen.values()))
    for number, label in _NUMBERS.items():
        table.add_row(label, *(_number(run.info["score"], numbers[number]) for numbers in chosen.values()))
    for name in (others := _others([run])):
        shown = (_number(name, numbers["metrics"][name]["weighted"]) for numbers in chosen.values())
        table.add_row(Scale(name).name, *shown)
    up, down = (run.total(name) / 1e6 for name in ("bytes_up", "bytes_down"))
    lost = run.records[-1].get("diverged", [])
    table.caption = f"{len(lost)} clients diverged: try a smaller lr. " if lost else ""
    table.caption += _failures(run)
    table.caption += f"{run.total('seconds'):.1f} s of training, engine {run.info['engine']}; "
    table.caption += f"{up:.1f} MB up and {down:.1f} MB down in all. "
    if (spent := run.records[-1].get("epsilon")) is not None:
        table.caption += f"ε = {spent:.3g} at δ = {run.experiment['channel']['delta']:g}. "
    table.caption += f"Best on test is what most papers print, and optimistic.{_about(others, [run])}"
    return table


def comparison(runs: Sequence[Run]) -> Table:
    """Several methods, ranked by the score as trained in the last round."""
    _check_comparable(runs)
    groups, first = _by_method(runs), runs[0]
    seeds = max(len(group) for group in groups.values())
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: differences may be chance"
    columns = ["method", "trained", "received", "worst 10 %", "> alone", "MB up", "MB down", "s"]
    table = new_table(f"{_where(first, method=False)}; {_scale(first).in_words}; {over}", columns, left=1)
    for name in _ranked(groups):
        group = groups[name]
        wanted = [("trained", "weighted"), ("received", "weighted"), ("trained", "worst_tenth")]
        shown = [spread(first.info["score"], _over(group, *what)) for what in wanted]
        up, down, seconds = (mean(run.total(key) for run in group) for key in ("bytes_up", "bytes_down", "seconds"))
        alone = _share(group, groups.get("local", []), "better_than_alone") if name != "local" else ""
        table.add_row(name, *shown, alone, f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", f"{seconds:.1f}")
    table.caption = (
        "Last round, all test samples. trained: after local training, before averaging; received: after it. "
        "worst 10 %: mean of those clients, trained. > alone: clients that beat training alone, trained. "
        "s: seconds of training; methods differ in the steps they take."
    )
    return table


def other_metrics(runs: Sequence[Run]) -> Table:
    """What the comparison leaves out, in its order: the 10 % of clients with most samples, macro F1, AUC, loss."""
    groups, first, names = _by_method(runs), runs[0], _others(runs)
    table = new_table("", ["method", "largest 10 %", *(Scale(name).name for name in names)], left=1)
    for name in _ranked(groups):
        shown = [spread(first.info["score"], _over(groups[name], "trained", "largest_tenth"))]
        shown += [spread(metric, _over(groups[name], "trained", "weighted", metric)) for metric in names]
        table.add_row(name, *shown)
    table.caption = f"Last round, trained. largest 10 %: of clients, by training samples.{_about(names, runs)}"
    return table


def verdict(runs: Sequence[Run]) -> str:
    """What the comparison found, in words, and whether it is more than chance over the seeds."""
    groups, first = _by_method(runs), runs[0]
    ranked = _ranked(groups)
    score = first.info["score"]
    shown = {name: spread(score, _over(groups[name], "trained", "weighted")) + Scale(score).unit for name in ranked}
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
    failed = [name for name in ranked if any(r.get("failed") for run in groups[name] for r in run.records)]
    warning += f" Some clients failed and did not count, see the runs of: {', '.join(failed)}." if failed else ""
    return f"{found}{shown[other]}: {clients}. {_chance(groups[other], groups['local'])}{warning}{_twins(groups)}"


def _failures(run: Run) -> str:
    """Who failed, with the first as an example."""
    failed = [(client, r["round"], why) for r in run.records for client, why in r.get("failed", {}).items()]
    if not failed:
        return ""
    client, number, why = failed[0]
    clients = len({client for client, *_ in failed})
    return f"{clients} of {run.num_clients} clients failed in some round, client {client} in round {number}: {why}. "


def _twins(groups: Groups) -> str:
    """Which methods ended alike to the last digit: here they are one method, as FedBN is FedAvg without batch norm."""
    ends: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for name, group in groups.items():
        found = [run.records[-1]["per_client"].get(f"loss_{moment}", {}) for run in group for moment in MOMENTS]
        if all(found):
            ends.setdefault(tuple(tuple(values.values()) for values in found), []).append(name)
    alike = [" and ".join(names) for names in ends.values() if len(names) > 1]
    return f" The same here, to the last digit: {'; '.join(alike)}." if alike else ""


def _chance(group: Sequence[Run], local: Sequence[Run]) -> str:
    """Whether two methods differ by more than seeds do: a paired t-test at 95 %."""
    number = ("trained", "weighted")
    pairs = [(_over([run], *number), _over([alone], *number)) for run, alone in _pairs(group, local)]
    gaps = [ours[0] - theirs[0] for ours, theirs in pairs if ours and theirs]
    if len(gaps) < 2:
        return "This is one seed: the difference may be chance."
    if not all(map(isfinite, gaps)):
        return "A run diverged, so the difference says nothing."
    return f"Over {len(gaps)} seeds the difference is {'more than' if student(gaps) < LIMIT else 'within'} chance."


def methods_table(entries: Mapping[str, Entry]) -> Table:
    """Every method, family by family: whose it is, then what crosses and what stays, then what a newcomer gets."""
    table = Table.grid(padding=(0, 2))
    family = ""
    for name, entry in entries.items():
        if entry.family != family:
            table.add_row("", f"\n[bold]{entry.family}[/]")
            family = entry.family
        personal = "personal" if entry.personal else "not personal"
        crosses = f"down: {entry.down}; up: {entry.up}; stays: {entry.keeps}; {personal}"
        joins = f"a newcomer gets {entry.newcomer}"
        table.add_row(name, f"{escape(entry.paper)}\n[dim]{escape(crosses)}\n{escape(joins)}[/]")
    table.columns[0].no_wrap = True
    return table


def listing(kind: str, about: str, rows: Mapping[str, tuple[str, Mapping[str, tuple[str, str]]]]) -> Table:
    """Names with what they are and their fields, if they have any."""
    some = any(notes for _, notes in rows.values())
    table = new_table("", [kind, about, "fields"][: 2 + some], left=3)
    table.show_lines = some
    for name, (text, notes) in rows.items():
        fields = [f"{field} = {default}" + (f"  {note}" if note else "") for field, (default, note) in notes.items()]
        table.add_row(name, " ".join(text.split()), *["\n".join(fields)][:some])
    return table


def _where(run: Run, method: bool = True) -> str:
    name = f"{run.experiment['method']['name']} on " if method else ""
    data = run.experiment["data"].get("name", "own data")
    return f"{name}{data}, {run.num_clients} clients, {len(run.records)} rounds"


def _scale(run: Run) -> Scale:
    return Scale(run.info["score"])


def _others(runs: Sequence[Run]) -> list[str]:
    """The metrics besides the score, the loss last."""
    found = [numbers["metrics"] for run in runs for moment in MOMENTS if (numbers := run.numbers(moment))]
    return sorted({name: None for metrics in found for name in metrics}, key=lambda name: name == "loss")


def _about(others: Sequence[str], runs: Sequence[Run]) -> str:
    """How the other metrics are meant, and for whom a metric is undefined."""
    said = (
        f" {', '.join(Scale(name).name for name in others)}: every client's, weighted by its test samples."
        if others
        else ""
    )
    last = [numbers for run in runs if (numbers := run.numbers("trained") or run.numbers("received"))]
    score = runs[0].info["score"]
    counts = [{name: n["clients"] for name, n in ({score: numbers} | numbers["metrics"]).items()} for numbers in last]
    for name in (score, *others):
        missing = {max(clients.values()) - clients[name] for clients in counts if name in clients}
        if any(missing):
            many = f"{min(missing)} to {max(missing)} clients" if len(missing) > 1 else f"{max(missing)} clients"
            said += f" {Scale(name).name} is undefined for {'1 client' if missing == {1} else many}."
    return said


def _by_method(runs: Sequence[Run]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
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


def _over(group: Sequence[Run], moment: str, number: str, metric: str | None = None) -> list[float]:
    """A number of the last round, of the score or of another metric, one for every seed."""
    last = [numbers for run in group if (numbers := run.numbers(moment))]
    found = [numbers if metric is None else numbers["metrics"].get(metric, {}) for numbers in last]
    return [numbers[number] for numbers in found if numbers.get(number) is not None]


def _pairs(group: Sequence[Run], local: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every run with the one of training alone on the same split."""
    partners = {run.experiment["seed"]: run for run in local}
    return [(run, partners[run.experiment["seed"]]) for run in group if run.experiment["seed"] in partners]


def _share(group: Sequence[Run], local: Sequence[Run], which: str) -> str:
    """The share of clients that do better, or worse, than alone, over all seeds."""
    found = [run.numbers("trained", alone=alone) for run, alone in _pairs(group, local)]
    known = [numbers[which] for numbers in found if numbers is not None and numbers[which] is not None]
    return f"{100 * mean(known):.0f} %" if known else ""


def spread(metric: str, values: Sequence[float]) -> str:
    """A number's mean and standard deviation over seeds, as tables have it.

    >>> spread("accuracy", [0.7, 0.8]), spread("loss", [0.5])
    ('75.0 ± 7.1', '0.5')
    """
    if not values:
        return ""
    several = len(values) > 1 and all(map(isfinite, values))  # who diverged has no spread
    return _number(metric, mean(values)) + (f" ± {_number(metric, stdev(values))}" if several else "")


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if metric in SHARES else f"{value:.4g}"


def new_table(title: str, columns: Sequence[str], left: int) -> Table:
    """A table in our looks, without rows; the first columns are text, so many of them, the others numbers.

    >>> [column.justify for column in new_table("Scores", ["method", "accuracy"], left=1).columns]
    ['left', 'right']
    """
    table = Table(title=title or None, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right", no_wrap=position >= left)
    return table
