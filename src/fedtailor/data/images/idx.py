"""Reader of IDX files, the format of MNIST and of data sets made like it."""

import gzip
import io
import math
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.images.image_table import Images, make_image_table
from fedtailor.data.images.publisher_files import MAX_FILE_BYTES, PublisherFiles
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError, reason

MNIST_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def read_mnist(files: PublisherFiles) -> SampleTable:
    """Return the samples in MNIST's four files."""
    train, test = (read_idx_part(files, part) for part in ("train", "t10k"))
    return make_image_table([train], test, 10, files.where)


def read_idx_part(files: PublisherFiles, start: str) -> Images:
    """Return the images and labels in two files whose names have the same start."""
    names = f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte"
    x, y = (parse_idx(files[name], files.describe(name)) for name in names)
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(f"{files.where} has {start} files that are not images and labels; use the publisher's files.")
    return x[:, None], y.astype(np.int64)


def parse_idx(data: bytes, what: str = "The IDX file") -> NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, gzipped or not.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [[7, 8, 9]]
    """
    file = io.BytesIO(data)
    stream = gzip.GzipFile(fileobj=file) if data[:2] == b"\x1f\x8b" else file
    try:
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise DataError(f"{what} is not an IDX file of unsigned bytes; replace it with the publisher's file.")
        shape = struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))
        size = math.prod(shape)
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{what} declares {size:,} bytes; the limit is {MAX_FILE_BYTES:,}, so it may be the wrong file."
            )
        body = _read_at_most(size + 1, stream)  # one more byte, to detect a file that is too long
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{what} is damaged or truncated ({reason(error)}); download it again.") from error
    if len(body) != size:
        actual = f"{len(body):,}" if len(body) < size else "more"
        raise DataError(f"{what} declares {size:,} bytes but contains {actual}; download it again.")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_at_most(size: int, stream: io.BufferedIOBase) -> bytearray:
    """Read up to `size` bytes of a stream; memory grows only with the data that is read."""
    body = bytearray()
    while size > len(body) and (part := stream.read(min(size - len(body), 1 << 20))):
        body += part
    return body
