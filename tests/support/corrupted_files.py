"""Small valid files of every input format, and malformed files with valid checksums but false sizes and types."""

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from numpy.typing import NDArray
from PIL import Image

import fedtailor as ft
from conftest import error_message
from fedtailor.core.trees import Rows
from fedtailor.runs.serialization import pack

RNG = np.random.default_rng(5)


def folder_error(folder: Path) -> str:
    """Return the message of the FedTailorError that reading a folder of clients raises."""
    return error_message(lambda: ft.Federation.from_folder(folder))


def npz(**arrays: Any) -> bytes:
    """Return the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


NPZ = [
    npz(x=RNG.normal(size=(4, 3)), y=np.arange(4) % 2),
    npz(x_train=np.eye(2), y_train=np.arange(2), x_test=np.eye(2), y_test=np.arange(2)),
]
_DESCRS = [
    "'<f8'", "'<i8'", "'|u1'", "'>f4'", "'|O'", "'|V0'", "'|S0'", "'<U5'", "'<M8[ns]'", "'|V1000000000'", "'<c16'",
    "'|b1'", "[('a', '<f8')]", "('<f4', (1000000000,))", "'<f2'", "'x'", "None", "'<i8'", "[" * 90,
]  # fmt: skip
_SHAPES = [
    "(4, 3)", "(4,)", "()", "(0,)", "(4, 0)", "(1000000000000,)", "(1000000000000, 0)", "(0, 1000000000000)", "(-4,)",
    "(9223372036854775808,)", "(4294967296, 4294967296)", "(-2, -2)", "(4, 3, 1)", "4", "(4.0,)", "(" * 90,
]  # fmt: skip
_LABELS = [np.arange(4), np.array([0, 1, 2, 2**62]), np.array([0, 1, 2, -1]), np.array([0.0, np.nan, 1, 2])]


def malformed_npz(name: str, descr: str, shape: str, body: int, version: int, length: int, compression: int) -> bytes:
    """Return an .npz file with an array that declares this type and shape, next to a valid array."""
    file = io.BytesIO()
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length < 0 else length)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.npy", b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(body), compression)
        for other in {"x", "y"} - {name}:
            valid = io.BytesIO()
            np.save(valid, _LABELS[body % 4] if other == "y" else np.ones((4, 3)))
            archive.writestr(f"{other}.npy", valid.getvalue())
    return file.getvalue()


def malformed_npz_files() -> SearchStrategy[bytes]:
    """Generate .npz files with odd names, types, shapes, versions, and compressions."""
    return st.builds(
        malformed_npz,
        st.sampled_from(["x", "y", "x_train", "../x", "x" * 300, "\x1b[2J"]),
        st.sampled_from(_DESCRS),
        st.sampled_from(_SHAPES),
        st.sampled_from([0, 1, 4, 32, 96, 97, 5000]),
        st.sampled_from([1, 2, 3, 9]),
        st.sampled_from([-1, -1, -1, 0, 20, 65535]),
        st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
    )


def image_bytes(form: str, mode: str = "RGB", size: tuple[int, int] = (12, 10), **options: Any) -> bytes:
    """Return the bytes of a random image in a format of pillow."""
    file = io.BytesIO()
    pixels = RNG.integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, form, **options)
    return file.getvalue()


IMAGES = [
    image_bytes("PNG"), image_bytes("PNG", "P"), image_bytes("PNG", "LA"), image_bytes("JPEG"),
    image_bytes("JPEG", "L", progressive=True),
    image_bytes("BMP"), image_bytes("TIFF"), image_bytes("TIFF", compression="tiff_deflate"), image_bytes("WEBP"),
    image_bytes("WEBP", lossless=True),
]  # fmt: skip


def repair_png_checksums(data: bytes) -> bytes:
    """Return a PNG with valid checksums, so that its other damage reaches the decoder."""
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunk = data[at + 4 : at + 8 + size]
        parts += [data[at : at + 4], chunk, struct.pack(">I", zlib.crc32(chunk))]
        at += 12 + size
    return b"".join(parts)


def idx_bytes(array: NDArray[Any]) -> bytes:
    """Return the bytes of an IDX file."""
    head = bytes([0, 0, 8, array.ndim])
    return head + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.astype(np.uint8).tobytes()


IDX = [
    idx_bytes(RNG.integers(0, 256, (2, 3, 3))),
    idx_bytes(np.arange(3)),
    gzip.compress(idx_bytes(np.arange(6)), mtime=0),
]
SHEET = image_bytes("PNG", size=(64, 32))
MNIST = {
    f"{part}-{kind}-ubyte": idx_bytes(array)
    for part in ("train", "t10k")
    for kind, array in (("images-idx3", RNG.integers(0, 256, (2, 2, 2))), ("labels-idx1", np.array([3, 9])))
}


TREE = {
    "params": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.float64)},
    "table": Rows(torch.ones(2, 2), torch.tensor([True, False])),
    "none": {},
    "count": torch.tensor(3),
}
PACKED = [pack(TREE), pack({})]


def safetensors(entries: Sequence[tuple[str, Any]], outline: Any, body: int) -> bytes:
    """Return the bytes of a safetensors file with these header entries and outline."""
    header = {
        **dict(entries),
        "__metadata__": {"outline": outline if isinstance(outline, str) else json.dumps(outline)},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def malformed_safetensors() -> SearchStrategy[bytes]:
    """Generate safetensors files with odd names, types, shapes, offsets, and outlines."""
    sides = st.sampled_from([0, 1, 2, -1, 2**31, 2**62, 2**64, 1.5, "2", None])
    offsets = st.sampled_from([0, 4, 8, 16, -4, 2**40, 2**63, 2**64])
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BF16", "BOOL", "I64", "U8", "F8_E4M3", "C64", "Q4", 5, None]),
            "shape": st.lists(sides, max_size=3),
            "data_offsets": st.lists(offsets, min_size=1, max_size=3),
        }
    )
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    names = st.sampled_from(["a", "a/b", "", "t/rows.values", "t/rows.present", "/", "__metadata__", "\x1b"])
    outlines: SearchStrategy[Any] = st.sampled_from(
        [{"a": None}, {"a": {"b": None}}, {"t": "rows"}, {}, {"a": 5}, [], None, "{" * 3000, "[" * 3000, {"": None}]
    )
    entries = st.lists(st.tuples(names, st.one_of(st.just(good), entry)), max_size=3)
    return st.builds(safetensors, entries, outlines, st.sampled_from([0, 4, 8, 16]))


def _federation() -> bytes:
    with TemporaryDirectory() as folder:
        x = {"image": RNG.integers(0, 9, (4, 3), dtype=np.uint8), "size": np.ones(4, np.float32)}
        clients = [(x, list("abab"), x, list("abab"))] * 2
        ft.Federation.from_arrays(clients, common_test=(x, list("abab"))).save(f"{folder}/fed")
        return Path(folder, "fed").read_bytes()


FEDERATION = _federation()


def change_federation(data: bytes, change: Callable[[dict[str, Any]], Any] = lambda entries: None) -> bytes:
    """Return a federation file with changed entries of its header and with a valid checksum, if it has a header."""
    first = 8 + int.from_bytes(data[:8], "little")
    try:
        entries = json.loads(data[8:first])
        metadata = entries.pop("__metadata__")
        inputs_end = max(entry["data_offsets"][1] for name, entry in entries.items() if name[:2] in ("x", "x/"))
        rest = data[first + inputs_end :]
        change(entries)
        text = json.dumps(entries, sort_keys=True).encode()
        metadata["sha256"] = sha256(text + sha256(rest).digest()).hexdigest()
        return data[:8] + json.dumps({"__metadata__": metadata} | entries).encode().ljust(first - 8) + data[first:]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return data
