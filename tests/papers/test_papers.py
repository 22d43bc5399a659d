"""The papers' tables: definitions, settings of cells, fingerprints, and runs."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ConfigError, RunError
from fedtailor.methods import METHODS
from fedtailor.papers import jobs, unfinished
from fedtailor.papers.__main__ import main
from fedtailor.papers.cells import Cell, make_cells
from fedtailor.papers.definition import PAPERS, load_paper, parse_paper
from fedtailor.papers.overview import failure_lines, note_lines, show_rows, summarize
from fedtailor.papers.running import CellResult, Job, compare, make_jobs, read_done, run, run_job, select_cells
from fedtailor.papers.unfinished import checkpoint_folder
from fedtailor.progress import OnRoundEnd
from fedtailor.runs.files import folder_lock
from fedtailor.tasks.choice import choose_runner
from fedtailor.training.client_failures import FailedRoundError
from fedtailor.training.signals import Interrupted
from fedtailor.training.simulate import train

ROOT = Path(__file__).parents[2]

TINY = ["rounds=2", "data.name=digits", "data.clients=4", "data.min_size=2", "data.test=0.25", "network.name=mlp"]
WITHOUT_LIBRARIES = """
import sys
class BlockedImports:
    def find_spec(self, name, path=None, target=None):
        blocked = {"safetensors", "pydantic", "typer", "rich", "sklearn", "scipy", "PIL", "click", "pandas"}
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, BlockedImports())
from pathlib import Path
from fedtailor.papers.__main__ import main
from fedtailor.papers.cells import make_cells
from fedtailor.papers.definition import parse_paper
from fedtailor.papers.jobs import run_jobs
from fedtailor.papers.running import make_jobs, run_job
table = {"id": "t", "title": "t", "metric": "m", "columns": [{"key": "a"}], "rows": [{"method": "ditto", "label": "D"}]}
settings = {"rounds": 1, "metrics": ["accuracy"], "data": {"name": "rectangles"}, "network": {"name": "logistic"}}
paper = parse_paper("x", {"name": "X", "venue": "Y", "settings": settings, "table": [table]})
run_jobs(run_job, make_jobs(make_cells(paper, paper.tables[0]), [0], "cpu"), Path(sys.argv[1]))
main(["list"])
"""


def cells_of(paper: str, table: str, only: tuple[str, ...] = ()) -> list[Cell]:
    return select_cells(paper, table, only)


@pytest.mark.parametrize("name", PAPERS)
def test_every_definition_fits_the_registries(name: str) -> None:
    paper = load_paper(name)
    assert len({table.id for table in paper.tables}) == len(paper.tables)
    for table in paper.tables:
        for cell in make_cells(paper, table):
            assert cell.row.method in METHODS
            assert cell.printed is not None or cell.row.ours or not cell.row.values or cell.missing
            if not cell.missing:
                config = cell.setup.config
                assert cell.column.metric in [*(config.metrics or []), "train_loss"]
                assert cell.column.metric != "train_loss" or config.evaluate_every == 1
                assert cell.setup.config.rounds
        added = [row.method for row in table.all_rows if row.ours]
        assert table.missing or not table.baselines or added[-4:] == ["local", "local", "fedavgft", "averaged"]
        common = {field for part in (paper, table, *table.columns, *table.rows) for field in training_fields(part)}
        known = {field.name for method in METHODS.values() for field in fields(method)}
        assert common <= known


def training_fields(part: Any) -> set[str]:
    return set(part.settings.get("training", {}))


def test_all_27_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    found = re.findall(r"^  (\S+): \d+ of \d+ cells", capsys.readouterr().out, re.MULTILINE)
    tables = [one for one in found if not one.endswith("-small")]  # not a variant
    assert len([one for one in tables if one.startswith(("table", "text")) or one == "figure-4"]) == 27


def test_settings_of_a_row_by_hand() -> None:
    (cell,) = [
        one for one in cells_of("fedapa", "table-1-50-clients", ("cifar10-practical",)) if one.row.method == "apple"
    ]
    setup = cell.setup
    assert cell.printed == 79.44
    assert (setup.data.name, setup.network.__class__.__name__) == ("cifar10", "LeNet5")
    data = vars(setup.data)
    assert (data["clients"], data["alpha"], data["cap"], data["redraw"], data["min_size"]) == (
        50,
        0.1,
        False,
        True,
        129,
    )
    assert (data["test"], data["normalize"], data["partition"]) == ("publisher", "half", "dirichlet")
    assert (setup.config.rounds, setup.config.batch_size, setup.config.participation) == (50, 64, (0.6, 1.0))
    assert {"lr": 0.01, "momentum": 0.9, "epochs": 2, "keep_optimizer_state": True}.items() <= vars(
        setup.method
    ).items()
    assert cell.score == ("accuracy_trained/weighted", "best")


def test_the_common_learning_rate_is_not_that_of_synthetic_samples() -> None:
    (cell,) = [one for one in cells_of("fedlag", "table-1", ("mnist-0.1",)) if one.row.method == "fedaf"]
    assert vars(cell.setup.method)["lr"] == 1.0


def test_a_figure_has_panels() -> None:
    assert [one.id for one in load_paper("selffl").select("figure-4")] == ["figure-4a", "figure-4b"]
    assert [one.id for one in load_paper("fedlag").select("table-1")] == ["table-1"]  # without its variant
    with pytest.raises(ConfigError, match="figure-1"):
        load_paper("fedlag").select("figure-1")


def test_only_takes_whole_words() -> None:
    columns = {cell.column.key for cell in cells_of("fedapa", "table-1", ("cifar10",))}
    assert columns == {"cifar10-pathological", "cifar10-practical"}
    assert {cell.column.key for cell in cells_of("fedapa", "table-4", ("mu=0",))} == {"mu=0"}
    assert {cell.row.label for cell in cells_of("fedapa", "table-1", ("fedavg",))} == {"FedAvg"}
    with pytest.raises(ConfigError, match="No cell of fedapa table-1 matches 'cifar'"):
        select_cells("fedapa", "table-1", ["cifar"])


def test_fields_of_a_column_apply_to_the_papers_rows_only() -> None:
    cells = cells_of("fedapa", "table-4", ("mu=0.3",))
    assert vars(cells[0].setup.method)["self_weight"] == 0.3
    assert {cell.setup.fingerprint for cell in cells[1:]} < {
        cell.setup.fingerprint for cell in cells_of("fedapa", "table-1-20-clients", ("cifar10-practical",))
    }


def test_a_changed_default_changes_only_the_cells_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints() -> dict[str, str]:
        return {cell.label: cell.setup.fingerprint for cell in cells_of("fedapa", "table-1-20-clients", ("cifar10",))}

    before, kind = prints(), METHODS["fedphp"]

    assert "mu" in {field.name for field in fields(kind)}
    old_init = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, *args, **own: old_init(self, *args, **{"mu": 0.123} | own))
    after = prints()
    assert {label for label in before if before[label] != after[label]} == {
        label for label in before if ", FedPHP, " in label
    }


def test_seed_device_and_folder_are_not_in_the_fingerprint() -> None:
    setup = cells_of("fedapa", "table-4")[0].setup
    data, config = replace(setup.data, seed=3), replace(setup.config, device="cpu", engine="sequential", seed=3)
    assert replace(setup, data=data, config=config).fingerprint == setup.fingerprint
    assert replace(setup, config=replace(setup.config, rounds=51)).fingerprint != setup.fingerprint


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/papers/*.jsonl")), ids=lambda path: path.stem)
def test_results_belong_to_cells(path: Path) -> None:
    """A new setting must not make results unfindable; results of settings that changed are deleted."""
    known = {cell.setup.fingerprint for cell in select_cells(path.stem) if not cell.missing}
    assert {fingerprint for fingerprint, _ in read_done(path)} <= known


def test_variants_are_tables_of_their_own() -> None:
    """The table of a variant has its own results, and its name says that its settings are not the paper's."""
    paper, small = cells_of("fedlag", "table-2"), cells_of("fedlag", "table-2-small")
    assert [one.printed for one in paper] == [one.printed for one in small]
    assert {vars(one.setup.data)["clients"] for one in paper} == {100}
    assert {vars(one.setup.data)["clients"] for one in small} == {20}
    assert not {one.setup.fingerprint for one in paper} & {one.setup.fingerprint for one in small}
    assert small[0].table.variant and small[0].table.variant in small[0].table.title
    assert not paper[0].table.variant


