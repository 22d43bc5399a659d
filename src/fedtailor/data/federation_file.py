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
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from fedtailor.data.samples import check_same_kind
from fedtailor.data.stored_samples import StoredSamples, hash_samples, non_finite_samples
from fedtailor.errors import DataError, FedTailorError, reason

_FORMAT = "fedtailor federation 1"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_PAGE = 4096  # bytes; the tensors start at a multiple of it
_MAX_HEADER = 2**20  # bytes; a header has one entry per part of the inputs
_PLAIN_FIELDS = ("names", "classes", "class_names", "mean", "std")  # of a federation, stored as JSON
_MAX_CLASSES = 10**6  # limits the memory for counts of each client's classes

Fields = dict[str, Any]  # the fields of a `Federation`
_Entries = dict[str, dict[str, Any]]  # tensor -> dtype, shape, and data_offsets


def write_federation(path: Path, blocks: Iterable[tuple[str, Inputs]], finish: Callable[[Inputs], Fields]) -> None:
    """Write a file in one pass over the inputs.

    `blocks` yields owners and some of their inputs at a time. `finish` gets all inputs, mapped into memory, and returns
    the fields of the federation. The file appears under its name only when it is complete.
    """
    try:
        with _temporary(path) as temporary:
            with temporary.open("wb") as file:
                first, entries, parts = _write_inputs(file, blocks, path.parent)
            with temporary.open("r+b") as file:
                _write_rest(file, first, entries, finish(_in_order(_map_inputs(file, first, entries), parts)))
            temporary.replace(path)
    except OSError as error:
        raise DataError(f"The federation cannot be written to '{path}': {error.strerror}.") from error


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


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a file name in the same folder; remove the file if it is still there at the end."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write_inputs(
    file: BinaryIO, blocks: Iterable[tuple[str, Inputs]], folder: Path
) -> tuple[int, _Entries, list[str]]:
    """Write the inputs; return where they start, their entries, and the order of their parts.

    Parts after the first wait in their own files.
    """
    reference: Inputs | None = None
    rows, first, files = 0, 0, dict[str, BinaryIO]()
    with ExitStack() as stack:
        for owner, block in blocks:
            parts = as_parts(block)
            if not len(next(iter(parts.values()))):
                continue
            if reference is None:
                reference = {name: part[:1] for name, part in parts.items()} if isinstance(block, dict) else block[:1]
                first = _reserve(as_parts(reference))
                file.seek(first)
                order = sorted(parts, key=lambda name: -parts[name].element_size())  # so that all parts are aligned
                files = {name: stack.enter_context(tempfile.TemporaryFile(dir=folder)) for name in order[1:]}
                files = {order[0]: file} | files
            check_same_kind(block, reference, owner, "inputs")
            for name, own in files.items():
                own.write(tensor_bytes(parts[name]))
            rows += len(next(iter(parts.values())))
        if reference is None:
            raise DataError("A federation needs samples; no client has any.")
        for own in list(files.values())[1:]:
            own.seek(0)
            shutil.copyfileobj(own, file)
    samples = as_parts(reference)
    return first, _entries({name: (samples[name], rows) for name in files}), list(samples)


def _reserve(parts: Mapping[str, Tensor]) -> int:
    """Return where the tensors start, with room for any header."""
    for name, part in parts.items():
        if part.dtype not in _DTYPES.values():
            what = f"inputs{f' {name!r}' if name else ''} of dtype {str(part.dtype).removeprefix('torch.')}"
            raise DataError(f"A federation file cannot contain {what}; convert them to float32, int64, or uint8.")
    largest = json.dumps(_entries({name: (part, 10**15) for name, part in parts.items()}))
    return -(-(len(largest) + 2 * _PAGE) // _PAGE) * _PAGE


def _entries(parts: Mapping[str, tuple[Tensor, int]]) -> _Entries:
    """Return the entries of inputs, from a sample and the number of samples of each part."""
    entries, end = _Entries(), 0
    for name, (sample, rows) in parts.items():
        _append(entries, f"x/{name}" if name else "x", sample.dtype, [rows, *sample.shape[1:]], end)
        end = entries[f"x/{name}" if name else "x"]["data_offsets"][1]
    return entries


def _append(entries: _Entries, name: str, dtype: torch.dtype, shape: list[int], start: int) -> None:
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + prod(shape) * dtype.itemsize]}


def _map_inputs(file: BinaryIO, first: int, entries: _Entries) -> Inputs:
    """Return the inputs as tensors over the file's pages, which are read when they are used.

    The pages are read-only. A private copy that could be changed would count as memory that the system has to provide,
    and mapping a file larger than memory would fail.
    """
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    inputs = {name[2:]: _map_tensor(pages, first, entry) for name, entry in entries.items() if _is_input(name)}
    return inputs[""] if list(inputs) == [""] else inputs


def _in_order(x: Inputs, parts: list[str]) -> Inputs:
    return {name: x[name] for name in parts} if isinstance(x, dict) else x


def _map_tensor(pages: mmap.mmap, first: int, entry: Mapping[str, Any]) -> Tensor:
    shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        start = first + entry["data_offsets"][0]
        return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=start).reshape(shape)


def _is_input(name: str) -> bool:
    return name == "x" or name.startswith("x/")


