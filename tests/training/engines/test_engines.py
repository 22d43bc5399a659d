"""Tests that the vectorized engine gives the results of the sequential one, and which engine `auto` chooses.

They cover clients of very different sizes (one with a single sample), partial participation, and many layers.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, error_message, same, tiny_federation
from fedtailor.core.trees import Params, Tree, flatten
from fedtailor.core.vmap_context import sequential_loop
from fedtailor.methods import DBE, LAG, FedAPA, FedAvg, FedPer, FedProto, FedRep, Scaffold, SelfFL
from fedtailor.training.engines import ENGINES, EngineChoice
from fedtailor.training.engines.auto import EngineBenchmark
from fedtailor.training.engines.cuda_graph import CudaGraphLoop
from fedtailor.training.engines.vectorized import Vectorized, make_chunks
from support.contexts import make_engine

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
SIZES = (30, 4, 17, 1, 41)  # training samples per client
SCHEDULE = [[0, 1, 2, 3, 4], [1, 3], [0, 2, 4]]  # full, then partial participation
METHODS_BY_CODE_PATH: list[ft.Method] = [  # test_contract.py compares all methods under vmap, test_pool.py in a pool
    Scaffold(),  # client states
    FedPer(),  # personal heads
    FedProto(),  # tables with absent rows
    FedAPA(share="all", variant="code"),  # sequential clients and a message per client
    LAG(inner=Scaffold()),  # a wrapped method
    SelfFL(warmup=0, augmented=True, minimum_steps=5),  # a different number of steps per client
]


class ConvNet(nn.Module):
    """Convolutions, pooling, group normalization, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, bias=False)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        return self.head(self.drop(torch.relu(self.conv2(x)).mean((2, 3))))  # type: ignore[no-any-return]


class BatchNormNet(TinyNet):
    """A network with batch normalization, whose statistics are recomputed after training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.fc(x))))  # type: ignore[no-any-return]


class ReusedLayers(nn.Module):
    """Uses a part of its nn.Sequential, and dropout on a tensor whose first axis is not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        tap = self.layers[:2](x).mean((2, 3))
        return self.head(self.drop(torch.cat([self.layers(x), tap], 1).T).T)  # type: ignore[no-any-return]


