"""Averaged: the mean by hand, and the inner method as a limiting case, for every method."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import same, tiny_federation
from fedtailor.core.trees import Rows
from fedtailor.methods import Averaged, Centralized, FedAvg, FedProto
from fedtailor.methods.averaged import _blend
from support.method_variants import ALL_METHODS
from support.problem import FULL, PARTIAL, Problem, make_normalized_net, make_problem, mixture

PROBLEM = make_problem()
INNER = {name: method for name, method in ALL_METHODS.items() if not isinstance(method, Averaged | Centralized)}


@pytest.mark.parametrize("name", INNER)
def test_without_memory_and_after_one_participation_it_is_the_inner_method(name: str) -> None:
    inner = INNER[name]
    plain, forgetful = PROBLEM.run(inner, PARTIAL), PROBLEM.run(Averaged(inner, memory=0.0), PARTIAL)
    first, averaged = PROBLEM.run(inner, FULL[:1]), PROBLEM.run(Averaged(inner), FULL[:1])
    for client in range(plain.num_clients):
        for moment in ("trained", "received"):
            assert same(plain.personal(client, moment), forgetful.personal(client, moment))
        assert same(first.personal(client, "trained"), averaged.personal(client, "trained"))
        assert same(averaged.personal(client, "trained"), averaged.personal(client, "received"))
    assert same(plain.server, forgetful.server)
    for name in ("bytes_up", "bytes_down"):
        assert [record[name] for record in plain.records] == [record[name] for record in forgetful.records]


@pytest.mark.parametrize("memory", [0.6, 0.9])
def test_mean_by_hand_with_partial_participation(memory: float) -> None:
    schedule = [[0, 1], [0, 2], [0, 1], [0, 1]]
    inner = FedAvg(lr=0.1)
    runs = [PROBLEM.run(inner, schedule[:rounds]) for rounds in range(1, 5)]
    averaged = PROBLEM.run(Averaged(inner, memory=memory), schedule)

    def weights(count: int) -> list[float]:
        """Return the weights of the models of the first `count` participations."""
        found: list[float] = []
        for number in range(count):
            past = min(number / (number + 1), memory)
            found = [past * weight for weight in found] + [1 - past]
        return found

    for client in (0, 1, 2):
        rounds = [number for number, clients in enumerate(schedule) if client in clients]
        models = [runs[number].personal(client, "trained") for number in rounds]
        expected = mixture(weights(len(models)), models)
        assert same(averaged.personal(client, "trained"), expected, 1e-12)
    assert same(averaged.personal(3, "received"), runs[-1].personal(3, "received")), "it has never trained"


def test_batch_normalization_statistics_are_those_of_the_mean_on_the_clients_data() -> None:
    problem = Problem(tiny_federation(), make_normalized_net(), batch_size=16)
    run = problem.run(Averaged(FedAvg(lr=0.1)), [[0, 1, 2, 3]] * 3)
    own, inputs = run.personal(0, "trained"), problem.fed.x[problem.fed.train[0]]
    hidden = inputs @ own["fc.weight"].T + own["fc.bias"]
    assert same({"mean": hidden.mean(0)}, {"mean": own["norm.running_mean"]}, 1e-12)
    assert same({"var": hidden.var(0)}, {"var": own["norm.running_var"]}, 1e-12)


def test_rows_that_only_one_side_has_are_kept() -> None:
    old = Rows(torch.tensor([[2.0], [4.0], [0.0]]), torch.tensor([True, True, False]))
    new = Rows(torch.tensor([[4.0], [0.0], [6.0]]), torch.tensor([True, False, True]))
    found = _blend(torch.tensor(0.5), old, new)
    assert found.values.tolist() == [[3.0], [4.0], [6.0]] and found.present.all()


def test_averaged_is_described_by_both_methods_and_nested_by_flags() -> None:
    assert Averaged(FedProto()).display_name == "Averaged (FedProto)"
    with pytest.raises(ft.ConfigError, match="inner must be a method"):
        Averaged("fedavg")  # type: ignore[arg-type]
    with pytest.raises(ft.ConfigError, match="setting of `inner`"):
        settings: dict[str, Any] = {"momentum": 0.9}
        Averaged(**settings)
