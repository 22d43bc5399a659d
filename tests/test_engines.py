"""Every engine computes what the sequential one does: every method, clients of very different sizes, one of them with a
single sample, partial participation, every kind of layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SOME, TinyNet, refusal, tiny_federation
from fedtailor.engines import ENGINES, Way
from fedtailor.engines.capture import Replay
from fedtailor.engines.vectorized import cut
from fedtailor.methods import LAG, METHODS, FedAPA, FedAvg, FedPer, Scaffold, SelfFL
from fedtailor.run import name_of
from fedtailor.simulate import describe
from fedtailor.together import one_after_another
from fedtailor.trees import Params, Tree, flatten

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OTHERS = [(engine, device) for device in DEVICES for engine in ENGINES if engine != "sequential"]
OTHERS = [(engine, device) for engine, device in OTHERS if (engine, device) != ("pool", "cuda")]
SIZES = (30, 4, 17, 1, 41)  # of training samples
PLAN = [[0, 1, 2, 3, 4], [1, 3], [0, 2, 4]]  # all; then some, and some who were away
EVERY: list[ft.Method] = [
    *(kind() for kind in METHODS.values()),
    LAG(inner=Scaffold()),
    FedAPA(share="all", variant="code"),
    SelfFL(warmup=0, augmented=True, minimum_steps=5),
]
ON_OTHERS = [
    pytest.param(
        method,
        engine,
        device,
        id=f"{name_of(describe(method))}-{engine}-{device}",
        marks=() if name_of(describe(method)) in SOME else pytest.mark.slow,
    )
    for method in EVERY
    for engine, device in OTHERS
]


class Pictures(nn.Module):
    """Convolutions, pooling, normalisation over groups, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, bias=False)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        return self.head(self.drop(torch.relu(self.conv2(x)).mean((2, 3))))  # type: ignore[no-any-return]


class Statistics(TinyNet):
    """With batch normalisation, whose statistics are recomputed after training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.fc(x))))  # type: ignore[no-any-return]


def pictures(sizes: Sequence[int] = SIZES) -> ft.Federation:
    """Small pictures in bytes."""
    random = np.random.default_rng(0)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8), random.integers(0, 3, count)

    return ft.Federation.from_arrays([(*some(size), *some(3)) for size in sizes], classes=3)


def run(
    method: ft.Method,
    net: nn.Module,
    fed: ft.Federation,
    engine: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> ft.Run:
    settings = {"schedule": PLAN} | settings
    return ft.simulate(method, net, fed, batch_size=3, engine=engine, device=device, dtype=dtype, **settings)


def everything(run: ft.Run) -> Params:
    """All that a run ends with: the server, what clients keep, their models."""
    clients = range(run.num_clients)
    own = {str(c): {"keeps": run.client(c), "has": run.personal(c)} for c in clients}
    return {name: leaf.cpu() for name, leaf in flatten({"server": run.server, "clients": own}).items()}


def farthest(one: ft.Run, other: ft.Run) -> float:
    """The largest difference of two runs, relative to the largest number of its tensor."""
    a, b = everything(one), everything(other)
    assert a.keys() == b.keys()
    distances = [
        float((a[name].double() - b[name].double()).abs().max() / a[name].double().abs().max().clamp(min=1e-30))
        for name in a
        if a[name].numel()
    ]
    return float(torch.tensor(distances).max())  # NaN, if one is


def fresh(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize(("method", "engine", "device"), ON_OTHERS)
def test_every_method_is_the_same_on_every_engine(method: ft.Method, engine: str, device: str) -> None:
    fed, net = tiny_federation(SIZES), fresh(TinyNet)
    for dtype, close in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        alone, other = (run(method, net, fed, e, device=device, dtype=dtype) for e in ("sequential", engine))
        assert farthest(alone, other) < close
    for mine, theirs in zip(alone.records, other.records, strict=True):  # and they say the same of themselves
        assert mine["bytes_up"] == theirs["bytes_up"] and mine["bytes_down"] == theirs["bytes_down"]
        assert mine["loss_trained"] == pytest.approx(theirs["loss_trained"], rel=1e-3)
        assert mine["per_client"].keys() == theirs["per_client"].keys()


@pytest.mark.parametrize(("engine", "device"), OTHERS)
@pytest.mark.parametrize("kind", [Pictures, Statistics])
@pytest.mark.parametrize("method", [FedAvg(momentum=0.5, weight_decay=0.01), FedPer(), SelfFL(warmup=0)])
def test_every_layer_is_the_same_on_every_engine(
    method: ft.Method, kind: type[nn.Module], engine: str, device: str
) -> None:
    fed = pictures() if kind is Pictures else tiny_federation(SIZES)
    alone, other = (run(method, fresh(kind), fed, e, device=device) for e in ("sequential", engine))
    assert farthest(alone, other) < 1e-9


@pytest.mark.parametrize(("engine", "device"), OTHERS)
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_the_same_run_twice_gives_the_same_bits(engine: str, device: str, chunk: int | None) -> None:
    chunk = chunk if engine == "vectorized" else None
    once, again = (
        run(SelfFL(), fresh(Pictures), pictures(), engine, device=device, dtype=torch.float32, chunk=chunk)
        for _ in range(2)
    )
    assert farthest(once, again) == 0.0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_how_clients_are_cut_changes_nothing(chunk: int) -> None:
    fed, net = pictures(), fresh(Pictures)
    alone, cut_up = run(FedPer(), net, fed, "sequential"), run(FedPer(), net, fed, "vectorized", chunk=chunk)
    assert farthest(alone, cut_up) < 1e-9
    assert cut_up.info["chunk"] == chunk


class Taps(nn.Module):
    """Uses a part of its own nn.Sequential, and dropout where samples are not the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        tap = self.layers[:2](x).mean((2, 3))
        return self.head(self.drop(torch.cat([self.layers(x), tap], 1).T).T)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("engine", "device"), OTHERS)
