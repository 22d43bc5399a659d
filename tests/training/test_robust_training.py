"""Tests of robust aggregation in a run: every method, the checks before round 1, and what a malicious client can do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import FEDERATED, error_message, same, tiny_federation
from fedtailor.core.robust import KINDS
from fedtailor.core.trees import Tree, flatten
from fedtailor.methods import METHODS

SIZES = (9, 4, 7, 6, 5, 8)
AVERAGING = [name for name in FEDERATED if len(METHODS[name]().robust_kinds) > 1]
MIXING = [name for name in FEDERATED if METHODS[name]().robust_kinds == ("norm_bound",)]
SPOILED = ft.attacks.Scaled(clients=[2], factor=1e6)
FEW = ("fedavg", "scaffold", "fedapm", "fedlag", "selffl", "fedproto", "fedexp")  # every way in which servers average


def simulate(method: ft.Method, net: nn.Module, kind: str = "none", **settings: Any) -> ft.Run:
    options: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": torch.float64, "engine": "sequential"}
    options |= {"robust": ft.Robust(kind=kind, fraction=1 / 6)}  # type: ignore[arg-type]
    return ft.simulate(method, net, tiny_federation(SIZES), **options | settings)


def largest(tree: Tree) -> float:
    return max(float(leaf.double().abs().max()) for leaf in flatten(tree).values())


def models_of_honest_clients(run: ft.Run) -> float:
    """Return the largest entry of the models that honest clients would receive."""
    honest = [client for client in range(len(SIZES)) if client not in run.malicious_clients]
    return max(largest(run.personal(client, "received")) for client in honest)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in FEW else pytest.mark.slow)
        for name in FEDERATED
        for kind in METHODS[name]().robust_kinds
    ],
)
def test_one_malicious_client_leaves_models_of_the_others_small(name: str, kind: str, net: nn.Module) -> None:
    """Methods with a rule of every kind, and mixing methods with a norm bound."""
    method = METHODS[name]()
    honest = models_of_honest_clients(simulate(method, net, kind))
    spoiled = simulate(method, net, kind, attack=SPOILED)
    assert spoiled.malicious_clients == [2]
    assert models_of_honest_clients(spoiled) < 20 * max(honest, 1)


def test_without_a_rule_one_malicious_client_spoils_the_mean(net: nn.Module) -> None:
    assert models_of_honest_clients(simulate(ft.methods.FedAvg(), net, attack=SPOILED)) > 1e3


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedlag", "selffl", "fedproto"])
def test_norm_bound_that_never_acts_changes_no_bit(name: str, net: nn.Module) -> None:
    plain = simulate(METHODS[name](), net)
    bounded = simulate(METHODS[name](), net, robust=ft.Robust(kind="norm_bound", bound=1e9))
    assert same(plain.server, bounded.server)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedapm", "fedlag", "fedexp", "selffl"])
def test_trimmed_mean_of_fraction_zero_is_the_uniform_mean(name: str, net: nn.Module) -> None:
    kind: Any = METHODS[name]
    method = kind() if name == "fedapm" else kind(weights="uniform")
    if name == "selffl":
        method = ft.methods.SelfFL(weights="uniform", adjust_weights=False, warmup=1)
    plain = simulate(method, net, rounds=3)
    trimmed = simulate(method, net, rounds=3, robust=ft.Robust(kind="trimmed_mean", fraction=0.0))
    assert same(plain.server, trimmed.server, 1e-9)


def test_unsupported_kinds_are_rejected_with_those_that_fit(net: nn.Module) -> None:
    assert {"fedapa", "apple", "fedfomo", "fedamp"} <= set(MIXING)
    for name in MIXING:
        message = error_message(lambda name=name: simulate(METHODS[name](), net, "median"))  # type: ignore[misc]
        assert "more of the uploads than their mean" in message and "use 'norm_bound'" in message
    assert "'median' or 'trimmed_mean' or 'norm_bound'" in error_message(
        lambda: simulate(ft.methods.FedProto(), net, "multi_krum")
    )
    assert "one at a time" in error_message(lambda: simulate(ft.methods.FedAPA(variant="code"), net, "norm_bound"))


def test_own_method_needs_a_declaration(net: nn.Module) -> None:
    @dataclass(frozen=True)
    class Own(ft.methods.FedAvg):
        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return exchange.mean(exchange.received, exchange.sizes)

    @dataclass(frozen=True)
    class Declared(Own):
        @property
        def robust_kinds(self) -> tuple[str, ...]:
            return KINDS

    assert "declare robust_kinds" in error_message(lambda: simulate(Own(), net, "median"))
    assert same(simulate(Declared(), net, "median").server, simulate(ft.methods.FedAvg(), net, "median").server, 1e-12)


def test_too_few_clients_are_an_error_before_round_1(net: nn.Module) -> None:
    def run(robust: ft.Robust, size: int) -> ft.Run:
        return simulate(ft.methods.FedAvg(), net, schedule=[[*range(size)]], rounds=None, robust=robust)

    message = error_message(lambda: run(ft.Robust(kind="multi_krum", fraction=0.2), 6))
    assert "Some round has 6 clients" in message and "more than 2f + 2 = 6 clients" in message
    assert "at least 3 clients" in error_message(lambda: run(ft.Robust(kind="median"), 2))
    run(ft.Robust(kind="multi_krum", fraction=0.2), 5)


def test_centralized_training_is_a_reference_without_rule_and_attack(net: nn.Module) -> None:
    attack = ft.attacks.LabelFlipped(clients=[0])
    plain = simulate(ft.methods.Centralized(), net)
    assert same(simulate(ft.methods.Centralized(), net, "multi_krum", attack=attack).server, plain.server)


def test_trusted_noise_and_robust_aggregation_exclude_each_other(net: nn.Module) -> None:
    channel = ft.Channel(clip=1.0, noise=1.0, trusted=True)
    assert "only the plain mean is private" in error_message(
        lambda: simulate(ft.methods.FedAvg(weights="uniform"), net, "median", channel=channel)
    )


def test_record_has_norms_and_cosines_of_all_updates(net: nn.Module) -> None:
    """FedAvg's update is the trained model minus the received one; one client uploads the opposite, four times as
    long."""
    attack = ft.attacks.SignFlipped(clients=[1], factor=4.0)
    plain, attacked = (simulate(ft.methods.FedAvg(), net, rounds=1, attack=a) for a in (None, attack))
    before, after = (run.records[0]["per_client"] for run in (plain, attacked))
    initial = dict(net.named_parameters())
    moved = [torch.cat([(plain.personal(c)[n] - initial[n]).flatten() for n in initial]).detach() for c in range(6)]
    assert list(before["update_norm"].values()) == pytest.approx([float(update.norm()) for update in moved])
    mean = torch.stack(moved).mean(0)
    cosines = [float(torch.cosine_similarity(update, mean, dim=0)) for update in moved]
    assert list(before["update_cosine"].values()) == pytest.approx(cosines)
    assert after["update_norm"][1] == pytest.approx(4 * before["update_norm"][1])
    assert after["update_cosine"][1] == pytest.approx(1, abs=1) and after["update_norm"][0] == before["update_norm"][0]


def test_settings_are_saved_and_the_run_resumes_with_them(net: nn.Module, tmp_path: Path) -> None:
    def stop(record: dict[str, object]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    def run(folder: Path, **settings: Any) -> ft.Run:
        attack = ft.attacks.LittleIsEnough(clients=[0, 4])
        return simulate(
            ft.methods.FedAvg(), net, "geometric_median", rounds=3, attack=attack, folder=folder, **settings
        )

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", on_round_end=stop, checkpoint_every=1)
    fed = tiny_federation(SIZES)
    resumed = ft.resume(tmp_path / "stopped", model=net, fed=fed)
    assert same(resumed.server, whole.server)
    loaded = ft.load_run(tmp_path / "whole")
    assert loaded.malicious_clients == [0, 4] and loaded.summary() == whole.summary()


def test_divergence_names_the_outlier_of_the_round_before(net: nn.Module, tmp_path: Path) -> None:
    """One finite upload spoils the model, and in the next round every client gets NaN: also when the run resumes."""

    @dataclass(frozen=True)
    class Overflowing(ft.methods.FedAvg):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            state, upload = super().train(ctx, state, message)
            large = largest_entry(message["params"]) > 1e3
            return state, {"params": {n: torch.where(large, torch.nan, p) for n, p in upload["params"].items()}}

    def run() -> ft.Run:
        return simulate(
            Overflowing(), net, rounds=4, attack=ft.attacks.Scaled(clients=[2]), folder=tmp_path, checkpoint_every=1
        )

    message = error_message(run)
    assert "In round 2, 6 of 6 clients failed" in message and "try a smaller lr" not in message
    assert "in round 1, the update of 2 was" in message and "robust.kind" in message
    fed = tiny_federation(SIZES)
    assert error_message(lambda: ft.resume(tmp_path, method=Overflowing(), model=net, fed=fed)) == message


def largest_entry(params: Tree) -> torch.Tensor:
    return torch.stack([leaf.abs().amax() for leaf in params.values()]).amax()
