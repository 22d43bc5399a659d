"""Tables as federations: statistics of the pooled training rows, features by hand, conflicts, and messy files."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.tables.agreement import agree
from fedtailor.data.tables.loading import (
    make_settings,
    read_schema,
    read_sites,
    read_summary,
    to_json,
)
from fedtailor.data.tables.site import open_site
from fedtailor.data.tables.summary import summarize


def patients(rows: int, seed: int = 0, **changed: object) -> pd.DataFrame:
    """Return a table with numbers, categories, booleans, dates, and missing values."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.normal(60, 12, rows).round(1),
            "height": random.normal(170, 9, rows).round(1),
            "sex": random.choice(["f", "m"], rows),
            "smoker": random.choice(["yes", "no"], rows),
            "admitted": pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 900, rows), "D"),
            "outcome": random.choice(["alive", "dead"], rows),
        }
    )
    frame.loc[::7, "age"] = np.nan
    frame.loc[3::11, "sex"] = None
    return frame.assign(**changed)


def write(folder: Path, **frames: pd.DataFrame) -> dict[str, Path]:
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return {name: folder / f"{name}.csv" for name in frames}


def train_rows(fed: ft.Federation, client: int) -> np.ndarray:
    """Return the positions of a client's training rows in its file; no row of these tables is left out."""
    start = min(int(torch.cat([fed.train[client], fed.test[client]]).min()), 10**9)
    return fed.train[client].numpy() - start


def test_statistics_are_those_of_the_pooled_training_rows(tmp_path: Path) -> None:
    frames = {"a": patients(40, 1), "b": patients(70, 2)}
    fed = ft.Federation.from_tables(write(tmp_path, **frames), target="outcome")
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


@pytest.mark.parametrize("fit", ["federation", "site"])
def test_sites_that_agree_by_files_have_bit_identical_inputs(tmp_path: Path, fit: str) -> None:
    frames = {"a": patients(40, 1), "b": patients(70, 2).drop(columns="smoker"), "c": patients(30, 3)}
    files, settings = write(tmp_path, **frames), make_settings(target="outcome", fit=fit)
    fed = ft.Federation.from_tables(files, target="outcome", fit=fit, seed=3)
    for name, raw in reversed(read_sites(files, None).items()):  # each site writes its summary
        summary = summarize(open_site(name, raw, settings, 3), settings, 3)
        (tmp_path / f"{name}.json").write_text(to_json(summary))
    summaries = [read_summary(tmp_path / f"{name}.json") for name in ("c", "a", "b")]
    (tmp_path / "schema.json").write_text(to_json(agree(summaries, settings)[0]))
    for client, (name, file) in enumerate(files.items()):  # each site encodes its own file
        alone = ft.Federation.from_tables({name: file}, schema=tmp_path / "schema.json")
        for split in ("train", "test"):
            own, found = getattr(fed, split)[client], getattr(alone, split)[0]
            assert torch.equal(fed.x[own], alone.x[found]) and torch.equal(fed.y[own], alone.y[found])


def test_summary_contains_no_row_and_no_rare_category(tmp_path: Path) -> None:
    frame = patients(60).assign(name=[f"patient-{number}" for number in range(60)], test="train")
    frame.loc[5, "sex"], frame.loc[6, "age"] = "unusual", 123.456
    frame["rare"] = [7.5] + [np.nan] * 59
    settings = make_settings(target="outcome", test="test")
    raw = read_sites(write(tmp_path, a=frame), None)["a"]
    text = to_json(summarize(open_site("a", raw, settings, 0), settings, 0))
    for secret in ("unusual", "patient-", "123.456", "7.5", 'min"', 'max"'):
        assert secret not in text
    assert '"f": ' in text and '"has_other": true' in text


def warnings_of(caplog: pytest.LogCaptureFixture, *frames: pd.DataFrame, **options: object) -> list[str]:
    frame = pd.concat([one.assign(site=f"site-{number}") for number, one in enumerate(frames)])
    with caplog.at_level(logging.WARNING, "fedtailor"):
        ft.Federation.from_dataframe(frame, client="site", target="outcome", **options)  # type: ignore[arg-type]
    return caplog.messages


@pytest.mark.parametrize(("column", "factor", "units"), [("height", 2.54, "inches"), ("weight", 0.4536, "pounds")])
def test_unit_that_is_off_by_a_factor_is_reported_with_the_site(
    caplog: pytest.LogCaptureFixture, column: str, factor: float, units: str
) -> None:
    random = np.random.default_rng(0)
    sites = [patients(60, seed, weight=random.normal(78, 15, 60)) for seed in range(3)]
    sites[1][column] /= factor
    found = [text for text in warnings_of(caplog, *sites) if "check the unit" in text]
    assert len(found) == 1 and found[0].startswith(f"site-1, column '{column}'") and units in found[0]


