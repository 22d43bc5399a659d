"""What a run evaluates on request: other metrics, training samples, and the global model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import FEDERATED, MEASURED, SIZES, TinyNet, error_message, tiny_federation
from fedtailor.core.method import Setup
from fedtailor.core.metrics import auc_absent_zero, weighted_f1
from fedtailor.methods import METHODS
from support.simulation import simulate

EXTRA: dict[str, Any] = {"evaluate_train": True, "evaluate_global": True, "measure_drift": True}
PARTICIPANTS = [[0, 1], [1, 2], [0, 2]]  # client 3 never trains


def outputs(state: Any, samples: torch.Tensor) -> torch.Tensor:
    """Compute the outputs of a model without the library."""
    twin = TinyNet().double()
    twin.load_state_dict(state)
    return twin(tiny_federation().x[samples]).detach()  # type: ignore[no-any-return]


def without_extra(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without measured times and without what `EXTRA` adds."""
    prefixes = ("seconds", "train_", "global_", "model_drift", "shared_drift")
    tables = {name: table for name, table in record["per_client"].items() if not name.startswith(prefixes)}
    return {name: value for name, value in record.items() if not name.startswith(prefixes)} | {"per_client": tables}


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "pool"])
def test_extra_evaluation_changes_nothing_else(engine: str, net: nn.Module) -> None:
    settings: dict[str, Any] = {"schedule": PARTICIPANTS, "engine": engine, "validation": 0.2, "held_out_clients": [3]}
    method = ft.methods.Ditto()
    plain, run = simulate(net, method, **settings), simulate(net, method, **settings, **EXTRA)
    assert [without_extra(record) for record in run.records] == list(map(without_extra, plain.records))
    assert not any(name.startswith(("train_", "global_")) for name in plain.records[-1])
    assert torch.equal(run.personal(0)["head.weight"], plain.personal(0)["head.weight"])


def test_run_with_chosen_metrics_records_and_ranks_by_them(net: nn.Module) -> None:
    run = simulate(net, metrics=["weighted_f1", "auc_absent_zero"])
    fed, last = tiny_federation(), run.records[-1]
    for name, function in {"weighted_f1": weighted_f1, "auc_absent_zero": auc_absent_zero}.items():
        for client in range(4):
            expected = function(outputs(run.personal(client), fed.test[client]), fed.y[fed.test[client]])
            assert last["per_client"][f"{name}_trained"][client] == pytest.approx(float(expected))
    assert run.info["score"] == "weighted_f1" and run.info["higher_is_better"] and "accuracy_trained" not in last
    assert same_bits(run, simulate(net))


