"""Several networks in the settings of an experiment: flags, files, and run folders."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from conftest import error_message, same
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.reporting.reproduce import _flags, _non_default_settings

NETWORKS = """
[method]
name = "fedproto"
[[network]]
name = "logistic"
[[network]]
name = "mlp"
hidden = [64]
"""


def names(experiment: Experiment, fed: ft.Federation) -> list[str]:
    model = experiment.model(fed)
    assert isinstance(model, ft.ClientModels)
    return [model[client].description["name"] for client in range(fed.num_clients)]


def test_clients_take_the_networks_of_flags_and_files_in_turn() -> None:
    fed = ft.load("digits", clients=3)
    flags = parse_overrides(["--network", "logistic,mlp"]).apply_to({})
    for settings in (flags, tomllib.loads(NETWORKS)):
        assert names(make_experiment(settings), fed) == ["logistic", "mlp", "logistic"]


def test_run_folder_restores_the_networks_of_all_clients(tmp_path: Path) -> None:
    """A run with networks that do not take turns can be repeated from its file and from flags, and resumed by name."""
    fed = ft.load("digits", clients=4)
    logistic, mlp = ft.network("logistic", fed), ft.network("mlp", fed, hidden=(8, 16))
    models = ft.client_models(lambda client: mlp if client == 2 else logistic, fed)
    run = ft.simulate(ft.methods.Local(), models, fed, rounds=1, device="cpu", folder=tmp_path / "run")
    experiment = make_experiment(read_experiment_file(tmp_path / "run" / "experiment.toml"))
    assert names(experiment, fed) == ["logistic", "logistic", "mlp", "logistic"]
    assert experiment.describe(fed) == run.experiment
    words = _flags(_non_default_settings(run.experiment))
    assert make_experiment(parse_overrides(words).apply_to({})).network == experiment.network
    (tmp_path / "run" / "personal" / "models.json").unlink()  # the run is not finished
    assert same(ft.resume(tmp_path / "run").personal(2), run.personal(2))


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        ([], "Several networks are written as a list"),
        ({"name": "by_client"}, "Several networks are written as a list"),
        (["mlp", "cnnn"], "cnn"),
        ({"name": "by_client", "networks": ["mlp"], "clients": [0, 1]}, "positions from 0 to 0"),
        ({"name": "by_client", "network": ["mlp"]}, "networks"),
        (["mlp", "nowhere:Net"], "'nowhere:Net' is code that importing would execute"),
    ],
)
def test_invalid_networks_are_rejected(network: Any, problem: str) -> None:
    assert problem in error_message(lambda: make_experiment({"network": network}))
