"""Declared fields of settings: types, constraints, and help texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.core.fields import Fraction, Positive, PositiveInt, check_fields, help_texts

if TYPE_CHECKING:
    from fractions import Fraction as Unresolvable


@dataclass(frozen=True)
class Settings:
    rate: Annotated[Positive, "the rate"] = 1.0
    steps: PositiveInt | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    bias: float = 0.0
    size: int | Literal["all"] = "all"
    path: str | Path = "x"

    def __post_init__(self) -> None:
        check_fields(self, "settings.")


@dataclass(frozen=True)
class Redeclared(Settings):
    """A subclass that repeats a field without its constraint and help text."""

    rate: float = 2.0


@dataclass(frozen=True)
class Plain(ft.Method):
    """A user's method without annotations."""

    lr: float = 0.1
    mu: float = 0.5
    other: "Unresolvable | None" = None


@dataclass(frozen=True)
class Declared(ft.LocalTraining):
    share: "Annotated[Fraction, 'the share']" = 0.5  # a string, as with `from __future__ import annotations`


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Settings(rate=0.0), "settings.rate must be above 0, got 0.0."),
        (lambda: Settings(rate=float("nan")), "settings.rate must be a finite number, above 0, got nan."),
        (lambda: Settings(bias=float("-inf")), "settings.bias must be a finite number, got -inf."),
        (lambda: Settings(rate=True), "settings.rate must be a finite number, above 0, got True."),
        (lambda: Settings(steps=0), "settings.steps must be at least 1, or none, got 0."),
        (lambda: Settings(steps=1.5), "settings.steps must be an integer, at least 1, or none, got 1.5."),  # type: ignore[arg-type]
        (lambda: Settings(kind="c"), "settings.kind must be 'a' or 'b', got 'c'."),  # type: ignore[arg-type]
        (lambda: Settings(flag=1), "settings.flag must be true or false, got 1."),  # type: ignore[arg-type]
        (lambda: Settings(size="some"), "settings.size must be an integer, or 'all', got 'some'."),  # type: ignore[arg-type]
        (lambda: Redeclared(rate=-1.0), "settings.rate must be above 0, got -1.0."),
        (lambda: Plain(lr=-1.0), "Plain: lr must be above 0, got -1.0."),
        (lambda: Declared(share=2.0), "Declared: share must be from 0 to 1, got 2.0."),
    ],
)
def test_check_fields_invalid_value_raises(make: Callable[[], Any], message: str) -> None:
    assert error_message(make) == message


def test_check_fields_valid_values_pass() -> None:
    Settings(rate=np.float32(0.5), steps=np.int64(3), size=4, path=Path("y"))  # type: ignore[arg-type]
    Plain(lr=1, mu=-1.0, other=None)


def test_help_texts_come_from_the_class_or_its_bases() -> None:
    assert help_texts(Redeclared)["rate"] == "the rate" and help_texts(Redeclared)["kind"] == ""
    assert help_texts(Declared)["share"] == "the share" and help_texts(Declared)["epochs"] == "E, local epochs"
    assert set(help_texts(Plain).values()) == {""}