def image_federation(sizes: Sequence[int] = SIZES) -> ft.Federation:
    """Return clients with small uint8 images."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8), random.integers(0, 3, count)

    return ft.Federation.from_arrays([(*samples(size), *samples(3)) for size in sizes], classes=3)


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
    settings = {"schedule": SCHEDULE} | settings
    return ft.simulate(method, net, fed, batch_size=3, engine=engine, device=device, dtype=dtype, **settings)


def final_tensors(run: ft.Run) -> Params:
    """Return the server state, client states, and personal models at the end of a run."""
    clients = range(run.num_clients)
    states = {str(c): {"state": run.client(c), "model": run.personal(c)} for c in clients}
    return {name: leaf.cpu() for name, leaf in flatten({"server": run.server, "clients": states}).items()}


def largest_difference(one: ft.Run, other: ft.Run) -> float:
    """Return the largest difference between two runs, relative to the largest value of its tensor."""
    a, b = final_tensors(one), final_tensors(other)
    assert a.keys() == b.keys()
    distances = [
        float((a[name].double() - b[name].double()).abs().max() / a[name].double().abs().max().clamp(min=1e-30))
        for name in a
        if a[name].numel()
    ]
    return float(torch.tensor(distances).max())  # NaN if any difference is NaN


def make_net(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@ON_EACH_DEVICE
@pytest.mark.parametrize("method", METHODS_BY_CODE_PATH, ids=lambda method: type(method).__name__)
def test_method_vectorized_matches_sequential(method: ft.Method, device: str) -> None:
    fed, net = tiny_federation(SIZES), make_net(TinyNet)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        sequential, other = (run(method, net, fed, e, device=device, dtype=dtype) for e in ("sequential", "vectorized"))
        assert largest_difference(sequential, other) < tolerance
    for mine, theirs in zip(sequential.records, other.records, strict=True):
        assert mine["bytes_up"] == theirs["bytes_up"] and mine["bytes_down"] == theirs["bytes_down"]
        assert mine["loss_trained"] == pytest.approx(theirs["loss_trained"], rel=1e-3)
        assert mine["per_client"].keys() == theirs["per_client"].keys()


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (ConvNet, FedAvg(momentum=0.5, weight_decay=0.01)),
        (ConvNet, SelfFL(warmup=0)),
        (BatchNormNet, FedAvg(momentum=0.5, weight_decay=0.01)),
        (BatchNormNet, FedPer()),
        (ConvNet, FedAvg(optimizer="adam", lr=0.01, clip_norm=1.0, keep_optimizer_state=True)),
        (ConvNet, FedRep(optimizer="adam", lr=0.01, head_epochs=1, keep_optimizer_state=True)),
        (ConvNet, DBE(momentum=0.9, lr=0.01, keep_optimizer_state=True)),
        # the gradient of a bias before batch normalization is a rounding error, which a small ε would amplify
        (BatchNormNet, FedPer(optimizer="adamw", lr=0.01, eps=0.01, weight_decay=0.1, steps=7, drop_last=True)),
        (ReusedLayers, FedAvg()),
    ],
)
def test_layers_vectorized_match_sequential(kind: type[nn.Module], method: ft.Method, device: str) -> None:
    fed = tiny_federation(SIZES) if kind is BatchNormNet else image_federation()
    sequential, other = (run(method, make_net(kind), fed, e, device=device) for e in ("sequential", "vectorized"))
    assert largest_difference(sequential, other) < 1e-9


@ON_EACH_DEVICE
def test_augmentation_engines_match(device: str) -> None:
    """Both the random numbers of dropout and those of the augmentation come from the key of a batch."""
    fed, augmentation = image_federation(), ft.Augmentation(flip=True, crop=2, cutout=3)
    settings: dict[str, Any] = {"device": device, "schedule": SCHEDULE[:2]}
    sequential, *others = (
        run(FedAvg(), make_net(ConvNet), fed, engine, augmentation=augmentation, **settings)
        for engine in ("sequential", "vectorized", *["pool"] * (device == "cpu"))
    )
    assert all(largest_difference(sequential, other) < 1e-9 for other in others)
    assert largest_difference(sequential, run(FedAvg(), make_net(ConvNet), fed, "sequential", **settings)) > 1e-3


@ON_EACH_DEVICE
@pytest.mark.parametrize(("engine", "chunk_size"), [("pool", None), ("vectorized", None), ("vectorized", 2)])
def test_engine_run_twice_gives_same_bits(engine: str, chunk_size: int | None, device: str) -> None:
    if (engine, device) == ("pool", "cuda"):
        pytest.skip("the pool is for CPUs")
    settings: dict[str, Any] = {"schedule": SCHEDULE[:1], "chunk_size": chunk_size, "dtype": torch.float32}
    once, again = (
        run(FedPer(), make_net(ConvNet), image_federation(), engine, device=device, **settings) for _ in range(2)
    )
    assert largest_difference(once, again) == 0.0


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_engine_with_in_place_change_raises(engine: str) -> None:
    @dataclass(frozen=True)
    class InPlace(FedAvg):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            message["params"]["head.bias"].mul_(0.5)
            return state, message

    message = error_message(lambda: run(InPlace(), make_net(TinyNet), tiny_federation((3,)), engine, schedule=[[0]]))
    assert "'params/head.bias' in place" in message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_garbage_of_an_earlier_run_does_not_end_a_capture() -> None:
    """A graph that is freed while another one is captured would end the capture, and the run would be slow."""
    device = torch.device("cuda")

    def advance(state: Tree, number: Any) -> Tree:
        cycle: list[Any] = [torch.ones(1)]
        cycle.append(cycle)  # allocates, so that garbage is collected now
        return {"w": state["w"] + 1}

    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            loop = CudaGraphLoop(device)
            assert loop(advance, {"w": torch.zeros(3, device=device)}, 0, 9)["w"].tolist() == [9, 9, 9]
            assert loop._can_capture
            loop.itself = loop  # type: ignore[attr-defined]  # only the garbage collector can free its graphs
            del loop
            gc.set_threshold(1, 1, 1)
    finally:
        gc.set_threshold(*thresholds)


def test_cuda_graph_loop_matches_sequential_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step overwrites its state leaf by leaf; steps may return leaves of their input."""

    class FakeGraph:
        def __init__(self, step: Callable[[], None]) -> None:
            self.replay = step

    monkeypatch.setattr(CudaGraphLoop, "_capture", lambda self, step: FakeGraph(step))

    def advance(state: Tree, number: int | Tensor) -> Tree:
        return {"now": state["now"] + number, "before": state["now"]}

    start = {"now": torch.tensor(1.0), "before": torch.tensor(0.0)}
    for _ in range(2):  # the first call warms up
        state = {name: leaf.clone() for name, leaf in start.items()}
        expected = sequential_loop(advance, state, 0, 9)
        assert CudaGraphLoop(torch.device("cpu"))(advance, state, 0, 9) == expected


