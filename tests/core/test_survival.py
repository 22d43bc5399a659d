"""The Cox loss equals the partial likelihood by hand, padding has no effect, and the C-index equals its definition."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedtailor as ft
from conftest import error_message, same, survival_federation
from fedtailor.core.survival import c_index, cox_loss

FOUR = torch.tensor([[1.0, 2.0], [0.0, 3.0], [1.0, 5.0], [1.0, 5.0]], dtype=torch.float64)  # events at 2, 5, and 5
SCORES = torch.tensor([[0.3], [-0.2], [1.0], [0.5]], dtype=torch.float64)


def loss_of(scores: Tensor, targets: Tensor = FOUR, weight: Tensor | None = None) -> Tensor:
    weight = torch.ones(len(scores), dtype=torch.float64) if weight is None else weight
    return (cox_loss(scores, targets, weight) * weight).sum()


def test_cox_loss_and_gradient_of_four_patients_equal_those_by_hand() -> None:
    """All four are at risk at time 2, and the last two at time 5, in both of its events (Breslow)."""
    a, b, c, d = SCORES.flatten().tolist()
    everyone, last = math.exp(a) + math.exp(b) + math.exp(c) + math.exp(d), math.exp(c) + math.exp(d)
    terms = cox_loss(SCORES, FOUR, torch.ones(4))
    expected = [math.log(everyone) - a, 0.0, math.log(last) - c, math.log(last) - d]
    assert terms.tolist() == pytest.approx(expected)
    gradient = torch.func.grad(loss_of)(SCORES).flatten().tolist()
    assert gradient == pytest.approx(
        [
            math.exp(a) / everyone - 1,
            math.exp(b) / everyone,
            math.exp(c) / everyone + 2 * math.exp(c) / last - 1,
            math.exp(d) / everyone + 2 * math.exp(d) / last - 1,
        ]
    )


def test_cox_loss_of_scores_shifted_by_a_constant_is_the_same() -> None:
    torch.testing.assert_close(loss_of(SCORES + 7), loss_of(SCORES))
    assert loss_of(SCORES + 1000).isfinite()


def test_cox_loss_of_batch_without_events_has_no_gradient() -> None:
    censored = FOUR * torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert loss_of(SCORES, censored) == 0 and not torch.func.grad(loss_of)(SCORES, censored).any()


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [1, 3], [2], []])
def test_examples_of_weight_0_are_in_no_risk_set(kept: list[int]) -> None:
    """The others have the loss and the gradient that they have without them, also under vmap; none at all gives 0."""
    weight = torch.zeros(4, dtype=torch.float64)
    weight[kept] = 1
    gradient = torch.func.vmap(torch.func.grad(loss_of))(SCORES[None], FOUR[None], weight[None])[0]
    expected = torch.func.grad(loss_of)(SCORES[kept], FOUR[kept])
    torch.testing.assert_close(gradient[kept], expected)
    assert not gradient[weight == 0].any()
    torch.testing.assert_close(loss_of(SCORES, FOUR, weight), loss_of(SCORES[kept], FOUR[kept]))


def test_survival_model_with_two_outputs_is_rejected() -> None:
    assert "one output" in error_message(lambda: cox_loss(torch.zeros(4, 2), FOUR, torch.ones(4)))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=9))
def test_c_index_equals_its_definition(patients: list[tuple[bool, int, int]]) -> None:
    """Of all pairs in which the first has an event before the second's time, or at the time of its censoring."""
    values = [
        1.0 if risk > other_risk else 0.5 if risk == other_risk else 0.0
        for (event, time, risk), (other_event, other_time, other_risk) in permutations(patients, 2)
        if event and (time < other_time or (time == other_time and not other_event))
    ]
    targets = torch.tensor([[float(event), time] for event, time, _ in patients])
    found = float(c_index(torch.tensor([[float(risk)] for *_, risk in patients]), targets))
    assert found == pytest.approx(np.mean(values) if values else math.nan, nan_ok=True)


def test_c_index_of_many_samples_equals_that_of_their_order() -> None:
    """Larger than one block of pairs. If all have an event, it is (1 + Kendall's τ) / 2."""
    from scipy.stats import kendalltau

    random = np.random.default_rng(0)
    time = random.permutation(3000).astype(np.float64)
    risk = -time + random.normal(scale=1000, size=3000)
    targets = torch.from_numpy(np.stack([np.ones(3000), time], 1))
    expected = (1 + kendalltau(time, -risk).statistic) / 2
    assert float(c_index(torch.from_numpy(risk), targets)) == pytest.approx(expected)


def test_c_index_of_diverged_model_is_nan() -> None:
    assert math.isnan(float(c_index(torch.tensor([math.nan, 0.0, 1.0, 2.0]), FOUR)))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedala", "apple", "selffl"])
def test_engines_agree_on_survival_with_clients_of_different_sizes(method: str) -> None:
    """Under vmap, smaller clients are padded with their own samples, which must not enter a risk set."""
    fed = survival_federation()
    model, run = ft.network("mlp", fed, hidden=(4,)), {}
    for engine in ("sequential", "vectorized"):
        run[engine] = ft.simulate(
            ft.methods.METHODS[method](), model, fed, rounds=3, batch_size=4, engine=engine, dtype="float64",
        )  # fmt: skip
    for client in range(4):
        assert same(run["sequential"].personal(client), run["vectorized"].personal(client), tolerance=1e-9)
    losses = [one.records[-1]["loss_trained"] for one in run.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("method", ["fedproto", "fedphp", "gpfl", "fedaf", "fedrod"])
def test_methods_for_classes_reject_survival(method: str) -> None:
    fed = survival_federation()
    run = lambda: ft.simulate(ft.methods.METHODS[method](), ft.network("mlp", fed), fed, rounds=1)  # noqa: E731
    assert "requires a classification model" in error_message(run)


def test_survival_network_ranks_patients_after_training() -> None:
    fed = survival_federation((60, 40, 50))
    run = ft.simulate(ft.methods.FedAvg(lr=0.3), ft.network("logistic", fed), fed, rounds=15, batch_size=20)
    assert run.info["score"] == "c_index" and run.info["higher_is_better"]
    assert run.records[-1]["c_index_received"] > 0.75
    assert run.personal(0)["head.weight"].shape == (1, 3)
