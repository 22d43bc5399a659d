"""Errors of all methods: invalid fields, and models or data that do not suit a method."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, error_message, tiny_federation
from fedtailor import methods as m
from support.problem import make_problem

NAN = math.nan
INVALID: list[tuple[type[ft.Method], str, Any, str]] = [  # method, field, value, message
    (m.FedAvg, "lr", 0, "lr must be above 0"),
    (m.FedAvg, "epochs", 0, "epochs must be at least 1"),
    (m.FedAvg, "momentum", 1.0, "momentum must be at least 0 and below 1"),
    (m.FedAvg, "weight_decay", -0.1, "weight_decay must be at least 0"),
    (m.FedAvg, "weights", "equal", "weights must be 'size' or 'uniform'"),
    (m.FedAvgFT, "tuning_epochs", -1, "tuning_epochs must be at least 0"),
    (m.FedProx, "mu", -1, "mu must be at least 0"),
    (m.FedExP, "epsilon", -1.0, "epsilon"),
    (m.FedExP, "weights", "equal", "weights"),
    (m.FedADMM, "rho", 0.0, "rho must be above 0"),
    (m.FedADMM, "server_lr", 0, "server_lr must"),
    (m.FedADMM, "variant", "x", "variant must be"),
    (m.Ditto, "lam", -1, "lam must be at least 0"),
    (m.PFedMe, "lam", -1.0, "lam"),
    (m.PFedMe, "personal_lr", 0.0, "personal_lr"),
    (m.PFedMe, "inner_steps", 0, "inner_steps"),
    (m.PFedMe, "steps", 0, "steps"),
    (m.PFedMe, "beta", -0.5, "beta"),
    (m.FedPHP, "lam", 1.0, "lam must be at least 0 and below 1"),
    (m.FedPHP, "mu", 1.0, "mu must be at least 0 and below 1"),
    (m.FedPHP, "teaching", "words", "teaching must be 'mmd' or 'kd'"),
    (m.FedRoD, "gamma", -1.0, "gamma must be at least 0"),
    (m.LpProj, "p", 0.5, "p must be at least 1"),
    (m.LpProj, "lam", -1.0, "lam must be at least 0"),
    (m.LpProj, "dimension", 0, "dimension must be at least 1"),
    (m.LpProj, "beta", 0.0, "beta must be above 0"),
    (m.LpProj, "repeats", 0, "repeats must be at least 1"),
    (m.FedRep, "head_epochs", -1, "head_epochs must be at least 0"),
    (m.FedBABU, "tuning_epochs", -1, "tuning_epochs must be at least 0"),
    (m.LGFedAvg, "weights", "fisher", "weights must be 'size' or 'uniform'"),
    (m.FedAS, "weights", "best", "weights must be 'fisher' or 'size' or 'uniform'"),
    (m.FedAS, "align_lr", 0.0, "align_lr must be above 0"),
    (m.FedAS, "align_epochs", -1, "align_epochs must be at least 0"),
    (m.FedCAC, "tau", 1.5, "tau must be from 0 to 1"),
    (m.FedCAC, "beta", 0, "beta must be above 0"),
    (m.FedAlt, "epochs", 0, "epochs"),
    (m.FedAlt, "weights", "half", "weights"),
    (m.FedAlt, "momentum", 1.0, "momentum"),
    (m.FedSim, "weights", "half", "weights"),
    (m.FedAlt, "split", 3, "3"),
    (m.FedSim, "split", [], "[]"),
    (m.FedAPM, "split", [], "[]"),
    (m.FedAPM, "rho", 0.0, "rho"),
    (m.FedAPM, "rho", -0.1, "rho"),
    (m.FedAPM, "rho", NAN, "rho"),
    (m.FedAPM, "sigma", -0.1, "sigma"),
    (m.FedAPM, "accuracy_decay", 0.0, "accuracy_decay"),
    (m.FedAPM, "accuracy_decay", 1.0, "accuracy_decay"),
    (m.FedAPM, "accuracy_start", -1.0, "accuracy_start"),
    (m.FedAPM, "accuracy_start", NAN, "accuracy_start"),
    (m.FedAPM, "epochs_personal", 0, "epochs_personal"),
    (m.FedAPM, "epochs_shared", 0, "epochs_shared"),
    (m.FedAPM, "weight_decay", -0.1, "weight_decay"),
    (m.FedAPM, "alpha", "half", "alpha"),
    (m.FedAPM, "start", "there", "start"),
    (m.FedAPM, "order", "never", "order"),
    (m.FedLAG, "personal_layers", -1, "personal_layers"),
    (m.FedLAG, "personal_layers", 1.5, "personal_layers"),
    (m.FedLAG, "threshold", 1.1, "threshold"),
    (m.FedLAG, "threshold", -1.1, "threshold"),
    (m.FedLAG, "threshold", NAN, "threshold"),
    (m.FedLAG, "warmup", -1, "warmup"),
    (m.FedLAG, "layers", "outer", "layers"),
    (m.FedLAG, "weights", "equal", "weights"),
    (m.FedLAG, "lr", 0.0, "lr"),
    (m.LAG, "threshold", NAN, "threshold"),
    (m.LAG, "warmup", -1, "warmup"),
    (m.LAG, "layers", "outer", "layers"),
    (m.LAG, "inner", "fedavg", "inner"),
    (m.LAG, "inner", m.FedAvg, "inner"),
    (m.FedAPA, "weight_lr", -0.1, "weight_lr"),
    (m.FedAPA, "weight_lr", NAN, "weight_lr"),
    (m.FedAPA, "self_weight", 0.0, "self_weight"),
    (m.FedAPA, "self_weight", 1.5, "self_weight"),
    (m.FedAPA, "share", "head", "share"),
    (m.FedAPA, "variant", "text", "variant"),
    (m.FedAPA, "weight_momentum", 1.0, "weight_momentum"),
    (m.FedAPA, "weight_momentum", -0.1, "weight_momentum"),
    (m.FedAMP, "alpha", 0.0, "alpha"),
    (m.FedAMP, "alpha", 2.0, "relative"),
    (m.FedAMP, "sigma", 0.0, "sigma"),
    (m.FedAMP, "lam", -1.0, "lam"),
    (m.FedAMP, "lam", 9.0, "alpha/lr"),
    (m.FedAMP, "attention", "dot", "cosine"),
    (m.FedAMP, "self_weight", 2.0, "self_weight"),
    (m.FedFomo, "models", 0, "models"),
    (m.FedFomo, "explore", 2.0, "explore"),
    (m.FedFomo, "explore_decay", -1.0, "explore_decay"),
    (m.FedFomo, "validation", 1.0, "validation"),
    (m.APPLE, "weight_lr", -1.0, "weight_lr"),
    (m.APPLE, "mu", -1.0, "mu"),
    (m.APPLE, "pull_rounds", 2.0, "pull_rounds"),
    (m.APPLE, "schedule", "linear", "cosine"),
    (m.APPLE, "limit", -1, "limit"),
    (m.FedALA, "weight_lr", -1.0, "weight_lr"),
    (m.FedALA, "layers", 0, "layers"),
    (m.FedALA, "share", 0.0, "share"),
    (m.FedALA, "first_epochs", 0, "first_epochs"),
    (m.PFedHN, "steps", 0, "steps"),
    (m.PFedHN, "hyper_lr", -1.0, "hyper_lr"),
    (m.PFedHN, "clip", 0.0, "clip"),
    (m.PFedHN, "hyper_momentum", 1.0, "hyper_momentum"),
    (m.PFedHN, "hyper_weight_decay", -0.1, "hyper_weight_decay"),
    (m.PFedHN, "hidden", 0, "hidden"),
    (m.PFedLA, "hyper_lr", -1.0, "hyper_lr"),
    (m.PFedLA, "retained", -1, "retained"),
    (m.PFedLA, "normalize", "none", "normalize"),
    (m.PFedLA, "embedding", 0, "embedding"),
    (m.PFedLA, "hidden", 0, "hidden"),
    (m.FedProto, "lam", -1, "lam must be at least 0"),
    (m.FedProto, "answer", "both", "answer must be 'prototypes' or 'head'"),
    (m.FedGH, "server_lr", -0.1, "server_lr must be at least 0"),
    (m.FedGH, "server_batch", 0, "server_batch must be at least 1"),
    (m.FedPAC, "head_lr", 0.0, "head_lr must be above 0"),
    (m.FedPAC, "smallest", 1.5, "smallest must be from 0 to 1"),
    (m.DBE, "kappa", -1.0, "kappa must be at least 0"),
    (m.DBE, "mu", 0.0, "mu must be above 0"),
    (m.FedCP, "lam", -1.0, "lam must be at least 0"),
    (m.FedCP, "tau", 0.0, "tau must be above 0"),
    (m.GPFL, "lam", -1.0, "lam must be at least 0"),
    (m.GPFL, "mu", -1.0, "mu must be at least 0"),
    (m.GPFL, "contexts", "sent", "contexts must be 'received' or 'own'"),
    (m.FedAF, "steps", 0, "steps must be at least 1"),
    (m.FedAF, "gamma", 1.1, "gamma must be from 0 to 1"),
    (m.FedAF, "start", "x", "start must be"),
    (m.FedAF, "tau", 0.0, "tau must be above 0"),
    (m.FedAF, "lr", 0.0, "lr must be above 0"),
    (m.FedAF, "local_weight", -1.0, "local_weight must be at least 0"),
    (m.FedAF, "noise", 0.0, "noise must be above 0, so that no real sample is sent unchanged"),
    (m.PerFedAvg, "inner_lr", -0.1, "inner_lr must be at least 0"),
    (m.PerFedAvg, "adapt_steps", 0, "adapt_steps must be at least 1"),
    (m.PerFedAvg, "hessian", "exact", "hessian must be"),
    (m.PerFedAvg, "delta", 0.0, "delta must be above 0"),
    (m.PerFedAvg, "weights", "x", "weights must be"),
    (m.SelfFL, "max_steps", 0, "max_steps"),
    (m.SelfFL, "default_steps", 0, "default_steps"),
    (m.SelfFL, "minimum_steps", 0, "minimum_steps"),
    (m.SelfFL, "warmup", -1, "warmup"),
    (m.SelfFL, "forgetting", 1.0, "forgetting"),
    (m.SelfFL, "forgetting", -0.1, "forgetting"),
    (m.SelfFL, "likelihood", "total", "likelihood"),
    (m.SelfFL, "clusters", (0, 0, 1, 1, -1), "cluster"),
    (m.SelfFL, "clusters", (0, 0, 2, 2, 2), "cluster"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"), INVALID, ids=[f"{k.__name__}.{f}={v}" for k, f, v, _ in INVALID]
)
def test_method_with_invalid_field_raises(kind: type[ft.Method], field: str, value: Any, message: str) -> None:
    assert message in error_message(lambda: kind(**{field: value}))


def test_fields_that_are_invalid_together_raise() -> None:
    assert "lam must be below" in error_message(lambda: m.LpProj(p=2.0, lam=30.0))
    assert "rho" in error_message(lambda: m.FedAPM(rho=-0.1, duals=False))


SPLIT_METHODS: list[Any] = [m.FedAPM, m.FedAlt, m.FedSim]
UNKNOWN_SPLITS = [
    ("middle", "middle"), ("split_input", "split_input"), (["head", "fc9"], "fc9"), (["fc1", "fc2", "head"], "fc2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (m.FedLAG(personal_layers=3), "personal_layers"),
        (m.LAG(m.FedAvg(), personal_layers=3), "personal_layers"),
        (m.LAG(m.Local()), "Local"),
        (m.LAG(m.FedPer()), "FedPer"),
        (m.LAG(m.LAG(m.FedAvg())), "LAG"),
        (m.PFedLA(retained=4), "at most 3"),
        (m.SelfFL(clusters=(0, 0, 1)), "cluster"),
        (m.SelfFL(clusters=(0, 0, 1, 1, 2, 2)), "cluster"),
        *((kind(split=split), word) for kind in SPLIT_METHODS for split, word in UNKNOWN_SPLITS),
    ],
    ids=str,
)  # fmt: skip
def test_field_that_does_not_suit_federation_raises_before_round_1(method: ft.Method, message: str) -> None:
    """The network has three layers, and there are five clients."""
    records: list[Any] = []
    problem = make_problem()
    run = lambda: ft.simulate(method, problem.net, problem.fed, rounds=1, on_round_end=records.append)  # noqa: E731
    assert message in error_message(run)
    assert not records


# models that do not suit a method


class TiedNet(nn.Module):
    """A network whose head shares its weights with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.fc.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(x)))  # type: ignore[no-any-return]


