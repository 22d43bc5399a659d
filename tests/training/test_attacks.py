"""Tests of attacks: what malicious clients upload, by hand, and that honest clients are not affected otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, error_message, same, tiny_federation
from fedtailor.analysis.comparability import experiment_key
from fedtailor.analysis.rows import run_rows
from fedtailor.core.trees import Tree
from fedtailor.experiments.deployment import make_deployment
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.grid import find_axes, make_points
from fedtailor.training.attacks import ATTACKS, Attack

SENT = {"w": torch.ones(5, 2, dtype=torch.float64)}
CHANGES = torch.tensor([[1.0, -2], [3, -2], [5, -5], [7, -9], [8, -1]], dtype=torch.float64)
MALICIOUS = torch.tensor([False, False, False, True, True])


def poisoned(attack: Attack) -> Tensor:
    """Return the changes of all clients after the attack."""
    uploads = {"w": SENT["w"] + CHANGES}
    found: Tree = attack.poison_uploads(uploads, SENT, MALICIOUS, [0, 1, 2, 3, 4], round=1)
    assert torch.equal(found["w"][:3], uploads["w"][:3])
    changes: Tensor = found["w"] - SENT["w"]
    return changes


def test_scaled_and_flipped_updates_are_multiples_of_the_own_update() -> None:
    assert torch.allclose(poisoned(ft.attacks.Scaled(factor=10))[3:], 10 * CHANGES[3:])
    assert torch.allclose(poisoned(ft.attacks.SignFlipped(factor=2))[3:], -2 * CHANGES[3:])


def test_noise_has_the_given_norm_and_differs_by_client() -> None:
    found = poisoned(ft.attacks.Noise(scale=3))[3:]
    assert torch.allclose(found.norm(dim=1), 3 * CHANGES[3:].norm(dim=1))
    assert abs(float(torch.cosine_similarity(found[:1], found[1:]))) < 0.999


def test_colluders_know_mean_and_deviation_of_the_honest_clients() -> None:
    mean, std = CHANGES[:3].mean(0), CHANGES[:3].std(0, correction=0)
    assert torch.allclose(poisoned(ft.attacks.LittleIsEnough(z=0.5))[3:], (mean - 0.5 * std).expand(2, 2))


def test_adaptive_attackers_stay_inside_what_the_defense_accepts() -> None:
    honest = CHANGES[:3]
    below = poisoned(ft.attacks.BelowBound(bound=2.0))
    lengths = below.norm(dim=1)
    assert float(lengths[3]) == pytest.approx(0.99 * 2 * float(honest.norm(dim=1).median()))
    assert float(torch.cosine_similarity(below[3], honest.mean(0), dim=0)) == pytest.approx(-1)
    edge = poisoned(ft.attacks.EdgeOfInterval())[3]
    assert edge.tolist() == [1.0, -2.0]  # the honest value that is most opposed to the mean, (3, -3)


def test_flipped_labels_change_training_labels_of_malicious_clients_only() -> None:
    fed = tiny_federation()
    found = ft.attacks.LabelFlipped().poison_data(fed, [1])
    own = fed.train[1]
    assert torch.equal(found.y[own], 2 - fed.y[own])
    rest = torch.ones(len(fed.y), dtype=torch.bool).index_fill(0, own, False)
    assert torch.equal(found.y[rest], fed.y[rest]) and torch.equal(fed.y, tiny_federation().y)


def test_attack_of_labels_leaves_other_clients_of_local_training_unaffected(net: nn.Module) -> None:
    attack = ft.attacks.LabelFlipped(clients=[1])
    plain, attacked = (
        ft.simulate(ft.methods.Local(), net, tiny_federation(), rounds=2, dtype="float64", attack=a)
        for a in (None, attack)
    )
    same_models = [same(plain.personal(client), attacked.personal(client)) for client in range(4)]
    assert same_models == [True, False, True, True]
    assert attacked.info["fingerprint"] == plain.info["fingerprint"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_attack_on_the_first_round_does_not_change_what_honest_clients_trained(engine: str, net: nn.Module) -> None:
    attack = ft.attacks.SignFlipped(clients=[1])
    runs = [
        ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, dtype="float64", engine=engine, attack=a)
        for a in (None, attack)
    ]
    trained = [[run.personal(client, "trained") for client in range(4)] for run in runs]
    assert all_same(trained[0], trained[1])
    assert not same(runs[0].server, runs[1].server)


def test_attackers_skip_clipping_but_a_trusted_server_clips_them(net: nn.Module) -> None:
    pytest.importorskip("dp_accounting")

    def step(channel: ft.Channel) -> float:
        attack = ft.attacks.Scaled(clients=[1], factor=1e6)
        run = ft.simulate(
            ft.methods.FedAvg(weights="uniform"), net, tiny_federation(), rounds=1, dtype="float64", channel=channel,
            attack=attack, engine="sequential",
        )  # fmt: skip
        norms: dict[int, float] = run.records[0]["per_client"]["update_norm"]
        return norms[1]

    assert step(ft.Channel(clip=0.1)) > 1e3
    assert step(ft.Channel(clip=0.1, noise=1e-6, trusted=True)) < 0.2


def test_summary_has_means_over_honest_clients(net: nn.Module) -> None:
    attack = ft.attacks.SignFlipped(clients=[0, 2])
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, dtype="float64", attack=attack)
    scores, found = run.scores("trained"), run.summary()["trained"]["last"]
    assert found["honest"]["mean"] == pytest.approx((scores[1] + scores[3]) / 2)
    assert found["honest"]["clients"] == 2 and found["clients"] == 4


def test_clients_are_chosen_by_the_seed() -> None:
    attack = ft.attacks.Scaled(fraction=0.25)
    chosen = [attack.choose(40, seed) for seed in range(5)]
    assert all(len(clients) == 10 and clients == sorted(set(clients)) for clients in chosen)
    assert len({*map(tuple, chosen)}) == 5 and chosen[0] == attack.choose(40, 0)
    assert "from 0 to 3" in error_message(lambda: ft.attacks.Noise(clients=[4]).choose(4, 0))


def test_attack_from_flags_toml_and_sweeps() -> None:
    settings = {"attack": {"name": "scaled", "factor": 5, "clients": [1]}, "robust": {"kind": "median"}}
    experiment = make_experiment(settings)
    assert experiment.attack == ft.attacks.Scaled(factor=5.0, clients=[1]) and experiment.robust.kind == "median"
    assert make_experiment({"attack": "none"}).attack is None
    assert "sign_flipped" in error_message(lambda: make_experiment({"attack": "signflipped"}))
    axes, single = find_axes({"attack": ["none", "scaled"], "robust.kind": ["none", "median"]}, {})
    points, invalid = make_points(axes, single, {})
    assert [p.experiment.attack and p.experiment.attack.name for p in points] == [None, None, "scaled", "scaled"]
    assert len({point.label for point in points}) == 4 and not invalid


def test_attacks_are_for_simulations_in_one_process() -> None:
    assert "attack applies only to simulations" in error_message(lambda: make_deployment({"attack": "scaled"}))
    assert "one process" in error_message(lambda: make_experiment({"attack": "scaled", "engine": "ray"}))
    assert all(kind.name == name for name, kind in ATTACKS.items())


def test_rows_to_paste_have_columns_for_honest_clients(net: nn.Module) -> None:
    attack = ft.attacks.SignFlipped(clients=[0, 2])
    run = ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, dtype="float64", attack=attack)
    found = run.summary()["trained"]["last"]["honest"]
    row = next(row for row in run_rows(run) if (row["moment"], row["choice"]) == ("trained", "last"))
    assert (row["honest"], row["honest_client_mean"]) == (found["weighted"], found["mean"])
    assert all(not isinstance(value, dict) for value in row.values())


def test_runs_under_other_attacks_or_rules_are_not_comparable(net: nn.Module) -> None:
    def key(**settings: Any) -> str:
        return experiment_key(ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, **settings))

    plain = key()
    assert plain == key(robust=ft.Robust(fraction=0.1))  # a fraction without a rule has no effect
    others = [
        key(robust=ft.Robust(kind="median")), key(attack=ft.attacks.Noise()), key(attack=ft.attacks.Noise(scale=2)),
    ]  # fmt: skip
    assert len({plain, *others}) == 4
