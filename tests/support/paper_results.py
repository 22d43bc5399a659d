"""Files of a paper's results with given scores, without training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fedtailor.papers.cells import Cell


def write_results(
    path: Path, cells: Sequence[Cell], score: Callable[[Cell, int], float], seeds: Sequence[int] = (0, 1, 2)
) -> Path:
    """Write one line per setting and seed, as `fedtailor paper run` does; `score` is in the unit of the table."""
    lines: dict[tuple[str, int], dict[str, object]] = {}
    for cell in cells:
        name, choice = cell.score
        for seed in seeds:
            key = (cell.setup.fingerprint, seed)
            line = lines.setdefault(key, {
                "run": cell.label, "fingerprint": key[0], "seed": seed, "settings": cell.setup.describe(), "scores": {},
                "seconds": 1.0, "date": "2026-01-01", "device": "a test", "torch": "2", "fedtailor": "1",
            })  # fmt: skip
            scores = line["scores"]
            assert isinstance(scores, dict)
            scores.setdefault(name, {choice: score(cell, seed) / cell.report.scale})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")
    return path