def test_a_model_may_use_its_layers_as_it_likes(engine: str, device: str) -> None:
    alone, other = (run(FedAvg(), fresh(Taps), pictures(), e, device=device) for e in ("sequential", engine))
    assert farthest(alone, other) < 1e-9


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_change_in_place_is_refused(engine: str) -> None:
    @dataclass(frozen=True)
    class Careless(FedAvg):
        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            message["params"]["head.bias"].mul_(0.5)
            return state, message

    words = refusal(lambda: run(Careless(), fresh(TinyNet), tiny_federation((3,)), engine, schedule=[[0]]))
    assert "'params/head.bias' in place" in words


def test_a_replayed_step_sees_its_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One captured step writes over the state it reads, leaf by leaf: one that hands a leaf on must not notice."""

    class Played:
        def __init__(self, step: Callable[[], None]) -> None:
            self.replay = step

    monkeypatch.setattr(Replay, "_capture", lambda self, step: Played(step))

    def advance(state: Tree, number: int | Tensor) -> Tree:
        return {"now": state["now"] + number, "before": state["now"]}

    start = {"now": torch.tensor(1.0), "before": torch.tensor(0.0)}
    for _ in range(2):  # the first time, a step warms up
        state = {name: leaf.clone() for name, leaf in start.items()}
        expected = one_after_another(advance, state, 0, 9)
        assert Replay(torch.device("cpu"))(advance, state, 0, 9) == expected


def test_clients_with_few_batches_do_not_wait_for_those_with_many() -> None:
    """A chunk takes as many steps as its longest client: one that is fifty times as long is left to itself."""
    chunks = cut((1, 1, 50, *[1] * 17), most=100)
    assert sorted(len(chunk) for chunk in chunks) == [1, 19]
    assert sorted(position for chunk in chunks for position in chunk) == list(range(20))
    assert max(len(chunk) for chunk in cut((3,) * 10, most=4)) <= 4


def test_a_cohort_larger_than_memory_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, net = pictures(), fresh(Pictures)
    whole = run(FedAvg(), net, fed, "vectorized")
    assert whole.info["chunk"] > 2
    monkeypatch.setattr("fedtailor.trial.total_memory", lambda device: 4 * 8 * 3 * 2000)
    cut_up = run(FedAvg(), net, fed, "vectorized")
    assert cut_up.info["chunk"] == 1
    assert farthest(whole, cut_up) < 1e-9


class Branching(TinyNet):
    """Asks a tensor for a number, which nobody can answer for many clients at once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_that_cannot_be_mapped_is_named() -> None:
    words = refusal(lambda: run(FedAvg(), fresh(Branching), tiny_federation(SIZES), "vectorized"))
    assert "many clients at once" in words and "'auto'" in words


def test_auto_falls_back_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.engines.choice._SHORT", 0.0)
    fed, plan = tiny_federation((3,) * 70), [[0], list(range(70))]
    found = run(FedAvg(), fresh(Branching), fed, "auto", schedule=plan)
    assert found.info["engine"] in ("pool", "sequential")
    assert found.info["engine_why"].count("many clients at once") == 1
    assert farthest(found, run(FedAvg(), fresh(Branching), fed, "sequential", schedule=plan)) < 1e-12


@pytest.mark.parametrize("fast", ENGINES)
def test_auto_takes_the_fastest_and_says_why(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    monkeypatch.setattr("fedtailor.engines.choice._SHORT", 0.0)
    monkeypatch.setattr(
        "fedtailor.engines.choice.Trial._seconds",
        lambda self, way, clients, batches: 0.05 if way.engine == fast else 0.5,
    )
    found = run(FedAvg(), fresh(TinyNet), tiny_federation(SIZES), "auto")
    assert found.info["engine"] == fast
    assert found.info["engine_why"].startswith(f"Milliseconds a client and batch: {fast}")


def test_a_short_run_is_not_worth_trying_others() -> None:
    found = run(FedAvg(), fresh(TinyNet), tiny_federation(SIZES), "auto")
    assert found.info["engine"] == "sequential" and "too little to try others" in found.info["engine_why"]


def test_chunk_belongs_to_vectorized() -> None:
    fed, net = tiny_federation(SIZES), fresh(TinyNet)
    assert "'pool' has no use for it" in refusal(lambda: run(FedAvg(), net, fed, "pool", chunk=2))
    assert "name that engine" in refusal(lambda: run(FedAvg(), net, fed, "auto", chunk=2))
    assert "at least 1" in refusal(lambda: run(FedAvg(), net, fed, "vectorized", chunk=0))
    assert str(Way("vectorized", chunk=3)) == "vectorized (3 at once)"
