"""`ft.compare`: runs, references, failures, folders, and the formats of its result."""

import csv
import io
import json
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from conftest import TinyNet, error_message, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.reporting.report import build_page

SETTINGS: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64", "engine": "sequential"}


def test_compare_equals_separate_simulations() -> None:
    """Every seed has its own split, and local training gets the optimizer settings of the first method."""
    result = ft.compare([ft.methods.FedPer(lr=0.3)], TinyNet, lambda seed: tiny_federation(seed=seed), seeds=[0, 1],
                        **SETTINGS)  # fmt: skip
    assert [(run.method, run.experiment["seed"]) for run in result.runs] == [
        ("local", 0), ("fedper", 0), ("local", 1), ("fedper", 1),
    ]  # fmt: skip
    for run, method in zip(result.runs, [ft.methods.Local(lr=0.3), ft.methods.FedPer(lr=0.3)] * 2, strict=True):
        seed = run.experiment["seed"]
        alone = ft.simulate(method, TinyNet, tiny_federation(seed=seed), seed=seed, **SETTINGS)
        assert run.summary() == alone.summary()


def test_splits_in_memory_are_told_apart_by_their_samples() -> None:
    """Two splits may have the same sizes, and validation samples are a part of the training samples of a split."""
    settings: dict[str, Any] = {"seeds": [0, 1], "validation": 0.3, **SETTINGS}
    one = ft.compare(["fedavg"], TinyNet, tiny_federation(), **settings)
    other = ft.compare(["fedavg"], TinyNet, lambda seed: tiny_federation(seed=seed), **settings)
    clients = tiny_federation().num_clients
    assert [len(found.rows("client_mean")) for found in (one, other)] == [2 * clients, 4 * clients]


class SizedNet(TinyNet):
    """A network that depends on the federation."""

    def __init__(self, fed: ft.Federation) -> None:
        super().__init__()
        assert fed.classes == 3


def test_compare_model_may_depend_on_the_federation() -> None:
    """A class gets initial weights from the seed, as without the parameter."""
    fed = tiny_federation()
    by_name = ft.compare(["fedavg"], "logistic", fed, **SETTINGS)
    by_function = ft.compare(["fedavg"], lambda fed: ft.network("logistic", fed), lambda seed: fed, **SETTINGS)
    assert by_name.rows("client") == by_function.rows("client")
    plain, sized = (ft.compare(["fedavg"], net, fed, seeds=[0, 1], **SETTINGS) for net in (TinyNet, SizedNet))
    assert plain.rows("client") == sized.rows("client")
    assert {run.info["initial_weights"] for run in sized.runs} == {"seed"}


def test_references_are_shown_but_not_ranked() -> None:
    """Centralized training scores highest here, but it is not an option for clients that cannot share data."""
    fed = ft.load("digits", clients=6, seed=0)
    result = ft.compare([ft.methods.FedAvg(lr=0.05)], "mlp", fed, rounds=4, participation=0.5, batch_size=16,
                        centralized=True, sampled_local=True)  # fmt: skip
    group = result.group
    assert group.references == ["Centralized training", "Local training (sampled)"] == [*group.methods][2:]
    best = max(group.score(label) or 0 for label in group.methods)
    assert group.score("Centralized training") == best and group.ranking is not None
    assert group.ranking.best == "Local training" and result.verdict().startswith("Local training scores highest")
    gap = 100 * (best - (group.score("Local training") or 0))
    assert f"centralized training scores {100 * best:.1f} %, {gap:.1f} points higher than local training" in (
        result.verdict()
    )
    assert "With FedAvg, the only federated method here" in result.verdict()
    assert [row["is_reference"] for row in result.rows()] == [False, False, True, True]
    page = build_page(result.runs)
    texts = [
        page.title,
        *(text for s in page.chapters[0].sections for text in (*s.answer, *(f.summary for f in s.figures))),
    ]
    assert page.title.startswith("FedAvg and local training on digits")
    assert not any("centralized training last" in text or "gain is largest with centralized" in text for text in texts)


