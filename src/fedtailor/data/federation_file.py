"""A federation in one file whose inputs are mapped into memory, for data larger than memory.

The file is a safetensors file, which any reader of that format opens; this module needs no library to do so:

    header         8 bytes (its length) and JSON: dtype, shape, and position of each tensor, and a checksum
    x              the inputs of all samples; x/NAME for each part if they have several
    y              the targets
    train, test    the positions of the clients' samples, client by client; train_sizes and test_sizes split them
    common_test    the positions of the common test set, if there is one
    description    JSON: names of clients and classes, preprocessing, and the SHA-256 of all samples

A file is untrusted: it contains no code, sizes are compared with the file and the memory before anything is allocated,
and everything but x is compared with the checksum whenever the file is opened.
"""

import json
import mmap
import os
import warnings
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.memory_limits import check_memory
from fedtailor.core.model import Inputs
from fedtailor.core.tensor_hash import tensor_bytes
from fedtailor.core.untrusted_input import check_settings, parse_json
from fedtailor.data.stored_samples import StoredSamples, hash_samples
from fedtailor.data.tables.table_format import TableFormat
from fedtailor.errors import DataError, FedTailorError, reason

FORMAT = "fedtailor federation 1"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER = 2**20  # bytes; a header has one entry per part of the inputs
PLAIN_FIELDS = ("names", "classes", "class_names", "mean", "std")  # of a federation, stored as JSON
_MAX_CLASSES = 10**6  # limits the memory for counts of each client's classes

Fields = dict[str, Any]  # the fields of a `Federation`
Entries = dict[str, dict[str, Any]]  # tensor -> dtype, shape, and data_offsets


def read_federation(path: Path, verify: bool = False) -> Fields:
    """Return the fields of the federation in a file; with `verify`, all inputs are compared with their checksum."""
    try:
        if not path.is_file():  # opening a pipe may never end
            raise DataError(f"There is no file '{path}'.")
        with path.open("rb") as file:
            found = _read(file)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        what = reason(error) if isinstance(error, FedTailorError | ValueError) else "its content is invalid"
        raise DataError(f"'{path}' is not a federation file, or it is damaged: {what}.") from error
    if verify and hash_samples(found["x"], found["y"]) != found["stored"].sha256:
        raise DataError(f"'{path}' is damaged: its samples do not match their checksum; write it again.")
    return found


def map_inputs(file: BinaryIO, first: int, entries: Entries) -> Inputs:
    """Return the inputs as tensors over the file's pages, which are read when they are used.

    The pages are read-only. A private copy that could be changed would count as memory that the system has to provide,
    and mapping a file larger than memory would fail.
    """
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    inputs = {name[2:]: _map_tensor(pages, first, entry) for name, entry in entries.items() if _is_input(name)}
    return inputs[""] if list(inputs) == [""] else inputs


def in_order(x: Inputs, parts: list[str]) -> Inputs:
    """Return inputs with their parts in this order; files contain those with the largest values first."""
    return {name: x[name] for name in parts} if isinstance(x, dict) else x


def _map_tensor(pages: mmap.mmap, first: int, entry: Mapping[str, Any]) -> Tensor:
    shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    start = first + entry["data_offsets"][0]
    if start % dtype.itemsize:
        raise ValueError("its inputs are not aligned")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=start).reshape(shape)


def _is_input(name: str) -> bool:
    return name == "x" or name.startswith("x/")


def header_checksum(entries: Entries, digest: bytes) -> str:
    """Return the checksum of the header's entries and of the SHA-256 of everything but the inputs."""
    return sha256(json.dumps(entries, sort_keys=True).encode() + digest).hexdigest()


