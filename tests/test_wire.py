"""Bytes, absent rows, and uploads that would carry training data."""

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
from fedtailor.batch import Batch
from fedtailor.methods import METHODS
from fedtailor.trees import Rows, Tree
from fedtailor.wire import count_bytes, deliver

Leak = Callable[[ft.LocalView, list[Batch]], Tensor]


@dataclass(frozen=True)
class Leaky(ft.Method):
    """FedAvg that also uploads something a function makes from the client's batches."""

    leak: Leak = lambda local, batches: torch.zeros(1)

    def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        batches: list[Batch] = []

        def keep(carry: Tree, batch: Batch) -> Tree:
            batches.append(batch)
            return carry

        local.fold(keep, {}, epochs=1)
        return state, {"params": message["params"], "extra": self.leak(local, batches)}


def inputs(local: ft.LocalView, batches: list[Batch]) -> Tensor:
    return torch.cat([batch.x for batch in batches])[:4]


LEAKS: dict[str, Leak] = {
    "inputs": inputs,
    "a batch": lambda local, batches: batches[0].x,
    "one example": lambda local, batches: batches[-1].x[0],
    "one example, flat": lambda local, batches: batches[0].x[1].flatten(),
    "examples among zeros": lambda local, batches: torch.cat([torch.zeros_like(batches[0].x), batches[0].x]),
}


def pictures(dtype: type = np.float32) -> ft.Federation:
    """Three clients with pictures of 3×4 of their own, kept as floats or as bytes."""
    random = np.random.default_rng(5)
    x = random.integers(0, 256, (3, 8, 1, 3, 4))
    x = x.astype(np.uint8) if dtype is np.uint8 else (x / 7).astype(dtype)
    y = np.array([0, 1] * 4)
    return ft.Federation.from_arrays([(own, y, own, y) for own in x])


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("kept", [np.uint8, np.float32, np.float64])
def test_an_upload_of_training_inputs_is_refused(leak: str, kept: type) -> None:
    model = ft.network("logistic", fed := pictures(kept))
    with pytest.raises(ft.Refused, match="Leaky would send client 0's training inputs: 'extra'"):
        ft.simulate(Leaky(leak=LEAKS[leak]), model, fed, rounds=1, batch_size=4)


