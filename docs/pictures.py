"""Makes the pictures of the pages from real runs: `make pictures` (seven minutes), or some by name:
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
from fedtailor import cli, screen

COMMAND = (
    "fedtailor compare local fedavg fedper fedapa fedapm fedlag selffl --data digits --data.clients 20 "
    "--data.alpha 0.1 --rounds 20 --batch-size 16 --seeds 0,1,2"
)
# a plain frame that names no font to download
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="what the command prints">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(8, 8)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
# the runs behind the methods' pictures; a method's fields are its defaults
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "clients": 20, "partition": "dirichlet", "alpha": 0.1, "seed": 0},
    "network": "mlp",
    "run": {"rounds": 20, "batch_size": 16, "seed": 0},
}
ROUNDS = range(1, SETTINGS["run"]["rounds"] + 1)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#E0E0E0"  # told apart by colour-blind readers (Okabe and Ito)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedtailor",  # the same bytes twice
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,  # of heat maps
}


def run(method: ft.Method, **settings: Any) -> ft.Run:
    fed = ft.load(**SETTINGS["data"])
    return ft.simulate(method, ft.network(SETTINGS["network"], fed), fed, **SETTINGS["run"], **settings)


def panels(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).ravel()


def over_rounds(axis: Any, label: str) -> None:
    axis.set(xlabel="round", ylabel=label, xlim=(0.5, len(ROUNDS) + 0.5), xticks=[1, *ROUNDS[4::5]])


def comparison(path: Path) -> None:
    """What `make run` prints."""
    console = Console(record=True, width=80, force_terminal=True)
    for module in (cli, screen):  # both know it by that name
        vars(module)["out"] = console
    console.print(f"$ {COMMAND}", highlight=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.argv = COMMAND.split()
        cli.app(standalone_mode=False)
    console.save_svg(str(path), title="", code_format=FRAME, unique_id="t")


def fedapa(path: Path) -> None:
    """The weights A after three rounds, and how alike the clients' data are, which the weights were never told."""
    done = run(ft.methods.FedAPA())
    counts = np.array([client["classes"] for client in done.info["clients"]], dtype=float)
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    alike = unit @ unit.T
    weights = {f"weights after round {number}": done.monitor("weights")[number].numpy() for number in (1, 5, 20)}
    order, others = chain(alike), ~np.eye(len(alike), dtype=bool)
    digits = [" ".join(str(digit) for digit in np.flatnonzero(row >= row.sum() / 5)) for row in counts[order]]
    top = max(float(values[others].max()) for values in weights.values())
    last = np.where(others, weights["weights after round 20"], 0)
    likest = (last.argmax(1) == np.where(others, alike, 0).argmax(1)).sum()
    agreement = np.corrcoef(last[others], alike[others])[0, 1]
    print(f"fedapa: weights and likeness correlate {agreement:.2f}; {likest} clients borrow most from the likest")

    figure, axes = panels(8.4, 7.3, 2, 2, sharex=True, sharey=True)
    for axis, (title, values) in zip(axes, (weights | {"likeness of data": alike}).items(), strict=True):
        colours, most = ("cividis", 1.0) if values is alike else ("viridis", top)
        grid = np.where(others, values, np.nan)[np.ix_(order, order)]
        image = axis.imshow(grid, cmap=colours, vmin=0, vmax=most)
        axis.set(title=title, facecolor=GREY, xticks=range(len(order)), yticks=range(len(order)))
        axis.set(xticklabels=digits, yticklabels=digits)
        axis.tick_params(labelsize=7, length=2)
        axis.tick_params(axis="x", labelrotation=90)
        label = "cosine of two clients' class counts" if values is alike else "weight"
        figure.colorbar(image, ax=axis, label=label, shrink=0.85)
    figure.supxlabel("from whom: clients by their commonest digits", fontsize=9)
    figure.supylabel("who receives: clients by their commonest digits", fontsize=9)
    save(figure, path)


