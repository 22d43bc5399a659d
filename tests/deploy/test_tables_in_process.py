"""Deployed sites with tables: they agree on a schema by files, and train as a simulation of all tables does."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.cli.main import main
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.selftest import read_personal_model
from fedtailor.experiments.deployment import read_deployment
from fedtailor.export.prediction import predict
from support.flower_in_process import federate

SITES = ("north", "south", "west")


def fedtailor(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["fedtailor", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code


def write_site(folder: Path, site: str, seed: int) -> Path:
    random, rows = np.random.default_rng(seed), 30 + 10 * seed
    age = random.normal(60, 12, rows).round(1)
    frame = pd.DataFrame({"age": age, "ward": random.choice(["A", "B"], rows), "id": range(rows)})
    frame["outcome"] = np.where(age + random.normal(0, 5, rows) > 60, "dead", "alive")
    frame.to_csv(folder / f"{site}.csv", index=False)
    return folder / f"{site}.csv"


@pytest.mark.parametrize("fit", ["federation", "site"])
def test_deployed_tables_give_same_models_as_simulation_and_predict_raw_files(
    fit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {site: write_site(tmp_path, site, seed) for seed, site in enumerate(SITES)}
    for site, file in files.items():
        out = tmp_path / f"{site}.json"
        fedtailor(monkeypatch, "tables", "summarize", file, "--target", "outcome", "--ignore", "id", "--out", out)
    summaries, schema = [tmp_path / f"{site}.json" for site in SITES], tmp_path / "schema.json"
    fedtailor(monkeypatch, "tables", "agree", *summaries, "--fit", fit, "--out", schema)
    assert "--inputs.shape 3 --inputs.classes 2 --inputs.schema " in (printed := capsys.readouterr().out)

    fed = ft.Federation.from_tables(files, target="outcome", ignore=["id"], fit=fit)
    assert fed.table is not None and fed.table.schema == printed.split()[-1], "as the sites agreed"
    settings = {"method": "fedper", "network": "mlp", "rounds": 2, "batch_size": 8, "evaluate_every": 2}
    federation = federate(tmp_path / "deployed", fed, settings)
    for site, folder in federation.client_folders.items():
        ClientFolder.create(folder, files[site], device="cpu", schema=schema)
    federation.run()
    deployment = read_deployment(federation.folder)
    run = ft.simulate(
        deployment.method, deployment.model(), fed, rounds=2, batch_size=8, engine="sequential", seed=deployment.seed,
        evaluate_every=2,
    )  # fmt: skip
    for client, folder in enumerate(federation.client_folders.values()):
        deployed, expected = read_personal_model(folder, "trained"), run.personal(client, "trained")
        assert all(torch.equal(deployed[name], expected[name]) for name in expected)
    found = predict(ft.load_personal(folder), files["west"])
    own = torch.cat([fed.train[2], fed.test[2]]).sort().values
    with torch.no_grad():
        assert torch.equal(found.outputs, ft.load_personal(folder)(fed.x[own]))
    assert found.rows()[1][0][1] in ("alive", "dead")


def test_table_without_schema_or_with_another_one_is_rejected(tmp_path: Path) -> None:
    files = {site: write_site(tmp_path, site, seed) for seed, site in enumerate(SITES)}
    fed = ft.Federation.from_tables(files, target="outcome", ignore=["id"])
    federation = federate(tmp_path / "deployed", fed, {"method": "fedavg", "network": "logistic", "rounds": 1})
    folder = federation.client_folders["north"]
    assert "--schema" in error_message(lambda: ClientFolder.create(folder, files["north"], device="cpu"))
    client = ClientFolder.create(folder, folder / "data.npz", device="cpu")
    inputs = replace(client.deployment.inputs, schema="0" * 16)
    other = replace(client, deployment=replace(client.deployment, inputs=inputs))
    assert "was not read with the schema of this federation" in error_message(lambda: other.fed)