def test_rows_per_client_and_seed_add_up_to_the_score_of_the_method() -> None:
    result = ft.compare(["fedper"], "mlp", lambda seed: tiny_federation(seed=seed), seeds=[0, 1], **SETTINGS)
    per_method = {row["method"]: row["score"] for row in result.rows()}
    for method, score in per_method.items():
        seeds = [row["score"] for row in result.rows("seed") if row["method"] == method]
        assert score == pytest.approx(sum(seeds) / 2)
        for seed, value in enumerate(seeds):
            own = [row for row in result.rows("client") if (row["method"], row["seed"]) == (method, seed)]
            total = sum(row["score"] * row["test_samples"] for row in own)
            assert value == pytest.approx(total / sum(row["test_samples"] for row in own))
    frame = result.to_pandas("client")
    assert frame.to_dict("records") == result.rows("client")


def test_repeats_equal_separate_simulations_on_redrawn_splits() -> None:
    """All methods of a repeat have the same split and training seed, and all repeats the same clients."""
    fed, methods = tiny_federation(), [ft.methods.Local(lr=0.3), ft.methods.FedPer(lr=0.3)]
    result = ft.compare(methods, TinyNet, fed, repeats=2, folds=2, **SETTINGS)
    assert len(result.runs) == 8 and result.group.is_repeated and "4 splits" in repr(result)
    for run, (repeat, method) in zip(result.runs, product(range(4), methods), strict=True):
        alone = ft.simulate(method, TinyNet, fed.resplit(repeat, folds=2), seed=repeat, **SETTINGS)
        assert run.summary() == alone.summary() and run.experiment == alone.experiment
    assert len({row["name"] for row in result.rows("client_mean")}) == fed.num_clients


def test_repeats_in_a_folder_continue_with_more_repeats(tmp_path: Path) -> None:
    """A name, a function, and a federation give the same splits of the clients of the first seed; other seeds of one
    data set are other clients and splits."""
    settings: dict[str, Any] = {"rounds": 1, "folder": tmp_path / "all"}
    ft.compare(["fedavg"], "logistic", "heart", repeats=3, **settings)
    lines = (tmp_path / "all" / "fedavg-repeat2" / "rounds.jsonl").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "all" / "local-repeat1" / "personal")  # as if it was interrupted
    more = ft.compare(["fedavg"], "logistic", ft.load("heart"), repeats=4, **settings)
    assert "federation" in (finding := more.report(tmp_path / "report.html")) and more.verdict().startswith(finding)
    assert (tmp_path / "all" / "fedavg-repeat2" / "rounds.jsonl").stat().st_mtime_ns == lines  # not run again
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        f"{method}-repeat{repeat}" for method in ("local", "fedavg") for repeat in range(4)
    }
    assert ft.load_comparison(tmp_path / "all").to_json() == more.to_json()
    experiment = more.runs[-1].experiment
    assert (experiment["seed"], experiment["data"]["seed"], experiment["data"]["repeat"]) == (3, 0, 3)
    other = ft.compare(["fedavg"], "logistic", lambda seed: ft.load("heart", seed=seed), seeds=[5], repeats=3, rounds=1)
    assert [run.experiment["data"]["repeat"] for run in other.runs[::2]] == [5, 6, 7]


@dataclass(frozen=True)
class Unsteady(ft.methods.FedAvg):
    """A method that fails in its second round."""

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        if ctx.round == 2:
            raise RuntimeError("out of order")
        return super().train(ctx, state, message)


def test_failed_run_leaves_the_others() -> None:
    result = ft.compare([Unsteady(), "fedavg"], TinyNet, tiny_federation(), **SETTINGS)
    assert sorted(result.group.methods) == ["FedAvg", "Local training"]
    [(name, why)] = result.failures.items()
    assert name.endswith("nsteady-seed0") and why == "RuntimeError: out of order."
    for text in (result.table(), result.verdict(), result.to_markdown(), result._repr_html_()):
        assert "nsteady-seed0 is missing: RuntimeError: out of order." in text
    assert "1 run missing" in repr(result)


