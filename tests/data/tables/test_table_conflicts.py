"""What looks wrong in the tables of several sites is reported with the site, or the file, row, and column."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from conftest import error_message


def rows(count: int, **columns: object) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame({"x": random.normal(size=count), "y": ["ill", "well"] * (count // 2)}).assign(**columns)


def test_classes_that_sites_write_differently_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.concat([rows(40, site="a"), rows(40, site="b", y=["Ill", "well"] * 20)])
    fed = ft.Federation.from_dataframe(frame, client="site", target="y")
    assert fed.class_names == ("Ill", "ill", "well")
    assert "b, column 'y': no other site reports its classes 'Ill'." in caplog.messages


def test_columns_of_numbers_with_text_are_not_lost_silently(caplog: pytest.LogCaptureFixture) -> None:
    mixed = rows(40, site="a", crp=[*["<5"] * 10, *map(str, range(30))])
    message = error_message(lambda: ft.Federation.from_dataframe(mixed, client="site", target="y"))
    assert "has '<5' in the column 'crp', where 30 of 40 values are numbers" in message
    with_unit = rows(40, site="a", crp=[*["5 mg"] * 16, *(f"{n} mg" for n in range(6, 30))])
    ft.Federation.from_dataframe(with_unit, client="site", target="y", min_count=2)
    assert any(
        "column 'crp'" in text and "are rare texts, which become one category" in text for text in caplog.messages
    )
    durations = rows(40, site="a", stay=pd.to_timedelta(np.arange(40), "D"))
    message = error_message(lambda: ft.Federation.from_dataframe(durations, client="site", target="y"))
    assert "has durations in the column 'stay'" in message


def test_invalid_survival_times_are_named_with_row_and_column(tmp_path: Path) -> None:
    rows(40, died=[1, 0] * 20, days=[5] * 30 + [-1] * 10).drop(columns="y").to_csv(tmp_path / "a.csv", index=False)

    def load(*target: str) -> str:
        files = {"a": tmp_path / "a.csv"}
        return error_message(lambda: ft.Federation.from_tables(files, target=target, survival=True))

    assert "Row 32" in load("died", "days") and "'-1' in the column 'days'" in load("died", "days")
    assert "Row 2" in load("days", "died") and "'5' in the column 'days', which must be 0 or 1" in load("days", "died")


def test_targets_that_cannot_be_learned_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    frame = rows(40, site="a", cost=np.linspace(10_000, 30_000, 40) + 0.5, same="ill")
    ft.Federation.from_dataframe(frame, client="site", target="cost")
    assert any(
        "column 'cost': its mean is" in text and "shift and scale the target" in text for text in caplog.messages
    )
    caplog.clear()
    ft.Federation.from_dataframe(frame.assign(cost=frame["cost"] / 10_000), client="site", target="cost")
    assert not any("shift and scale" in text for text in caplog.messages)
    same = error_message(lambda: ft.Federation.from_dataframe(frame, client="site", target="same"))
    assert "has the same class in all training rows" in same
    text = error_message(lambda: ft.Federation.from_dataframe(frame, client="site", target="y", regression=True))
    assert "a, column 'y': it is a text, but must be a number" in text
