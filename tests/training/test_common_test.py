"""A test set that belongs to no client: all personal models are evaluated on it, and nothing else changes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import SIZES, TinyNet, error_message, tiny_federation
from fedtailor.methods import FedPer
from fedtailor.training.fingerprint import fingerprint


def common_federation(shift: float = 0.0, has_common: bool = True) -> ft.Federation:
    """Return clients with 5, 4, 2, and no test samples, and a common test set of 40 samples."""
    fed, random = tiny_federation(), np.random.default_rng(5)
    tests = [test[:count] for test, count in zip(fed.test, (5, 4, 2, 0), strict=True)]
    clients = [(fed.x[a], fed.y[a], fed.x[b], fed.y[b]) for a, b in zip(fed.train, tests, strict=True)]
    common = (random.normal(size=(40, 4)) + shift, np.arange(40) % 3)
    return ft.Federation.from_arrays(clients, classes=3, common_test=common if has_common else None)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_personal_models_are_evaluated_on_common_test_set(engine: str, net: nn.Module) -> None:
    fed = common_federation()
    settings = {"schedule": [[0, 1, 2], [0]], "dtype": torch.float64, "engine": engine}
    run = ft.simulate(FedPer(), net, fed, **settings)  # type: ignore[arg-type]
    record, twin = run.records[-1], TinyNet().double()
    assert fed.common_test is not None and len(fed.common_test) == run.info["common_test"] == 40
    for moment in ("received", "trained"):
        expected = []
        for client in range(4):  # also client 3, which has not trained and has no test samples of its own
            twin.load_state_dict(run.personal(client, moment))
            expected.append(float((twin(fed.x[fed.common_test]).argmax(1) == fed.y[fed.common_test]).double().mean()))
        assert record["per_client"][f"common_accuracy_{moment}"] == dict(enumerate(expected))
        # all clients have the same samples, so their weights are equal
        summary = run.summary()[moment]["last"]["metrics"]["common_accuracy"]
        for mean in (record[f"common_accuracy_{moment}"], summary["weighted"], summary["mean"]):
            assert mean == pytest.approx(np.mean(expected))
    plain = ft.simulate(FedPer(), net, common_federation(has_common=False), **settings)  # type: ignore[arg-type]
    for name, table in plain.records[-1]["per_client"].items():
        assert record["per_client"][name] == table
    assert run.info["clients"] == plain.info["clients"] and [c["train"] for c in run.info["clients"]] == list(SIZES)


def test_load_draws_common_test_set_before_the_split() -> None:
    fed, plain = ft.load("digits", clients=5, common_test=0.2), ft.load("digits", clients=5)
    assert fed.common_test is not None and plain.common_test is None
    owned = torch.cat([*fed.train, *fed.test])
    assert sorted([*owned.tolist(), *fed.common_test.tolist()]) == list(range(1797))
    counts, everyone = (torch.bincount(fed.y[i], minlength=10) for i in (fed.common_test, torch.arange(1797)))
    assert bool(((counts - 0.2 * everyone).abs() <= 1).all())  # stratified by class
    again = ft.load("digits", **{n: v for n, v in fed.settings.items() if n != "name"})
    assert again.common_test is not None and torch.equal(again.common_test, fed.common_test)


def test_from_owners_takes_fraction_or_indices_from_the_clients() -> None:
    x, y, owners = np.arange(40.0)[:, None], np.arange(40) % 2, ["ann", "bob"] * 20
    fed = ft.Federation.from_owners(x, y, owners, common_test=[1, 4, 0])
    assert fed.common_test is not None and fed.common_test.tolist() == [0, 1, 4]
    assert [len(a) + len(b) for a, b in zip(fed.train, fed.test, strict=True)] == [18, 19]
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for made in (
        ft.Federation.from_owners(x, y, owners, common_test=0.25),
        ft.Federation.from_dataset(data, owners, common_test=0.25),
    ):
        assert made.common_test is not None and torch.bincount(made.y[made.common_test]).tolist() == [5, 5]
        assert sorted(torch.cat([*made.train, *made.test, made.common_test]).tolist()) == list(range(40))


def test_fingerprint_and_resume_cover_common_test_set(net: nn.Module, tmp_path: Path) -> None:
    def data(fed: ft.Federation) -> str:
        return fingerprint({}, FedPer, ft.wrap(net), fed)["data"]

    assert len({data(common_federation()), data(common_federation(shift=1.0)), data(tiny_federation())}) == 3
    ft.simulate(FedPer(), net, common_federation(), rounds=1, dtype=torch.float64, folder=tmp_path)
    (tmp_path / "personal" / "models.json").unlink()
    assert "data differs" in error_message(lambda: ft.resume(tmp_path, model=net, fed=tiny_federation()))
    loaded = ft.resume(tmp_path, model=net, fed=common_federation())
    assert loaded.records[-1]["common_accuracy_trained"] > 0


X, Y = np.zeros((6, 4)), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("common", "words"),
    [
        ((X, Y, X), "The common test set must be (x, y), got 3 arrays"),
        ((X[:5], Y), "The common test set's inputs have 5 rows"),
        ((X[:, :2], Y), "The common test set's inputs are float64 (2,)"),
        ((X * np.nan, Y), "The common test set has NaN or infinity in its inputs"),
        ((X, Y + 3), "The common test set has the label 3"),
        ((X, Y.astype(str)), "The common test set has text labels"),
        ((X[:0], Y[:0]), "The common test set has no samples"),
    ],
)
def test_invalid_common_test_set_is_named(common: tuple[np.ndarray, ...], words: str) -> None:
    clients = [(X, Y, X, Y)]
    message = error_message(lambda: ft.Federation.from_arrays(clients, classes=3, common_test=common))  # type: ignore[arg-type]
    assert words in message


@pytest.mark.parametrize("common", [0.0, 1.0, [6], [-1], [], [[0]]])
def test_invalid_common_test_indices_raise(common: object) -> None:
    owners = [[0, 1, 2], [3, 4, 5]]
    call = lambda: ft.Federation.from_owners(X, Y, owners, common_test=common)  # type: ignore[arg-type]  # noqa: E731
    assert "common_test must" in error_message(call)
