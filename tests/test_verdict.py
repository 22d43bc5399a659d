"""Which method is best, by how much, and whether that is more than chance: the answer says what the numbers say."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import fedtailor as ft
from conftest import refusal
from fedtailor.see import clients, curves, gains, ranking, verdict
from fedtailor.see.digest import groups
from fedtailor.see.page import html
from fedtailor.see.report import compose, report
from seen import answer, clear, made, one


def test_a_sure_lead_is_called_more_than_chance() -> None:
    said = answer(clear())
    assert said.startswith("fedper is best here with 64.9 %, 10.4 points ahead of")
    assert "which is more than chance" in said and "One seed: differences between seeds are not in it." in said
    assert "All 2 others are behind it by more than chance" in said


def test_a_lead_that_comes_and_goes_is_within_chance() -> None:
    runs = [made("local", dict.fromkeys(range(10), 0.5)), made("fedavg", {c: 0.9 if c < 4 else 0.3 for c in range(10)})]
    assert answer(runs).startswith(
        "fedavg ends best here with 54.0 %, but its lead of 4.0 points over training alone is within"
    )


def test_training_alone_may_win() -> None:
    runs = [made("local", dict.fromkeys(range(12), 0.9)), made("fedavg", {c: 0.7 + c / 100 for c in range(12)})]
    said = answer(runs)
    assert said.startswith("Training alone is best here with 90.0 %: no federated method beats it")
    assert "14.5 points ahead of fedavg, which is more than chance" in said


def test_less_may_be_better() -> None:
    """Of errors the smallest is best, a gain is a fall, and the worst client is the one with most."""
    runs = [made("local", dict.fromkeys(range(8), 0.5), score="mse", higher=False)]
    runs.append(made("ditto", {c: 0.3 + c / 100 for c in range(8)}, score="mse", higher=False))
    assert answer(runs).startswith("ditto is best here with 0.335, 0.165 ahead of training alone")
    group = one(runs)
    assert "8 of 8 clients do better than alone" in gains.who_gains(group)[0]
    shown = clients.distribution(group)
    assert shown is not None and "the worst, client 7, 0.37" in shown.says


def test_one_run_says_what_it_cannot() -> None:
    runs = [made("fedper", {0: 0.5, 1: 0.7})]
    assert "which method is best cannot be answered" in answer(runs)
    assert "cannot be answered" in gains.who_gains(one(runs))[0]
    assert answer(runs).startswith("fedper gets 60.0 %")
    assert report(runs).count("<figure") >= 4


def test_who_diverged_is_last_and_proves_nothing() -> None:
    lost = made("fedavg", {0: float("nan"), 1: 0.99})
    runs = [lost, made("local", {0: 0.5, 1: 0.5}), made("ditto", {0: 0.4, 1: 0.4})]
    assert list(one(runs).methods) == ["local", "ditto", "fedavg"]
    assert "NaN" not in report(runs).partition("<script>/**")[0]


def test_the_weighted_mean_of_gaps_is_the_difference_of_scores() -> None:
    """So that the test is of the numbers in the ranking, and not of others."""
    random = np.random.default_rng(0)
    runs = []
    for seed, method in product(range(3), ("local", "fedper")):
        values = {c: float(random.random()) for c in range(6)}
        runs.append(made(method, values, seed, tests=[1, 5, 2, 9, 3, 1]))
    group = one(runs)
    gaps = group.gaps("fedper", "local").values()
    mean = sum(gap * weight for gap, weight in gaps) / sum(weight for _, weight in gaps)
    ours, theirs = group.score("fedper"), group.score("local")
    assert ours is not None and theirs is not None and mean == pytest.approx(ours - theirs)


@pytest.mark.parametrize(("split_seed", "units"), [(None, 12), (7, 4)])
def test_a_client_is_itself_in_every_seed_of_its_split(split_seed: int | None, units: int) -> None:
    """Three seeds that split anew have twelve clients; three on one split have four, each the mean of its seeds."""
    runs = [
        made(method, dict.fromkeys(range(4), base + seed / 10), seed, split_seed=split_seed)
        for seed in range(3)
        for method, base in (("local", 0.5), ("fedper", 0.6))
    ]
    found = one(runs).gaps("fedper", "local")
    assert len(found) == units and all(gap == pytest.approx(0.1) for gap, _ in found.values())


def test_seeds_that_not_all_have_do_not_count() -> None:
    """fedper looks better only because it lacks the hard seed."""
    runs = [made("local", {0: 0.9}, 0), made("local", {0: 0.1}, 1), made("fedper", {0: 0.8}, 0)]
    group = one(runs)
    assert next(iter(group.methods)) == "local" and group.score("local") == pytest.approx(0.9)
    assert "local with seed 1" in answer(runs)


def test_whose_score_leaves_out_hard_clients_is_no_leader() -> None:
    """fedavg lost the clients that are hard, so that its score is higher; on those it kept it is worse everywhere."""
    hard = {c: 0.9 if c < 12 else 0.1 for c in range(20)}
    runs = [made("local", hard), made("fedavg", {c: 0.7 + c / 1000 for c in range(12)}, people=20)]
    group = one(runs)
    assert group.scored[0] == "fedavg"  # by its own score
    (lead,) = verdict.leads(group)
    assert lead.is_behind and not lead.is_more_than_chance and lead.seeds_ahead == 0
    said = answer(runs)
    assert said.startswith("fedavg comes first here with 70.5 %, but on the 12 clients that both have, training alone ")
    assert "is 19.5 points ahead" in said and "fedavg's score is over 12 of 20" in said
    assert "19.5 points better where both are known" in said
    figure = ranking.against_best(group, [lead])
    assert figure is not None and "no other is behind" in figure.says
    assert "not over the same clients" not in answer(clear())


def test_without_a_common_seed_nothing_is_paired() -> None:
    runs = [made("local", {0: 0.9, 1: 0.8}, 0), made("fedper", {0: 0.7, 1: 0.6}, 1)]
    said = answer(runs)
    assert "No seed is common to all methods" in said and "of 0 seeds" not in said and "mean of 2 seeds" not in said
    assert "whether by chance cannot be said" in said and "within chance" not in said
    assert "cannot be answered" in gains.who_gains(one(runs))[0]
    assert report(runs)


def test_what_must_be_doubted_is_said_of_a_single_method_too() -> None:
    lost = made("fedavg", {0: float("nan"), 1: 0.9})
    lost.records[-1]["diverged"] = [0]
    assert "Clients diverged with fedavg: try a smaller lr." in answer([lost])
    assert "Clients diverged with fedavg" in answer([lost, made("local", {0: 0.5, 1: 0.5})])


def test_whose_samples_a_score_is_over_is_said() -> None:
    """With evaluate="participants" scores are over few clients; those of all methods alike, or not."""
    runs = []
    for method, base in (("local", 0.5), ("fedavg", 0.6)):
        own = {2: base, 5: base + 0.1}
        runs.append(made(method, own, before=dict.fromkeys(range(8), 0.3), people=8))
        runs[-1].records[-1]["last_trained"] = {"accuracy": own}
        runs[-1].experiment["evaluate"] = "participants"
    said = answer(runs)
    assert "over the test samples of the 2 of 8 clients that have a score, as trained" in said
    assert "all test samples" not in said and "not over the same clients" not in said
    shown, lines = clients.distribution(one(runs)), curves.curves(one(runs))
    assert shown is not None and "the median of 2 clients has 65.0 %" in shown.says
    assert "whiskers: 90 % of these; 6 have no score" in shown.says and "all clients" not in shown.says
    assert lines is not None and "its last score is over the clients that were evaluated then" in lines.says
    runs[1].records[-1]["last_trained"] = {"accuracy": {0: 0.5}}
    assert "over the test samples of the clients that have a score, as" in answer(runs)
    again = [made(m, {c: 0.5, 3: 0.6}, c, people=8) for c in (0, 1) for m in ("local", "fedavg")]
    assert "2 of 8 clients that have a score in each seed" in answer(again)
    whole = clients.distribution(one(clear()))
    assert "over all test samples" in answer(clear()) and whole is not None and "90 % of all clients)" in whole.says
    lines = curves.curves(one(clear()))
    assert lines is not None and "last score" not in lines.says


def test_who_was_not_evaluated_is_not_in_a_real_score() -> None:
    fed = ft.load("digits", clients=6, seed=0)
    method, network = ft.methods.FedPer(), ft.network("mlp", fed)
    for evaluate, count in (("participants", 2), (4, 4)):
        run = ft.simulate(method, network, fed, rounds=2, participation=0.3, evaluate=evaluate, batch_size=64)
        assert f"the {count} of 6 clients that have a score" in answer([run])


@pytest.mark.parametrize(("count", "others", "few"), [(3, 1, True), (5, 1, True), (6, 1, False), (6, 2, True)])
def test_few_clients_are_called_too_few(count: int, others: int, few: bool) -> None:
    """All clients agree: of 5 that happens by chance once in 16, and no lead of theirs could ever be sure."""
    runs = [made(f"m{k}", {c: 0.5 + c / 100 for c in range(count)}) for k in range(others)]
    runs.append(made("fedper", {c: 0.7 + c / 50 for c in range(count)}))
    said, (lead, *_) = answer(runs), verdict.leads(one(runs))
    figure = ranking.against_best(one(runs), verdict.leads(one(runs)))
    words = f"{count} clients are too few to tell chance apart"
    assert (lead.p >= 0.05) == few and "within chance" not in said and figure is not None
    assert (said.count(words) >= 2 and "interval" not in said and words in figure.says) == few
    assert ("which is more than chance" in said and "95 % interval" in said) != few


def test_training_alone_may_lead_by_too_few() -> None:
    said = answer([made("local", {0: 0.9}), made("fedavg", {0: 0.7})])
    assert "no federated method beats it; it is 20.0 points ahead of fedavg, but 1 client is too few to tell" in said


def test_one_is_not_several() -> None:
    runs = [made("local", {0: 0.5}, rounds=1), made("fedavg", {0: 0.6}, rounds=1)]
    page = compose(runs)
    assert page.about.startswith("1 client · 1 round · ")
    text = " ".join(line for section in page.chapters[0].sections for line in [*section.answer, *(
        figure.says for figure in section.figures)])  # fmt: skip
    assert "into 1 client with 10 training samples and 1 test sample." in text
    assert not re.search(r"\b1 (clients|rounds|pairs|samples|do)\b", text)


def test_the_interval_is_said_to_be_of_one_pair() -> None:
    """p is corrected for several comparisons, the interval beside it is not."""
    assert "(95 % interval of this pair alone: +" in answer(clear())


# ---- which runs belong together


def test_settings_that_differ_behind_the_end_of_a_label_are_two() -> None:
    """Labels are cut where they are too long; what they name is not."""
    long = "a" * 70
    runs = [made("fedapa", {0: rho, 1: rho}, fields={"kind": f"{long}{rho}"}) for rho in (0.3, 0.6, 0.9)]
    found = list(one(runs).methods)
    assert len(set(found)) == 3 and all(label.startswith("fedapa kind=aaa") for label in found)
    assert [one(runs).score(label) for label in found] == pytest.approx([0.9, 0.6, 0.3])
    assert "ran twice" in refusal(lambda: groups([*runs, made("fedapa", {0: 1.0}, fields={"kind": f"{long}0.3"},
                                                                people=2)]))  # fmt: skip
    assert all(label in report(runs) for label in found)


def test_other_experiments_get_chapters_of_their_own() -> None:
    runs = [*clear(), *(replace(run, experiment=run.experiment | {"batch_size": 8}) for run in clear())]
    page = compose(runs)
    assert [chapter.title for chapter in page.chapters] == ["batch_size = none", "batch_size = 8"]
    found = re.findall(r'\sid="([^"]+)"', html(page))
    assert len(found) == len(set(found))


def test_a_method_with_several_settings_is_several_rows() -> None:
    runs = [made("fedapa", {0: rho, 1: rho}, fields={"rho": rho, "lr": 0.1}) for rho in (0.3, 0.6)]
    assert list(one(runs).methods) == ["fedapa rho=0.6", "fedapa rho=0.3"]
    assert "the best of many flatters itself" in answer(runs) and "flatters" not in answer(clear())
    assert "ran twice with seed 0" in refusal(lambda: groups([runs[0], made("fedapa", {0: 1.0, 1: 1.0}, fields={
        "rho": 0.3, "lr": 0.1})]))  # fmt: skip
