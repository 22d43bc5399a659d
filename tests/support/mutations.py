"""Strategies for invalid input: valid files with damaged bytes, valid settings with unusual values."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date
from math import inf, nan
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

PIECES = [
    b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\x80" + b"\0" * 11,
    b"-1", b"1e999", b"nan", b"9" * 20, b"0x" + b"f" * 40, b"null", b"[", b"{", b'"', b"'", b".", b"a.", b"=", b"\n",
    b"../../", b"\x1b[2J", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xda",
]  # fmt: skip
_STEP = 6  # bytes per edit: kind, position (two), length (two), inserted piece
PROGRAMS = st.binary(min_size=_STEP, max_size=4 * _STEP)


def damage(whole: bytes, program: bytes) -> bytes:
    """Return bytes with up to four edits, which `program` encodes."""
    data = bytearray(whole)
    for step in range(0, len(program) - _STEP + 1, _STEP):
        kind, piece = program[step] % 8, PIECES[program[step + 5] % len(PIECES)]
        position, length = (int.from_bytes(program[step + i : step + i + 2], "big") for i in (1, 3))
        at = position % (len(data) + 1)
        end = at + 1 + length % 64
        if kind == 0:  # flip a bit
            data[at : at + 1] = bytes(byte ^ 1 << length % 8 for byte in data[at : at + 1])
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = piece
        elif kind == 3:
            data[at : at + len(piece)] = piece
        elif kind == 4:
            del data[at:end]
        elif kind == 5:
            data[at:at] = data[at:end]
        elif kind == 6:  # copy a part from elsewhere
            data[at:end] = data[length % (len(data) + 1) :][: end - at]
        else:
            data[at:at] = piece * (length % 3000)
    return bytes(data)


def damaged(files: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Return a strategy that damages one of these valid files in up to four places."""
    return st.builds(damage, st.sampled_from(list(files)), PROGRAMS)


def _nested(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


ODD: list[Any] = [
    0, 1, -1, 2, 3, 7, 20, 1000, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**7, 10**12, 10**15, 10**17,
    10**40, 10**400, 0.5, -0.5, 1.0, 1e-300, 5e-324, 1e308, inf, -inf, nan, True, False, None, date(1, 1, 1),
    "", " ", "none", "None", "auto", "all", "1e400", "7", "nan", "../../..", "/", "~nobody/x", "\x1b[2J", "a\nb",
    "\ud800", "\0", "x" * 5000, "head", "fc1", "group",
    [], [[]], [0], [[0]], [[0, 1], [2]], [nan], [inf], [10**12], [2**62, 2**62], [16], [8, 8], [8, 8, 8], [1, 1, 1, 1],
    [0.1, 0.9], [0.9, 0.1], [1, "a"], [""] * 50, list(range(2000)), _nested(20), _nested(40), _nested(300),
    {}, {"": 0}, {"name": 5}, {"name": []}, {"name": "fedavg"}, {"name": "lag", "inner": "fedavg"}, {"a": {"b": {}}},
]  # fmt: skip


def nest(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return nested settings from dotted names; a value that conflicts with a longer name is replaced."""
    settings: dict[str, Any] = {}
    for name, value in pairs:
        *path, last = name.split(".")
        table = settings
        for part in path:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[last] = value
    return settings


def odd_settings(names: Mapping[str, Sequence[str]]) -> SearchStrategy[dict[str, Any]]:
    """Return a strategy for settings with a few unusual values; `names` maps a method to its dotted fields."""

    def build(method: str, picks: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        known = names[method]
        return nest([("method.name", method), *((known[pick % len(known)], value) for pick, value in picks)])

    picks = st.lists(st.tuples(st.integers(0, 999), st.sampled_from(ODD).map(deepcopy)), min_size=1, max_size=5)
    return st.builds(build, st.sampled_from(list(names)), picks)