def test_ordinary_differences_between_sites_are_no_unit_conflict(caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(0)
    adults = patients(60, 0, weight=random.normal(78, 15, 60), protein=random.exponential(8, 60))
    children = patients(60, 1, weight=random.normal(30, 10, 60), protein=random.exponential(80, 60))
    children["age"], children["height"] = random.normal(8, 4, 60), random.normal(125, 20, 60)
    old = patients(60, 2, weight=random.normal(70, 13, 60), protein=random.exponential(20, 60))
    assert not [text for text in warnings_of(caplog, adults, children, old) if "unit" in text]


def test_conflicts_name_site_and_column(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    second = patients(60, 1).rename(columns={"age": "Age"})
    second["sex"] = second["sex"].map({"f": "female", "m": "male"})
    files = write(tmp_path, first=patients(60), second=second)
    fed = ft.Federation.from_tables(files, target="outcome")
    text = "\n".join(caplog.messages)
    assert "second, column 'age': the site lacks it (rename 'Age' if it is the same)" in text
    assert "second, column 'sex': no other site reports its categories 'female', 'male'" in text
    assert fed.table is not None and not torch.isnan(fed.x).any()
    assert bool((fed.x[60:, fed.table.feature_names.index("age")] == 0).all()), "imputed by the mean"
    common = ft.Federation.from_tables(files, target="outcome", columns="common")
    assert common.table is not None and common.table.columns[0].name == "height"


def test_number_at_one_site_and_text_at_another_is_an_error(tmp_path: Path) -> None:
    second, third = patients(60, 1, height=["tall", "small"] * 30), patients(60, 2, height="")
    files = write(tmp_path, first=patients(60), second=second, third=third)
    message = error_message(lambda: ft.Federation.from_tables(files, target="outcome"))
    assert "second, column 'height': it is a text, but a number at first; " in message and "third" not in message
    assert ft.Federation.from_tables(files, target="outcome", ignore=["height"]).num_clients == 3
    assert "did you mean 'height'?" in error_message(
        lambda: ft.Federation.from_tables(files, target="outcome", ignore=["heigth"])
    )


def test_boolean_words_and_digits_of_sites_agree(tmp_path: Path) -> None:
    first = patients(40, smoker=["yes", "no"] * 20, outcome=["Yes", "No"] * 20)
    second = patients(40, smoker=[1, 0] * 20, outcome=[0, 1] * 20)
    fed = ft.Federation.from_tables(write(tmp_path, a=first, b=second), target="outcome")
    assert fed.class_names == ("false", "true") and fed.table is not None
    assert fed.y[:4].tolist() == [1, 0, 1, 0] and fed.y[40:44].tolist() == [0, 1, 0, 1]
    smoker = fed.table.feature_names.index("smoker")
    assert fed.x[:2, smoker].tolist() == [1, 0] and fed.x[40:42, smoker].tolist() == [1, 0]
    words = ft.Federation.from_tables(write(tmp_path, a=first), target="outcome")
    assert words.class_names == ("no", "yes")


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


def test_rare_class_is_left_out_unless_another_site_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    labels = ["alive"] * 39 + ["dead"]
    frames = [patients(40, 1, outcome=labels), patients(40, 2), patients(40, 3, outcome=["odd", *["dead"] * 39])]
    fed_warnings = warnings_of(caplog, *frames)
    left_out = [text for text in fed_warnings if "rows of a class that no site reports" in text]
    assert len(left_out) == 1 and "(site-2)" in left_out[0] and "left out: 1" in left_out[0]


def test_split_is_stratified_and_repeatable(tmp_path: Path) -> None:
    files = write(tmp_path, a=patients(80, outcome=["alive"] * 60 + ["dead"] * 20))
    one, again, other = (ft.Federation.from_tables(files, target="outcome", seed=seed) for seed in (1, 1, 2))
    assert one.class_counts(one.test[0]) == [15, 5] and torch.equal(one.test[0], again.test[0])
    assert not torch.equal(one.test[0], other.test[0])


def test_data_set_tables_loads_folders_and_single_files(tmp_path: Path) -> None:
    frames = {"a": patients(40, 1), "b": patients(30, 2)}
    folder = tmp_path / "sites"
    folder.mkdir()
    files = write(folder, **frames)
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
    fed = ft.Federation.from_tables(write(tmp_path, a=patients(40)), target="outcome", fit="site")
    fed.save(tmp_path / "fed.safetensors")
    assert ft.Federation.from_file(tmp_path / "fed.safetensors").table == fed.table


def test_missing_target_is_reported_with_file_and_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = patients(40)
    frame.loc[:2, "outcome"] = None
    fed = ft.Federation.from_tables(write(tmp_path, a=frame), target="outcome")
    assert len(fed.y) == 37 and "a.csv': rows without a target are left out: 3 of 40." in caplog.text
    message = error_message(lambda: ft.Federation.from_tables(write(tmp_path, a=frame), target="outcom"))
    assert "has no column 'outcom'; " in message and "did you mean 'outcome'?" in message


def test_duplicates_identifiers_and_empty_columns_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    frame = patients(40, number=range(1000, 1040), empty=np.nan, same=3)
    repeated = pd.concat([frame, frame], ignore_index=True)
    text = "\n".join(warnings_of(caplog, frame, repeated))
    assert "(site-0): every row has another value in the column 'number'" in text
    assert "(site-1): duplicate rows (40), also across the training and the test data" in text
    assert "All sites, column 'empty': it has no values" in text
    assert "All sites, column 'same': it has the same value in all rows" in text


@pytest.mark.parametrize("kind", ["summary", "schema"])
def test_damaged_summary_or_schema_is_rejected(kind: str, tmp_path: Path) -> None:
    settings = make_settings(target="outcome")
    raw = read_sites(write(tmp_path, a=patients(40)), None)["a"]
    summary = summarize(open_site("a", raw, settings, 0), settings, 0)
    valid = json.loads(to_json(summary if kind == "summary" else agree([summary], settings)[0]))
    read = read_summary if kind == "summary" else read_schema
    path = tmp_path / "file.json"

    def damage(values: dict[str, Any], name: str, value: object) -> str:
        path.write_text(json.dumps({**values, name: value}))
        return error_message(lambda: read(path))

    for name in valid:
        for value in (None, 7, "x", [1], {"age": 3}):
            if name in ("format", "settings", "columns", "fit"):
                assert "is not" in damage(valid, name, value)
    column = valid["columns"]["age"]
    parts: dict[str, list[dict[str, Any]]] = {
        "schema": [{"kind": "blob"}, {"std": 0}, {"mean": None}, {"fill": "x"}, {"categories": [1]}, {"more": 1}],
        "summary": [{"kinds": []}, {"moments": {"count": 3, "sum": "nan", "squares": 1}}, {"categories": {"a": "x"}}],
    }
    for part in parts[kind]:
        assert "is not" in damage(valid, "columns", {"age": {**column, **part}})
    path.write_text("[")
    assert "is not a JSON file" in error_message(lambda: read(path))


def test_survival_split_is_stratified_by_event() -> None:
    frame = patients(80, site="a", event=[1] * 8 + [0] * 72, time=np.arange(80) + 0.5)
    fed = ft.Federation.from_dataframe(frame, client="site", target=["event", "time"])
    assert fed.y[fed.test[0]][:, 0].sum() == 2


def test_cells_with_line_breaks_are_categories_that_can_be_stored(tmp_path: Path) -> None:
    frame = patients(40, note=["two\nlines", "one\tline"] * 20)
    fed = ft.Federation.from_tables(write(tmp_path, a=frame), target="outcome")
    assert fed.table is not None and fed.table.columns[-1].categories == ("one line", "two lines")


def test_schema_leaves_no_choice_but_the_way_of_writing(tmp_path: Path) -> None:
    files, settings = write(tmp_path, a=patients(40)), make_settings(target="outcome")
    raw = read_sites(files, None)["a"]
    schema = agree([summarize(open_site("a", raw, settings, 0), settings, 0)], settings)[0]
    (tmp_path / "schema.json").write_text(to_json(schema))
    message = error_message(lambda: ft.Federation.from_tables(files, schema=tmp_path / "schema.json", fit="site"))
    assert "The schema sets fit for all sites" in message
    again = ft.Federation.from_tables(files, schema=tmp_path / "schema.json", decimal=".", seed=9)
    assert torch.equal(again.train[0], ft.Federation.from_tables(files, target="outcome").train[0])


def test_numbers_to_predict_in_another_unit_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(0)
    frames = [patients(60, 1, stay=random.normal(9, 1, 60), site="days"), patients(60, 2, stay=0.0, site="months")]
    frames[1]["stay"] = random.normal(9, 1, 60) / 1000
    ft.Federation.from_dataframe(pd.concat(frames), client="site", target="stay")
    assert "months, column 'stay': its mean is 0.00" in caplog.text
