"""Tests of payload sizes and absent rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import FEDERATED, tiny_federation
from fedtailor.core.trees import Rows, Tree
from fedtailor.methods import METHODS
from fedtailor.training.channel.payload import count_bytes, mask_absent_rows


def test_count_bytes_counts_payload() -> None:
    """float32 takes 4 bytes, float64 8, and a boolean one bit (rounded up once); there are no headers."""
    stacked = {"a": torch.zeros(3, 5), "b": {"c": torch.zeros(3, 2, dtype=torch.float64)}}
    assert count_bytes(stacked, 3) == [36, 36, 36] and count_bytes({}, 2) == [0, 0]
    masks = {f"mask {size}": torch.zeros(2, size, dtype=torch.bool) for size in (3, 6)}
    assert count_bytes(masks, 2) == [2, 2]
    present = torch.tensor([[True, False, True], [False, False, False]])
    rows = Rows(torch.ones(2, 3, 4), present)
    assert count_bytes({"prototypes": rows}, 2) == [2 * 4 * 4, 0]  # absent rows take no bytes
    arrived = mask_absent_rows({"nested": {"prototypes": rows}})["nested"]["prototypes"]
    assert torch.equal(arrived.values, present[:, :, None] * torch.ones(2, 3, 4))


def test_absent_rows_arrive_as_zeros_at_server_and_clients(net: nn.Module) -> None:
    """The server and the clients of a simulation receive no more than those of a deployment."""
    nines = torch.full((4, 3, 4), 9.0, dtype=torch.float64)
    first_rows = torch.arange(3) <= torch.arange(4)[:, None]  # client 0 is sent one row, client 1 two

    @dataclass(frozen=True)
    class Tables(ft.Method):
        def init_server(self, setup: ft.Setup) -> Tree:
            return {"params": setup.params, "uploaded": nines, "sent": nines}

        def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
            table = Rows(nines[clients], first_rows[clients])
            return ft.trees.repeat({"params": server["params"]}, len(clients)) | {"table": table}

        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            counts = ctx.sum_over_data(lambda b: {"n": ((b.y[:, None] == torch.arange(3)) * b.weight[:, None]).sum(0)})
            return state, {"own": Rows(nines[0], counts["n"] > 0), "sent": message["table"].values}

        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return server | {"uploaded": exchange.received["own"].values, "sent": exchange.received["sent"]}

    fed = tiny_federation()
    run = ft.simulate(Tables(), net, fed, rounds=1, dtype=torch.float64)
    owned = torch.tensor([fed.class_counts(fed.train[client]) for client in range(4)]) > 0
    assert torch.equal(run.server["uploaded"], owned[:, :, None] * nines)
    assert torch.equal(run.server["sent"], first_rows[:, :, None] * nines)
    assert run.records[0]["bytes_up"] == int(owned.sum()) * 4 * 8 + nines.nbytes


MODEL, HEAD, WIDTH, CLASSES, OWNED_CLASSES = 62_006, 850, 84, 10, 2  # LeNet-5 on CIFAR-10 images
BODY = MODEL - HEAD
IMAGE = 3 * 32 * 32
POLICY = 2 * WIDTH**2 + 6 * WIDTH  # parameters of FedCP's policy network
CONDITION = 2 * (WIDTH**2 + 3 * WIDTH)  # parameters of GPFL's conditional network
Cost = float | list[float]  # values of four bytes per client and round: in all rounds, or in rounds 1, 2, ...
ONE_MODEL = ["fedavg", "fedavgft", "fedprox", "fedexp", "fedadmm", "fedadam", "fedyogi", "fedadagrad"]
OWN_MODEL = ["ditto", "pfedme", "fedphp", "fedala", "perfedavg", "fedamp", "pfedla", "pfedhn"]
SHARED_BODY = ["fedper", "fedrep", "fedbabu", "fedalt", "fedsim", "fedapa", "fedapm"]
# method -> (down, up), for three clients with two classes each; prototypes of other classes are not sent
TABLE: dict[str, tuple[Cost, Cost]] = {
    "local": (0, 0),
    **dict.fromkeys([*ONE_MODEL, *OWN_MODEL], (MODEL, MODEL)),
    **dict.fromkeys(SHARED_BODY, (BODY, BODY)),
    "scaffold": (2 * MODEL, 2 * MODEL),
    "lgfedavg": (HEAD, HEAD),
    "fedbn": (MODEL, MODEL),  # LeNet-5 has no batch normalization
    "fedrod": (MODEL, MODEL),
    "fedas": (BODY, BODY + 1),
    "fedpac": (
        [MODEL, MODEL + OWNED_CLASSES * WIDTH],  # first no prototypes, then those of all known classes
        MODEL + OWNED_CLASSES * WIDTH + CLASSES * WIDTH + CLASSES + 1,
    ),
    "fedproto": ([0, OWNED_CLASSES * WIDTH], OWNED_CLASSES * WIDTH + OWNED_CLASSES),
    "fedgh": (HEAD, OWNED_CLASSES * WIDTH),
    "dbe": ([MODEL, MODEL + WIDTH, MODEL], [MODEL + WIDTH, MODEL, MODEL]),
    "fedcp": (MODEL + POLICY, MODEL + POLICY),
    "gpfl": (BODY + CLASSES * WIDTH + CONDITION, BODY + CLASSES * WIDTH + CONDITION),
    "fedcac": (MODEL, MODEL + MODEL / 32),
    "apple": (2 * MODEL, MODEL),
    "fedfomo": (2 * MODEL, MODEL + 2),
    "lpproj": (16, 16),
    "fedaf": (MODEL + CLASSES * CLASSES, OWNED_CLASSES * (4 * IMAGE + 2 * CLASSES)),
    "selffl": (MODEL + 2, MODEL + 1),
    "fedlag": (MODEL, MODEL),  # no conflicts here; see below
    "lag": (MODEL, MODEL),
    "averaged": (MODEL, MODEL),  # around FedAvg
}
FIELDS: dict[str, dict[str, Any]] = {  # fields for the costs above
    "fedfomo": {"models": 2},
    "pfedme": {"steps": 1},  # for speed
    "lpproj": {"dimension": 16},
    "fedaf": {"per_class": 4},
    "fedlag": {"threshold": -1.0},
    "lag": {"threshold": -1.0},
}


@pytest.mark.parametrize("name", FEDERATED)
def test_method_bytes_match_cost_table(name: str) -> None:
    """Costs for a model of 62,006 parameters; FedAvg sends 484.4 KiB both ways."""
    fields = FIELDS.get(name, {})
    rounds = max(len(cost) if isinstance(cost, list) else 2 for cost in TABLE[name])
    down, up = (cost if isinstance(cost, list) else [cost] * rounds for cost in TABLE[name])
    for record, *costs in zip(train_lenet(METHODS[name](**fields), rounds).records, down, up, strict=True):
        for direction, cost in zip(("bytes_down", "bytes_up"), costs, strict=True):
            assert record["per_client"][direction] == dict.fromkeys(range(3), ceil(4 * cost))
            assert record[direction] == 3 * ceil(4 * cost)


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (ft.methods.FedAPA(share="all"), MODEL, MODEL),
        (ft.methods.FedAPM(split=("conv1", "head")), BODY - 456, BODY - 456),
        (ft.methods.SelfFL(default_steps=1, minimum_steps=1, augmented=True), MODEL + 2, 2 * MODEL + 1),
    ],
)
def test_method_bytes_with_other_settings(method: ft.Method, down: int, up: int) -> None:
    for record in train_lenet(method).records:
        assert record["per_client"]["bytes_down"][0] == 4 * down and record["per_client"]["bytes_up"][0] == 4 * up


def train_lenet(method: ft.Method, rounds: int = 2) -> ft.Run:
    """Train LeNet-5 on three clients with one image of each of two classes."""
    x, y = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8), np.array([0, 9])
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 3, classes=10)
    return ft.simulate(method, ft.network("lenet5", fed), fed, rounds=rounds, evaluate_every=rounds, evaluate=1)


def test_fedlag_does_not_send_personal_layers() -> None:
    """From round 2 on, the last two layers (84 × 10 + 10 and 120 × 84 + 84 values) are not sent to clients."""
    x, y = np.zeros((2, 3, 32, 32), np.uint8), np.array([0, 9])
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 2, classes=10)
    run = ft.simulate(ft.methods.FedLAG(layers="last"), ft.network("lenet5", fed), fed, rounds=3)
    assert [record["per_client"]["bytes_down"][0] for record in run.records] == [248_024, 203_968, 203_968]
    assert all(record["per_client"]["bytes_up"][1] == 248_024 for record in run.records)


def test_scaffold_controls_exclude_running_statistics() -> None:
    """The controls cover trained parameters; running statistics are sent once, with the model."""
    fed = ft.load("digits", clients=2, partition="iid")
    run = ft.simulate(ft.methods.Scaffold(lr=0.01), ft.network("cnn", fed, norm="batch"), fed, rounds=1)
    trained, statistics = run.info["parameters"], 2 * (16 + 32)
    assert run.records[0]["per_client"]["bytes_up"][0] == 4 * (2 * trained + statistics)
