"""A run in several actors equals the run in one process; actors are in this process here, without Ray."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import MEASURED, tiny_federation
from fedtailor.core.trees import Tree, flatten
from fedtailor.core.updates import UPDATE_COSINE
from fedtailor.errors import ConfigError, RunError
from fedtailor.training.ray_clients.ray_clients import RayClients
from support.in_process_actors import lose_actor, use_in_process_actors

SIZES = (9, 4, 7, 1, 12, 3, 5)


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    use_in_process_actors(monkeypatch)


def simulate(method: ft.Method, **settings: Any) -> ft.Run:
    fed = tiny_federation(SIZES)
    model = settings.pop("model", None) or ft.network("mlp", fed)
    defaults: dict[str, Any] = {"rounds": 3, "dtype": "float64", "batch_size": 4}
    return ft.simulate(method, model, fed, **defaults | settings)


def assert_same(first: Any, second: Any, path: str = "") -> None:
    """Assert that two records, or trees, are equal to float64 rounding; times do not count."""
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            if not str(name).startswith(MEASURED):
                assert_same(first[name], second[name], f"{path}/{name}")
    elif isinstance(first, float | torch.Tensor):
        one, other = torch.as_tensor(first), torch.as_tensor(second)
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11, equal_nan=True), path
    else:
        assert first == second, path


def assert_same_runs(first: ft.Run, second: ft.Run) -> None:
    for one, other in zip(first.records, second.records, strict=True):
        if UPDATE_COSINE not in other["per_client"]:  # actors that average uploads record only norms
            one["per_client"].pop(UPDATE_COSINE, None)
        assert_same(one, other)
    assert_same(flatten(first.server), flatten(second.server))
    for client in range(len(first.info["clients"])):
        assert_same(flatten(first.client(client)), flatten(second.client(client)))
        for moment in ("received", "trained"):
            assert_same(first.personal(client, moment), second.personal(client, moment))


METHODS = {
    "fedavg": ft.methods.FedAvg(),
    "uniform": ft.methods.FedAvg(weights="uniform"),
    "fedapa": ft.methods.FedAPA(),
    "ditto": ft.methods.Ditto(),
    "scaffold": ft.methods.Scaffold(),
    "fedproto": ft.methods.FedProto(),
    "averaged": ft.methods.Averaged(ft.methods.FedAS()),
    "selffl": ft.methods.SelfFL(),
    "centralized": ft.methods.Centralized(),
    "local": ft.methods.Local(),
}


@pytest.mark.parametrize("actors", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_actors_equal_one_process(name: str, actors: int) -> None:
    one = simulate(METHODS[name], engine="sequential", participation=0.7)
    many = simulate(METHODS[name], engine="ray", actors=actors, actor_engine="sequential", participation=0.7)
    assert_same_runs(one, many)
    assert many.info["engine"] == "ray"
    assert many.info["actor_engine"] == "sequential"


SETTINGS: dict[str, dict[str, Any]] = {
    "vectorized": {"engine": "vectorized", "chunk_size": 2},
    "validation": {"validation": 0.3, "patience": 1, "rounds": 6},
    "held out": {"held_out_clients": 2},
    "more evaluation": {"evaluate_train": True, "evaluate_global": True, "measure_drift": True},
    "sampled evaluation": {"evaluate": 3, "evaluate_every": 2, "participation": 0.4},
    "compression": {"channel": ft.Channel(top=0.5, quantize="int8")},
    "clipping": {"channel": ft.Channel(clip=0.1), "method": ft.methods.FedAvg(weights="uniform")},
    "private uploads": {"channel": ft.Channel(clip=0.1, noise=1.0)},
    "private sum": {
        "channel": ft.Channel(clip=0.1, noise=1.0, trusted=True),
        "method": ft.methods.FedAvg(weights="uniform"),
    },
    "unreliable": {"unreliable": ft.Unreliable(dropout=0.4)},
    "class weights": {"class_weights": "balanced"},
    "robust": {"robust": ft.Robust(kind="geometric_median")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_actors_equal_one_process_with_settings(name: str) -> None:
    settings: dict[str, Any] = {"engine": "sequential", "method": ft.methods.Ditto()} | SETTINGS[name]
    engine, method = settings.pop("engine"), settings.pop("method")
    one = simulate(method, engine=engine, **settings)
    assert_same_runs(one, simulate(method, engine="ray", actors=3, actor_engine=engine, **settings))


def test_actors_with_different_networks_equal_one_process() -> None:
    fed = tiny_federation(SIZES)
    networks = ft.client_models([ft.network("mlp", fed, hidden=hidden) for hidden in ([8], [5, 8])], fed)
    one, two = (
        simulate(ft.methods.LGFedAvg(), model=networks, participation=0.6, **engine)
        for engine in ({"engine": "sequential"}, {"engine": "ray", "actors": 2, "actor_engine": "sequential"})
    )
    assert_same_runs(one, two)


def test_same_number_of_actors_gives_same_bits() -> None:
    runs = [simulate(ft.methods.FedAvg(), engine="ray", actors=3, dtype="float32") for _ in range(2)]
    first, second = (flatten(run.server) for run in runs)
    assert all(torch.equal(first[path], second[path]) for path in first)


@pytest.mark.parametrize("method", [ft.methods.FedAvg(), ft.methods.Scaffold(), ft.methods.Ditto(weights="uniform")])
def test_reduced_uploads_equal_all_uploads(method: ft.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []  # of the uploads that reach the driver
    train = RayClients.train

    def count_rows(self: RayClients, *args: Any) -> Any:
        results = train(self, *args)
        rows.append(sum(map(len, flatten(results.encoded).values())) if results else 0)
        return results

    monkeypatch.setattr(RayClients, "train", count_rows)
    reduced = simulate(method, engine="ray", actors=3, dtype="float32")
    assert sum(rows) == 0
    monkeypatch.setattr(type(method), "mean_weights", None)
    all_uploads = simulate(method, engine="ray", actors=3, dtype="float32")
    assert sum(rows) > 0
    first, second = flatten(reduced.server), flatten(all_uploads.server)
    assert all(torch.allclose(first[path], second[path], rtol=1e-5, atol=1e-6) for path in first)


@dataclass(frozen=True)
class Median(ft.methods.FedAvg):
    """A user's own server, which needs all uploads although its base class needs only their mean."""

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return ft.trees.map_leaves(lambda leaf: leaf.median(0).values, exchange.received)


