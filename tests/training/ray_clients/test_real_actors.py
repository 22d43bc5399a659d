"""Runs in real Ray processes: on this machine, on a cluster of two nodes, and when processes are killed."""

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.core.trees import Tree, flatten
from fedtailor.errors import ConfigError, RunError
from fedtailor.training.ray_clients.cluster import connect

ray = pytest.importorskip("ray")
SIZES = (9, 4, 7, 1, 12, 3, 5)
OPTIONS: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 200 * 2**20}


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[None]:
    """A Ray cluster on this machine, whose workers find this repository's packages."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets have short paths
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        ray.init("local", num_cpus=4, log_to_driver=False, logging_level="ERROR", _temp_dir=folder, **OPTIONS)
        yield
        ray.shutdown()


def simulate(method: ft.Method, **settings: Any) -> ft.Run:
    fed = tiny_federation(SIZES)
    defaults: dict[str, Any] = {"rounds": 3, "dtype": "float64", "batch_size": 4, "participation": 0.7}
    return ft.simulate(method, ft.network("mlp", fed, hidden=[8]), fed, **defaults | settings)


def assert_same_end(one: ft.Run, other: ft.Run, tolerance: float = 1e-10) -> None:
    """Assert that two runs end with the same server state, client states, personal models, and metrics."""
    pairs = [(one.server, other.server)]
    for client in range(len(SIZES)):
        pairs.append((one.client(client), other.client(client)))
        pairs.append((one.personal(client), other.personal(client)))
    for first, second in pairs:
        flat, expected = flatten(second), flatten(first)
        assert flat.keys() == expected.keys()
        assert all(torch.allclose(flat[p], expected[p], rtol=tolerance, atol=tolerance) for p in expected)
    for record, expected_record in zip(other.records, one.records, strict=True):
        assert record["clients"] == expected_record["clients"]
        assert record["bytes_up"] == expected_record["bytes_up"]
        assert record["accuracy_trained"] == pytest.approx(expected_record["accuracy_trained"])


SLOW = pytest.mark.slow
METHODS = [
    ft.methods.Scaffold(),
    pytest.param(ft.methods.FedAvg(), marks=SLOW),
    pytest.param(ft.methods.FedAPA(), marks=SLOW),
    pytest.param(ft.methods.Ditto(), marks=SLOW),
]


@pytest.mark.usefixtures("local_cluster")
@pytest.mark.parametrize("actors", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_actors_equal_vectorized_engine(method: ft.Method, actors: int) -> None:
    run = simulate(method, engine="ray", actors=actors, actor_engine="vectorized")
    assert_same_end(simulate(method, engine="vectorized"), run)
    assert run.info["actors"] == actors


def killing(marker: Path, how: str) -> ft.Method:
    """Return Ditto whose client 4 kills its process, or the node of its process, in round 2, as long as `marker` has
    lines. The class is local so that Ray sends its code to the actors."""

    @dataclass(frozen=True)
    class Killing(ft.methods.Ditto):
        marker: str = ""
        how: str = "process"

        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            left = Path(self.marker).read_text().splitlines()
            if int(ctx.index) == 4 and ctx.round == 2 and left:
                Path(self.marker).write_text("\n".join(left[1:]))
                os.kill(os.getppid() if self.how == "node" else os.getpid(), signal.SIGKILL)
                signal.pause()  # until the node is gone
            return super().train(ctx, state, message)

    return Killing(marker=str(marker), how=how)


@pytest.mark.usefixtures("local_cluster")
@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=SLOW)])
def test_killed_actor_changes_nothing(saved: bool, tmp_path: Path) -> None:
    marker = tmp_path / "kills"
    marker.write_text("")
    method = killing(marker, "process")
    expected = simulate(method, engine="sequential")
    marker.write_text("one kill\n")
    rounds: list[int] = []
    run = simulate(
        method, engine="ray", actors=2, actor_engine="sequential", folder=tmp_path / "run" if saved else None,
        on_round_end=lambda record: rounds.append(record["round"]),
    )  # fmt: skip
    assert marker.read_text() == "", "the actor was killed"
    assert rounds == [1, 2, 3]
    assert_same_end(expected, run)


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A head without cores, and two nodes with one core each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    ray.shutdown()
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **OPTIONS})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OPTIONS["object_store_memory"])
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_killed_node_changes_nothing(two_nodes: Any, tmp_path: Path) -> None:
    """Both actors continue on the node that is left."""
    marker = tmp_path / "kills"
    marker.write_text("")
    method = killing(marker, "node")
    expected = simulate(method, engine="sequential")
    marker.write_text("one kill\n")
    run = simulate(method, engine="ray", actors=2, actor_engine="sequential", folder=tmp_path / "run")
    assert marker.read_text() == "", "the node was killed"
    assert_same_end(expected, run)


@pytest.mark.slow
def test_without_nodes_run_stops_and_can_be_resumed(two_nodes: Any, tmp_path: Path) -> None:
    marker = tmp_path / "kills"
    marker.write_text("kill\n" * 9)
    method, fed = killing(marker, "node"), tiny_federation(SIZES)
    with pytest.raises(RunError, match=r"no machine left.*; resume it with: fedtailor resume"):
        simulate(method, engine="ray", actors=2, actor_engine="sequential", folder=tmp_path / "run")
    marker.write_text("")
    run = ft.resume(tmp_path / "run", method=method, model=ft.network("mlp", fed, hidden=[8]), fed=fed, engine="pool")
    assert_same_end(simulate(method, engine="sequential"), run)


@pytest.mark.slow
@pytest.mark.usefixtures("local_cluster")
def test_run_can_be_resumed_with_other_actors(tmp_path: Path) -> None:
    """Two actors train two rounds; three actors train the others."""

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise OSError("stopped")

    fed = tiny_federation(SIZES)
    with pytest.raises(OSError, match="stopped"):
        simulate(ft.methods.Ditto(), engine="ray", actors=2, folder=tmp_path / "run", on_round_end=stop)
    run = ft.resume(tmp_path / "run", fed=fed, actors=3)
    assert_same_end(simulate(ft.methods.Ditto(), engine="sequential"), run)
    assert run.info["engine_changes"] == [[2, "ray with 3 actors"]]


def test_unknown_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"There is no Ray cluster at '127\.0\.0\.1:1'"):
        connect("127.0.0.1:1")