def _write_rest(file: BinaryIO, first: int, entries: _Entries, fields: Fields) -> None:
    """Append everything but the inputs, and write the header into the room before them."""
    x, y = fields["x"], fields["y"]
    description = {name: fields[name] for name in _PLAIN_FIELDS}
    description |= {"parts": list(as_parts(x)), "source": dict(fields["settings"]), "sha256": hash_samples(x, y)}
    description["is_finite"] = not any(bool(non_finite_samples(part).any()) for part in as_parts(x).values())
    text = json.dumps(
        description, default=lambda value: value.item() if hasattr(value, "item") else str(value)
    ).encode()
    tensors = {"y": y} | _pack_indices(fields) | {"description": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    digest, end = sha256(), file.seek(0, os.SEEK_END) - first
    for name, tensor in tensors.items():
        _append(entries, name, tensor.dtype, list(tensor.shape), end)
        end = entries[name]["data_offsets"][1]
        file.write(tensor_bytes(tensor))
        digest.update(tensor_bytes(tensor))
    metadata = {"format": _FORMAT, "sha256": _checksum(entries, digest.digest())}
    header = json.dumps({"__metadata__": metadata} | entries).encode()
    if len(header) > min(first - 8, _MAX_HEADER):
        raise DataError("The inputs have too many parts, or parts with too long names, for a federation file.")
    file.seek(0)
    file.write((first - 8).to_bytes(8, "little") + header.ljust(first - 8))
    file.flush()
    os.fsync(file.fileno())


def _pack_indices(fields: Fields) -> dict[str, Tensor]:
    packed = dict[str, Tensor]()
    for split in ("train", "test"):
        packed[split] = torch.cat(fields[split]).long()
        packed[f"{split}_sizes"] = torch.tensor([len(own) for own in fields[split]])
    common = fields["common_test"]
    return packed if common is None else packed | {"common_test": common.long()}


def _checksum(entries: _Entries, digest: bytes) -> str:
    return sha256(json.dumps(entries, sort_keys=True).encode() + digest).hexdigest()


def _read(file: BinaryIO) -> Fields:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    first = 8 + int.from_bytes(file.read(8), "little")
    if not 8 < first <= min(size, _MAX_HEADER):
        raise ValueError("it has no header")
    entries = parse_json(file.read(first - 8))
    metadata = entries.pop("__metadata__", {})
    if metadata.get("format") != _FORMAT:
        raise ValueError("it was not written by Federation.save or Federation.write")
    inputs_end = _check_entries(entries, size - first)
    check_memory(size - first - inputs_end, "Everything but the inputs in the file")
    file.seek(first + inputs_end)
    rest = file.read()
    if metadata["sha256"] != _checksum(entries, sha256(rest).digest()):
        raise ValueError("it does not match its checksum; write it again")
    tensors = {name: _load(rest, entry, inputs_end) for name, entry in entries.items() if not _is_input(name)}
    return _unpack(_map_inputs(file, first, entries), tensors)


def _check_entries(entries: _Entries, size: int) -> int:
    """Raise an error unless the entries describe `size` bytes without gaps; return where the inputs end."""
    end, inputs_end = 0, 0
    for name, entry in entries.items():
        shape = entry["shape"]
        if not shape or len(shape) > 64 or not all(type(length) is int and 0 <= length <= size for length in shape):
            raise ValueError(f"the shape of its tensor '{name}' is invalid")
        expected = [end, end + prod(shape) * _DTYPES[entry["dtype"]].itemsize]
        if entry["data_offsets"] != expected or (_is_input(name) and inputs_end != end):
            raise ValueError(f"the position of its tensor '{name}' is invalid")
        end = expected[1]
        inputs_end = end if _is_input(name) else inputs_end
    if end != size:
        raise ValueError(f"it has {size:,} bytes of tensors instead of {end:,}")
    return inputs_end


def _load(rest: bytes, entry: Mapping[str, Any], inputs_end: int) -> Tensor:
    start, end = (offset - inputs_end for offset in entry["data_offsets"])
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if start == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(rest[start:end]), dtype=dtype).reshape(shape)


def _unpack(mapped: Inputs, tensors: Mapping[str, Tensor]) -> Fields:
    """Return the fields of a federation after checking that they fit together."""
    description = parse_json(bytes(tensor_bytes(tensors["description"])))
    check_settings({name: value for name, value in description.items() if name != "source"}, "Its description")
    x, y = _in_order(mapped, description["parts"]), tensors["y"]
    if len(as_parts(x)) != len(as_parts(mapped)) or any(len(part) != len(y) for part in as_parts(x).values()):
        raise ValueError("its inputs and targets do not have the same number of samples")
    found: Fields = {"x": x, "y": y, "common_test": None} | _plain_fields(description)
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
    found = {name: tuple(v) if isinstance(v := description[name], list) else v for name in _PLAIN_FIELDS}
    texts, numbers = [*found["names"], *(found["class_names"] or ())], [*(found["mean"] or ()), *(found["std"] or ())]
    is_valid = all(isinstance(text, str) for text in texts) and all(type(n) in (int, float) for n in numbers)
    if not is_valid or not 0 <= (found["classes"] or 0) <= _MAX_CLASSES:
        raise ValueError("its description is invalid")
    return found
