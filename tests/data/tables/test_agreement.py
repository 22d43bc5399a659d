"""Sites agree on a schema from summaries without rows, and conflicts name the site and the column."""

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
from support.table_files import patients, write_tables


@pytest.mark.parametrize("fit", ["federation", "site"])
def test_sites_that_agree_by_files_have_bit_identical_inputs(tmp_path: Path, fit: str) -> None:
    frames = {"a": patients(40, 1), "b": patients(70, 2).drop(columns="smoker"), "c": patients(30, 3)}
    files, settings = write_tables(tmp_path, **frames), make_settings(target="outcome", fit=fit)
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
    raw = read_sites(write_tables(tmp_path, a=frame), None)["a"]
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
    files = write_tables(tmp_path, first=patients(60), second=second)
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
    files = write_tables(tmp_path, first=patients(60), second=second, third=third)
    message = error_message(lambda: ft.Federation.from_tables(files, target="outcome"))
    assert "second, column 'height': it is a text, but a number at first; " in message and "third" not in message
    assert ft.Federation.from_tables(files, target="outcome", ignore=["height"]).num_clients == 3
    assert "did you mean 'height'?" in error_message(
        lambda: ft.Federation.from_tables(files, target="outcome", ignore=["heigth"])
    )


def test_boolean_words_and_digits_of_sites_agree(tmp_path: Path) -> None:
    first = patients(40, smoker=["yes", "no"] * 20, outcome=["Yes", "No"] * 20)
    second = patients(40, smoker=[1, 0] * 20, outcome=[0, 1] * 20)
    fed = ft.Federation.from_tables(write_tables(tmp_path, a=first, b=second), target="outcome")
    assert fed.class_names == ("false", "true") and fed.table is not None
    assert fed.y[:4].tolist() == [1, 0, 1, 0] and fed.y[40:44].tolist() == [0, 1, 0, 1]
    smoker = fed.table.feature_names.index("smoker")
    assert fed.x[:2, smoker].tolist() == [1, 0] and fed.x[40:42, smoker].tolist() == [1, 0]
    words = ft.Federation.from_tables(write_tables(tmp_path, a=first), target="outcome")
    assert words.class_names == ("no", "yes")


def test_rare_class_is_left_out_unless_another_site_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    labels = ["alive"] * 39 + ["dead"]
    frames = [patients(40, 1, outcome=labels), patients(40, 2), patients(40, 3, outcome=["odd", *["dead"] * 39])]
    fed_warnings = warnings_of(caplog, *frames)
    left_out = [text for text in fed_warnings if "rows of a class that no site reports" in text]
    assert len(left_out) == 1 and "(site-2)" in left_out[0] and "left out: 1" in left_out[0]


def test_duplicates_identifiers_and_empty_columns_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    frame = patients(40, number=range(1000, 1040), empty=np.nan, same=3)
    repeated = pd.concat([frame, frame], ignore_index=True)
    text = "\n".join(warnings_of(caplog, frame, repeated))
    assert "(site-0): every row has another value in the column 'number'" in text
    assert "(site-1): duplicate rows (40), also across the training and the test data" in text
    assert "All sites, column 'empty': it has no values" in text
    assert "All sites, column 'same': it has the same value in all rows" in text


def test_numbers_to_predict_in_another_unit_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(0)
    frames = [patients(60, 1, stay=random.normal(9, 1, 60), site="days"), patients(60, 2, stay=0.0, site="months")]
    frames[1]["stay"] = random.normal(9, 1, 60) / 1000
    ft.Federation.from_dataframe(pd.concat(frames), client="site", target="stay")
    assert "months, column 'stay': its mean is 0.00" in caplog.text


@pytest.mark.parametrize("kind", ["summary", "schema"])
def test_damaged_summary_or_schema_is_rejected(kind: str, tmp_path: Path) -> None:
    settings = make_settings(target="outcome")
    raw = read_sites(write_tables(tmp_path, a=patients(40)), None)["a"]
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


def test_schema_leaves_no_choice_but_the_way_of_writing(tmp_path: Path) -> None:
    files, settings = write_tables(tmp_path, a=patients(40)), make_settings(target="outcome")
    raw = read_sites(files, None)["a"]
    schema = agree([summarize(open_site("a", raw, settings, 0), settings, 0)], settings)[0]
    (tmp_path / "schema.json").write_text(to_json(schema))
    message = error_message(lambda: ft.Federation.from_tables(files, schema=tmp_path / "schema.json", fit="site"))
    assert "The schema sets fit for all sites" in message
    again = ft.Federation.from_tables(files, schema=tmp_path / "schema.json", decimal=".", seed=9)
    assert torch.equal(again.train[0], ft.Federation.from_tables(files, target="outcome").train[0])