def same_bits(run: ft.Run, other: ft.Run) -> bool:
    pairs = zip(run.personal(0).values(), other.personal(0).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_unknown_repeated_or_unfit_metrics_are_named(net: nn.Module) -> None:
    assert "no metric 'f1'" in error_message(lambda: simulate(net, metrics=["f1"]))
    assert "different names" in error_message(lambda: simulate(net, metrics=["auc", "auc"]))
    fed = ft.Federation.from_arrays([(torch.randn(6, 2), torch.randn(6), torch.randn(3, 2), torch.randn(3))])
    model = ft.wrap(nn.Linear(2, 1), head=None, loss="regression")
    message = error_message(lambda: ft.simulate(ft.methods.FedAvg(), model, fed, rounds=1, metrics=["accuracy"]))
    assert "'accuracy' is for classes, but the targets are numbers" in message and "mse" in message
    assert "cannot be named 'train_auc'" in error_message(lambda: ft.wrap(net, metrics={"train_auc": weighted_f1}))


def test_own_metrics_can_be_chosen_with_built_in_ones(net: nn.Module) -> None:
    own = ft.Metric(lambda outputs, targets: outputs.max(), higher_is_better=False)
    run = simulate(ft.wrap(net, metrics={"peak": own}), metrics=["peak", "weighted_f1"])  # type: ignore[arg-type]
    assert run.info["score"] == "peak" and not run.info["higher_is_better"]
    assert {"peak_trained", "weighted_f1_trained"} <= run.records[-1].keys()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_accuracy_is_that_of_both_personal_models_on_training_samples(engine: str, net: nn.Module) -> None:
    run = simulate(net, ft.methods.FedPer(), schedule=PARTICIPANTS, engine=engine, evaluate_train=True)
    fed, last = tiny_federation(), run.records[-1]
    for moment in ("received", "trained"):
        right = [
            outputs(run.personal(c, moment), fed.train[c]).argmax(1) == fed.y[fed.train[c]] for c in range(len(SIZES))
        ]
        expected = {client: float(own.double().mean()) for client, own in enumerate(right)}
        assert last["per_client"][f"train_accuracy_{moment}"] == pytest.approx(expected)
        assert last[f"train_accuracy_{moment}"] == pytest.approx(float(torch.cat(right).double().mean()))
        assert last[f"train_accuracy_{moment}_mean"] == pytest.approx(sum(expected.values()) / len(SIZES))
        assert run.summary()[moment]["last"]["metrics"]["train_accuracy"]["weighted"] == pytest.approx(
            last[f"train_accuracy_{moment}"]
        )
    participants = last["clients"]  # the training loss that every run records covers the clients of the round
    losses = last["per_client"]["train_loss_trained"]
    assert last["per_client"]["loss"] == pytest.approx({client: losses[client] for client in participants})


@pytest.mark.parametrize("method", [ft.methods.Ditto(), ft.methods.FedAvgFT(), ft.methods.FedAvg()], ids=str)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_global_model_of_fedavg_family_scores_as_fedavg(method: ft.Method, engine: str, net: nn.Module) -> None:
    """Ditto's and FedAvg-FT's global models are those of FedAvg with the same seed."""
    run = simulate(net, method, schedule=PARTICIPANTS, engine=engine, evaluate_global=True)
    fedavg = simulate(net, schedule=PARTICIPANTS, engine=engine)
    for record, expected in zip(run.records, fedavg.records, strict=True):
        for metric in ("accuracy", "macro_f1", "auc", "loss"):
            assert record["per_client"][f"global_{metric}_received"] == pytest.approx(
                expected["per_client"][f"{metric}_received"], abs=1e-12
            )
        assert not any(name.startswith("global_") and "trained" in name for name in record["per_client"])
    found = run.records[-1]["global_accuracy_received"]
    for moment in ("received", "trained"):
        assert run.summary()[moment]["last"]["metrics"]["global_accuracy"]["weighted"] == pytest.approx(found)


def test_global_model_of_fedrod_uses_its_generic_head_only(net: nn.Module) -> None:
    run, fed = simulate(net, ft.methods.FedRoD(), evaluate_global=True), tiny_federation()
    expected = {c: (outputs(run.server["params"], t).argmax(1) == fed.y[t]).double() for c, t in enumerate(fed.test)}
    means = {client: float(right.mean()) for client, right in expected.items()}
    assert run.records[-1]["per_client"]["global_accuracy_received"] == means


@pytest.mark.parametrize("name", [name for name in FEDERATED if METHODS[name]().has_global_model])
def test_methods_with_a_global_model_send_it_to_all_clients(name: str, net: nn.Module) -> None:
    method, params = METHODS[name](), {n: p.detach() for n, p in net.named_parameters()}
    setup = Setup(ft.wrap(net), params, 3, torch.tensor([3, 2, 1]), rounds=2, seed=0)
    sent = method.serve(method.init_server(setup), [0, 2], round=1)["params"]
    assert sent.keys() == params.keys()
    assert all(torch.equal(leaf[0], leaf[1]) for leaf in sent.values())


def test_method_without_global_model_is_rejected_and_left_out_of_comparisons(net: nn.Module) -> None:
    message = error_message(lambda: simulate(net, ft.methods.FedPer(), evaluate_global=True))
    assert "FedPer has no global model" in message and "receives: body" in message
    settings: dict[str, Any] = {"rounds": 2, "dtype": torch.float64, "evaluate_global": True, "evaluate_train": True}
    result = ft.compare(["ditto", "fedper"], net, tiny_federation(), **settings)
    rows = {row["method"]: row for row in result.rows()}
    known = {name: rows[name].get("global_accuracy_received") for name in rows}
    assert known["Ditto"] is not None and known["FedPer"] is None and known["Local training"] is None
    assert all(row["train_accuracy_trained"] is not None for row in rows.values())
    ditto = next(run for run in result.runs if run.method == "ditto").records[-1]
    for column, name in {
        "client_mean": "accuracy_trained_mean",
        "macro_f1_client_mean": "macro_f1_trained_mean",
    }.items():
        assert rows["Ditto"][column] == pytest.approx(ditto[name])
    assert "global trained" not in " ".join(result.table().split()) and "global model" in result.table()


def test_resumed_run_has_the_same_extra_values(net: nn.Module, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": ft.methods.Ditto(), "schedule": PARTICIPANTS, "engine": "sequential"}
    settings |= {"metrics": ["accuracy", "auc_absent_zero"], **EXTRA}
    expected = simulate(net, **settings)

    def stop(record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(net, folder=tmp_path / "run", checkpoint_every=1, on_round_end=stop, **settings)
    run = ft.resume(tmp_path / "run", model=TinyNet().double(), fed=tiny_federation())
    loaded = ft.load_run(tmp_path / "run")
    for found in (run, loaded):
        for record, whole in zip(found.records, expected.records, strict=True):
            assert {n: v for n, v in record.items() if not n.startswith(MEASURED)} == {
                n: v for n, v in whole.items() if not n.startswith(MEASURED)
            }
    assert found.experiment["metrics"] == ["accuracy", "auc_absent_zero"] and found.experiment["evaluate_global"]