def test_training_loss_of_the_figures_needs_no_evaluation_of_training_samples(tmp_path: Path) -> None:
    override = [*TINY[1:], "rounds=10", "participation=0.5"]
    cells = select_cells("fedapm", "figure-7", ["C=0.5"], override)
    run("fedapm", "figure-7", only=["C=0.5"], seeds=[0], results=tmp_path / "r.jsonl", override=override)
    (result,) = read_done(tmp_path / "r.jsonl").values()
    (job,) = make_jobs(cells, [0], "cpu")
    records = train(replace(job.config, evaluate_train=True), job.setup.method, *job.load()).records
    assert {client for record in records for client in record["clients"]} == {0, 1, 2, 3}
    expected = records[-1]["train_loss_trained"]
    assert result["scores"]["train_loss_trained/weighted"]["round_10"] == pytest.approx(expected, abs=1e-5)
    shown = compare(cells, read_done(tmp_path / "r.jsonl"))
    assert [one.scores for one in shown] == [(pytest.approx(48.4 * expected, abs=1e-3),), (), (), (), ()]


def test_no_training_loss_between_evaluations(tmp_path: Path) -> None:
    override = [*TINY[1:], "rounds=10", "evaluate_every=5"]
    run("fedapm", "figure-7", only=["C=0.5"], seeds=[0], results=tmp_path / "r.jsonl", override=override)
    (result,) = read_done(tmp_path / "r.jsonl").values()
    assert not [name for name in result["scores"] if name.startswith("train_loss")]