def test_one_example_of_many_values_is_refused_in_any_round() -> None:
    """Also of a client that comes late, after others were seen; what differs from it in a single value is none."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3, 5, 100)), np.arange(5) % 2
    fed = ft.Federation.from_arrays([(own, y, own, y) for own in x])

    def late(change: float) -> Leak:
        def leak(local: ft.LocalView, batches: list[Batch]) -> Tensor:
            unlike = torch.zeros(100, dtype=torch.float64).index_fill(0, torch.tensor([99]), 1.0)
            change_it = change if local.round == 3 and int(local.index) == 1 else 1.0
            example: Tensor = batches[0].x[2]
            return example + change_it * unlike

        return leak

    settings: dict[str, Any] = {"schedule": [[0, 2], [2], [0, 1, 2]], "dtype": torch.float64, "engine": "sequential"}
    ft.simulate(Leaky(leak=late(0.5)), ft.network("logistic", fed), fed, **settings)
    with pytest.raises(ft.Refused, match="client 1's training inputs"):
        ft.simulate(Leaky(leak=late(0.0)), ft.network("logistic", fed), fed, **settings)


def test_raw_bytes_are_refused_too() -> None:
    fed = pictures(np.uint8)
    method = Leaky(leak=lambda local, batches: (batches[0].x * 255).round().to(torch.uint8))
    with pytest.raises(ft.Refused, match="training inputs"):
        ft.simulate(method, ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_a_part_of_several_inputs_is_refused() -> None:
    x = {"a": np.random.default_rng(0).normal(size=(6, 10)), "b": np.ones((6, 2)), "c": np.arange(6.0)}
    fed = ft.Federation.from_arrays([(x, np.zeros(6, int), x, np.zeros(6, int))], classes=2)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 2)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.head(x["a"])  # type: ignore[no-any-return]

    with pytest.raises(ft.Refused, match="training inputs"):
        ft.simulate(Leaky(leak=lambda local, batches: batches[0].x["a"][0]), First(), fed, rounds=1)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda local, batches: torch.cat([b.x for b in batches])[:8].mean(0),  # a mean is no example
        lambda local, batches: batches[0].x[:4] * 1.5,
        lambda local, batches: torch.zeros(8, 12),  # constant: nobody's picture
    ],
)
def test_what_only_depends_on_inputs_passes(harmless: Leak) -> None:
    fed = pictures()
    ft.simulate(Leaky(leak=harmless), ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_a_mean_over_one_number_is_no_leak() -> None:
    """Where an example is a single number, one equal number is chance; a list of them is not."""
    y = torch.arange(9.0)
    fed = ft.Federation.from_arrays([(y[:, None].clone(), y, y[:, None].clone(), y)])
    model = ft.network("logistic", fed)
    ft.simulate(Leaky(leak=lambda local, batches: batches[0].x[0]), model, fed, rounds=1)
    with pytest.raises(ft.Refused, match="training inputs"):
        ft.simulate(Leaky(leak=lambda local, batches: batches[0].x), model, fed, rounds=1)


def test_bytes_are_payload() -> None:
    """float32 4 bytes, float64 8, bools one bit (rounded up once), no headers; an empty message is free."""
    stacked = {"a": torch.zeros(3, 5), "b": {"c": torch.zeros(3, 2, dtype=torch.float64)}}
    assert count_bytes(stacked, 3) == [36, 36, 36]
    assert count_bytes(
        {"mask": torch.zeros(2, 3, dtype=torch.bool), "more": torch.zeros(2, 6, dtype=torch.bool)}, 2
    ) == [2, 2]
    assert count_bytes({}, 2) == [0, 0]


def test_absent_rows_are_neither_sent_nor_counted() -> None:
    present = torch.tensor([[True, False, True], [False, False, False]])
    rows = Rows(torch.ones(2, 3, 4), present)
    assert count_bytes({"prototypes": rows}, 2) == [2 * 4 * 4, 0]
    arrived = deliver({"deep": {"prototypes": rows}})["deep"]["prototypes"]
    assert torch.equal(arrived.values, present[:, :, None] * torch.ones(2, 3, 4))


def test_rows_arrive_as_zeros_where_absent(net: nn.Module) -> None:
    """A server cannot read from simulation memory what a real client would not have sent."""

    @dataclass(frozen=True)
    class Sums(ft.Method):
        def init_server(self, setup: ft.Setup) -> Tree:
            return {"params": setup.params, "seen": torch.zeros(4, 3, 4, dtype=torch.float64)}

        def send(self, server: Tree, clients: list[int], round: int) -> Tree:  # type: ignore[override]
            return ft.trees.repeat({"params": server["params"]}, len(clients))

        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            classes = torch.arange(3)
            mine = local.total(lambda b: {"n": ((b.y[:, None] == classes) * b.weight[:, None]).sum(0)})["n"]
            return state, {"sums": Rows(torch.full((3, 4), 9.0, dtype=torch.float64), mine > 0)}

        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            return server | {"seen": exchange.received["sums"].values}

    fed = tiny_federation()
    run = ft.simulate(Sums(), net, fed, rounds=1, dtype=torch.float64)
    owned = torch.tensor([fed.class_counts(fed.train[client]) for client in range(4)]) > 0
    assert torch.equal(run.server["seen"], owned[:, :, None] * torch.full((4, 3, 4), 9.0, dtype=torch.float64))
    assert run.records[0]["bytes_up"] == int(owned.sum()) * 4 * 8


MODEL, HEAD, WIDTH, CLASSES, OWNED = 62_006, 850, 84, 10, 2  # numbers of LeNet-5 on CIFAR-10 pictures
BODY = MODEL - HEAD
PICTURE = 3 * 32 * 32
POLICY, CONDITION = 2 * WIDTH**2 + 6 * WIDTH, 2 * (WIDTH**2 + 3 * WIDTH)  # FedCP's network, GPFL's
Cost = float | list[float]  # numbers of four bytes in a round: in all rounds, or in the first, second and third
ONE_MODEL = ["fedavg", "fedavgft", "fedprox", "fedexp", "fedadmm"]
OWN_MODEL = ["ditto", "pfedme", "fedphp", "fedala", "perfedavg", "fedamp", "pfedla", "pfedhn"]
SHARED_BODY = ["fedper", "fedrep", "fedbabu", "fedalt", "fedsim", "fedapa", "fedapm"]
# method -> down, up; of three clients with two of the classes each: prototypes of the others neither exist nor cross
TABLE: dict[str, tuple[Cost, Cost]] = {
    "local": (0, 0),
    **dict.fromkeys([*ONE_MODEL, *OWN_MODEL], (MODEL, MODEL)),
    **dict.fromkeys(SHARED_BODY, (BODY, BODY)),
    "scaffold": (2 * MODEL, 2 * MODEL),
    "lgfedavg": (HEAD, HEAD),
    "fedbn": (MODEL, MODEL),  # there is no batch normalisation here
    "fedrod": (MODEL, MODEL),
    "fedas": (BODY, BODY + 1),
    "fedpac": (
        [MODEL, MODEL + OWNED * WIDTH, MODEL + OWNED * WIDTH],  # no prototypes yet; then of the classes that anyone has
        MODEL + OWNED * WIDTH + CLASSES * WIDTH + CLASSES + 1,
    ),
    "fedproto": ([0, OWNED * WIDTH, OWNED * WIDTH], OWNED * WIDTH + OWNED),
    "fedgh": (HEAD, OWNED * WIDTH),
    "dbe": ([MODEL, MODEL + WIDTH, MODEL], [MODEL + WIDTH, MODEL, MODEL]),
    "fedcp": (MODEL + POLICY, MODEL + POLICY),
    "gpfl": (BODY + CLASSES * WIDTH + CONDITION, BODY + CLASSES * WIDTH + CONDITION),
    "fedcac": (MODEL, MODEL + MODEL / 32),
    "apple": (2 * MODEL, MODEL),
    "fedfomo": (2 * MODEL, MODEL + 2),
    "lpproj": (16, 16),
    "fedaf": (MODEL + CLASSES * CLASSES, OWNED * (4 * PICTURE + 2 * CLASSES)),
    "selffl": (MODEL + 2, MODEL + 1),
    "fedlag": (MODEL, MODEL),  # nobody conflicts here; see below
    "lag": (MODEL, MODEL),
}
FIELDS: dict[str, dict[str, Any]] = {  # what the costs above take for granted
    "fedfomo": {"models": 2},
    "lpproj": {"dimension": 16},
    "fedaf": {"per_class": 4},
    "fedlag": {"threshold": -1.0},
    "lag": {"threshold": -1.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_bytes_of_every_method(name: str) -> None:
    """The table of communication costs, for a model of 62,006 parameters: FedAvg 484.4 KiB both ways."""
    fields = FIELDS.get(name, {})
    down, up = (cost if isinstance(cost, list) else [cost] * 3 for cost in TABLE[name])
    for record, *costs in zip(three_rounds(METHODS[name](**fields)).records, down, up, strict=True):
        for way, cost in zip(("bytes_down", "bytes_up"), costs, strict=True):
            assert record["per_client"][way] == dict.fromkeys(range(3), ceil(4 * cost))
            assert record[way] == 3 * ceil(4 * cost)


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (ft.methods.FedAPA(share="all"), MODEL, MODEL),
        (ft.methods.FedAPM(split=("conv1", "head")), BODY - 456, BODY - 456),
        (ft.methods.SelfFL(default_steps=1, minimum_steps=1, augmented=True), MODEL + 2, 2 * MODEL + 1),
    ],
)
def test_bytes_of_other_settings(method: ft.Method, down: int, up: int) -> None:
    for record in three_rounds(method).records:
        assert record["per_client"]["bytes_down"][0] == 4 * down and record["per_client"]["bytes_up"][0] == 4 * up


def three_rounds(method: ft.Method) -> ft.Run:
    """Of LeNet-5 with three clients who have two pictures of two classes each."""
    x, y = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8), np.array([0, 9])
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 3)
    return ft.simulate(method, ft.network("lenet5", fed), fed, rounds=3, evaluate_every=3, evaluate=1)


def test_fedlag_does_not_send_personal_layers() -> None:
    """From round 2 on the last two layers stay, 84 × 10 + 10 and 120 × 84 + 84 numbers; uploads are whole models."""
    x, y = np.zeros((2, 3, 32, 32), np.uint8), np.array([0, 9])
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 2)
    run = ft.simulate(ft.methods.FedLAG(layers="last"), ft.network("lenet5", fed), fed, rounds=3)
    assert [record["per_client"]["bytes_down"][0] for record in run.records] == [248_024, 203_968, 203_968]
    assert all(record["per_client"]["bytes_up"][1] == 248_024 for record in run.records)


def test_scaffold_corrects_gradients_and_not_running_statistics() -> None:
    """Its controls cover what is trained: batch statistics cross once, with the model."""
    fed = ft.load("digits", clients=2, partition="iid")
    run = ft.simulate(ft.methods.Scaffold(lr=0.01), ft.network("cnn", fed, norm="batch"), fed, rounds=1)
    trained, statistics = run.info["parameters"], 2 * (16 + 32)
    assert run.records[0]["per_client"]["bytes_up"][0] == 4 * (2 * trained + statistics)
