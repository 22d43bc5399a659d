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
INVALID: dict[type[ft.Method], dict[str, list[Any]]] = {  # method -> field -> invalid values
    m.FedAvg: {"lr": [0], "epochs": [0], "momentum": [1.0], "weight_decay": [-0.1], "weights": ["equal"]},
    m.FedAvgFT: {"tuning_epochs": [-1]},
    m.FedProx: {"mu": [-1]},
    m.FedExP: {"epsilon": [-1.0], "weights": ["equal"]},
    m.FedADMM: {"rho": [0.0], "server_lr": [0], "variant": ["x"]},
    m.Ditto: {"lam": [-1]},
    m.PFedMe: {"lam": [-1.0], "personal_lr": [0.0], "inner_steps": [0], "steps": [0], "beta": [-0.5]},
    m.FedPHP: {"lam": [1.0], "mu": [1.0], "teaching": ["words"]},
    m.FedRoD: {"gamma": [-1.0]},
    m.LpProj: {"p": [0.5], "lam": [-1.0], "dimension": [0], "beta": [0.0], "repeats": [0]},
    m.FedRep: {"head_epochs": [-1]},
    m.FedBABU: {"tuning_epochs": [-1]},
    m.LGFedAvg: {"weights": ["fisher"]},
    m.FedAS: {"weights": ["best"], "align_lr": [0.0], "align_epochs": [-1]},
    m.FedCAC: {"tau": [1.5], "beta": [0]},
    m.FedAlt: {"epochs": [0], "weights": ["half"], "momentum": [1.0], "split": [3]},
    m.FedSim: {"weights": ["half"], "split": [[]]},
    m.FedAPM: {
        "rho": [0.0, -0.1, NAN], "sigma": [-0.1], "accuracy_decay": [0.0, 1.0], "accuracy_start": [-1.0, NAN],
        "epochs_personal": [-1], "epochs_shared": [-1], "weight_decay": [-0.1], "alpha": ["half"], "start": ["there"],
        "order": ["never"], "split": [[]],
    },
    m.FedLAG: {
        "personal_layers": [-1, 1.5], "threshold": [1.1, -1.1, NAN], "warmup": [-1], "layers": ["outer"],
        "weights": ["equal"], "lr": [0.0],
    },
    m.LAG: {"threshold": [NAN], "warmup": [-1], "layers": ["outer"], "inner": ["fedavg", m.FedAvg]},
    m.FedAPA: {
        "weight_lr": [-0.1, NAN], "self_weight": [-0.1, 1.5], "share": ["head"], "variant": ["text"],
        "weight_momentum": [1.0, -0.1],
    },
    m.FedAMP: {"alpha": [0.0, 2.0], "sigma": [0.0], "lam": [-1.0, 9.0], "attention": ["dot"], "self_weight": [2.0]},
    m.FedFomo: {"models": [0], "explore": [2.0], "explore_decay": [-1.0], "validation": [1.0]},
    m.APPLE: {"weight_lr": [-1.0], "mu": [-1.0], "pull_rounds": [2.0], "schedule": ["linear"], "limit": [-1]},
    m.FedALA: {"weight_lr": [-1.0], "layers": [0], "share": [0.0], "first_epochs": [0]},
    m.PFedHN: {
        "steps": [0], "hyper_lr": [-1.0], "clip": [0.0], "hyper_momentum": [1.0], "hyper_weight_decay": [-0.1],
        "hidden": [0],
    },
    m.PFedLA: {"hyper_lr": [-1.0], "retained": [-1], "normalize": ["none"], "embedding": [0], "hidden": [0]},
    m.FedProto: {"lam": [-1], "answer": ["both"]},
    m.FedGH: {"server_lr": [-0.1], "server_batch": [0]},
    m.FedPAC: {"head_lr": [0.0], "smallest": [1.5]},
    m.DBE: {"kappa": [-1.0], "mu": [0.0]},
    m.FedCP: {"lam": [-1.0], "tau": [0.0]},
    m.GPFL: {"lam": [-1.0], "mu": [-1.0], "contexts": ["sent"]},
    m.FedAF: {"steps": [0], "gamma": [1.1], "start": ["x"], "tau": [0.0], "lr": [0.0], "local_weight": [-1.0]},
    m.PerFedAvg: {"inner_lr": [-0.1], "adapt_steps": [0], "hessian": ["exact"], "delta": [0.0], "weights": ["x"]},
    m.SelfFL: {
        "max_steps": [0], "default_steps": [0], "minimum_steps": [0], "warmup": [-1], "forgetting": [1.0, -0.1],
        "likelihood": ["total"], "clusters": [(0, 0, 1, 1, -1), (0, 0, 2, 2, 2)],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", INVALID)
def test_method_with_invalid_field_raises(kind: type[ft.Method]) -> None:
    for field, values in INVALID[kind].items():
        for value in values:
            message = error_message(lambda kwargs={field: value}: kind(**kwargs))  # type: ignore[misc]
            assert message.startswith(f"{kind.__name__}: {field} must be "), value


def test_fields_that_are_invalid_together_raise() -> None:
    assert "lam must be below" in error_message(lambda: m.LpProj(p=2.0, lam=30.0))
    assert "rho" in error_message(lambda: m.FedAPM(rho=-0.1, duals=False))
    assert "nothing is trained" in error_message(lambda: m.FedAPM(epochs_personal=0, epochs_shared=0))
    assert "nothing is trained" in error_message(lambda: m.FedAPM(epochs_shared=0, order="together"))
    assert "if distances are relative" in error_message(lambda: m.FedAMP(alpha=2.0))
    assert "from 0 to alpha/lr" in error_message(lambda: m.FedAMP(lam=9.0))
    assert "above 0, so that no real sample is sent unchanged" in error_message(lambda: m.FedAF(noise=0.0))


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
