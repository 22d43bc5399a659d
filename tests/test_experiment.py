"""An experiment is the same thing as a dataclass, as TOML and as flags."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from conftest import SOME_FAST
from fedtailor.experiment import Experiment, field_notes, from_toml, make
from fedtailor.flags import read_flags
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


def test_toml_and_flags_are_the_same() -> None:
    by_flags = make(read_flags(FLAGS.replace("16,", "[16]").split()).over({}))
    assert make(tomllib.loads(TOML)) == by_flags
    assert by_flags.method == ft.methods.FedProx(mu=0.3)
    assert by_flags.participation == (0.5, 1.0)


def test_flags_lie_over_the_file() -> None:
    made = make(read_flags(["--method.mu", "0.7", "--rounds", "9", "--data", "mnist"]).over(tomllib.loads(TOML)))
    assert made.method == ft.methods.FedProx(mu=0.7)
    assert (made.rounds, made.data.name, made.data.clients) == (9, "mnist", 6)


def test_a_run_repeats_from_the_experiment_it_left(tmp_path: Path) -> None:
    """What the folder says is enough to do the same again, to the last bit."""
    first = make(tomllib.loads(TOML)).run(folder=tmp_path / "run")
    again = make(from_toml(tmp_path / "run" / "experiment.toml")).run()
    pairs = zip(first.records, again.records, strict=True)
    assert all(a["per_client"] == b["per_client"] and a["clients"] == b["clients"] for a, b in pairs)


def test_the_split_follows_the_seed_unless_it_has_its_own() -> None:
    sizes = [[len(own) for own in make(s).load().train] for s in ({"seed": 1}, {"seed": 2}, {"seed": 1})]
    assert sizes[0] != sizes[1] and sizes[0] == sizes[2]
    fixed = [[len(o) for o in make({"seed": s, "data": {"seed": 5}}).load().train] for s in (1, 2)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fedavgg"}, "no method 'fedavgg'; did you mean 'fedavg'"),
        ({"method": {"name": "ditto", "lamm": 1}}, "no field of ditto 'lamm'; did you mean 'lam'"),
        ({"method": {"name": "ditto", "lam": "much"}}, r"method\.lam cannot be 'much'"),
        ({"method": {"name": "fedavg", "weights": "sizes"}}, r"method\.weights cannot be 'sizes'"),
        ({"method": 3}, "method must be a name or a table"),
        ({"method": {"name": ["x"]}}, r"method\.name must be a text"),
        ({"data": {"name": 5}}, r"data\.name must be a text"),
        ({"network": "lenet"}, "did you mean 'lenet5'"),
        ({"network": {"hidden": [3]}}, "has fields but no name"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"data": {"cleints": 3}}, "did you mean 'clients'"),
        ({"data": {"clients": "many"}}, r"data\.clients cannot be 'many'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": "three"}, "rounds cannot be 'three'"),
        ({"dtype": "float16"}, "dtype cannot be 'float16'"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ft.Refused, match=words):
        make(settings)


def test_flags_that_say_nothing_are_refused() -> None:
    with pytest.raises(ft.Refused, match="--rounds needs a value"):
        read_flags(["--rounds"])
    with pytest.raises(ft.Refused, match="--rounds needs a value"):
        read_flags(["--rounds", "--seed", "1"])
    for word in ("--", "--=3"):
        with pytest.raises(ft.Refused, match="name follows its two dashes"):
            read_flags([word])
    with pytest.raises(ft.Refused, match="is not TOML"):
        from_toml(Path(__file__))


@pytest.mark.parametrize("kind", [*METHODS.values(), *NETWORKS.values(), Experiment, type(Experiment().data)])
def test_every_field_has_a_default_and_most_a_note(kind: Any) -> None:
    notes = field_notes(kind)
    assert notes.keys() == {f.name for f in fields(kind)}
    if kind in METHODS.values():
        assert all(default and note for default, note in notes.values())


def test_none_is_a_value_where_a_field_may_have_none() -> None:
    words = "--method fedlag --method.personal-layers none --network cnn --network.norm none"
    made = make(read_flags(words.split()).over({}))
    assert made.method == ft.methods.FedLAG() and getattr(made.network, "norm", "") == "none"


def test_a_method_around_a_method_has_flags_of_its_own() -> None:
    words = "--method lag --method.threshold 0.2 --method.inner scaffold --method.inner.lr 0.05"
    made = make(read_flags(words.split()).over({}))
    assert made.method == ft.methods.LAG(ft.methods.Scaffold(lr=0.05), threshold=0.2)
    other = read_flags(["--method.inner.mu", "0.5"]).over({"method": {"name": "lag", "inner": "fedprox"}})
    assert make(other).method == ft.methods.LAG(ft.methods.FedProx(mu=0.5))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "lag", "inner": "scafold"}, "There is no method.inner 'scafold'; did you mean 'scaffold'?"),
        ({"name": "lag", "inner": {"name": "fedprox", "mue": 1}}, "There is no field of fedprox 'mue'"),
        ({"name": "lag", "inner": {"mu": 1}}, "The method.inner has fields but no name"),
        ({"name": "lag", "inner": {"name": "fedprox", "mu": "much"}}, "method.inner.mu cannot be 'much'"),
        ({"name": "lag", "inner": 3}, "method.inner must be a name or a table with a name"),
        ({"name": "selffl", "clusters": "all"}, "method.clusters cannot be 'all'"),
        ({"name": "fedapm", "split": 3}, "method.split cannot be 3"),
    ],
)
def test_what_an_inner_method_cannot_be_is_said(method: dict[str, Any], words: str) -> None:
    with pytest.raises(ft.Refused, match=re.escape(words)):
        make({"method": method})


ODD: dict[str, ft.Method] = {
    "lag": ft.methods.LAG(ft.methods.Scaffold(lr=0.05), personal_layers=1),
    "fedapm": ft.methods.FedAPM(split=("fc1", "head"), accuracy_start=0.5),
    "selffl": ft.methods.SelfFL(clusters=(0, 0, 1, 1), warmup=0),
    "fedapa": ft.methods.FedAPA(variant="code", clip=False),
}


@pytest.mark.parametrize("name", SOME_FAST)
def test_every_method_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    """The TOML of a run names all that its method was told."""
    settings: dict[str, Any] = {"rounds": 1, "evaluate": 1, "data": {"clients": 4, "alpha": 1.0}}
    experiment = replace(make(settings), method=ODD.get(name, METHODS[name]()))
    experiment.run(folder=tmp_path / "run")
    assert make(from_toml(tmp_path / "run" / "experiment.toml")).method == experiment.method


def test_a_list_of_one_is_written_as_its_value() -> None:
    assert make({"network": {"name": "mlp", "hidden": 16}}).network == NETWORKS["mlp"](hidden=(16,))  # type: ignore[call-arg]
