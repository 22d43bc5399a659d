"""A reader and what is tried on it: hostile input is served or refused in one sentence, and nothing grows."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

import fedtailor as ft
from fedtailor.untrusted import is_printable
from peaks import peak, start_peak

GROWTH = 2**27  # bytes that a reader may take beyond what it takes for a valid input
FIRST = 1000 * int(os.environ.get("FUZZ", "0"))  # FUZZ=1 tries other inputs than are tried every time
SLOWEST = timedelta(minutes=3)  # of one input on a busy machine, be it a run of a thousand rounds


@dataclass(frozen=True)
class Reader:
    """What reads one input, given a folder to put it into; a valid input, and hostile ones."""

    read: Callable[[Any, Path], object]
    valid: Any
    inputs: SearchStrategy[Any]


def fuzz(reader: Reader, thousands: int, folder: Path) -> None:
    """So many thousand inputs; some are served and some are refused, and nothing else happens.

    They are the same every time, so that what fails can be repeated and nobody's change fails for an older fault.
    """
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

    def try_out(examples: int, number: int) -> None:
        settings(
            max_examples=examples, database=None, deadline=SLOWEST, print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(seed(FIRST + number)(given(reader.inputs)(read)))()  # fmt: skip

    reader.read(reader.valid, folder)
    try_out(10, thousands)  # hypothesis makes tables of its own at first
    before = start_peak()
    for number in range(thousands):  # apart, for hypothesis remembers every input of a run
        try_out(1000, number)
    assert peak() - before < GROWTH
    assert min(outcomes.values()) > 0 and sum(outcomes.values()) >= 1000 * thousands, outcomes
