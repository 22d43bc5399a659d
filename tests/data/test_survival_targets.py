"""Federations whose targets are (event, time): validation, files, folders, fingerprints, and resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from conftest import error_message, same, survival_federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.training.fingerprint import data_fingerprint

X = np.zeros((4, 3), np.float32)
Y = np.array([[1, 5], [0, 9], [1, 2], [0, 0]])


def test_pairs_of_integers_become_float_targets_of_survival() -> None:
    fed = ft.Federation.from_arrays([(X, Y, X, Y)], survival=True)
    assert fed.task == "survival" and fed.classes is None and fed.num_outputs == 1 and fed.y.is_floating_point()
    assert ft.Federation.from_arrays([(X, Y.astype(np.float32), X, Y.astype(np.float32))]).task == "regression"


def test_times_that_float32_cannot_tell_apart_stay_different() -> None:
    """Seconds since 1970: float32 has one number for 128 of them."""
    x, y = -torch.arange(9.0)[:, None], torch.tensor([[1, 1_700_000_000 + second] for second in range(9)])
    fed = ft.Federation.from_arrays([(x, y, x, y)], survival=True)
    weights = {"head.weight": torch.ones(1, 1), "head.bias": torch.zeros(1)}
    for engine in ("sequential", "vectorized"):
        run = ft.simulate(
            ft.methods.Local(lr=1e-9), ft.network("logistic", fed), fed, rounds=1, initial_weights=weights,
            engine=engine, evaluate_train=True,
        )  # fmt: skip
        assert run.records[-1]["c_index_trained"] == run.records[-1]["train_c_index_trained"] == 1.0


@pytest.mark.parametrize(
    ("y", "named"),
    [
        (Y[:, 0], "pairs (event, time)"),
        (np.column_stack([Y, Y]), "pairs (event, time)"),
        (Y[:, ::-1], "Client bob has invalid survival targets"),  # time and event swapped
        (Y - [[0, 1]], "Client bob has invalid survival targets"),
    ],
)
def test_invalid_survival_targets_are_named(y: np.ndarray, named: str) -> None:
    y = np.ascontiguousarray(y)
    good = Y if y.shape == Y.shape else y
    clients = [(X, good, X, good), (X, y, X, y)]
    assert named in error_message(lambda: ft.Federation.from_arrays(clients, names=["ann", "bob"], survival=True))


def test_test_samples_of_owners_have_the_same_fraction_of_events() -> None:
    targets, owners = [[n % 4 == 0, n] for n in range(40)], [n // 20 for n in range(40)]
    fed = ft.Federation.from_owners(np.zeros((40, 2)), targets, owners, survival=True, common_test=0.2)
    assert fed.common_test is not None and int(fed.y[fed.common_test, 0].sum()) == 2  # of eight
    assert [int(fed.y[test, 0].sum()) for test in fed.test] == [1, 1]  # of four


def test_federation_file_and_folder_keep_survival(tmp_path: Path) -> None:
    fed = survival_federation()
    fed.save(tmp_path / "fed.safetensors")
    opened = ft.Federation.from_file(tmp_path / "fed.safetensors")
    assert opened.survival and opened.task == "survival" and torch.equal(opened.y, fed.y)
    folder = tmp_path / "clients"
    folder.mkdir()
    np.savez(folder / "ann.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    assert ft.load("folder", folder=str(folder), survival=True).task == "survival"


def test_folder_holds_out_the_same_fraction_of_events(tmp_path: Path) -> None:
    y = np.array([[n % 4 == 0, n] for n in range(40)], np.float32)
    np.savez(tmp_path / "ann.npz", x=np.zeros((40, 2), np.float32), y=y)
    for seed in range(5):
        fed = ft.load("folder", folder=str(tmp_path), survival=True, seed=seed)
        assert 2 <= int(fed.y[fed.test[0], 0].sum()) <= 3 and len(fed.test[0]) == 10  # of ten events
    np.savez(tmp_path / "ann.npz", x=np.zeros((40, 2), np.float32), y=y[:, 0])
    assert "pairs (event, time)" in error_message(lambda: ft.load("folder", folder=str(tmp_path), survival=True))


def test_data_fingerprint_and_input_spec_tell_survival_from_regression() -> None:
    fed = survival_federation()
    numbers = replace(fed, survival=False)
    assert data_fingerprint(fed) != data_fingerprint(numbers)
    spec = InputSpec.from_federation(fed)
    assert spec.survival and spec.dummy_federation().num_outputs == 1
    assert not InputSpec.from_federation(numbers).survival


def test_survival_run_is_resumed_bit_by_bit_and_its_model_predicts_risks(tmp_path: Path) -> None:
    fed = survival_federation()
    options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "engine": "sequential", "checkpoint_every": 1}
    options |= {"validation": 0.3, "held_out_clients": [1]}

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyError

    model = ft.network("mlp", fed)
    whole = ft.simulate(ft.methods.Ditto(), model, fed, **options)
    with pytest.raises(KeyError):
        ft.simulate(ft.methods.Ditto(), model, fed, folder=tmp_path / "run", on_round_end=stop, **options)
    resumed = ft.resume(tmp_path / "run", fed=fed)
    assert all(same(whole.personal(client), resumed.personal(client)) for client in range(3))
    personal = ft.load_personal(tmp_path / "run", client=0)
    assert personal(fed.x[fed.test[0]]).shape == (20, 1)


def test_common_test_set_is_evaluated_with_the_c_index() -> None:
    fed = survival_federation((9, 6))
    x, y = fed.x[fed.test[0]], fed.y[fed.test[0]]
    clients = [(fed.x[a], fed.y[a], fed.x[b], fed.y[b]) for a, b in zip(fed.train, fed.test, strict=True)]
    made = ft.Federation.from_arrays(clients, survival=True, common_test=(x, y))
    run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", made), made, rounds=1)
    last = run.records[-1]
    assert last["per_client"]["common_c_index_received"][1] == last["per_client"]["c_index_received"][0]
