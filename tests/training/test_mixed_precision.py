"""Runs in bfloat16: all methods and engines, evaluation in float32, resuming, and deployment."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import REPRESENTATIVE_METHODS, TinyNet, all_same, error_message, models, tiny_federation
from fedtailor.core.client_context import ClientContext
from fedtailor.core.trees import Tree, flatten
from fedtailor.methods import METHODS
from fedtailor.training import simulated_clients
from fedtailor.training.client_update import client_update
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer
from support.method_variants import ALL_METHODS

SCHEDULE = [[0, 1, 2, 3], [0, 2, 3]]
SOME_METHODS = [
    name if name in (*REPRESENTATIVE_METHODS, "perfedavg") else pytest.param(name, marks=pytest.mark.slow)
    for name in ALL_METHODS
]
TOLERANCE = 0.1  # of a client's update, by norm, between engines and to float32, after one round; docs/engines.md


class PlainNet(TinyNet):
    """Records the dtype of its hidden layer."""

    dtypes: ClassVar[set[torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        self.dtypes.add(hidden.dtype)
        return self.head(torch.tanh(hidden))  # type: ignore[no-any-return]


def run(method: ft.Method, **settings: Any) -> ft.Run:
    defaults: dict[str, Any] = {"engine": "sequential", "device": "cpu", "batch_size": 4, "schedule": SCHEDULE}
    return ft.simulate(method, TinyNet, tiny_federation(), **(defaults | {"precision": "bf16"} | settings))


def final_tensors(run: ft.Run) -> Iterator[tuple[str, Tensor]]:
    for part in (run.server, *map(run.client, range(run.num_clients)), *models(run), *models(run, "received")):
        yield from flatten(part).items()


@pytest.mark.parametrize("name", SOME_METHODS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_bf16_method_keeps_float32_and_is_finite(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[Tree] = []

    def update(method: ft.Method, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        assert ctx.model.precision == "bf16"
        result = client_update(method, ctx, state, message)
        uploads.append(result)
        return result

    monkeypatch.setattr(simulated_clients, "client_update", update)
    found = run(ALL_METHODS[name], engine=engine)
    tensors = dict(final_tensors(found))
    assert all(leaf.isfinite().all() for leaf in tensors.values())
    kept = [*tensors.items(), *(item for upload in uploads for item in flatten(upload).items())]
    assert uploads and [path for path, leaf in kept if leaf.dtype in (torch.bfloat16, torch.float16)] == []


def relative_distance(one: Tree, other: Tree, start: Tree) -> float:
    """Return the difference of two models, relative to the distance that the first moved from its start."""
    left, right, begin = (
        torch.cat([leaf.flatten() for leaf in flatten(tree).values()]) for tree in (one, other, start)
    )
    return float((left - right).norm() / (left - begin).norm())


def test_bf16_engines_agree_with_each_other_and_with_float32() -> None:
    start = ft.wrap(TinyNet).init(0)
    settings: dict[str, Any] = {"schedule": SCHEDULE[:1]}
    runs = {engine: run(ft.methods.FedAvg(), engine=engine, **settings) for engine in ("sequential", "vectorized")}
    pool = run(ft.methods.FedAvg(), engine="pool", **settings)
    exact = run(ft.methods.FedAvg(), precision="float32", **settings)
    assert all_same(models(pool), models(runs["sequential"]))
    for client in range(4):
        expected = exact.personal(client)
        for found in runs.values():
            assert 0 < relative_distance(expected, found.personal(client), start) < TOLERANCE


def test_bf16_trains_in_bfloat16_and_evaluates_in_float32() -> None:
    PlainNet.dtypes.clear()
    fed, method = tiny_federation(), ft.methods.FedAvg()
    found = ft.simulate(method, PlainNet, fed, precision="bf16", engine="sequential", batch_size=4, rounds=1)
    assert PlainNet.dtypes == {torch.bfloat16, torch.float32}
    net = PlainNet()
    net.load_state_dict(found.personal(0))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(fed.x[fed.test[0]].float()), fed.y[fed.test[0]])
    assert found.records[-1]["per_client"]["loss_trained"][0] == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_bf16_run_resumes_with_same_bits(engine: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"engine": engine, "rounds": 3, "schedule": None, "checkpoint_every": 1}
    method = ft.methods.Ditto(momentum=0.9, keep_optimizer_state=True)
    expected = run(method, **settings)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(method, **settings, folder=tmp_path / "run", on_round_end=stop)
    resumed = ft.resume(tmp_path / "run", model=TinyNet, fed=tiny_federation())
    assert resumed.experiment["precision"] == "bf16"
    assert all_same(models(resumed), models(expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bf16_step_is_captured_on_gpu_and_agrees_with_float32() -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (4, 40, 1, 28, 28), dtype=np.uint8), random.integers(0, 4, (4, 40))
    fed = ft.Federation.from_arrays([(x, y, x, y) for x, y in zip(images, labels, strict=True)], classes=4)
    model, start = ft.network("lenet5", fed), ft.network("lenet5", fed).init(0)
    config = TrainingConfig(rounds=1, batch_size=8, engine="vectorized", device="cuda", precision="bf16")
    trainer, _ = make_trainer(config, ft.methods.FedAvg(), model, fed)
    record = trainer.run_round(1)
    engine = trainer.clients.engine
    assert engine._graph_loop._graphs and engine._graph_loop._can_capture
    assert 0 < record["peak_memory"] <= record["peak_memory_reserved"]
    exact = ft.simulate(ft.methods.FedAvg(), model, fed, rounds=1, batch_size=8, engine="sequential", device="cpu")
    for client in range(4):
        assert 0 < relative_distance(exact.personal(client), trainer.run.personal(client), start) < TOLERANCE


def test_tf32_leaves_no_trace_and_cpu_results_unchanged() -> None:
    before = torch.get_float32_matmul_precision()
    one, other = (run(ft.methods.FedAvg(), precision=precision) for precision in ("tf32", "float32"))
    assert torch.get_float32_matmul_precision() == before
    assert all(
        0 <= relative_distance(a, b, {n: 0 * p for n, p in a.items()}) < 0.01
        for a, b in zip(models(one), models(other), strict=True)
    )


def test_precision_needs_float32() -> None:
    text = error_message(lambda: run(METHODS["fedavg"](), dtype="float64"))
    assert "precision 'bf16' needs dtype float32" in text
    assert "precision" in error_message(lambda: run(METHODS["fedavg"](), precision="half"))
