"""Tests of payload sizes, absent rows, and the check for training data in uploads."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.core.batch import Batch
from fedtailor.core.trees import Rows, Tree
from fedtailor.methods import METHODS
from fedtailor.training.channel.payload import count_bytes, mask_absent_rows

Leak = Callable[[ft.ClientContext, list[Batch]], Tensor]


@dataclass(frozen=True)
class Leaky(ft.Method):
    """FedAvg that also uploads a function of the client's batches."""

    leak: Leak = lambda ctx, batches: torch.zeros(1)

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        batches: list[Batch] = []

        def keep(carry: Tree, batch: Batch) -> Tree:
            batches.append(batch)
            return carry

        ctx.scan(keep, {}, epochs=1)
        return state, {"params": message["params"], "extra": self.leak(ctx, batches)}


def inputs(ctx: ft.ClientContext, batches: list[Batch]) -> Tensor:
    return torch.cat([batch.x for batch in batches])[:4]


LEAKS: dict[str, Leak] = {
    "inputs": inputs,
    "a batch": lambda ctx, batches: batches[0].x,
    "one example": lambda ctx, batches: batches[-1].x[0],
    "one example, flat": lambda ctx, batches: batches[0].x[1].flatten(),
    "examples among zeros": lambda ctx, batches: torch.cat([torch.zeros_like(batches[0].x), batches[0].x]),
}


def image_federation(dtype: type = np.float32) -> ft.Federation:
    """Return three clients with images of 3×4, stored as floats or as bytes."""
    random = np.random.default_rng(5)
    x = random.integers(0, 256, (3, 8, 1, 3, 4))
    x = x.astype(np.uint8) if dtype is np.uint8 else (x / 7).astype(dtype)
    y = np.array([0, 1] * 4)
    return ft.Federation.from_arrays([(own, y, own, y) for own in x])


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_leak_check_rejects_training_inputs(leak: str, dtype: type) -> None:
    model = ft.network("logistic", fed := image_federation(dtype))
    with pytest.raises(ft.FedTailorError, match="Leaky would send client 0's training inputs: 'extra'"):
        ft.simulate(Leaky(leak=LEAKS[leak]), model, fed, rounds=1, batch_size=4)


