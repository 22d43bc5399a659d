"""Arrays of bytes in the cache are mapped, which no one notices except by the memory that it saves."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.formats.npz import map_npz
from support.memory import assert_memory_below

MIB = 2**20
BYTES = np.arange(20 * MIB, dtype=np.uint32).astype(np.uint8).reshape(-1, 4, 8)


def test_map_npz_returns_writable_arrays_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, y=np.arange(5), x=BYTES, mask=BYTES % 2 == 0)
    before = path.read_bytes()
    with assert_memory_below(8 * MIB):
        arrays = map_npz(path)
    path.rename(tmp_path / "b.npz")  # as a replacement by another process does
    np.testing.assert_array_equal(arrays["x"], BYTES, strict=True)
    np.testing.assert_array_equal(arrays["mask"], BYTES % 2 == 0, strict=True)
    assert arrays["y"].tolist() == [0, 1, 2, 3, 4]
    arrays["x"][:] = 0
    assert (tmp_path / "b.npz").read_bytes() == before, "changes are private"


def test_map_npz_reads_arrays_that_cannot_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    values: dict[str, Any] = {"floats": np.arange(MIB, dtype=np.float32), "columns": np.asfortranarray(BYTES[:, 0])}
    for save in (np.savez, np.savez_compressed):
        save(path, **values, x=BYTES)
        arrays = map_npz(path)
        for name, expected in {**values, "x": BYTES}.items():
            np.testing.assert_array_equal(arrays[name], expected, strict=True)
            assert arrays[name].flags.aligned


@pytest.mark.parametrize("shape", ["(20971521,)", "(-1,)", "(4611686018427387904, 4)"])
def test_map_npz_rejects_false_shape(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + BYTES.tobytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    assert "cannot be read" in error_message(lambda: map_npz(tmp_path / "a.npz"))
