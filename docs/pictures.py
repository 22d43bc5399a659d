"""Draw the figures of the documentation from real runs: `make pictures` (seven minutes), or some of them by name:
`python docs/pictures.py fedlag selffl`."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console

import fedtailor as ft
from fedtailor.cli import console, show
from fedtailor.cli.app import app

COMMAND = (
    "fedtailor compare local fedavg fedper fedapa fedapm fedlag selffl --data digits --data.clients 20 "
    "--data.alpha 0.1 --rounds 20 --batch-size 16 --seeds 0,1,2"
)
# a terminal frame that needs no downloaded font
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="output of the command">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(8, 8)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
# the runs of the methods' figures; methods use their defaults
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "clients": 20, "partition": "dirichlet", "alpha": 0.1, "seed": 0},
    "network": "mlp",
    "run": {"rounds": 20, "batch_size": 16, "seed": 0},
}
ROUNDS = range(1, SETTINGS["run"]["rounds"] + 1)
BLUE, ORANGE, GRAY = "#0072B2", "#D55E00", "#E0E0E0"  # distinguishable by color-blind readers (Okabe and Ito)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "fedtailor",  # reproducible output
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,  # for heat maps
}


def simulate(method: ft.Method, **settings: Any) -> ft.Run:
    """Run a method with the settings of all figures."""
    fed = ft.load(**SETTINGS["data"])
    return ft.simulate(method, ft.network(SETTINGS["network"], fed), fed, **SETTINGS["run"], **settings)


def make_panels(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and the flat array of its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).ravel()


def set_round_axis(axis: Any, label: str) -> None:
    """Label an axis whose x values are rounds."""
    axis.set(xlabel="round", ylabel=label, xlim=(0.5, len(ROUNDS) + 0.5), xticks=[1, *ROUNDS[4::5]])


def comparison(path: Path) -> None:
    """The output of the second comparison in `make run`."""
    terminal = Console(record=True, width=80, force_terminal=True)
    for module in (show, console):  # both import the console by this name
        vars(module)["out"] = terminal
    command = f"{COMMAND} --out runs/make-run/digits"
    terminal.print(f"$ {command}", highlight=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.argv = command.split()
        app(standalone_mode=False)
    terminal.save_svg(str(path), title="", code_format=FRAME, unique_id="t")


def fedapa(path: Path) -> None:
    """The weights A after rounds 1, 5, and 20, and the similarity of the clients' data, which FedAPA does not see."""
    run = simulate(ft.methods.FedAPA())
    counts = np.array([client["classes"] for client in run.info["clients"]], dtype=float)
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    similarity = unit @ unit.T
    weights = {f"weights after round {number}": run.metric("weights")[number].numpy() for number in (1, 5, 20)}
    order, others = order_by_similarity(similarity), ~np.eye(len(similarity), dtype=bool)
    digits = [" ".join(str(digit) for digit in np.flatnonzero(row >= row.sum() / 5)) for row in counts[order]]
    max_weight = max(float(values[others].max()) for values in weights.values())
    last = np.where(others, weights["weights after round 20"], 0)
    matches = (last.argmax(1) == np.where(others, similarity, 0).argmax(1)).sum()
    correlation = np.corrcoef(last[others], similarity[others])[0, 1]
    print(f"FedAPA: weights and similarity correlate with {correlation:.2f}; the maxima agree for {matches} clients")

    figure, axes = make_panels(8.4, 7.3, 2, 2, sharex=True, sharey=True)
    for axis, (title, values) in zip(axes, (weights | {"similarity of data": similarity}).items(), strict=True):
        colormap, vmax = ("cividis", 1.0) if values is similarity else ("viridis", max_weight)
        grid = np.where(others, values, np.nan)[np.ix_(order, order)]
        image = axis.imshow(grid, cmap=colormap, vmin=0, vmax=vmax)
        axis.set(title=title, facecolor=GRAY, xticks=range(len(order)), yticks=range(len(order)))
        axis.set(xticklabels=digits, yticklabels=digits)
        axis.tick_params(labelsize=7, length=2)
        axis.tick_params(axis="x", labelrotation=90)
        label = "cosine of two clients' class counts" if values is similarity else "weight"
        figure.colorbar(image, ax=axis, label=label, shrink=0.85)
    figure.supxlabel("sending client, by its most frequent digits", fontsize=9)
    figure.supylabel("receiving client, by its most frequent digits", fontsize=9)
    save(figure, path)