def test_own_receive_gets_all_uploads() -> None:
    one, many = (simulate(Median(), engine=engine) for engine in ("sequential", "ray"))
    assert_same_runs(one, many)


@dataclass(frozen=True)
class FailsOnOne(ft.methods.FedAvg):
    """Client 4 uploads infinity."""

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        state, upload = super().train(ctx, state, message)
        return state, ft.trees.map_leaves(lambda leaf: torch.where(ctx.index == 4, torch.inf, leaf), upload)


def test_failed_client_is_dropped_as_in_one_process() -> None:
    one, many = (simulate(FailsOnOne(), engine=engine) for engine in ("sequential", "ray"))
    assert one.records[0]["failed"].keys() == {4}
    assert_same_runs(one, many)


@pytest.mark.parametrize(("engine", "actors"), [("ray", 4), ("sequential", None), ("ray", 1)])
def test_run_can_be_resumed_with_other_engine_or_actors(engine: str, actors: int | None, tmp_path: Path) -> None:
    expected = simulate(ft.methods.Ditto(), engine="sequential", participation=0.5, rounds=4)
    fed, folder = tiny_federation(SIZES), tmp_path / "run"

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise OSError("stopped")

    with pytest.raises(OSError, match="stopped"):
        simulate(
            ft.methods.Ditto(), engine="ray", actors=2, participation=0.5, rounds=4, folder=folder, on_round_end=stop,
            checkpoint_every=2,
        )  # fmt: skip
    run = ft.resume(folder, fed=fed, engine=engine, actors=actors)
    assert_same_runs(expected, run)
    assert run.info["engine_changes"][0][1].startswith(engine)


def test_resumed_run_has_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"engine": "ray", "actors": 3, "participation": 0.5, "dtype": "float32"}
    expected = simulate(ft.methods.Ditto(), **settings, rounds=4)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise OSError("stopped")

    with pytest.raises(OSError, match="stopped"):
        simulate(ft.methods.Ditto(), **settings, rounds=4, folder=tmp_path / "run", on_round_end=stop)
    run = ft.resume(tmp_path / "run", fed=tiny_federation(SIZES))
    for client in range(len(SIZES)):
        first, second = (flatten(found.client(client)) for found in (expected, run))
        assert all(torch.equal(first[path], second[path]) for path in first)


def total_calls(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[ft.Run, int]:
    """Return a run and how often it waited for an actor."""
    calls = lose_actor(monkeypatch, at=None)
    return simulate(ft.methods.Ditto(), **settings), calls()


@pytest.mark.parametrize("part", [0, 1, 2, 3, 4, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 40))])
@pytest.mark.parametrize("saved", [False, True])
def test_lost_actor_changes_nothing(part: int, saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor is lost at one of 40 moments of a run: while it trains, commits, evaluates, or writes a checkpoint."""
    settings: dict[str, Any] = {
        "engine": "ray", "actors": 2, "actor_engine": "sequential", "rounds": 2, "participation": 0.6,
        "dtype": "float32", "channel": ft.Channel(clip=0.1, noise=1.0),
    }  # fmt: skip
    expected, calls = total_calls(monkeypatch, **settings, folder=tmp_path / "undisturbed" if saved else None)
    spread = [4, 9, 13, 18, 23, 27, *(n for n in range(40) if n not in (4, 9, 13, 18, 23, 27))][part]
    lose_actor(monkeypatch, at=calls * spread // 40)
    rounds: list[int] = []
    run = simulate(
        ft.methods.Ditto(), **settings, folder=tmp_path / "disturbed" if saved else None,
        on_round_end=lambda record: rounds.append(record["round"]),
    )  # fmt: skip
    assert rounds == [1, 2]
    for one, other in zip(expected.records, run.records, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    for client in range(len(SIZES)):
        first, second = (flatten(found.client(client)) for found in (expected, run))
        assert all(torch.equal(first[path], second[path]) for path in first)
        assert_same(expected.personal(client), run.personal(client))


def test_actor_that_is_always_lost_ends_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"engine": "ray", "actors": 2, "rounds": 3}
    _, calls = total_calls(monkeypatch, **settings)
    lose_actor(monkeypatch, at=calls // 2, again=True)
    with pytest.raises(RunError, match="times in round 2; resume it with: fedtailor resume"):
        simulate(ft.methods.Ditto(), **settings, folder=tmp_path / "run")
    lose_actor(monkeypatch, at=None)
    resumed = ft.resume(tmp_path / "run", fed=tiny_federation(SIZES), engine="sequential")
    assert_same_runs(simulate(ft.methods.Ditto(), engine="sequential"), resumed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actors": 2}, "actors applies only to the engine 'ray', not to 'auto'; omit it."),
        ({"engine": "ray", "chunk_size": 2}, "chunk_size applies only to vectorized clients"),
        ({"engine": "ray", "device": "cuda"}, "has no GPU for the device 'cuda'"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(ft.methods.FedAvg(), **settings)
