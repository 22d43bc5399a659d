"""All figures of a comparison, by the names that the report, `plot`, and figure files use."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fedtailor.analysis.comparability import first_seed_runs
from fedtailor.analysis.run_summary import Comparison
from fedtailor.errors import ConfigError
from fedtailor.reporting.figures import clients, cost, curves, data_split, gains, ranking
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.figures.method_metric_figures import draw_method_metrics
from fedtailor.reporting.figures.similarity import mixing_figures
from fedtailor.runs.run import Run

# Name -> function that draws the figure, or returns None if the runs lack what it shows.
FIGURES: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "ranking": ranking.ranking,
    "against-best": ranking.pairwise_figure,
    "curves": curves.curves,
    "gainers": gains.gain_fractions,
    "gains": gains.gain_by_size,
    "clients": clients.score_distribution,
    "failures": clients.failures,
    "bytes": cost.score_by_bytes,
    "seconds": cost.training_time,
    "split": data_split.split_figure,
}


def draw(group: Comparison, *keys: str) -> list[Figure]:
    """Return the figures with these keys, without those that these runs do not have."""
    figures = (FIGURES[key](group) for key in keys)
    return [figure for figure in figures if figure is not None]


def find_figure(group: Comparison, key: str) -> Figure:
    """Return the figure with this key; if there is none, raise `ConfigError` with the keys of all figures."""
    if key in FIGURES and (figure := FIGURES[key](group)) is not None:
        return figure
    of_methods = {figure.key: figure for figure in method_figures(group)}
    if key in of_methods:
        return of_methods[key]
    known = [figure.key for figure in draw(group, *FIGURES)] + list(of_methods)
    raise ConfigError(f"These runs have no figure '{key}'; their figures are {', '.join(known)}.")


def method_figures(group: Comparison) -> list[Figure]:
    """Return the figures of mixing weights and other method metrics, whose keys end with the method's name."""
    return [
        figure
        for run in runs_with_records(group)
        for figure in [*mixing_figures([run]), *draw_method_metrics([run], local_runs(group))]
    ]


def runs_with_records(group: Comparison) -> Iterator[Run]:
    """Yield the first seed of each method with all records loaded; discard each run before the next one, because the
    records of all runs can take gigabytes."""
    for run in first_seed_runs([run_summary.run for run_summary in group.summaries]):
        yield replace(run, records=[run.records[position] for position in range(len(run.records))])


def local_runs(group: Comparison) -> list[Run]:
    """Return the runs of local training."""
    return [one.run for one in group.summaries if one.run.experiment["method"]["name"] == "local"]
