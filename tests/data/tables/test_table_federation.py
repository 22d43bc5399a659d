"""Tables as federations: statistics of the pooled training rows, features by hand, targets, and sources."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from support.table_files import patients, write_tables


def train_rows(fed: ft.Federation, client: int) -> np.ndarray:
    """Return the positions of a client's training rows in its file; no row of these tables is left out."""
    start = int(torch.cat([fed.train[client], fed.test[client]]).min())
    return fed.train[client].numpy() - start


def test_statistics_are_those_of_the_pooled_training_rows(tmp_path: Path) -> None:
    frames = {"a": patients(40, 1), "b": patients(70, 2)}
    fed = ft.Federation.from_tables(write_tables(tmp_path, **frames), target="outcome")
    pooled = pd.concat([frame.iloc[train_rows(fed, client)] for client, frame in enumerate(frames.values())])
    assert fed.table is not None and list(fed.table.statistics) == [""]
    found, names = fed.table.statistics[""], fed.table.feature_names
    assert names == ["age", "height", "sex=f", "sex=m", "smoker", "admitted"]
    for column in ("age", "height"):
        assert found.mean[names.index(column)] == pytest.approx(pooled[column].mean(), rel=1e-12)
        assert found.std[names.index(column)] == pytest.approx(pooled[column].std(), rel=1e-12)
    assert found.fill[0] == pytest.approx(pooled["age"].mean(), rel=1e-12)
    days = (pooled["admitted"] - pd.Timestamp(0)) / pd.Timedelta(days=1)
    assert found.mean[5] == pytest.approx(days.mean()) and found.std[5] == pytest.approx(days.std())
    assert fed.table.columns[2].categories[int(found.fill[2])] == pooled["sex"].mode()[0]
    assert found.mean[2:5] == (0, 0, 0) and found.std[2:5] == (1, 1, 1), "categories and booleans are 0 or 1"


def test_rows_are_encoded_by_hand(tmp_path: Path) -> None:
    """Ages 10, 20, and 30: mean 20, deviation 10. The test rows do not change them."""
    rows = ["age;sex;ok;split;y"]
    for age, sex, ok in ((10, "f", "yes"), (20, "m", "no"), (30, "f", "yes")):
        rows += [f"{age};{sex};{ok};train;{label}" for label in ("sick", "well") for _ in range(3)]
    rows += ["1000;f;no;test;sick", ";;;test;well", "20;x;yes;test;well"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    fed = ft.Federation.from_tables({"a": tmp_path / "a.csv"}, target="y", test="split", missing_indicator=True)
    assert fed.table is not None and fed.table.feature_names == ["age", "sex=f", "sex=m", "ok"]
    assert fed.class_names == ("sick", "well") and fed.y[fed.test[0]].tolist() == [0, 1, 1]
    std = np.std([10, 20, 30] * 6, ddof=1)
    expected = [[980 / std, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]]
    np.testing.assert_allclose(fed.x[fed.test[0]].numpy(), np.array(expected, np.float32), rtol=1e-6)
    np.testing.assert_allclose(fed.x[fed.train[0]][0].numpy(), np.array([-10 / std, 1, 0, 1], np.float32), rtol=1e-6)


def test_missing_indicator_and_other_are_features() -> None:
    frame = pd.DataFrame({"c": "a", "v": [1.0, np.nan, 3.0, 4.0] * 10, "kind": ["x", "y"] * 20, "y": [0, 1] * 20})
    frame.loc[0, "kind"], frame["part"] = "rare", ["train"] * 36 + ["test"] * 4
    frame.loc[39, "kind"] = "unseen"
    fed = ft.Federation.from_dataframe(frame, client="c", target="y", test="part", missing_indicator=True)
    assert fed.table is not None
    assert fed.table.feature_names == ["v", "v missing", "kind=x", "kind=y", "kind=other"]
    assert fed.x[:2, 1].tolist() == [0, 1] and fed.x[1, 0] == 0
    assert fed.x[[0, 1, 39], 2:].tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 1]]


