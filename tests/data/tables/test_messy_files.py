"""Files as sites really export them: encodings, delimiters, numbers, dates, and damaged rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.tables.columns import Column, read_columns
from fedtailor.data.tables.reading import read_table
from fedtailor.data.tables.settings import SiteSettings


def columns(folder: Path, text: str | bytes, name: str = "a.csv", **settings: object) -> dict[str, Column]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_columns(read_table(path), SiteSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"age,kind\n61.5,x\n,y\n",
        b"\xef\xbb\xbfage,kind\r\n61.5,x\r\n?,y\r\n",
        "age,kind\n61.5,x\nNA,y\n".encode("utf-16"),
        b"age;kind\n61,5;x\n;y\n\n\n",
        b"age\tkind\n61.5\tx\nn/a\ty\n",
        b'"age" , "kind"\n"61.5", x\n"-", y\n',
        b"age|kind\n61.5|x\nNULL|y",
        b",age,kind\n0,61.5,x\n1,,y\n",
    ],
    ids=["plain", "byte-order mark", "UTF-16", "decimal comma", "tabs", "spaces and quotes", "bars", "index"],
)
def test_same_table_in_other_formats_has_same_columns(tmp_path: Path, content: bytes) -> None:
    found = columns(tmp_path, content)
    assert list(found) == ["age", "kind"]
    np.testing.assert_array_equal(found["age"].values, [61.5, np.nan])
    assert [found["kind"].texts[code] for code in found["kind"].codes] == ["x", "y"]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1.234,5", "12"], [1234.5, 12]),
        (['"1,234.5"', "12"], [1234.5, 12]),
        (["1 234", "5"], [1234, 5]),
        (["1'234.5", "2"], [1234.5, 2]),
        (["−3,25", "1,5E2"], [-3.25, 150]),
        (["0.123", "0.456"], [0.123, 0.456]),
        ([".5", "1e-3"], [0.5, 0.001]),
    ],
)
def test_numbers_are_read_in_the_notation_of_the_column(
    tmp_path: Path, cells: list[str], expected: list[float]
) -> None:
    found = columns(tmp_path, "v;w\n" + "\n".join(f"{cell};x" for cell in cells))
    assert found["v"].values.tolist() == expected


def test_ambiguous_thousands_are_decided_by_other_columns_or_by_the_user(tmp_path: Path) -> None:
    assert columns(tmp_path, "v;w\n1,234;0,5\n2,345;0,75\n")["v"].values.tolist() == [1.234, 2.345]
    assert columns(tmp_path, 'v,w\n"1,234",0.5\n"2,345",0.75\n')["v"].values.tolist() == [1234, 2345]
    text = "v;w\n1,234;x\n2,345;y\n"
    message = error_message(lambda: columns(tmp_path, text))
    assert "Row 2 of " in message and "'1,234' in the column 'v', which can be 1234 or 1.234" in message
    assert columns(tmp_path, text, decimal=",")["v"].values.tolist() == [1.234, 2.345]


def test_dates_are_days_and_ambiguous_ones_are_an_error(tmp_path: Path) -> None:
    for cells in (["1970-01-02", "1970-02-01"], ["02.01.1970", "01.02.1970"], ["02/01/1970", "31/01/1970"]):
        found = columns(tmp_path, "d,w\n" + "\n".join(f"{cell},x" for cell in cells))["d"]
        assert found.kinds[0] == "date" and found.values[0] == 1
    message = error_message(lambda: columns(tmp_path, "d,w\n02/01/1970,x\n01/02/1970,y\n"))
    assert "'02/01/1970' in the column 'd', which can be %d/%m/%Y or %m/%d/%Y; set date_format" in message
    american = columns(tmp_path, "d,w\n02/01/1970,x\n", date_format="%m/%d/%Y")["d"]
    assert american.values.tolist() == [31]


def test_values_that_are_written_differently_are_one_value(tmp_path: Path) -> None:
    found = columns(tmp_path, "b,n,c\nYes,1,1.0\nyes,1.0,1\nno,2,x\nNO,,1\n", categories=("c",))
    assert found["b"].counts() == {"yes": 2, "no": 2} and found["n"].counts() == {"1": 2, "2": 1}
    assert found["c"].counts() == {"1": 3, "x": 1} and found["b"].values.tolist() == [1, 1, 0, 0]


def test_codes_with_leading_zeros_and_years_are_not_changed(tmp_path: Path) -> None:
    found = columns(tmp_path, "zip,year\n01234,1999\n99999,2004\n")
    assert found["zip"].kinds == ("category",) and found["zip"].texts == ("01234", "99999")
    assert found["year"].kinds[0] == "number"


def test_missing_markers_of_the_user_and_codes_as_categories(tmp_path: Path) -> None:
    found = columns(tmp_path, "v,code\n-999,1\n5,2\n", missing=("-999",), categories=("code",))
    np.testing.assert_array_equal(found["v"].values, [np.nan, 5])
    assert found["code"].kinds == ("category",)
    frame = pd.DataFrame({"v": [-999.0, 5.0], "code": [1, 2]})
    frame.to_parquet(tmp_path / "a.parquet")
    typed = read_columns(read_table(tmp_path / "a.parquet"), SiteSettings(missing=("-999",), categories=("code",)))
    np.testing.assert_array_equal(typed["v"].values, [np.nan, 5])
    assert typed["code"].texts == ("1", "2")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a,b\n1,2\n3\n", "Row 3 of 'FILE' has 1 values, but the header, row 1, has 2"),
        ("a,b\n1,2,3\n", "Row 2 of 'FILE' has 3 values, but the header, row 1, has 2"),
        ('a,b\n1,2\n3,"4\n5,6\n', "close the quote that is open at its end"),
        ("a,a\n1,2\n", "'FILE' has 2 columns with the name 'a'"),
        ("a,b\n", "'FILE' has no rows"),
        ("", "'FILE' has no rows"),
        ("age,b\n" + "\n".join(f"{n},x" for n in range(50, 59)) + "\nsixty,y\n",
         "Row 11 of 'FILE' has 'sixty' in the column 'age', where 9 of 10 values are numbers"),
        ("day,b\n2020-01-01,x\n2020-01-02,x\n2020-01-03,y\n2020-01-04,y\n2020-02-31,y\n",
         "Row 6 of 'FILE' has '2020-02-31' in the column 'day', where 4 of 5 values are dates"),
        (b"a,b\n1,\x81\n", "'FILE' cannot be read: byte 6 is not text; save it as UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "'FILE' cannot be read: byte 1 is 0, which is not text; save it as UTF-8"),
    ],
)  # fmt: skip
def test_damaged_file_is_rejected_with_row_and_column(tmp_path: Path, content: str | bytes, problem: str) -> None:
    message = error_message(lambda: columns(tmp_path, content))
    assert problem.replace("FILE", str(tmp_path / "a.csv")) in message


def test_other_files_and_huge_tables_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    assert "unsupported format; use a .csv" in error_message(lambda: read_table(tmp_path / "a.xlsx"))
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    assert "cannot be read as a Parquet file" in error_message(lambda: read_table(tmp_path / "a.parquet"))
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(10**12)
    assert "of memory" in error_message(lambda: read_table(tmp_path / "a.csv"))
    (tmp_path / "twice").mkdir()
    for name in ("a.csv", "a.tsv"):
        (tmp_path / "twice" / name).write_text("x,y\n1,2\n")
    assert "names must be unique" in error_message(
        lambda: ft.load("tables", folder=str(tmp_path / "twice"), target="y")
    )
    assert "date_format cannot be" in error_message(lambda: columns(tmp_path, "d\tw\nx\ty\n", date_format="%Q"))
    assert columns(tmp_path, "d,w\n1e999,x\n", "b.csv")["d"].kinds == ("category",)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "b.csv").symlink_to(tmp_path / "a.csv")
    assert "link that leads out" in error_message(lambda: ft.load("tables", folder=str(tmp_path / "sites"), target="y"))


def test_tables_without_pandas_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    message = error_message(lambda: ft.Federation.from_tables({"a": tmp_path / "a.csv"}, target="y"))
    assert "pip install 'fedtailor[tables]'" in message
    assert ft.load("heart").num_clients == 4, "needs no pandas"
