"""Fixtures of browser tests: the browser, and a small comparison with its report."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.experiments.experiment import make_experiment
from fedtailor.runs.reader import load_run
from support.browser import CLIENTS, METHODS, ROUNDS, SEEDS, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small comparison, as `fedtailor compare` writes it, and its report."""
    root = tmp_path_factory.mktemp("compared")
    settings = {"rounds": ROUNDS, "batch_size": 64, "engine": "sequential",
                "data": {"name": "digits", "clients": CLIENTS, "alpha": 0.3},
                "network": {"name": "mlp", "hidden": [16]}}  # fmt: skip
    for method, seed in product(METHODS, SEEDS):
        own = {"method": {"name": method}, "seed": seed}
        make_experiment(settings | own).run(folder=root / "runs" / f"{method}-seed{seed}")
    from fedtailor.reporting.report import write_report

    write_report([root / "runs"], root / "report.html")
    return root


@pytest.fixture(scope="session")
def runs(compared: Path) -> dict[tuple[str, int], ft.Run]:
    return {(m, s): load_run(compared / "runs" / f"{m}-seed{s}") for m, s in product(METHODS, SEEDS)}