def test_unknown_key_in_a_definition() -> None:
    row = {"method": "fedavg", "label": "FedAvg", "value": [1.0]}
    table = {"id": "t", "title": "t", "metric": "m", "columns": [{"key": "a"}], "rows": [row]}
    with pytest.raises(ConfigError, match="value"):
        parse_paper("x", {"name": "X", "venue": "Y", "table": [table]})
    with pytest.raises(ConfigError, match="'FedAvg' has 2 numbers"):
        parse_paper("x", {"name": "X", "venue": "Y", "table": [table | {"rows": [row_with([1.0, 2.0])]}]})


def row_with(values: list[float]) -> dict[str, Any]:
    return {"method": "fedavg", "label": "FedAvg", "values": values}


def test_run_resume_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    only = ("mu=0.3", "mu=0.5")
    assert run("fedapa", "table-4", only=only, seeds=[0], results=file, override=TINY) == 6  # two cells, four of ours
    with file.open("a") as opened:
        opened.write('{"fingerprint": "unfinis')  # a process that was killed
    assert run("fedapa", "table-4", only=only, seeds=[0, 1], results=file, override=TINY) == 6
    assert run("fedapa", "table-4", only=only, seeds=[0, 1], results=file, override=TINY) == 0
    done, cells = read_done(file), select_cells("fedapa", "table-4", only, TINY)
    comparisons = compare(cells, done)
    assert len(comparisons) == 10 and all(len(one.scores) == 2 for one in comparisons)
    results = [one for one in done.values() if one["fingerprint"] == cells[0].setup.fingerprint]
    best = [100 * one["scores"]["accuracy_trained/weighted"]["best"] for one in results]
    assert comparisons[0].mean == pytest.approx(sum(best) / 2)
    assert comparisons[0].difference == pytest.approx(sum(best) / 2 - 84.76)
    assert {"date", "device", "seeds", "settings"} <= summarize(comparisons, done)[0].keys()
    words = [word for setting in TINY for word in ("--override", setting)]
    main(["show", "fedapa", "table-4", "--results", str(file), *words])
    lines = capsys.readouterr().out.splitlines()
    assert "84.76" in lines[3] and "–" in lines[2]  # mu=0 was not run


