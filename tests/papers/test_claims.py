"""Claims of papers: verdicts on printed numbers and on our results, by hand."""

from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ConfigError
from fedtailor.papers.cells import Cell, make_cells
from fedtailor.papers.claims import Contest, JudgedClaim, failure_texts, judge
from fedtailor.papers.definition import PAPERS, Paper, load_paper, parse_paper
from fedtailor.papers.running import read_done
from support.paper_results import write_results

SETTINGS = {"rounds": 1, "metrics": ["accuracy"], "data": {"name": "rectangles"}, "network": {"name": "logistic"}}
BEST = {"text": "A is best", "tables": ["t"], "row": "A"}


def paper_with(**claim: Any) -> Paper:
    """A paper with two methods and two columns: A is ahead in the first column and behind in the second one."""
    rows = [
        {"method": "fedavg", "label": "A", "values": [80.0, 70.0]},
        {"method": "ditto", "label": "B", "values": [75.0, 72.0]},
    ]
    columns = [{"key": "one", "settings": {"batch_size": 1}}, {"key": "two", "settings": {"batch_size": 2}}]
    table = {"id": "t", "title": "T", "metric": "%", "columns": columns, "rows": rows}
    claims = [{name: value for name, value in (BEST | claim).items() if value is not None}]
    return parse_paper("x", {"name": "X", "venue": "Y", "settings": SETTINGS, "table": [table], "claim": claims})


def judged(paper: Paper, folder: Path, scores: dict[tuple[str, str], list[float]]) -> JudgedClaim:
    """Judge the paper's claim with scores by row, column, and seed."""

    def score(cell: Cell, seed: int) -> float:
        return scores[cell.row.label, cell.column.key][seed]

    lines = ""
    for seed in range(3):
        wanted = [
            cell for cell in make_cells(paper, paper.tables[0])
            if seed < len(scores.get((cell.row.label, cell.column.key), []))
        ]  # fmt: skip
        lines += write_results(folder / "part.jsonl", wanted, score, [seed]).read_text()
    (folder / "all.jsonl").write_text(lines)
    (one,) = judge(paper, read_done(folder / "all.jsonl"))
    return one


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ({}, "does not hold: 1 of 2 comparisons; lead -2 to +5"),
        ({"at_least": 1}, "holds: 1 of 2 comparisons; lead -2 to +5"),
        ({"columns": ["one"]}, "holds: 1 of 1 comparisons; lead +5"),
        ({"columns": ["one"], "margin": 5.5}, "does not hold: 0 of 1 comparisons; lead +5"),
        ({"margin": -2.5}, "holds: 2 of 2 comparisons; lead -2 to +5"),
        ({"row": "B", "columns": ["one"], "lower_is_better": True}, "holds: 1 of 1 comparisons; lead +5"),
        ({"row": "B", "over": ["A"], "columns": ["two"]}, "holds: 1 of 1 comparisons; lead +2"),
        ({"row": None, "column": "one"}, "holds: 2 of 2 comparisons; lead +3 to +10"),  # 80 > 70 and 75 > 72
    ],
)
def test_verdict_on_printed_numbers_by_hand(claim: dict[str, Any], text: str) -> None:
    (one,) = judge(paper_with(**claim), {})
    assert one.printed is not None and one.printed.describe() == text
    assert one.ours is not None and one.ours.describe() == "open: nothing run yet"


def test_claim_is_open_until_all_its_cells_are_run(tmp_path: Path) -> None:
    one = judged(paper_with(), tmp_path, {("A", "one"): [80, 81], ("B", "one"): [79, 80], ("A", "two"): [60]})
    assert one.ours is not None and one.ours.holds is None
    assert one.ours.describe() == "open: 1 of 1 comparisons, 1 in every seed, 1 not run yet; lead +1; 2 seeds"


def test_equal_means_are_no_lead(tmp_path: Path) -> None:
    one = judged(paper_with(columns=["one"]), tmp_path, {("A", "one"): [80, 82], ("B", "one"): [81, 81]})
    assert one.ours is not None and one.ours.holds is False


def test_claim_fails_as_soon_as_one_rival_is_ahead(tmp_path: Path) -> None:
    one = judged(paper_with(), tmp_path, {("A", "one"): [70], ("B", "one"): [71]})
    assert one.ours is not None
    assert one.ours.describe() == "does not hold: 0 of 1 comparisons, 1 not run yet; lead -1; 1 seed"
    assert failure_texts(one)[-1] == "ours, with all baselines, t, one: B 71 against 70"


