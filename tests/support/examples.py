"""Run a program of examples/ in this process, which is faster than a new one."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *words: str | Path) -> None:
    """Run a program with these words as its command line."""
    script = str(EXAMPLES / name)
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    runpy.run_path(script, run_name="__main__")