def test_leak_check_rejects_single_example_in_later_round() -> None:
    """Client 1 takes part only in round 3; an upload that differs from an example in one value is accepted."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3, 5, 100)), np.arange(5) % 2
    fed = ft.Federation.from_arrays([(own, y, own, y) for own in x])

    def leak_in_round_3(change: float) -> Leak:
        def leak(ctx: ft.ClientContext, batches: list[Batch]) -> Tensor:
            last_value = torch.zeros(100, dtype=torch.float64).index_fill(0, torch.tensor([99]), 1.0)
            factor = change if ctx.round == 3 and int(ctx.index) == 1 else 1.0
            example: Tensor = batches[0].x[2]
            return example + factor * last_value

        return leak

    settings: dict[str, Any] = {"schedule": [[0, 2], [2], [0, 1, 2]], "dtype": torch.float64, "engine": "sequential"}
    ft.simulate(Leaky(leak=leak_in_round_3(0.5)), ft.network("logistic", fed), fed, **settings)
    with pytest.raises(ft.FedTailorError, match="client 1's training inputs"):
        ft.simulate(Leaky(leak=leak_in_round_3(0.0)), ft.network("logistic", fed), fed, **settings)


def test_leak_check_rejects_raw_bytes() -> None:
    fed = image_federation(np.uint8)
    method = Leaky(leak=lambda ctx, batches: (batches[0].x * 255).round().to(torch.uint8))
    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(method, ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_leak_check_rejects_part_of_several_inputs() -> None:
    x = {"a": np.random.default_rng(0).normal(size=(6, 10)), "b": np.ones((6, 2)), "c": np.arange(6.0)}
    fed = ft.Federation.from_arrays([(x, np.zeros(6, int), x, np.zeros(6, int))], classes=2)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 2)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.head(x["a"])  # type: ignore[no-any-return]

    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x["a"][0]), First(), fed, rounds=1)


@pytest.mark.parametrize(
    "statistic",
    [
        lambda ctx, batches: torch.cat([b.x for b in batches])[:8].mean(0),  # a mean is not an example
        lambda ctx, batches: batches[0].x[:4] * 1.5,
        lambda ctx, batches: torch.zeros(8, 12),  # a constant is not an example
    ],
)
def test_leak_check_accepts_statistics_of_inputs(statistic: Leak) -> None:
    fed = image_federation()
    ft.simulate(Leaky(leak=statistic), ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_leak_check_accepts_single_value_and_rejects_list() -> None:
    """If examples are single values, one equal value is a coincidence; a list of them is not."""
    y = torch.arange(9.0)
    fed = ft.Federation.from_arrays([(y[:, None].clone(), y, y[:, None].clone(), y)])
    model = ft.network("logistic", fed)
    ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x[0]), model, fed, rounds=1)
    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x), model, fed, rounds=1)


def test_count_bytes_counts_payload() -> None:
    """float32 takes 4 bytes, float64 8, and a boolean one bit (rounded up once); there are no headers."""
    stacked = {"a": torch.zeros(3, 5), "b": {"c": torch.zeros(3, 2, dtype=torch.float64)}}
    assert count_bytes(stacked, 3) == [36, 36, 36]
    assert count_bytes(
        {"mask": torch.zeros(2, 3, dtype=torch.bool), "more": torch.zeros(2, 6, dtype=torch.bool)}, 2
    ) == [2, 2]
    assert count_bytes({}, 2) == [0, 0]


def test_absent_rows_are_zero_and_take_no_bytes() -> None:
    present = torch.tensor([[True, False, True], [False, False, False]])
    rows = Rows(torch.ones(2, 3, 4), present)
    assert count_bytes({"prototypes": rows}, 2) == [2 * 4 * 4, 0]
    arrived = mask_absent_rows({"nested": {"prototypes": rows}})["nested"]["prototypes"]
    assert torch.equal(arrived.values, present[:, :, None] * torch.ones(2, 3, 4))


def test_server_receives_zeros_for_absent_rows(net: nn.Module) -> None:
    """The server of a simulation receives no more than that of a deployment."""

    @dataclass(frozen=True)
    class Sums(ft.Method):
        def init_server(self, setup: ft.Setup) -> Tree:
            return {"params": setup.params, "seen": torch.zeros(4, 3, 4, dtype=torch.float64)}

        def send(self, server: Tree, clients: list[int], round: int) -> Tree:  # type: ignore[override]
            return ft.trees.repeat({"params": server["params"]}, len(clients))

        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            classes = torch.arange(3)
            mine = ctx.sum_over_data(lambda b: {"n": ((b.y[:, None] == classes) * b.weight[:, None]).sum(0)})["n"]
            return state, {"sums": Rows(torch.full((3, 4), 9.0, dtype=torch.float64), mine > 0)}

        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return server | {"seen": exchange.received["sums"].values}

    fed = tiny_federation()
    run = ft.simulate(Sums(), net, fed, rounds=1, dtype=torch.float64)
    owned = torch.tensor([fed.class_counts(fed.train[client]) for client in range(4)]) > 0
    assert torch.equal(run.server["seen"], owned[:, :, None] * torch.full((4, 3, 4), 9.0, dtype=torch.float64))
    assert run.records[0]["bytes_up"] == int(owned.sum()) * 4 * 8


MODEL, HEAD, WIDTH, CLASSES, OWNED_CLASSES = 62_006, 850, 84, 10, 2  # LeNet-5 on CIFAR-10 images
BODY = MODEL - HEAD
IMAGE = 3 * 32 * 32
POLICY = 2 * WIDTH**2 + 6 * WIDTH  # parameters of FedCP's policy network
CONDITION = 2 * (WIDTH**2 + 3 * WIDTH)  # parameters of GPFL's conditional network
Cost = float | list[float]  # values of four bytes per client and round: in all rounds, or in rounds 1, 2, ...
ONE_MODEL = ["fedavg", "fedavgft", "fedprox", "fedexp", "fedadmm"]
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
}
FIELDS: dict[str, dict[str, Any]] = {  # fields for the costs above
    "fedfomo": {"models": 2},
    "pfedme": {"steps": 1},  # for speed
    "lpproj": {"dimension": 16},
    "fedaf": {"per_class": 4},
    "fedlag": {"threshold": -1.0},
    "lag": {"threshold": -1.0},
}


@pytest.mark.parametrize("name", METHODS)
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
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 3)
    return ft.simulate(method, ft.network("lenet5", fed), fed, rounds=rounds, evaluate_every=rounds, evaluate=1)


def test_fedlag_does_not_send_personal_layers() -> None:
    """From round 2 on, the last two layers (84 × 10 + 10 and 120 × 84 + 84 values) are not sent to clients."""
    x, y = np.zeros((2, 3, 32, 32), np.uint8), np.array([0, 9])
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 2)
    run = ft.simulate(ft.methods.FedLAG(layers="last"), ft.network("lenet5", fed), fed, rounds=3)
    assert [record["per_client"]["bytes_down"][0] for record in run.records] == [248_024, 203_968, 203_968]
    assert all(record["per_client"]["bytes_up"][1] == 248_024 for record in run.records)


def test_scaffold_controls_exclude_running_statistics() -> None:
    """The controls cover trained parameters; running statistics are sent once, with the model."""
    fed = ft.load("digits", clients=2, partition="iid")
    run = ft.simulate(ft.methods.Scaffold(lr=0.01), ft.network("cnn", fed, norm="batch"), fed, rounds=1)
    trained, statistics = run.info["parameters"], 2 * (16 + 32)
    assert run.records[0]["per_client"]["bytes_up"][0] == 4 * (2 * trained + statistics)
