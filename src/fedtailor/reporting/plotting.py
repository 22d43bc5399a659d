"""Figures as plotly figures with a complete light theme, for notebooks and for image files."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import ceil
from textwrap import wrap
from typing import Any

from plotly import graph_objects as go  # type: ignore[import-untyped]

from fedtailor.analysis.formatting import escape_markup
from fedtailor.analysis.run_summary import Comparison, compare_runs
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.reporting.figures.catalog import find_figure
from fedtailor.reporting.figures.curves import moment_curves
from fedtailor.reporting.figures.data_split import federation_figure
from fedtailor.reporting.figures.figure import Choice, Figure, Option
from fedtailor.runs.run import Run

WIDTH = 800  # pixels, for which titles and legends are wrapped
_DEFAULT_HEIGHT = 420  # as on the page
_TOP_MARGIN = 16
_TITLE_SIZE, _TITLE_CHARACTERS, _TITLE_LINE, _TITLE_PADDING = 16, 90, 21, 12  # the latter two are in pixels
_LEGEND_LINE, _CHARACTER, _LEGEND_SYMBOL = 21, 6.5, 45  # pixels
_INK, _QUIET, _FAINT, _GRAY = "#1d1f21", "#5c6166", "#e4e1da", "#7f7f7f"  # the first three as in page.css
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif'
_AXIS: Mapping[str, Any] = {
    "gridcolor": _FAINT, "linecolor": _FAINT, "zerolinecolor": _QUIET, "tickcolor": _FAINT,
    "tickfont": {"color": _QUIET, "size": 12}, "title": {"font": {"color": _QUIET, "size": 13}, "standoff": 10},
    "zerolinewidth": 1, "automargin": True, "exponentformat": "power",
}  # fmt: skip
# The same as `template` in static/figures.js in light mode, but on white and with a title.
THEME: Mapping[str, Any] = {
    "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff", "font": {"family": _FONT, "size": 13, "color": _INK},
    "colorway": ["#0072b2", "#d55e00", "#009e73", "#cc79a7"], "xaxis": _AXIS,
    "yaxis": {**_AXIS, "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"},
    "margin": {"l": 12, "r": 16, "t": _TOP_MARGIN, "b": 44}, "hovermode": "closest", "dragmode": False,
    "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": _QUIET, "font": {"color": _INK, "size": 13}},
    "legend": {"font": {"color": _INK, "size": 12}}, "annotationdefaults": {"font": {"color": _QUIET, "size": 13}},
    "title": {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "yref": "container",
              "pad": {"l": _TITLE_PADDING, "t": _TITLE_PADDING}, "font": {"size": _TITLE_SIZE, "color": _INK}},
}  # fmt: skip

_LEGEND_ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}


def plot_run(run: Run, what: str = "curves", **choices: str) -> Any:
    """Draw a figure of one run, by default its learning curve at both moments; see `Run.plot`."""
    group = compare_runs([run])
    figure = moment_curves(group) if what == "curves" else None
    return to_plotly(find_figure(group, what) if figure is None else figure, choices)


def plot_comparison(group: Comparison, what: str = "curves", **choices: str) -> Any:
    """Draw a figure of the report as a plotly figure; `what` is its name, such as "ranking", "curves", or "bytes".

    The figures' controls are keywords, such as `axis="bytes"` and `model="received"` of the curves.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=2)
    >>> run = ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1)
    >>> plot_comparison(compare_runs([run]), "ranking").layout.title.text
    '<b>Ranking</b>'
    """
    return to_plotly(find_figure(group, what), choices)


def plot_federation(fed: Federation) -> Any:
    """Draw how the data are split into clients; see `Federation.plot`."""
    return to_plotly(federation_figure(fed))


def to_plotly(figure: Figure, choices: Mapping[str, str] | None = None) -> Any:
    """Return a figure as a `plotly.graph_objects.Figure` with title, legend, and theme.

    Of a figure with controls, it shows the first option of each, unless `choices` selects another one by the last word
    of the control's label. Of a figure with a slider, it shows the last round.

    >>> from fedtailor.reporting.figures.figure import Table
    >>> to_plotly(Figure("cost", "Cost", "It costs nothing.", [], {}, Table(["bytes"], [[0]]))).layout.title.text
    '<b>Cost</b>'
    """
    data, layout = deepcopy([dict(trace) for trace in figure.data]), deepcopy(dict(figure.layout))
    for option in _selected(figure.choices, choices or {}):
        _apply(option, data, layout)
    if figure.frames:
        for trace, part in zip(data, figure.frames[-1]["data"], strict=False):
            trace |= part
    if "yaxis2" in layout:
        layout.setdefault("legend", _LEGEND_ABOVE)
    if figure.legend:
        data = [trace | {"showlegend": False} for trace in data]
        data += [_legend_entry(name, marker) for name, marker in figure.legend.items()]
        own = layout.get("legend", {})
        layout |= {"showlegend": True, "legend": _LEGEND_ABOVE | {"x": 1, "xanchor": "right"} | own}
    layout |= _header(f"{figure.title}{_shown_options(figure.choices, choices or {})}", data, layout)
    return go.Figure(data, layout | {"template": {"layout": deepcopy(dict(THEME))}})


def _apply(option: Option, data: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
    """Change traces and layout as an option says."""
    for name, values in option.traces.items():
        for number, trace in enumerate(data):
            _set(trace, name, values[number % len(values)])
    for name, value in option.layout.items():
        _set(layout, name, value)


def _selected(controls: Sequence[Choice], wanted: Mapping[str, str]) -> list[Option]:
    """Return the wanted options; their names may be abbreviated, such as "received" for "received (after ...)"."""
    by_name = {control.label.split()[-1]: control for control in controls}
    for name, start in wanted.items():
        if name not in by_name:
            raise ConfigError(f"This figure has no choice '{name}'; its choices are {', '.join(by_name) or 'none'}.")
        names = [option.name for option in by_name[name].options]
        if not any(option.startswith(start) for option in names):
            raise ConfigError(f"There is no {name} '{start}' in this figure; there are {', '.join(names)}.")
    return [
        next(option for option in control.options if option.name.startswith(wanted[name]))
        for name, control in by_name.items()
        if name in wanted
    ]


def _shown_options(controls: Sequence[Choice], wanted: Mapping[str, str]) -> str:
    """Return the options that are shown, because an image has no controls; empty without controls."""
    selected = {id(option) for option in _selected(controls, wanted)}
    shown = [
        next((o for o in c.options if id(o) in selected), c.options[0]).name for c in controls if len(c.options) > 1
    ]
    return f" ({'; '.join(shown)})" if shown else ""


def _set(target: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted name, as in plotly's restyle."""
    *outer, last = path.split(".")
    for name in outer:
        target = target.setdefault(name, {})
    target[last] = value


