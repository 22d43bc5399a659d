"""Run folders: their content, reading them back, and protection against overwriting."""

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedtailor as ft
from conftest import DivergingNet, TinyNet, same, tiny_federation
from fedtailor.experiments.experiment import make_experiment, read_experiment_file
from fedtailor.methods import METHODS
from fedtailor.runs.records import Record, validate_record
from fedtailor.runs.toml import to_toml


def saved_run(folder: Path, name: str, net: nn.Module) -> ft.Run:
    schedule = [[0, 1], [2]]
    return ft.simulate(
        METHODS[name](), net, tiny_federation(), schedule=schedule, dtype=torch.float64, validation=0.3, folder=folder
    )


@pytest.mark.parametrize("name", METHODS)
def test_load_run_restores_the_run(name: str, net: nn.Module, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", name, net)
    again = ft.load_run(tmp_path / "run")
    assert again.records == run.records
    assert again.summary() == run.summary()
    assert again.info == run.info
    assert same(again.server, run.server)
    for client in range(4):
        assert same(again.client(client), run.client(client))
        for moment in ("received", "trained"):
            assert same(again.personal(client, moment), run.personal(client, moment))


def test_run_folder_is_readable_without_fedtailor(net: nn.Module, tmp_path: Path) -> None:
    run = saved_run(tmp_path, "fedper", net)
    experiment = tomllib.loads((tmp_path / "experiment.toml").read_text())
    fields = {"lr": 0.1, "epochs": 2, "optimizer": "sgd", "betas": [0.9, 0.999], "weights": "size"}
    assert experiment["method"].items() >= ({"name": "fedper"} | fields).items()
    assert experiment["schedule"] == [[0, 1], [2]]
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    clients = json.loads((tmp_path / "run.json").read_text())["clients"]
    assert [client["test"] for client in clients] == [5, 5, 5, 5]
    model = TinyNet().double()
    model.load_state_dict(load_file(tmp_path / "personal" / "trained" / "002.safetensors"))
    assert same(dict(model.state_dict()), run.personal(2))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The first record of a run, as in its file."""
    folder = tmp_path_factory.mktemp("run")
    saved_run(folder, "fedavg", TinyNet().double())
    record: Record = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    return record


@pytest.mark.parametrize(
    "invalid",
    [
        *({"seconds": value} for value in (math.nan, math.inf, 1e300, 10**400, "7", True, None)),
        {"clients": [7]}, {"clients": None}, {"missed": {"0": 7}}, {"failed": {"9": "late"}}, {"diverged": ["x"]},
        {"accuracy_trained": 10**400}, {"seconds_evaluating": [1.0]}, {"stopped_early": False}, {"stopped_early": 1},
        {"per_client": {"bytes_up": {"0": math.inf}}}, {"per_client": {"bytes_up": {"7": 1}}}, {"per_client": {}},
        {"last_trained": {"loss": 1.0}}, {"method_metrics": {"weights": [[0.5, 10**400]]}}, {"method_metrics": [1.0]},
    ],
    ids=lambda invalid: str(invalid)[:40],
)  # fmt: skip
def test_validate_record_invalid_value_raises(invalid: Record, first: Record) -> None:
    assert validate_record(first | {"method_metrics": {"weights": [[0.5, 1e308, 1e308]], "layer": "fc"}}, 1, 4)
    (name,) = invalid
    with pytest.raises(ValueError, match=f"line 1 has an invalid value of '{name}'"):
        validate_record(first | invalid, 1, 4)
    with pytest.raises(ValueError, match="line 2 is not the record of round 2"):
        validate_record(first, 2, 4)


def test_validate_record_held_out_clients_are_only_in_their_own_metrics(first: Record) -> None:
    """Readers use the numbers of clients as positions, and held-out clients are not in the list of clients."""
    held_out = {"held_out_loss_trained": {"4": 1.0}}
    assert validate_record(first | {"per_client": first["per_client"] | held_out}, 1, 4, held_out=1)
    for tables, count in ((held_out, 0), ({"loss_trained": {"4": 1.0}}, 1)):
        with pytest.raises(ValueError, match="line 1 has an invalid value of 'per_client'"):
            validate_record(first | {"per_client": first["per_client"] | tables}, 1, 4, count)


def test_load_run_missing_or_unfinished_raises(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ft.FedTailorError, match="There is no run"):
        ft.load_run(tmp_path)
    saved_run(tmp_path / "run", "fedavg", net)
    (tmp_path / "run" / "personal").rename(tmp_path / "elsewhere")
    with pytest.raises(ft.FedTailorError, match="is not finished; resume it with: fedtailor resume"):
        ft.load_run(tmp_path / "run")


def test_simulate_into_unwritable_folder_raises_before_training(net: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rounds: list[object] = []
    with pytest.raises(ft.FedTailorError, match="cannot be written"):
        inside = tmp_path / "file" / "run"
        ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, folder=inside, on_round_end=rounds.append)
    assert not rounds


def test_diverged_run_has_null_in_its_file_and_nan_in_its_summary(tmp_path: Path) -> None:
    """JSON has no NaN, and other programs must be able to read a diverged run."""
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    method, model = ft.methods.FedAvg(lr=1.0, epochs=1), ft.wrap(DivergingNet().double(), loss=loss, metrics={})
    run = ft.simulate(method, model, tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    assert math.isnan(run.records[0]["loss"])
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["loss"] is None
    found = ft.load_run(tmp_path).summary()["received"]  # without metrics, the loss is the score
    assert math.isnan(found["last"]["weighted"]) and found["best_test"] is None


def test_to_toml_round_trips_settings() -> None:
    settings = {
        "name": 'a "quoted" näme\n', "none": None, "list": [[0, 1], [2]], "yes": True,
        "table": {"x": 1e-7, "y": None, "z": [0.6, 1.0]},
    }  # fmt: skip
    table = {"x": 1e-7, "z": [0.6, 1.0]}
    assert tomllib.loads(to_toml(settings)) == {k: settings[k] for k in ("name", "list", "yes")} | {"table": table}


def test_run_folder_describes_inner_method(net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Wrapper(ft.methods.FedAvg):
        inner: ft.Method = field(default_factory=lambda: ft.methods.FedProx(mu=0.3))
        scale: float = 1.0

    ft.simulate(Wrapper(scale=np.float32(0.5)), net, tiny_federation(), rounds=1, folder=tmp_path)  # type: ignore[arg-type]
    method = ft.load_run(tmp_path).experiment["method"]
    assert method["name"].endswith(".<locals>.Wrapper") and method["scale"] == 0.5
    assert method["inner"]["name"] == "fedprox" and method["inner"]["mu"] == 0.3


def test_experiment_of_custom_arrays_cannot_be_repeated(net: nn.Module, tmp_path: Path) -> None:
    """A run with custom arrays must not be silently repeated on a built-in data set."""
    saved_run(tmp_path, "fedavg", net)
    with pytest.raises(ft.FedTailorError, match="There is no data set 'own data'"):
        make_experiment(read_experiment_file(tmp_path / "experiment.toml") | {"network": "mlp"})