def chain(alike: Any) -> list[int]:
    """An order in which neighbours are alike: from each client on to the nearest one left; the best of all starts."""

    def follow(first: int) -> list[int]:
        order, left = [first], set(range(len(alike))) - {first}
        while left:
            order.append(max(sorted(left), key=lambda other: alike[order[-1], other]))
            left.remove(order[-1])
        return order

    return max(map(follow, range(len(alike))), key=lambda order: alike[order[:-1], order[1:]].sum())


def fedapm(path: Path) -> None:
    """How far the clients' copies of the shared part are from the common one, and whether the method settles."""
    figure, axes = panels(9, 2.9, 1, 3)
    for label, colour, share in [("all clients every round", BLUE, 1.0), ("30 % of the clients", ORANGE, 0.3)]:
        done = run(ft.methods.FedAPM(), participation=share)
        drift = [np.mean(list(record["per_client"]["drift"].values())) for record in done.records]
        axes[0].plot(ROUNDS, drift, color=colour, label=label)
        axes[1].plot(ROUNDS, done.monitor("residual").values(), color=colour)
        axes[2].plot(ROUNDS, done.monitor("lyapunov").values(), color=colour)
        axes[2].plot(ROUNDS, done.monitor("lagrangian").values(), color=colour, linestyle="--")
    for axis, label in zip(axes, ["drift, mean of the round's clients", "residual", ""], strict=True):
        over_rounds(axis, label)
        axis.set_ylim(0)
    axes[2].set(yscale="log", ylim=(0.1, 1000))
    for line, label in [("-", "Lyapunov"), ("--", "augmented Lagrangian")]:
        axes[2].plot([], [], line, color="black", label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    save(figure, path)


def fedlag(path: Path) -> None:
    """Conflict in every layer and round, and the layers it made personal."""
    done = run(ft.methods.FedLAG())
    layers = list(ft.network(SETTINGS["network"], ft.load(**SETTINGS["data"])).layers())
    pairs = [len(record["clients"]) * (len(record["clients"]) - 1) / 2 for record in done.records]
    conflicts = np.array([record["monitor"]["conflicts"] for record in done.records]).T / pairs
    rows, columns = np.array([record["monitor"]["personal"] for record in done.records]).T.nonzero()

    figure, (axis,) = panels(9, 2.4, 1, 1)
    image = axis.pcolormesh(ROUNDS, range(len(layers)), 100 * conflicts, cmap="viridis", vmin=0, edgecolors="white")
    label = "made personal by it, for the next round"
    axis.scatter(columns + 1, rows, s=28, color="white", edgecolors="black", label=label)
    axis.set(xlabel="round", xticks=ROUNDS, ylabel="layer", yticks=range(len(layers)), yticklabels=layers)
    axis.spines[:].set_visible(False)
    axis.invert_yaxis()
    figure.colorbar(image, ax=axis, label="pairs of clients\nin conflict, %")
    figure.legend(loc="outside upper left")
    save(figure, path)


def selffl(path: Path) -> None:
    """How sure clients are of their models, how many steps that gives them, and what they may expect to gain."""
    method = ft.methods.SelfFL()
    done = run(method)
    sizes = np.array([client["train"] for client in done.info["clients"]])
    colours = matplotlib.colormaps["viridis"](0.9 * sizes / sizes.max())
    figure, axes = panels(9, 3.1, 1, 3)
    for client, colour in enumerate(colours):
        variances = np.array([record["monitor"]["variances"][client] for record in done.records])
        steps = [record["per_client"]["steps"][client] for record in done.records]
        axes[0].plot(ROUNDS, np.where(variances < 0, np.nan, variances), color=colour, linewidth=0.8)  # < 0: unknown
        axes[1].plot(ROUNDS, steps, color=colour, linewidth=0.8)
    axes[0].plot(ROUNDS, done.monitor("between").values(), color=ORANGE, linewidth=3, label="between clients, σ₀²")
    axes[0].plot([], [], color=colours[0], linewidth=0.8, label="of a client over its rounds, σ²")
    gains = done.monitor("gains")[ROUNDS[-1]]
    axes[2].scatter(sizes, gains, color=colours)
    for axis, label in [(axes[0], "variance of models"), (axes[1], "local steps")]:
        over_rounds(axis, label)
        axis.set_ylim(0)
        axis.axvspan(0.5, method.warmup + 0.5, color=GREY, linewidth=0)
    axes[1].text(method.warmup / 2 + 0.5, 1, "warm-up", ha="center")
    axes[2].set(xlabel="training samples (colour: as the lines)", ylabel="GAIN after the last round (1: none)")
    axes[2].set(xlim=(0, 1.05 * sizes.max()), ylim=(1, 1.1 * float(gains.max())))
    figure.legend(loc="outside upper left", ncols=2)
    save(figure, path)


def engines(path: Path) -> None:
    """What a client-step costs against how many clients there are, from the benchmarks' kept results."""
    figure, axes = panels(7.2, 3.2, 1, 2)
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    colours, marks = {"LeNet-5": BLUE, "logistic": ORANGE}, {"sequential": "o:", "pool": "s--", "vectorized": "D-"}
    for axis, device, title in zip(axes, ("cpu", "cuda"), ("two CPU cores", "one H200"), strict=True):
        series = json.loads((results / f"engines-{device}.json").read_text())["rows"]["h"]["microseconds"]
        for name, found in series.items():
            work, engine = name.split(", ")
            counts = [int(count) for count in found]
            axis.plot(counts, found.values(), marks[engine], color=colours[work], markersize=3, label=name)
        axis.set(title=title, xscale="log", yscale="log", xlabel="clients of a round", ylabel="µs a client-step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    save(figure, path)


def heterogeneity(path: Path) -> None:
    """How good received models are, the more clients break off in mid-round: mean and range of three splits."""
    shares = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    methods: list[ft.Method] = [ft.methods.Local(), ft.methods.FedAvg()]
    methods += [ft.methods.FedAPA(), ft.methods.FedAPM(), ft.methods.FedLAG(), ft.methods.SelfFL()]
    found = {type(m).__name__: np.array([[received(m, d, seed) for d in shares] for seed in range(3)]) for m in methods}
    for name, values in found.items():
        print(f"heterogeneity: {name:8}", *(f"{value:5.1f}" for value in values.mean(0)))
    figure, axes = panels(9, 2.9, 1, 4, sharey=True)
    for axis, (name, values) in zip(axes, list(found.items())[2:], strict=True):
        for label, colour, line, own in [
            ("the method", BLUE, "o-", values),
            ("Local", "black", "--", found["Local"]),
            ("FedAvg", ORANGE, ":", found["FedAvg"]),
        ]:
            axis.plot(shares, own.mean(0), line, color=colour, markersize=3, label=label)
            axis.fill_between(shares, own.min(0), own.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=name, xlabel="share that drops out", xticks=shares[::2] + shares[-1:], ylim=(0, 100))
    axes[0].set_ylabel("accuracy received, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    save(figure, path)


def received(method: ft.Method, dropout: float, seed: int) -> float:
    """Accuracy in % over all test samples after 30 rounds in which a share of the clients drops out."""
    fed = ft.load(**SETTINGS["data"] | {"seed": seed})
    settings = SETTINGS["run"] | {"rounds": 30, "seed": seed, "evaluate_every": 30, "engine": "vectorized"}
    lossy = ft.Unreliable(dropout=dropout)
    done = ft.simulate(method, ft.network(SETTINGS["network"], fed), fed, unreliable=lossy, **settings)
    return 100 * float(done.records[-1]["accuracy_received"])


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None})


PICTURES: dict[str, tuple[Callable[[Path], None], str]] = {
    "comparison": (comparison, "comparison.svg"),
    "engines": (engines, "engines.svg"),
    "heterogeneity": (heterogeneity, "heterogeneity.svg"),
    **{make.__name__: (make, f"methods/{make.__name__}.svg") for make in (fedapa, fedapm, fedlag, selffl)},
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)
    for name in names or PICTURES:
        make, path = PICTURES[name]
        make(Path(__file__).parent.absolute() / path)


if __name__ == "__main__":
    main(sys.argv[1:])