def test_local_with_the_same_budget_trains_less_often(tmp_path: Path) -> None:
    override = [*TINY, "participation=0.5"]
    run("fedapa", "table-4", only=["mu=0.5"], seeds=[0], results=tmp_path / "r.jsonl", override=override)
    cells = select_cells("fedapa", "table-4", ["mu=0.5"], override)
    scores = {one.cell.row.label: one.scores for one in compare(cells, read_done(tmp_path / "r.jsonl"))}
    assert scores["Local training"] > scores["Local training, same budget"]


def test_within_the_spread_by_hand() -> None:
    cell = cells_of("fedapa", "table-4", ("mu=0.5",))[0]  # 85.85, no deviation printed
    assert CellResult(cell, (84.0, 85.0, 86.0)).is_within  # 0.85 below, and 2 √2 is allowed
    assert CellResult(cell, (81.0, 82.0, 83.0)).is_within is False  # 3.85 below
    assert CellResult(cell, (85.0,)).is_within is None
    printed = cells_of("fedapm", "table-3-cifar10")[0]  # 0.738 ± 0.005
    assert CellResult(printed, (0.71, 0.72)).is_within is False  # 0.023 below, 2 · √(0.0071² + 0.005²) = 0.0173


def test_failed_runs_are_reported_and_repeated(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    override = [*TINY[:-1], "network.name=logistic"]  # has no body, which FedAPA needs
    assert run("fedapa", "table-4", only=["mu=0.5"], seeds=[0], results=file, override=override) == 5
    (line,) = failure_lines(file)
    assert line.startswith("1 runs failed") and "head" in line
    assert run("fedapa", "table-4", only=["mu=0.5"], seeds=[0], results=file, override=override) == 1


def test_notes_name_the_suspects_of_a_table() -> None:
    paper = load_paper("fedapa")
    notes = "".join(note_lines(paper, paper.select("table-1-50-clients")))
    assert "Suspect: table-1: pfedla" in notes and "97.83" in notes and "table-4" not in notes


@pytest.mark.parametrize("name", PAPERS)
def test_every_suspect_has_an_answer(name: str) -> None:
    """Commands in answers and claims name tables that exist."""
    paper = load_paper(name)
    assert all(one.answer for one in paper.suspects)
    found = [claim.found for claim in paper.claims]
    for text in [*(one.answer for one in paper.suspects), *found]:
        for other, table in re.findall(r"fedtailor paper (?:run|show) (\w+) ([\w-]+)", text):
            assert load_paper(other).select(table)


def test_missing_cells_are_not_run() -> None:
    cells = cells_of("selffl", "table-2a")
    assert not make_jobs(cells)
    assert next(row[2:4] for row in show_rows(compare(cells, {}))) == ("0.92", "–")


def test_several_processes(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    assert jobs.run_jobs(describe, [1, 2, 3], file, choose_runner(parallel=2)) == 3
    assert sorted(one["job"] for one in jobs.read_results(file)) == [1, 2, 3]
    assert jobs.run_jobs(describe, [4], file, seconds=0) == 0


def test_parallel_runs_of_a_table_equal_sequential_ones(tmp_path: Path) -> None:
    def scores(name: str, **runner: Any) -> dict[Any, Any]:
        found = run("fedapa", "table-4", only=["mu=0.5"], seeds=[0], results=tmp_path / name, override=TINY, **runner)
        assert found == 5 and [path.name for path in tmp_path.glob(".*")] == []  # no checkpoints are left
        return {key: (one["settings"], one["scores"]) for key, one in read_done(tmp_path / name).items()}

    assert scores("parallel", runner=choose_runner(parallel=2)) == scores("sequential")


def first_job() -> Job:
    return make_jobs(select_cells("fedapa", "table-4", ["mu=0.5"], TINY), [0])[0]


def run_tiny(folder: Path) -> int:
    return run("fedapa", "table-4", only=["mu=0.5"], seeds=[0], results=folder / "r.jsonl", override=TINY)


@pytest.mark.parametrize("damaged", [False, True])
def test_run_whose_process_died_continues_from_its_checkpoint(tmp_path: Path, damaged: bool) -> None:
    rounds: list[int] = []

    def die(record: dict[str, Any]) -> None:
        raise OSError("lost")

    def undisturbed(record: dict[str, Any]) -> None:
        rounds.append(record["round"])

    assert run_job(first_job(), die, tmp_path / "run")["error"] == "lost"
    if damaged:
        for file in tmp_path.glob("run/checkpoints/*/*"):
            file.write_bytes(b"")
    again = run_job(first_job(), undisturbed, tmp_path / "run")
    assert rounds == ([1, 2] if damaged else [2]) and again["scores"] == run_job(first_job())["scores"]


@pytest.mark.parametrize("code", ["same", "other"])
def test_stopped_run_continues_with_the_same_code_only(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def stop(record: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGTERM)

    def recorded(config: Any, method: Any, model: Any, fed: Any, on_round_end: Any, folder: Path, **other: Any) -> Any:
        started.append(folder.name)
        return train(config, method, model, fed, stop if len(started) == 1 else on_round_end, folder, **other)

    monkeypatch.setattr(unfinished, "train", recorded)
    monkeypatch.setattr(unfinished, "source_hash", lambda: "same")
    with pytest.raises(Interrupted, match="after round 1 of 2"):
        run_tiny(tmp_path)
    monkeypatch.setattr(unfinished, "source_hash", lambda: code)
    assert run_tiny(tmp_path) == 5 and not (tmp_path / ".unfinished").exists()
    assert (started[0] in started[1:]) == (code == "other") and len(set(started)) == 5


def test_runs_of_another_command_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpoint_folder(tmp_path) as folder:
        assert folder is not None
        theirs = folder / first_job().folder_name
        theirs.mkdir(parents=True)
        with folder_lock(theirs):
            assert run_tiny(tmp_path) == 4
            monkeypatch.setattr(unfinished, "source_hash", lambda: "other")
            assert run_tiny(tmp_path) == 1 and theirs.is_dir()


@pytest.mark.parametrize("error", [RunError("No space left"), FailedRoundError("NaN")], ids=["disk", "diverged"])
def test_failed_run_is_repeated_unless_it_would_fail_again(
    error: RunError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise error

    def disturbed(config: Any, method: Any, model: Any, fed: Any, _: Any, folder: Path, **other: Any) -> Any:
        return train(config, method, model, fed, fail, folder, **other)

    monkeypatch.setattr(unfinished, "train", disturbed)
    assert run_tiny(tmp_path) == 5
    repeated = not isinstance(error, FailedRoundError)
    assert len(list(tmp_path.glob(".unfinished/*/*"))) == 5 * repeated
    assert run_tiny(tmp_path) == 5 * repeated
    assert all(("scores" in one) == repeated for one in read_done(tmp_path / "r.jsonl").values())


def describe(job: int, on_round_end: OnRoundEnd) -> dict[str, Any]:
    return {"job": job}


def test_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, str(tmp_path / "r.jsonl")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(results) == 5 and all("scores" in one for one in results)