def _read(file: BinaryIO) -> Fields:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    first = 8 + int.from_bytes(file.read(8), "little")
    if not 8 < first <= min(size, MAX_HEADER):
        raise ValueError("it has no header")
    entries = parse_json(file.read(first - 8))
    metadata = entries.pop("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ValueError("it was not written by Federation.save or Federation.write")
    inputs_end = _check_entries(entries, size - first)
    check_memory(size - first - inputs_end, "Everything but the inputs in the file")
    file.seek(first + inputs_end)
    rest = file.read()
    if metadata["sha256"] != header_checksum(entries, sha256(rest).digest()):
        raise ValueError("it does not match its checksum; write it again")
    tensors = {name: _load(rest, entry, inputs_end) for name, entry in entries.items() if not _is_input(name)}
    return _unpack(map_inputs(file, first, entries), tensors)


def _check_entries(entries: Entries, size: int) -> int:
    """Raise an error unless the entries describe `size` bytes without gaps; return where the inputs end."""
    end, inputs_end = 0, 0
    for name, entry in entries.items():
        shape = entry["shape"]
        if not shape or len(shape) > 64 or not all(type(length) is int and 0 <= length <= size for length in shape):
            raise ValueError(f"the shape of its tensor '{name}' is invalid")
        expected = [end, end + prod(shape) * DTYPES[entry["dtype"]].itemsize]
        if entry["data_offsets"] != expected or (_is_input(name) and inputs_end != end):
            raise ValueError(f"the position of its tensor '{name}' is invalid")
        end = expected[1]
        inputs_end = end if _is_input(name) else inputs_end
    if end != size:
        raise ValueError(f"it has {size:,} bytes of tensors instead of {end:,}")
    return inputs_end


def _load(rest: bytes, entry: Mapping[str, Any], inputs_end: int) -> Tensor:
    start, end = (offset - inputs_end for offset in entry["data_offsets"])
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if start == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(rest[start:end]), dtype=dtype).reshape(shape)


def _unpack(mapped: Inputs, tensors: Mapping[str, Tensor]) -> Fields:
    """Return the fields of a federation after checking that they fit together."""
    description = parse_json(bytes(tensor_bytes(tensors["description"])))
    check_settings({name: value for name, value in description.items() if name != "source"}, "Its description")
    x, y = in_order(mapped, description["parts"]), tensors["y"]
    if len(as_parts(x)) != len(as_parts(mapped)) or any(len(part) != len(y) for part in as_parts(x).values()):
        raise ValueError("its inputs and targets do not have the same number of samples")
    found: Fields = {"x": x, "y": y, "common_test": None} | _plain_fields(description)
    found["survival"] = description.get("survival") is True
    if found["classes"] is not None and (y.ndim != 1 or y.dtype != torch.int64):
        raise ValueError("its targets are not classes")
    for split in ("train", "test"):
        sizes = tensors[f"{split}_sizes"].tolist()
        found[split] = torch.split(_positions(tensors[split], len(y)), sizes)
        if len(sizes) != len(found["names"]):
            raise ValueError("it does not have one name per client")
    if "common_test" in tensors:
        found["common_test"] = _positions(tensors["common_test"], len(y))
    stored = StoredSamples(x, y, str(description["sha256"]), description["is_finite"] is True)
    return found | {"stored": stored}


def _positions(positions: Tensor, samples: int) -> Tensor:
    if positions.dtype != torch.int64 or (len(positions) and not 0 <= positions.min() <= positions.max() < samples):
        raise ValueError("it has positions of samples that do not exist")
    return positions


def _plain_fields(description: Mapping[str, Any]) -> Fields:
    found: Fields = {name: tuple(v) if isinstance(v := description[name], list) else v for name in PLAIN_FIELDS}
    texts, numbers = [*found["names"], *(found["class_names"] or ())], [*(found["mean"] or ()), *(found["std"] or ())]
    found["table"] = None if (table := description.get("table")) is None else TableFormat.from_json(table)
    is_valid = all(isinstance(text, str) for text in texts) and all(type(n) in (int, float) for n in numbers)
    if not is_valid or not 0 <= (found["classes"] or 0) <= _MAX_CLASSES:
        raise ValueError("its description is invalid")
    return found