def test_make_chunks_separates_long_clients() -> None:
    """A chunk takes as many steps as its longest client, so a client with fifty times more batches is separate."""
    chunks = make_chunks((1, 1, 50, *[1] * 17), chunk_size=100)
    assert sorted(len(chunk) for chunk in chunks) == [1, 19]
    assert sorted(position for chunk in chunks for position in chunk) == list(range(20))
    assert max(len(chunk) for chunk in make_chunks((3,) * 10, chunk_size=4)) <= 4


def test_vectorized_with_small_chunks_matches_sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk size is given, or reduced for lack of memory."""
    fed, net = image_federation(), make_net(ConvNet)
    sequential = run(FedPer(), net, fed, "sequential", schedule=SCHEDULE[:2])
    chunked = run(FedPer(), net, fed, "vectorized", schedule=SCHEDULE[:2], chunk_size=2)
    assert largest_difference(sequential, chunked) < 1e-9 and chunked.info["chunk_size"] == 2
    assert run(FedPer(), net, fed, "vectorized", schedule=SCHEDULE[:1]).info["chunk_size"] > 2
    monkeypatch.setattr("fedtailor.training.preflight.total_memory", lambda device: 4 * 8 * 3 * 2000)
    limited = run(FedPer(), net, fed, "vectorized", schedule=SCHEDULE[:2])
    assert largest_difference(sequential, limited) < 1e-9 and limited.info["chunk_size"] == 1


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_vectorized_in_one_process_matches_sequential(chunk_size: int, net: nn.Module) -> None:
    """With several cores, `ft.simulate` gives every chunk to a process of its own."""
    shared, sequential = make_engine(net)
    message = {"params": ft.wrap(net).init(0)}

    def train(ctx: ft.ClientContext) -> Tree:
        return FedAvg().train(ctx, {}, message)[1]

    vectorized = Vectorized(shared, sequential.samples, chunk_size)
    assert same(vectorized.apply(train, 1, [2, 0, 3, 1]), sequential.apply(train, 1, [2, 0, 3, 1]), tolerance=1e-9)


class DataDependentNet(TinyNet):
    """Branches on a tensor's value, which vmap does not support."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_auto_with_data_dependent_model_uses_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 0.0)
    fed, net, schedule = tiny_federation((3,) * 70), make_net(DataDependentNet), [[0], list(range(70))]
    assert "'vectorized' cannot run this model" in error_message(lambda: run(FedAvg(), net, fed, "vectorized"))
    found, sequential = (run(FedAvg(), net, fed, engine, schedule=schedule) for engine in ("auto", "sequential"))
    assert found.info["engine"] in ("pool", "sequential")
    assert found.info["engine_reason"].count("cannot run this model") == 1
    assert largest_difference(found, sequential) < 1e-12


@pytest.mark.parametrize("fast", ENGINES)
def test_auto_chooses_fastest_engine_and_gives_reason(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 0.0)
    monkeypatch.setattr("fedtailor.training.engines.auto._QUICK_RUN_SECONDS", 0.0)
    monkeypatch.setattr(
        "fedtailor.training.engines.auto.EngineBenchmark._seconds",
        lambda self, choice, clients, batches: len(clients) * (0.05 if choice.engine == fast else 0.5),
    )
    found = run(FedAvg(), make_net(TinyNet), tiny_federation(SIZES), "auto")
    assert found.info["engine"] == fast
    assert found.info["engine_reason"].startswith(f"Milliseconds per client and batch: {fast}")