def order_by_similarity(similarity: Any) -> list[int]:
    """Return an order in which neighbors are similar: the best greedy chain over all starting clients."""

    def follow(first: int) -> list[int]:
        order, remaining = [first], set(range(len(similarity))) - {first}
        while remaining:
            order.append(max(sorted(remaining), key=lambda other: similarity[order[-1], other]))
            remaining.remove(order[-1])
        return order

    return max(map(follow, range(len(similarity))), key=lambda order: similarity[order[:-1], order[1:]].sum())


def fedapm(path: Path) -> None:
    """Drift of the clients' copies of the shared part from the global one, and convergence of the method."""
    figure, axes = make_panels(9, 2.9, 1, 3)
    for label, color, participation in [("all clients per round", BLUE, 1.0), ("30 % of the clients", ORANGE, 0.3)]:
        run = simulate(ft.methods.FedAPM(), participation=participation)
        drift = [np.mean(list(record["per_client"]["drift"].values())) for record in run.records]
        axes[0].plot(ROUNDS, drift, color=color, label=label)
        axes[1].plot(ROUNDS, run.metric("residual").values(), color=color)
        axes[2].plot(ROUNDS, run.metric("lyapunov").values(), color=color)
        axes[2].plot(ROUNDS, run.metric("lagrangian").values(), color=color, linestyle="--")
    for axis, label in zip(axes, ["drift, mean over the round's clients", "residual", ""], strict=True):
        set_round_axis(axis, label)
        axis.set_ylim(0)
    axes[2].set(yscale="log", ylim=(0.1, 1000))
    for line, label in [("-", "Lyapunov"), ("--", "augmented Lagrangian")]:
        axes[2].plot([], [], line, color="black", label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    save(figure, path)


def fedlag(path: Path) -> None:
    """Conflicts per layer and round, and the layers that are personal because of them."""
    run = simulate(ft.methods.FedLAG())
    layers = list(ft.network(SETTINGS["network"], ft.load(**SETTINGS["data"])).layers())
    pairs = [len(record["clients"]) * (len(record["clients"]) - 1) / 2 for record in run.records]
    conflicts = np.array([record["method_metrics"]["conflicts"] for record in run.records]).T / pairs
    rows, columns = np.array([record["method_metrics"]["personal"] for record in run.records]).T.nonzero()

    figure, (axis,) = make_panels(9, 2.4, 1, 1)
    image = axis.pcolormesh(ROUNDS, range(len(layers)), 100 * conflicts, cmap="viridis", vmin=0, edgecolors="white")
    label = "personal in the next round"
    axis.scatter(columns + 1, rows, s=28, color="white", edgecolors="black", label=label)
    axis.set(xlabel="round", xticks=ROUNDS, ylabel="layer", yticks=range(len(layers)), yticklabels=layers)
    axis.spines[:].set_visible(False)
    axis.invert_yaxis()
    figure.colorbar(image, ax=axis, label="pairs of clients\nin conflict, %")
    figure.legend(loc="outside upper left")
    save(figure, path)


def selffl(path: Path) -> None:
    """Variance of the clients' models, the resulting local steps, and the predicted gains."""
    method = ft.methods.SelfFL()
    run = simulate(method)
    sizes = np.array([client["train"] for client in run.info["clients"]])
    colors = matplotlib.colormaps["viridis"](0.9 * sizes / sizes.max())
    figure, axes = make_panels(9, 3.1, 1, 3)
    for client, color in enumerate(colors):
        variances = np.array([record["method_metrics"]["variances"][client] for record in run.records])
        steps = [record["per_client"]["steps"][client] for record in run.records]
        axes[0].plot(
            ROUNDS, np.where(variances < 0, np.nan, variances), color=color, linewidth=0.8
        )  # negative: unknown
        axes[1].plot(ROUNDS, steps, color=color, linewidth=0.8)
    axes[0].plot(ROUNDS, run.metric("between").values(), color=ORANGE, linewidth=3, label="between clients, σ₀²")
    axes[0].plot([], [], color=colors[0], linewidth=0.8, label="of one client over rounds, σ²")
    gains = run.metric("gains")[ROUNDS[-1]]
    axes[2].scatter(sizes, gains, color=colors)
    for axis, label in [(axes[0], "variance of models"), (axes[1], "local steps")]:
        set_round_axis(axis, label)
        axis.set_ylim(0)
        axis.axvspan(0.5, method.warmup + 0.5, color=GRAY, linewidth=0)
    axes[1].text(method.warmup / 2 + 0.5, 1, "warm-up", ha="center")
    axes[2].set(xlabel="training samples (color: as the lines)", ylabel="GAIN after the last round (1: no gain)")
    axes[2].set(xlim=(0, 1.05 * sizes.max()), ylim=(1, 1.1 * float(gains.max())))
    figure.legend(loc="outside upper left", ncols=2)
    save(figure, path)


def engines(path: Path) -> None:
    """Cost of a client step over the number of clients per round, from the saved benchmark results."""
    figure, axes = make_panels(7.2, 3.2, 1, 2)
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    colors, markers = {"LeNet-5": BLUE, "logistic": ORANGE}, {"sequential": "o:", "pool": "s--", "vectorized": "D-"}
    for axis, device, title in zip(axes, ("cpu", "cuda"), ("two CPU cores", "one H200"), strict=True):
        series = json.loads((results / f"engines-{device}.json").read_text())["rows"]["h"]["microseconds"]
        for name, costs in series.items():
            workload, engine = name.split(", ")
            counts = [int(count) for count in costs]
            axis.plot(counts, costs.values(), markers[engine], color=colors[workload], markersize=3, label=name)
        axis.set(title=title, xscale="log", yscale="log", xlabel="clients per round", ylabel="µs per client step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    save(figure, path)


def heterogeneity(path: Path) -> None:
    """Accuracy of received models over the dropout rate: mean and range of three splits."""
    dropouts = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    methods: list[ft.Method] = [ft.methods.Local(), ft.methods.FedAvg()]
    methods += [ft.methods.FedAPA(), ft.methods.FedAPM(), ft.methods.FedLAG(), ft.methods.SelfFL()]
    results = {
        m.display_name: np.array([[received_accuracy(m, d, seed) for d in dropouts] for seed in range(3)])
        for m in methods
    }
    for name, values in results.items():
        print(f"heterogeneity: {name:14}", *(f"{value:5.1f}" for value in values.mean(0)))
    figure, axes = make_panels(9, 2.9, 1, 4, sharey=True)
    for axis, (name, values) in zip(axes, list(results.items())[2:], strict=True):
        for label, color, line, accuracies in [
            ("the method", BLUE, "o-", values),
            ("Local training", "black", "--", results["Local training"]),
            ("FedAvg", ORANGE, ":", results["FedAvg"]),
        ]:
            axis.plot(dropouts, accuracies.mean(0), line, color=color, markersize=3, label=label)
            axis.fill_between(dropouts, accuracies.min(0), accuracies.max(0), color=color, alpha=0.15, linewidth=0)
        axis.set(title=name, xlabel="fraction that drops out", xticks=dropouts[::2] + dropouts[-1:], ylim=(0, 100))
    axes[0].set_ylabel("accuracy as received, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    save(figure, path)


def received_accuracy(method: ft.Method, dropout: float, seed: int) -> float:
    """Return the accuracy in % over all test samples after 30 rounds with this dropout rate."""
    fed = ft.load(**SETTINGS["data"] | {"seed": seed})
    settings = SETTINGS["run"] | {"rounds": 30, "seed": seed, "evaluate_every": 30, "engine": "vectorized"}
    unreliable = ft.Unreliable(dropout=dropout)
    run = ft.simulate(method, ft.network(SETTINGS["network"], fed), fed, unreliable=unreliable, **settings)
    return 100 * float(run.records[-1]["accuracy_received"])


def save(figure: Figure, path: Path) -> None:
    """Save a figure without metadata that changes between runs."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})


FIGURES: dict[str, tuple[Callable[[Path], None], str]] = {
    "comparison": (comparison, "comparison.svg"),
    "engines": (engines, "engines.svg"),
    "heterogeneity": (heterogeneity, "heterogeneity.svg"),
    **{draw.__name__: (draw, f"methods/{draw.__name__}.svg") for draw in (fedapa, fedapm, fedlag, selffl)},
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)
    for name in names or FIGURES:
        draw, path = FIGURES[name]
        draw(Path(__file__).parent.absolute() / path)


if __name__ == "__main__":
    main(sys.argv[1:])
