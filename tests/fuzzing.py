"""A reader and what is tried on it: hostile input is served or refused in one sentence, and nothing grows."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

import fedtailor as ft
from fedtailor.untrusted import is_printable
from peaks import peak, start_peak

GROWTH = 2**27  # bytes that a reader may take beyond what it takes for a valid input
SLOWEST = timedelta(seconds=20)  # of one input, on a busy machine; all are of a few kilobytes


@dataclass(frozen=True)
class Reader:
    """What reads one input, given a folder to put it into; a valid input, and hostile ones."""

    read: Callable[[Any, Path], object]
    valid: Any
    inputs: SearchStrategy[Any]


def fuzz(reader: Reader, thousands: int, folder: Path, derandomize: bool) -> None:
    """So many thousand inputs; some are served and some are refused, and nothing else happens."""
    outcomes = {"served": 0, "refused": 0}

    def read(given: Any) -> None:
        try:
            reader.read(given, folder)
        except ft.Refused as refusal:
            text = str(refusal)
            assert is_printable(text) and text[-1] in ".?" and 20 < len(text) < 6000, text
            outcomes["refused"] += 1
        else:
            outcomes["served"] += 1

    def try_out(examples: int) -> None:
        settings(
            max_examples=examples, derandomize=derandomize, database=None, deadline=SLOWEST, print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(given(reader.inputs)(read))()  # fmt: skip

    reader.read(reader.valid, folder)
    try_out(10)  # hypothesis makes tables of its own at first
    before = start_peak()
    for _ in range(thousands):  # apart, for hypothesis remembers every input of a run
        try_out(1000)
    assert peak() - before < GROWTH
    assert min(outcomes.values()) > 0 and sum(outcomes.values()) >= 1000 * thousands, outcomes