def test_auto_measures_engines_within_factor_two_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more batches, fixed costs weigh less; an engine that takes twice as long or longer is out after one try."""
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 0.0)
    monkeypatch.setattr("fedtailor.training.engines.auto._QUICK_RUN_SECONDS", 0.0)
    monkeypatch.setattr("fedtailor.training.engines.auto._MIN_SECONDS", 0.0)
    fixed = {"sequential": 0.0, "pool": 0.09, "vectorized": 0.11}  # seconds in addition to 0.1 per batch
    per_batch = {"sequential": 0.1, "pool": 0.02, "vectorized": 0.0}

    def seconds(self: object, choice: EngineChoice, clients: Sequence[int], batches: int) -> float:
        return len(clients) * (fixed[choice.engine] + per_batch[choice.engine] * batches)

    monkeypatch.setattr("fedtailor.training.engines.auto.EngineBenchmark._seconds", seconds)
    monkeypatch.setattr("fedtailor.training.engines.auto.available_cores", lambda: 2)
    monkeypatch.setattr("fedtailor.training.engines.auto.padding_overhead", lambda *arguments: 2.0)
    found = run(FedAvg(), make_net(TinyNet), tiny_federation((30,) * 5), "auto")
    assert found.info["engine"] == "pool" and "vectorized" not in found.info["engine_reason"]


@pytest.mark.parametrize("size", [1, 2, 30])
@pytest.mark.parametrize("vectorized, fastest", [(0.19, "vectorized"), (0.21, "pool")])
def test_auto_of_a_quick_run_starts_no_worker(
    monkeypatch: pytest.MonkeyPatch, vectorized: float, fastest: str, size: int
) -> None:
    """Four equal clients on two cores: pool takes half of the sequential 0.2 ms per batch, vectorized half of its own
    time, however few batches a client has."""
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 0.0)
    monkeypatch.setattr("fedtailor.training.engines.auto.available_cores", lambda: 2)
    measured: list[EngineChoice] = []

    def seconds(self: EngineBenchmark, choice: EngineChoice, clients: Sequence[int], batches: int) -> float:
        measured.append(choice)
        assert len(clients) == 2, "one chunk of the vectorized engine trains in this process"
        trained = 2 * min(batches, -(-size // self.batch_size))
        return trained * {"sequential": 0.0002, "vectorized": vectorized / 1000}[choice.engine]

    monkeypatch.setattr("fedtailor.training.engines.auto.EngineBenchmark._seconds", seconds)
    found = run(FedAvg(), make_net(TinyNet), tiny_federation((size,) * 4), "auto", schedule=[[0, 1, 2, 3]])
    assert found.info["engine"] == fastest
    assert f"Milliseconds per client and batch: {fastest}" in found.info["engine_reason"]
    assert "pool 0.1" in found.info["engine_reason"]
    assert set(measured) == {EngineChoice("sequential"), EngineChoice("vectorized", chunk_size=2)}


def test_auto_with_short_run_skips_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.training.engines.auto._SHORT_RUN_SECONDS", 1e9)
    found = run(FedAvg(), make_net(TinyNet), tiny_federation(SIZES), "auto")
    assert found.info["engine"] == "sequential" and "too short for a benchmark" in found.info["engine_reason"]


def test_chunk_size_with_other_engine_raises() -> None:
    fed, net = tiny_federation(SIZES), make_net(TinyNet)
    assert "not to 'pool'" in error_message(lambda: run(FedAvg(), net, fed, "pool", chunk_size=2))
    assert "set engine='vectorized'" in error_message(lambda: run(FedAvg(), net, fed, "auto", chunk_size=2))
    assert "at least 1" in error_message(lambda: run(FedAvg(), net, fed, "vectorized", chunk_size=0))
    assert str(EngineChoice("vectorized", chunk_size=3)) == "vectorized (chunks of 3)"