def make_net_with_deep_head() -> TinyNet:
    net = TinyNet()
    net.head = nn.Sequential(nn.Linear(5, 3))  # type: ignore[assignment]
    return net


NEEDS_CLASSIFIER = [m.FedProto(), m.FedGH(), m.FedPAC(), m.DBE(), m.FedCP(), m.GPFL()]
HEADLESS, DEEP = ft.wrap(TinyNet(), head=None), ft.wrap(make_net_with_deep_head())
REGRESSION = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), head="1", loss="regression")
LINEAR = ft.wrap(nn.Sequential(nn.Linear(4, 3)), head="0")
UNSUITABLE: list[tuple[ft.Method, ft.Model, str]] = [
    *((method, HEADLESS, "head") for method in (m.FedRep(), m.FedBABU(), m.LGFedAvg(), m.FedAS(), m.FedAPA())),
    *((method, HEADLESS, "output") for method in (m.FedAPM(), m.FedAlt(), m.FedSim())),
    (m.PFedHN(local_head=True), HEADLESS, "head"),
    *((method, DEEP, "classification") for method in NEEDS_CLASSIFIER),
    *((method, REGRESSION, "classification") for method in NEEDS_CLASSIFIER[:3]),
    *((method, ft.wrap(TiedNet()), "another layer") for method in (m.FedRoD(), m.FedGH(), m.FedCP())),
    *((kind(split=split), LINEAR, split) for kind in SPLIT_METHODS for split in ("input", "output")),
    (m.FedLAG(personal_layers=1), LINEAR, "personal_layers"),
]


@pytest.mark.parametrize(
    ("method", "model", "message"),
    UNSUITABLE,
    ids=[f"{type(method).__name__}-{message}" for method, _, message in UNSUITABLE],
)
def test_method_with_unsuitable_model_raises(method: ft.Method, model: ft.Model, message: str) -> None:
    assert message in error_message(lambda: ft.simulate(method, model, tiny_federation(), rounds=1))


class TwoInputNet(nn.Module):
    """A network with two input tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(torch.cat([x["a"], x["b"]], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fedaf_with_several_input_tensors_raises(engine: str) -> None:
    x, y = {"a": np.ones((4, 2)), "b": np.ones((4, 2))}, np.array([0, 1, 0, 1])
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=2)
    run = lambda: ft.simulate(m.FedAF(), TwoInputNet(), fed, rounds=1, engine=engine)  # noqa: E731
    assert "inputs must be one tensor" in error_message(run)