def test_only_common_seeds_are_compared(tmp_path: Path) -> None:
    """B is ahead in the only seed that both have, although A's mean over its own seeds is higher."""
    one = judged(paper_with(columns=["one"]), tmp_path, {("A", "one"): [50, 99, 99], ("B", "one"): [60]})
    assert one.ours is not None and one.ours.holds is False
    assert failure_texts(one)[-1] == "ours, with all baselines, t, one: B 60 against 50"


def test_lead_in_every_seed_is_counted(tmp_path: Path) -> None:
    scores = {("A", "one"): [50, 60], ("B", "one"): [49, 59], ("A", "two"): [50, 60], ("B", "two"): [51, 49]}
    one = judged(paper_with(), tmp_path, {key: list(map(float, values)) for key, values in scores.items()})
    expected = "holds: 2 of 2 comparisons, 1 in every seed; lead +1 to +5; 2 seeds"
    assert one.ours is not None and one.ours.describe() == expected


def test_baselines_that_the_paper_leaves_out_have_a_verdict_of_their_own(tmp_path: Path) -> None:
    scores = {("A", "one"): [80.0], ("B", "one"): [75.0], ("FedAvg-FT", "one"): [85.0]}
    one = judged(paper_with(columns=["one"]), tmp_path, scores)
    assert one.ours is not None and one.with_baselines is not None
    assert one.ours.holds is True and one.with_baselines.holds is False


def test_most_of_the_comparisons_is_the_same_fraction_of_those_that_can_be_run() -> None:
    """FedAPM claims most of 12 comparisons, at least 7; 6 can be run, of which 4 must be as claimed."""
    claim = judge(load_paper("fedapm"), {})[0]
    assert claim.printed is not None and (len(claim.printed.contests), claim.printed.needed) == (12, 7)
    assert claim.ours is not None and (len(claim.ours.contests), claim.ours.needed) == (6, 4)


def test_lower_is_better_names_the_smallest() -> None:
    contest = Contest("errors", {0: 5.0}, {"B": {0: 6.0}, "C": {0: 4.0}}, lower_is_better=True)
    assert contest.is_won is False and contest.leader == "C"


@pytest.mark.parametrize("claim", [{"row": "Z"}, {"over": ["Z"]}, {"columns": ["Z"]}])
def test_claim_about_an_unknown_row_or_column_is_an_error(claim: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'Z', which is not in its tables"):
        judge(paper_with(**claim), {})
    with pytest.raises(ConfigError, match="either a row or a column"):
        paper_with(column="one")


@pytest.mark.parametrize("name", PAPERS)
def test_every_claim_of_a_definition_can_be_judged(name: str) -> None:
    paper = load_paper(name)
    judged_claims = judge(paper, {})
    assert len(judged_claims) == len(paper.claims) > 5
    assert all(one.ours is None or one.ours.holds is None for one in judged_claims)
    assert all(one.claim.has_rule or one.claim.missing or one.claim.found for one in judged_claims)


def test_exceptions_that_the_paper_names_are_found() -> None:
    """The text of FedAPA names the two columns that it does not win, and by how much."""
    claim = judge(load_paper("fedapa"), {})[0]
    assert failure_texts(claim) == [
        "paper, table-1-20-clients, fmnist-pathological: FedPAC 99.41 against 99.35",
        "paper, table-1-20-clients, cifar100-pathological: FedALA 59.75 against 59.24",
    ]


def test_claims_about_one_table_are_selected() -> None:
    paper = load_paper("fedapa")
    assert [one.claim.column for one in judge(paper, {}, paper.select("table-4"))] == ["mu=0.5"]


def test_claims_of_a_table_are_claims_about_it() -> None:
    """Such a claim may have no rule; then it shows what was found."""
    table = {"id": "t", "title": "T", "metric": "%", "columns": [{"key": "one"}], "rows": []}
    claims = [{"text": "it converges", "found": "it does not"}]
    paper = parse_paper("x", {"name": "X", "venue": "Y", "table": [table | {"claims": claims}, table | {"id": "u"}]})
    assert judge(paper, {}, paper.select("u")) == []
    both = [table | {"claims": claims}, table | {"id": "u", "claims": claims}]
    assert len(judge(parse_paper("x", {"name": "X", "venue": "Y", "table": both}), {})) == 1
    (one,) = judge(paper, {}, paper.select("t"))
    assert one.row() == ("it converges", "no printed numbers", "it does not", "")
