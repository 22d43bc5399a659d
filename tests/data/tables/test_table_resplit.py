"""Tables whose rows are split anew: features are fitted on the new training rows, as if they had been read so."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor.data.tables.agreement import agree
from fedtailor.data.tables.loading import to_json
from fedtailor.data.tables.reading import read_table
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.site import open_site
from fedtailor.data.tables.summary import summarize


def write_sites(folder: Path) -> None:
    random = np.random.default_rng(0)
    for number, site in enumerate(("a", "b")):
        age = random.normal(50 + 10 * number, 5, 40).round(1)
        frame = pd.DataFrame({"age": age, "sex": random.choice(["f", "m"], 40), "ill": ["yes", "no"] * 20})
        frame.loc[::7, "age"] = None
        frame.to_csv(folder / f"{site}.csv", index=False)


@pytest.mark.parametrize("fit", ["federation", "site"])
def test_resplit_equals_reading_tables_with_this_split(tmp_path: Path, fit: str) -> None:
    """The new split, written into the files as a column, gives the same features."""
    write_sites(tmp_path)
    fed = ft.Federation.from_tables(tmp_path, target="ill", fit=fit)
    new = fed.resplit(5).resplit(2)
    (tmp_path / "split").mkdir()
    for client, name in enumerate(new.names):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        frame["part"] = "train"
        frame.loc[new.test[client].numpy() - 40 * client, "part"] = "test"
        frame.to_csv(tmp_path / "split" / f"{name}.csv", index=False)
    read = ft.Federation.from_tables(tmp_path / "split", target="ill", fit=fit, test="part")
    assert isinstance(new.x, torch.Tensor) and isinstance(read.x, torch.Tensor) and isinstance(fed.x, torch.Tensor)
    assert torch.equal(new.x, read.x) and not torch.equal(new.x, fed.x)
    assert new.table is not None and read.table is not None and new.table.statistics == read.table.statistics


def test_tables_of_an_agreed_schema_are_split_anew_in_the_same_way(tmp_path: Path) -> None:
    write_sites(tmp_path)
    settings = TableSettings(target="ill")
    sites = [open_site(name, read_table(tmp_path / f"{name}.csv"), settings, 0) for name in ("a", "b")]
    schema, _ = agree([summarize(site, settings, 0) for site in sites], settings)
    (tmp_path / "schema.json").write_text(to_json(schema))
    agreed, read = (
        ft.Federation.from_tables(tmp_path, **given).resplit(3)
        for given in ({"schema": tmp_path / "schema.json"}, {"target": "ill"})
    )
    assert isinstance(agreed.x, torch.Tensor) and isinstance(read.x, torch.Tensor) and torch.equal(agreed.x, read.x)


def test_rows_of_a_rare_class_are_left_out_of_all_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sites(tmp_path)
    for site, label in (("a", "unknown"), ("b", "yes")):
        frame = pd.read_csv(tmp_path / f"{site}.csv")
        frame.loc[5, "ill"] = label
        frame.to_csv(tmp_path / f"{site}.csv", index=False)
    fed = ft.Federation.from_tables(tmp_path, target="ill")
    new = fed.resplit(0).resplit(1)
    assert fed.class_names == ("no", "yes") and [len(new.train[i]) + len(new.test[i]) for i in (0, 1)] == [39, 40]
    assert sum("see min_count" in one.message for one in caplog.records) == 1


def test_event_and_time_are_survival_targets(tmp_path: Path) -> None:
    """Two columns are trained with Cox's loss; every redrawn test set has events and censored rows."""
    random = np.random.default_rng(1)
    for site in ("a", "b"):
        frame = pd.DataFrame({"age": random.normal(60, 9, 40).round(1), "days": random.exponential(300, 40).round(1)})
        frame["died"] = np.where(random.random(40) < 0.4, "yes", "no")
        frame.to_csv(tmp_path / f"{site}.csv", index=False)
    fed = ft.Federation.from_tables(tmp_path, target=["died", "days"], survival=True)
    assert fed.task == "survival" and fed.num_outputs == 1
    for new in (fed.resplit(repeat) for repeat in range(3)):
        assert all({0.0, 1.0} == set(new.y[rows, 0].tolist()) for rows in new.test)
    run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2)
    assert run.info["score"] == "c_index"


def test_redrawn_splits_have_the_same_features_and_classes() -> None:
    """A category and a class with about min_count training rows are known in all splits or in none."""
    frame = pd.DataFrame({"site": "a", "age": np.arange(40.0), "kind": ["rare"] * 7 + ["x"] * 18 + ["y"] * 15})
    frame["ill"] = ["odd"] * 7 + ["yes", "no", "no"] * 11
    fed = ft.Federation.from_dataframe(frame, client="site", target="ill")
    splits = [fed.resplit(repeat) for repeat in range(6)]
    assert fed.table is not None
    for new in splits:
        assert new.table is not None and new.table.feature_names == fed.table.feature_names
        assert new.class_names == fed.class_names and len(new.x) == len(fed.y)
        ages = frame["age"].to_numpy()[new.train[0].numpy()]
        assert new.table.statistics[""].mean[0] == pytest.approx(ages.mean())
