"""Tiny data sets in the publishers' formats and in the packages of registries."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from support.corrupted_files import idx_bytes

Bytes = NDArray[np.uint8]
RNG = np.random.default_rng(7)
GRAY, GRAY_Y = RNG.integers(0, 256, (5, 28, 28), np.uint8), np.array([3, 0, 9, 1, 1], np.uint8)
COLOR, COLOR_Y = RNG.integers(0, 256, (12, 3, 32, 32), np.uint8), np.arange(12) % 10
BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


def mnist_files(x: Bytes = GRAY, y: Bytes = GRAY_Y, train: int = 3) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx_bytes(x[:train]),
        "train-labels-idx1-ubyte": idx_bytes(y[:train]),
        "t10k-images-idx3-ubyte": idx_bytes(x[train:]),
        "t10k-labels-idx1-ubyte": idx_bytes(y[train:]),
    }


def png(images: Bytes) -> bytes:
    """Return a sheet as in the package, with one image per row of 1,024 pixels."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(images.transpose(0, 2, 3, 1)).reshape(-1, 1024, 3)).save(file, "PNG")
    return file.getvalue()


def cifar_sheets() -> dict[str, bytes]:
    files = {f"{batch}.png": png(COLOR[2 * n : 2 * n + 2]) for n, batch in enumerate(BATCHES)}
    files["train_lables.json"] = json.dumps(COLOR_Y[:10].tolist()).encode()
    files["test_lables.json"] = json.dumps(COLOR_Y[10:].tolist()).encode()
    return files


def cifar_binary() -> dict[str, bytes]:
    records = [bytes([label]) + image.tobytes() for image, label in zip(COLOR, COLOR_Y, strict=True)]
    return {f"{batch}.bin": b"".join(records[2 * n : 2 * n + 2]) for n, batch in enumerate(BATCHES)}


def tar(files: dict[str, bytes], mode: Literal["w:gz", "w:xz"], prefix: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in {"package.json": b"{}", "../../../escape": b"no", **files}.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",  # odd length, which requires a padding byte
        "data.tar.xz": tar({f"{n}.gz": gzip.compress(c) for n, c in files.items()}, "w:xz", "./usr/share/datasets/f/"),
    }
    out = b"!<arch>\n"
    for name, content in members.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write these files into a folder and return it."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
