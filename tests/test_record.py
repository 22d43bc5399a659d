"""A run on disk: what is there, that it reads back, that nothing is overwritten."""

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
from conftest import Loud, TinyNet, same, tiny_federation
from fedtailor.experiment import from_toml, make
from fedtailor.lines import Record, check_line
from fedtailor.methods import METHODS
from fedtailor.record import free_folder
from fedtailor.toml import to_toml


def kept(folder: Path, name: str, net: nn.Module) -> ft.Run:
    schedule = [[0, 1], [2]]
    return ft.simulate(
        METHODS[name](), net, tiny_federation(), schedule=schedule, dtype=torch.float64, validation=0.3, folder=folder
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_run_reads_back_as_it_was(name: str, net: nn.Module, tmp_path: Path) -> None:
    run = kept(tmp_path / "run", name, net)
    again = ft.open(tmp_path / "run")
    assert again.records == run.records
    assert again.summary() == run.summary()
    assert again.info == run.info
    assert same(again.server, run.server)
    for client in range(4):
        assert same(again.client(client), run.client(client))
        for moment in ("received", "trained"):
            assert same(again.personal(client, moment), run.personal(client, moment))


def test_the_folder_can_be_read_without_this_library(net: nn.Module, tmp_path: Path) -> None:
    run = kept(tmp_path, "fedper", net)
    experiment = tomllib.loads((tmp_path / "experiment.toml").read_text())
    fields = {"lr": 0.1, "epochs": 2, "momentum": 0.0, "weight_decay": 0.0, "weights": "size"}
    assert experiment["method"] == {"name": "fedper"} | fields
    assert experiment["schedule"] == [[0, 1], [2]]
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    clients = json.loads((tmp_path / "run.json").read_text())["clients"]
    assert [client["test"] for client in clients] == [5, 5, 5, 5]
    model = TinyNet().double()
    model.load_state_dict(load_file(tmp_path / "personal" / "trained" / "002.safetensors"))
    assert same(dict(model.state_dict()), run.personal(2))


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e300, 10**400, "7", True, None])
def test_a_line_says_how_long_its_round_took(odd: object, net: nn.Module, tmp_path: Path) -> None:
    kept(tmp_path, "fedavg", net)
    first = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])
    assert check_line(first, 1, 4) == first
    with pytest.raises(ValueError, match="not a round's"):
        check_line(first | {"seconds": odd}, 1, 4)


@pytest.mark.parametrize(
    "odd",
    [
        {"seconds_evaluating": [1.0]},
        {"accuracy_trained": 10**400},
        {"per_client": {"bytes_up": {"0": math.inf}}},
        {"monitor": {"weights": [[0.5, 10**400]]}},
        {"missed": {"0": 7}},
    ],
)
def test_a_line_with_what_is_no_number_is_not_read(odd: Record, net: nn.Module, tmp_path: Path) -> None:
    kept(tmp_path, "fedavg", net)
    first = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])
    assert check_line(first | {"monitor": {"weights": [[0.5, 1e308, 1e308]], "layer": "fc"}}, 1, 4)
    with pytest.raises(ValueError, match="line 1 of the record"):
        check_line(first | odd, 1, 4)


def test_runs_never_overwrite_each_other(net: nn.Module, tmp_path: Path) -> None:
    kept(tmp_path / "run", "fedavg", net)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ft.Refused, match="runs never overwrite each other"):
        kept(tmp_path / "run", "local", net)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert free_folder(tmp_path, "run").name == "run-2"


def test_what_is_no_finished_run_is_refused(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ft.Refused, match="There is no run"):
        ft.open(tmp_path)
    kept(tmp_path / "run", "fedavg", net)
    (tmp_path / "run" / "personal").rename(tmp_path / "elsewhere")
    with pytest.raises(ft.Refused, match="is not finished; go on with: fedtailor resume"):
        ft.open(tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_refused_before_training(net: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rounds: list[object] = []
    with pytest.raises(ft.Refused, match="cannot be written"):
        inside = tmp_path / "file" / "run"
        ft.simulate(ft.methods.FedAvg(), net, tiny_federation(), rounds=1, folder=inside, record=rounds.append)
    assert not rounds


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    """JSON has no NaN; a diverged run must still be readable by others."""
    method, model = ft.methods.FedAvg(lr=1.0, epochs=1), Loud().double()
    run = ft.simulate(method, model, tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    assert math.isnan(run.records[0]["loss"])
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["loss"] is None


def test_toml_says_the_same_as_the_settings() -> None:
    settings = {
        "name": 'a "quoted" näme\n', "none": None, "list": [[0, 1], [2]], "yes": True,
        "table": {"x": 1e-7, "y": None, "z": [0.6, 1.0]},
    }  # fmt: skip
    table = {"x": 1e-7, "z": [0.6, 1.0]}
    assert tomllib.loads(to_toml(settings)) == {k: settings[k] for k in ("name", "list", "yes")} | {"table": table}


def test_a_method_inside_a_method_is_told_apart(net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Wrapper(ft.methods.FedAvg):
        inner: ft.Method = field(default_factory=lambda: ft.methods.FedProx(mu=0.3))
        scale: float = 1.0

    ft.simulate(Wrapper(scale=np.float32(0.5)), net, tiny_federation(), rounds=1, folder=tmp_path)  # type: ignore[arg-type]
    method = ft.open(tmp_path).experiment["method"]
    assert method["name"] == "wrapper" and method["scale"] == 0.5
    assert method["inner"]["name"] == "fedprox" and method["inner"]["mu"] == 0.3


def test_a_diverged_run_can_be_read_and_summed_up(tmp_path: Path) -> None:
    method = ft.methods.FedAvg(lr=1.0, epochs=1)
    own = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    model = ft.wrap(Loud().double(), loss=own)  # with a loss of one's own, that is the score
    ft.simulate(method, model, tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    found = ft.open(tmp_path).summary()["received"]
    assert math.isnan(found["last"]["weighted"]) and found["best_test"] is None


def test_own_data_are_not_taken_for_a_named_set(net: nn.Module, tmp_path: Path) -> None:
    """What a run with arrays leaves cannot silently repeat on digits."""
    kept(tmp_path, "fedavg", net)
    with pytest.raises(ft.Refused, match="There is no"):
        make(from_toml(tmp_path / "experiment.toml"))