def _legend_entry(name: str, marker: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace without points that only adds a symbol to the legend."""
    line = {"width": 1.6 if str(marker["symbol"]).endswith("-open") else 0}
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None], "offsetgroup": name,
        "marker": {"size": 10, "color": _GRAY, "line": line} | dict(marker), "hoverinfo": "skip",
    }  # fmt: skip


def _header(title: str, data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the title, and the layout with space for the title and for a legend above the plot."""
    lines = wrap(escape_markup(title), _TITLE_CHARACTERS)
    margin, height = dict(layout.get("margin", {})), layout.get("height", _DEFAULT_HEIGHT)
    space = _TITLE_LINE * len(lines) + _TITLE_PADDING
    legend = layout.get("legend", {})
    if legend.get("orientation") == "h" and legend.get("yanchor") == "bottom" and layout.get("showlegend", True):
        names = [str(trace.get("name", "")) for trace in data if trace.get("showlegend", True)]
        widest = max((_CHARACTER * len(name) + _LEGEND_SYMBOL for name in names), default=0)
        per_line = max(int(WIDTH / max(widest, 1)), 1)
        space += _LEGEND_LINE * ceil(len(names) / per_line)
    top = margin.get("t", _TOP_MARGIN)
    return {
        "title": {"text": f"<b>{'<br>'.join(lines)}</b>",
                  "pad": {"t": _TITLE_PADDING + _TITLE_LINE / 2 * (len(lines) - 1)}},  # plotly centers the lines
        "margin": margin | {"t": top + space}, "height": height + space,
    }  # fmt: skip
