"""Fuzz readers: invalid input is either read or rejected with a FedTailorError, in bounded time and memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

import fedtailor as ft
from fedtailor.core.untrusted_input import is_printable
from support.memory import peak, start_peak

GROWTH = 2**27  # bytes of memory that a reader may need in addition to those for a valid input
FIRST = 1000 * int(os.environ.get("FUZZ", "0"))  # FUZZ=1 tests other inputs than the default ones
MAX_TIME = timedelta(minutes=3)  # per input on a busy machine; the input may be a run of a thousand rounds


@dataclass(frozen=True)
class Reader:
    """A function that reads one input (and may write into a folder), a valid input, and a strategy for invalid ones."""

    read: Callable[[Any, Path], object]
    valid: Any
    inputs: SearchStrategy[Any]


def fuzz(reader: Reader, thousands: int, folder: Path) -> None:
    """Test a reader with this number of thousands of inputs; some must be read, others rejected.

    The inputs are the same every time, so that failures are reproducible and unrelated changes do not fail.
    """
    outcomes = {"read": 0, "rejected": 0}

    def read(given: Any) -> None:
        try:
            reader.read(given, folder)
        except ft.FedTailorError as error:
            text = str(error)
            assert is_printable(text) and text[-1] in ".?" and 20 < len(text) < 6000, text
            outcomes["rejected"] += 1
        else:
            outcomes["read"] += 1

    def run_batch(examples: int, number: int) -> None:
        settings(
            max_examples=examples, database=None, deadline=MAX_TIME, print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(seed(FIRST + number)(given(reader.inputs)(read)))()  # fmt: skip

    reader.read(reader.valid, folder)
    run_batch(10, thousands)  # hypothesis builds its tables first
    before = start_peak()
    for number in range(thousands):  # in batches, because hypothesis stores all inputs of one run
        run_batch(1000, number)
    assert peak() - before < GROWTH
    assert min(outcomes.values()) > 0 and sum(outcomes.values()) >= 1000 * thousands, outcomes