def test_fit_by_site_uses_only_the_sites_own_training_rows() -> None:
    frame = pd.concat([patients(50, 1, site="a"), patients(50, 2, site="b", height=np.arange(50.0))])
    options = {"client": "site", "target": "outcome", "fit": "site"}
    fed = ft.Federation.from_dataframe(frame, **options)  # type: ignore[arg-type]
    for client in range(2):
        numbers = fed.x[fed.train[client]][:, [1, 5]]
        torch.testing.assert_close(numbers.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(numbers.std(0), torch.ones(2), atol=1e-5, rtol=0)
    alone = ft.Federation.from_dataframe(frame[frame["site"] == "a"], **options)  # type: ignore[arg-type]
    own = torch.cat([fed.train[0], fed.test[0]]).sort().values
    assert torch.equal(fed.x[own], alone.x), "the other site does not matter"


def test_test_rows_do_not_change_training_features(tmp_path: Path) -> None:
    frame = patients(40, split=["train"] * 30 + ["test"] * 10)
    changed = frame.copy()
    changed.loc[30:, "age"], changed.loc[30:, "sex"] = 1e6, "new"
    one, other = (
        ft.Federation.from_dataframe(f.assign(c="a"), client="c", target="outcome", test="split")
        for f in (frame, changed)
    )
    assert torch.equal(one.x[:30], other.x[:30]) and not torch.equal(one.x[30:], other.x[30:])


def test_integers_are_classes_in_numeric_order_and_fractions_are_numbers() -> None:
    frame = patients(60, site="a", score=[9, 10, 11] * 20, dose=np.linspace(0, 1, 60))
    fed = ft.Federation.from_dataframe(frame, client="site", target="score")
    assert fed.class_names == ("9", "10", "11") and fed.y[:3].tolist() == [0, 1, 2]
    numbers = ft.Federation.from_dataframe(frame, client="site", target="score", regression=True)
    assert numbers.classes is None and numbers.y[:3].tolist() == [9, 10, 11]
    dose = ft.Federation.from_dataframe(frame, client="site", target="dose")
    assert dose.classes is None and dose.y.dtype == torch.float32
    assert ft.simulate(ft.methods.FedAvg(lr=0.01), ft.network("logistic", dose), dose, rounds=1).records
    days = {"client": "site", "target": "days"}
    with pytest.raises(ft.DataError, match="29 different integers or more; set regression"):
        ft.Federation.from_dataframe(frame.assign(days=[*range(30), *[7] * 30]), test=0.01, **days)  # type: ignore[arg-type]


def test_several_targets_are_numbers_in_columns() -> None:
    frame = patients(60, site="a", event=[True, False] * 30, time=np.arange(60) + 0.5)
    fed = ft.Federation.from_dataframe(frame, client="site", target=["event", "time"])
    assert fed.classes is None and fed.y.shape == (60, 2) and fed.y[1].tolist() == [0, 1.5]


def test_split_is_stratified_and_repeatable(tmp_path: Path) -> None:
    files = write_tables(tmp_path, a=patients(80, outcome=["alive"] * 60 + ["dead"] * 20))
    one, again, other = (ft.Federation.from_tables(files, target="outcome", seed=seed) for seed in (1, 1, 2))
    assert one.class_counts(one.test[0]) == [15, 5] and torch.equal(one.test[0], again.test[0])
    assert not torch.equal(one.test[0], other.test[0])


def test_data_set_tables_loads_folders_and_single_files(tmp_path: Path) -> None:
    frames = {"a": patients(40, 1), "b": patients(30, 2)}
    folder = tmp_path / "sites"
    folder.mkdir()
    files = write_tables(folder, **frames)
    by_file = ft.Federation.from_tables(files, target="outcome")
    by_folder = ft.load("tables", folder=str(folder), target="outcome")
    assert by_folder.names == by_file.names == ("a", "b") and torch.equal(by_folder.x, by_file.x)
    one = pd.concat([frame.assign(site=name) for name, frame in frames.items()])
    one.to_parquet(tmp_path / "all.parquet")
    from_one = ft.load("tables", file=str(tmp_path / "all.parquet"), client="site", target="outcome")
    assert torch.equal(from_one.x, by_file.x) and torch.equal(from_one.y, by_file.y)
    frame = ft.Federation.from_dataframe(one, client="site", target="outcome")
    assert torch.equal(frame.x, by_file.x) and torch.equal(frame.test[1], by_file.test[1])


def test_federation_file_keeps_the_table(tmp_path: Path) -> None:
    fed = ft.Federation.from_tables(write_tables(tmp_path, a=patients(40)), target="outcome", fit="site")
    fed.save(tmp_path / "fed.safetensors")
    assert ft.Federation.from_file(tmp_path / "fed.safetensors").table == fed.table


def test_missing_target_is_reported_with_file_and_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = patients(40)
    frame.loc[:2, "outcome"] = None
    fed = ft.Federation.from_tables(write_tables(tmp_path, a=frame), target="outcome")
    assert len(fed.y) == 37 and "a.csv': rows without a target are left out: 3 of 40." in caplog.text
    message = error_message(lambda: ft.Federation.from_tables(write_tables(tmp_path, a=frame), target="outcom"))
    assert "has no column 'outcom'; " in message and "did you mean 'outcome'?" in message


def test_survival_split_is_stratified_by_event() -> None:
    frame = patients(80, site="a", event=[1] * 8 + [0] * 72, time=np.arange(80) + 0.5)
    fed = ft.Federation.from_dataframe(frame, client="site", target=["event", "time"])
    assert fed.y[fed.test[0]][:, 0].sum() == 2


def test_cells_with_line_breaks_are_categories_that_can_be_stored(tmp_path: Path) -> None:
    frame = patients(40, note=["two\nlines", "one\tline"] * 20)
    fed = ft.Federation.from_tables(write_tables(tmp_path, a=frame), target="outcome")
    assert fed.table is not None and fed.table.columns[-1].categories == ("one line", "two lines")
