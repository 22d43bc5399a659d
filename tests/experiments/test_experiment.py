"""Experiments as dataclasses, TOML files, and command-line flags."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from conftest import METHOD_PARAMS, error_message
from fedtailor.data.datasets import DATASETS
from fedtailor.data.images.datasets import MNIST, Digits
from fedtailor.experiments.deployment import Deployment
from fedtailor.experiments.deployment_inputs import Inputs
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.parsing import field_help
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS

TOML = """
rounds = 3
participation = [0.5, 1.0]
evaluate = 4
[method]
name = "fedprox"
mu = 0.3
[data]
name = "digits"
clients = 6
alpha = 1
[network]
name = "mlp"
hidden = [16]
"""
FLAGS = (
    "--rounds 3 --participation 0.5,1.0 --evaluate 4 --method fedprox --method.mu 0.3 "
    "--data digits --data.clients 6 --data.alpha 1 --network mlp --network.hidden 16,"
)


def test_toml_and_flags_give_the_same_experiment() -> None:
    by_flags = make_experiment(parse_overrides(FLAGS.replace("16,", "[16]").split()).apply_to({}))
    assert make_experiment(tomllib.loads(TOML)) == by_flags
    assert by_flags.method == ft.methods.FedProx(mu=0.3)
    assert by_flags.participation == (0.5, 1.0)


def test_flags_take_precedence_over_the_file() -> None:
    experiment = make_experiment(
        parse_overrides(["--method.mu", "0.7", "--rounds", "9", "--data", "mnist"]).apply_to(tomllib.loads(TOML))
    )
    assert experiment.method == ft.methods.FedProx(mu=0.7)
    assert isinstance(experiment.data, MNIST)
    assert (experiment.rounds, experiment.data.name, experiment.data.clients) == (9, "mnist", 6)


def test_saved_experiment_reproduces_the_run(tmp_path: Path) -> None:
    """The settings in the run folder are sufficient to repeat the run exactly."""
    first = make_experiment(tomllib.loads(TOML)).run(folder=tmp_path / "run")
    again = make_experiment(read_experiment_file(tmp_path / "run" / "experiment.toml")).run()
    pairs = zip(first.records, again.records, strict=True)
    assert all(a["per_client"] == b["per_client"] and a["clients"] == b["clients"] for a, b in pairs)


@pytest.mark.parametrize(
    ("flags", "clients"),
    [
        ("--data digits --data.partition indices --data.indices split.json --data.normalize pixel", ("ann", "bob")),
        ("--data rectangles --data.owners-per-client 2 --data.normalize half", ("1 to 2", "3 to 4")),
        ("--data gaussian --data.clients 2 --network logistic --network.bias false", ("0", "1")),
        ("--data digits --data.clients 2 --data.cap false --data.min-size 300 --data.redraw true", ("0", "1")),
    ],
)
def test_saved_split_reproduces_the_run(
    flags: str, clients: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("split.json").write_text('{"ann": [0, 1, 2, 3, 4], "bob": [9, 8, 7, 6, 5]}', encoding="utf-8")
    experiment = make_experiment(parse_overrides(f"--rounds 2 {flags}".split()).apply_to({}))
    assert experiment.load().names == clients
    first = experiment.run(folder=tmp_path / "run")
    again = make_experiment(read_experiment_file(tmp_path / "run" / "experiment.toml")).run()
    assert [record["per_client"] for record in first.records] == [record["per_client"] for record in again.records]


def test_split_depends_on_seed_unless_data_seed_is_set() -> None:
    sizes = [[len(own) for own in make_experiment(s).load().train] for s in ({"seed": 1}, {"seed": 2}, {"seed": 1})]
    assert sizes[0] != sizes[1] and sizes[0] == sizes[2]
    fixed = [[len(o) for o in make_experiment({"seed": s, "data": {"seed": 5}}).load().train] for s in (1, 2)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedavgg"}, "no method 'fedavgg'; did you mean 'fedavg'"),
        ({"method": {"name": "ditto", "lamm": 1}}, "no field of ditto 'lamm'; did you mean 'lam'"),
        ({"method": {"name": "ditto", "lam": "much"}}, "method.lam cannot be 'much'"),
        ({"method": {"name": "fedavg", "weights": "sizes"}}, "method.weights cannot be 'sizes'"),
        ({"method": 3}, "method must be a name or a table"),
        ({"method": {"name": ["x"]}}, "method.name must be a string"),
        ({"data": {"name": 5}}, "data.name must be a string"),
        ({"network": "lenet"}, "did you mean 'lenet5'"),
        ({"network": {"hidden": [3]}}, "has fields but no name"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"data": {"cleints": 3}}, "did you mean 'clients'"),
        ({"data": {"clients": "many"}}, "data.clients cannot be 'many'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": "three"}, "rounds cannot be 'three'"),
        ({"dtype": "float16"}, "dtype cannot be 'float16'"),
        (
            {"method": {"name": "lag", "inner": "scafold"}},
            "no method.inner 'scafold'; did you mean 'scaffold'",
        ),
        ({"method": {"name": "lag", "inner": {"name": "fedprox", "mue": 1}}}, "There is no field of fedprox 'mue'"),
        ({"method": {"name": "lag", "inner": {"mu": 1}}}, "The method.inner has fields but no name"),
        ({"method": {"name": "lag", "inner": {"name": "fedprox", "mu": "much"}}}, "method.inner.mu cannot be 'much'"),
        ({"method": {"name": "lag", "inner": 3}}, "method.inner must be a name or a table with a name"),
        ({"method": {"name": "selffl", "clusters": "all"}}, "method.clusters cannot be 'all'"),
        ({"method": {"name": "fedapm", "split": 3}}, "method.split cannot be 3"),
    ],
)
def test_make_experiment_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    assert message in error_message(lambda: make_experiment(settings))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds"], "--rounds needs a value"),
        (["--rounds", "--seed", "1"], "--rounds needs a value"),
        (["--"], "needs a name directly after its two dashes"),
        (["--=3"], "needs a name directly after its two dashes"),
    ],
)
def test_parse_overrides_incomplete_flags_raise(words: list[str], message: str) -> None:
    assert message in error_message(lambda: parse_overrides(words))


@pytest.mark.parametrize(
    "kind",
    [
        *METHODS.values(),
        *NETWORKS.values(),
        Experiment,
        *DATASETS.values(),
        ft.Augmentation,
        ft.Unreliable,
        ft.Channel,
        Deployment,
        Inputs,
    ],
)
def test_field_help_every_field_has_default_and_help(kind: Any) -> None:
    found = field_help(kind)
    hidden = getattr(kind, "fixed_settings", {})  # settings of local training that the method does not allow
    assert found.keys() == {f.name for f in fields(kind)} - set(hidden)
    parts = ("method", "data", "network", "inputs")  # described by their own fields
    assert all(default and text for name, (default, text) in found.items() if name not in parts)


def test_flag_none_is_none_for_optional_fields_and_single_value_is_a_list() -> None:
    words = "--method fedlag --method.personal-layers none --network cnn --network.norm none"
    experiment = make_experiment(parse_overrides(words.split()).apply_to({}))
    assert experiment.method == ft.methods.FedLAG() and getattr(experiment.network, "norm", "") == "none"
    assert getattr(make_experiment({"network": {"name": "mlp", "hidden": 16}}).network, "hidden", None) == (16,)


@pytest.mark.parametrize(("text", "value"), [("2", 2), ("0.25", 0.25), ("1,3", [1, 3]), ("[3]", [3]), ("none", None)])
def test_held_out_clients_are_saved_as_they_were_given(text: str, value: Any, tmp_path: Path) -> None:
    flags = ["--held-out-clients", text, "--data.common-test", "0.1", "--data.clients", "4", "--rounds", "1"]
    experiment = make_experiment(parse_overrides(flags).apply_to({}))
    assert experiment.held_out_clients == value and type(experiment.held_out_clients) is type(value)
    run = experiment.run(folder=tmp_path)
    saved = make_experiment(read_experiment_file(tmp_path / "experiment.toml"))
    assert saved.held_out_clients == value and isinstance(saved.data, Digits) and saved.data.common_test == 0.1
    assert len(run.held_out_clients) == {"2": 2, "0.25": 1, "1,3": 2, "[3]": 1, "none": 0}[text]


def test_flags_set_fields_of_inner_method() -> None:
    words = "--method lag --method.threshold 0.2 --method.inner scaffold --method.inner.lr 0.05"
    experiment = make_experiment(parse_overrides(words.split()).apply_to({}))
    assert experiment.method == ft.methods.LAG(ft.methods.Scaffold(lr=0.05), threshold=0.2)
    other = parse_overrides(["--method.inner.mu", "0.5"]).apply_to({"method": {"name": "lag", "inner": "fedprox"}})
    assert make_experiment(other).method == ft.methods.LAG(ft.methods.FedProx(mu=0.5))


UNUSUAL: dict[str, ft.Method] = {
    "lag": ft.methods.LAG(ft.methods.Scaffold(lr=0.05), personal_layers=1),
    "fedapm": ft.methods.FedAPM(split=("fc1", "head"), accuracy_start=0.5),
    "selffl": ft.methods.SelfFL(clusters=(0, 0, 1, 1), warmup=0),
    "fedapa": ft.methods.FedAPA(variant="code", clip=False),
}


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_saved_experiment_restores_method(name: str, tmp_path: Path) -> None:
    """experiment.toml contains all fields of the method."""
    settings: dict[str, Any] = {"rounds": 1, "evaluate": 1, "data": {"clients": 4, "alpha": 1.0}}
    experiment = replace(make_experiment(settings), method=UNUSUAL.get(name, METHODS[name]()))
    experiment.run(folder=tmp_path / "run")
    assert make_experiment(read_experiment_file(tmp_path / "run" / "experiment.toml")).method == experiment.method
