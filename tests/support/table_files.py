"""Small tables of patients, and a table in all formats for tests of damaged files."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from fedtailor.data.tables.agreement import agree
from fedtailor.data.tables.loading import to_json
from fedtailor.data.tables.reading import RawTable, read_table
from fedtailor.data.tables.settings import TableSettings
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


def write_tables(folder: Path, **frames: pd.DataFrame) -> dict[str, Path]:
    """Write one CSV file per site; return the files by site."""
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return {name: folder / f"{name}.csv" for name in frames}


def table_files() -> tuple[RawTable, bytes, bytes, bytes, bytes]:
    """Return a table, as read and as CSV and as Parquet, its summary, and its schema."""
    rows = 12
    frame = pd.DataFrame(
        {
            "age": [50.5 + row for row in range(rows)],
            "day": [f"2020-01-{row + 10}" for row in range(rows)],
            "sex": ["f", "m"] * 6,
            "ok": ["yes", "no", ""] * 4,
            "y": ["sick", "well", "well"] * 4,
        }
    )
    text, parquet = frame.to_csv(index=False).encode(), io.BytesIO()
    frame.to_parquet(parquet)
    settings = TableSettings(target="y", min_count=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_bytes(text)
        raw = read_table(path)
    summary = summarize(open_site("a", raw, settings, 0), settings, 0)
    schema, _ = agree([summary], settings)
    return raw, text, parquet.getvalue(), to_json(summary).encode(), to_json(schema).encode()
