"""Data frames in a pickle are read without executing anything that the file contains."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.formats.dataframe_pickle import unpickle_data_frames
from support.data_frame_pickles import FRAME, RECONSTRUCTOR, call, data_frame, data_frames, plain
from support.malicious_pickle import Trap
from support.memory import assert_memory_below

FRAMES = {
    1: [{"a": np.array([0.5, -2.0]), "b": np.array([1.0, 3.0]), "label": np.array([-1, 7])}],
    2: [{"a": np.array([n]), "b": np.array([0.25]), "label": np.array([3])} for n in (4.0, 5.0)],
}
GOOD = data_frames(FRAMES)


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def test_unpickle_data_frames_returns_the_columns() -> None:
    found = unpickle_data_frames(GOOD)
    assert {key: len(frames) for key, frames in found.items()} == {1: 1, 2: 2}
    for key, frames in FRAMES.items():
        for frame, columns in zip(frames, found[key], strict=True):
            assert list(columns) == ["a", "b", "label"]
            for name, values in frame.items():
                np.testing.assert_array_equal(columns[name], values, strict=True)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("hide", [lambda t: t, lambda t: {1: [t]}, lambda t: {1: [], "x": {"y": (t,)}}])
def test_malicious_pickle_raises_without_executing_it(
    tmp_path: Path, protocol: int, hide: Callable[[Trap], Any]
) -> None:
    trap = Trap(tmp_path / "sprung")
    with pytest.raises(ft.DataError):
        unpickle_data_frames(pickle.dumps(hide(trap), protocol))
    trapped = pickle.dumps({"x": trap}, 1)[:-1] + GOOD  # the trap comes first, and a valid pickle follows
    assert "could execute code" in error_message(lambda: unpickle_data_frames(trapped))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n" + text(b"touch sprung") + b"\x85R.",
        b"c__builtin__\neval\n(" + text(b"1") + b"tR.",
        b"ccopy_reg\n_reconstructor\n(c__builtin__\nobject\nc__builtin__\nobject\nNtR.",  # a class other than a frame
        call(plain("system"), plain(1)) + b".",  # text is called
        call(call(FRAME), plain(1)) + b".",  # an object is called
        call(b"c_codecs\nencode\n", text(b"abc"), text(b"rot13")) + b".",
        b"}" + plain(1) + b"]" + data_frame(FRAMES[1][0])[:-1] + b"as.",  # a data frame without content
        b"}" + plain(1) + b"](" + call(FRAME) + b"}bes.",
        pickle.dumps({1: [1, 2]}, 1),
        pickle.dumps([1], 1),
        GOOD[:-1],
    ],
)
def test_invalid_program_raises(program: bytes) -> None:
    with pytest.raises(ft.DataError):
        unpickle_data_frames(program)


def test_text_that_is_encoded_again_and_again_raises_before_it_fills_the_memory() -> None:
    """A program of one megabyte would make a thousand copies of its text."""
    size = 2**20
    again = b"c_codecs\nencode\n(h\x00h\x01tR"
    program = text(b"x" * size) + b"q\x00" + text(b"latin1") + b"q\x01" + again * 1000 + b"."
    with assert_memory_below(16 * size):
        assert "encodes more text" in error_message(lambda: unpickle_data_frames(program))


def test_nested_tuples_and_lists_raise_before_they_are_hashed_or_printed() -> None:
    """A tuple or list of itself, 100 times nested, has 2¹⁰⁰ parts."""
    nested = b")" + b"q\x00h\x00h\x00\x86" * 100 + b"q\x00"
    assert "keys are neither" in error_message(lambda: unpickle_data_frames(nested + b"}h\x00Ns."))
    for program in (b"h\x00h\x00\x93.", call(RECONSTRUCTOR, b"h\x00", b"N", b"N") + b"."):
        with pytest.raises(ft.DataError):
            unpickle_data_frames(nested + program)
    frame = data_frame(FRAMES[1][0]).replace(plain("label"), b"h\x00")
    with pytest.raises(ft.DataError):
        unpickle_data_frames(nested + b"}(" + plain(1) + b"](" + frame + b"eu.")