@pytest.mark.parametrize(
    ("methods", "more", "message"),
    [
        (["fedavgg"], {}, "did you mean 'fedavg'?"),
        ("fedavg", {}, "compare takes a list of methods"),
        ([ft.methods.FedAvg], {}, "A method must be an instance"),
        (["fedavg", "fedavg"], {}, "FedAvg is listed twice"),
        (["fedavg"], {"seeds": []}, "seeds must be a list of numbers"),
        (["fedavg"], {"seeds": 3}, "seeds must be a list of numbers, such as [0, 1, 2], got 3"),
        (["fedavg"], {"target": 90}, "target must be a fraction such as 0.9 (90 %), got 90"),
        ([], {}, "compare needs at least one method"),
        (["fedavg"], {"seed": 1}, "seeds=[...] instead of seed"),
        (["fedavg"], {"round": 1}, "did you mean 'rounds'?"),
        (["fedavg"], {"repeats": 2}, "An interval needs at least 3 splits; use more repeats or folds, got 2."),
        (["fedavg"], {"repeats": 2.5}, "repeats must be a number such as 10, got 2.5"),
        (["fedavg"], {"repeats": 3, "seeds": [0, 1]}, "give at most one seed"),
        (["fedavg"], {"folds": 7}, "Client 3 has 6 samples, too few for 7 folds"),
    ],
)
def test_invalid_comparison_raises_before_training(methods: Any, more: dict[str, Any], message: str) -> None:
    assert message in error_message(lambda: ft.compare(methods, TinyNet, tiny_federation(), **more))


def test_same_call_with_a_folder_continues_and_adds_methods(tmp_path: Path) -> None:
    fed, methods = tiny_federation(), [ft.methods.FedProx(mu=1.0)]
    first = ft.compare(methods, TinyNet, fed, folder=tmp_path / "all", **SETTINGS)
    lines = (tmp_path / "all" / "fedprox-seed0" / "rounds.jsonl").stat().st_mtime_ns
    more = [*methods, ft.methods.FedProx(mu=0.1)]
    second = ft.compare(more, TinyNet, fed, folder=tmp_path / "all", sampled_local=True, **SETTINGS)
    assert (tmp_path / "all" / "fedprox-seed0" / "rounds.jsonl").stat().st_mtime_ns == lines  # not run again
    names = {"local-seed0", "local-sampled-seed0", "fedprox-seed0", "fedprox-mu0.1-seed0"}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    assert first.runs[1].summary() == second.runs[1].summary()
    assert ft.load_comparison(tmp_path / "all").to_csv() == second.to_csv()
    assert "contains another run" in error_message(
        lambda: ft.compare(more, TinyNet, fed, folder=tmp_path / "all", sampled_local=True, **SETTINGS | {"rounds": 3})
    )
    fewer = "contains runs of another comparison (fedprox-mu0.1-seed0, local-sampled-seed0); compare these methods"
    assert fewer in error_message(lambda: ft.compare(methods, TinyNet, fed, folder=tmp_path / "all", **SETTINGS))


@pytest.fixture(scope="module")
def result() -> ft.ComparisonResult:
    return ft.compare(["fedavg", "fedper"], TinyNet, lambda seed: tiny_federation(seed=seed), seeds=[0, 1, 2],
                      target=0.5, **SETTINGS)  # fmt: skip


def test_csv_and_json_contain_the_rows(result: ft.ComparisonResult, tmp_path: Path) -> None:
    text = result.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == text
    read = list(csv.DictReader(io.StringIO(text)))
    assert [(row["method"], float(row["score"])) for row in read] == [
        (row["method"], row["score"]) for row in result.rows()
    ]
    found = json.loads(result.to_json())
    assert found["rows"] == json.loads(json.dumps(result.rows())) and found["verdict"] == result.verdict()


def test_latex_and_markdown_mark_the_best_score_and_those_not_significantly_worse(
    result: ft.ComparisonResult,
) -> None:
    group = result.group
    assert group.ranking is not None
    similar = {found.other for found in group.ranking.differences if found.p is not None and found.p >= 0.05}
    latex, markdown = result.to_latex(), result.to_markdown()
    for label in group.methods:
        is_best = label in (group.ranking.best, *similar)
        [row] = [line for line in latex.splitlines() if line.startswith(f"{label} &")][:1]
        assert (r"\textbf{" in row) == is_best and r"$\pm$" in row
        row = next(line for line in markdown.splitlines() if line.startswith(f"| {label} |"))
        assert ("**" in row) == is_best
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 3  # scores, metrics, target
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert body and not any("%" in line.replace(r"\%", "") for line in body)


def test_html_is_escaped_and_report_is_written(result: ft.ComparisonResult, tmp_path: Path) -> None:
    failed = ft.ComparisonResult(result.runs, {"<b>": "<script>"})
    assert "<script>" not in failed._repr_html_() and "&lt;script&gt;" in failed._repr_html_()
    finding = result.report(tmp_path / "report.html")
    assert result.verdict().startswith(finding) and finding in (tmp_path / "report.html").read_text()
