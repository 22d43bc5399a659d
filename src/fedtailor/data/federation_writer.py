"""Writer of federation files, whose layout `federation_file` describes."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.model import Inputs
from fedtailor.core.tensor_hash import tensor_bytes
from fedtailor.data.federation_file import (
    DTYPES,
    FORMAT,
    MAX_HEADER,
    PLAIN_FIELDS,
    Entries,
    Fields,
    header_checksum,
    in_order,
    map_inputs,
)
from fedtailor.data.samples import check_same_kind
from fedtailor.data.stored_samples import hash_samples, non_finite_samples
from fedtailor.errors import DataError

_PAGE = 4096  # bytes; the tensors start at a multiple of it


def write_federation(path: Path, blocks: Iterable[tuple[str, Inputs]], finish: Callable[[Inputs], Fields]) -> None:
    """Write a file in one pass over the inputs.

    `blocks` yields owners and some of their inputs at a time. `finish` gets all inputs, mapped into memory, and returns
    the fields of the federation. The file appears under its name only when it is complete.
    """
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with ExitStack() as stack:
            with _write_errors(path):
                writer = _InputsWriter(stack.enter_context(temporary.open("w+b")), path.parent, stack)
            for owner, block in blocks:
                with _write_errors(path):
                    writer.append(owner, block)
            with _write_errors(path):
                entries = writer.finish()
                x = in_order(map_inputs(writer.file, writer.first, entries), list(writer.parts))
                _write_rest(writer.file, writer.first, entries, finish(x))
        with _write_errors(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"The federation cannot be written to '{path}': {error.strerror}.") from error


class _InputsWriter:
    """Appends inputs to a file. Parts after the first wait in temporary files, because their position is unknown."""

    def __init__(self, file: BinaryIO, folder: Path, stack: ExitStack) -> None:
        self.file, self._folder, self._stack = file, folder, stack
        self.first = 0  # where the tensors start in the file
        self.parts: dict[str, Tensor] = {}  # one sample
        self._reference: Inputs | None = None  # the same sample
        self._rows, self._files = 0, dict[str, BinaryIO]()

    def append(self, owner: str, block: Inputs) -> None:
        """Write inputs, which must be like those before them."""
        parts = as_parts(block)
        rows = len(next(iter(parts.values())))
        if not rows:
            return
        if self._reference is None:
            self._start({name: part[:1] for name, part in parts.items()}, isinstance(block, dict))
        check_same_kind(block, self._reference, owner, "inputs")
        for name, file in self._files.items():
            file.write(tensor_bytes(parts[name]))
        self._rows += rows

    def finish(self) -> Entries:
        """Return the entries of all inputs, which are then in the file."""
        if self._reference is None:
            raise DataError("A federation needs samples; no client has any.")
        for file in list(self._files.values())[1:]:
            file.seek(0)
            shutil.copyfileobj(file, self.file)
        self.file.flush()
        return _input_entries({name: (self.parts[name], self._rows) for name in self._files})

    def _start(self, parts: dict[str, Tensor], has_names: bool) -> None:
        self.parts, self._reference = parts, parts if has_names else parts[""]
        self.first = _reserve(parts)
        self.file.seek(self.first)
        first, *others = sorted(parts, key=lambda name: -parts[name].element_size())  # so that all parts are aligned
        self._files = {first: self.file}
        for name in others:
            self._files[name] = self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115


def _reserve(parts: Mapping[str, Tensor]) -> int:
    """Return where the tensors start, with room for any header."""
    for name, part in parts.items():
        if part.dtype not in DTYPES.values():
            what = f"inputs{f' {name!r}' if name else ''} of dtype {str(part.dtype).removeprefix('torch.')}"
            raise DataError(f"A federation file cannot contain {what}; convert them to float32, int64, or uint8.")
    largest = json.dumps(_input_entries({name: (part, 10**15) for name, part in parts.items()}))
    return -(-(len(largest) + 2 * _PAGE) // _PAGE) * _PAGE


def _input_entries(parts: Mapping[str, tuple[Tensor, int]]) -> Entries:
    """Return the entries of inputs, from a sample and the number of samples of each part."""
    entries, end = Entries(), 0
    for name, (sample, rows) in parts.items():
        _append(entries, f"x/{name}" if name else "x", sample.dtype, [rows, *sample.shape[1:]], end)
        end = entries[f"x/{name}" if name else "x"]["data_offsets"][1]
    return entries


def _append(entries: Entries, name: str, dtype: torch.dtype, shape: list[int], start: int) -> None:
    code = next(code for code, known in DTYPES.items() if known == dtype)
    entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + prod(shape) * dtype.itemsize]}


def _write_rest(file: BinaryIO, first: int, entries: Entries, fields: Fields) -> None:
    """Append everything but the inputs, and write the header into the room before them."""
    x, y = fields["x"], fields["y"]
    description = {name: fields[name] for name in PLAIN_FIELDS}
    description["table"] = None if fields["table"] is None else asdict(fields["table"])
    description |= {"parts": list(as_parts(x)), "source": dict(fields["settings"]), "sha256": hash_samples(x, y)}
    description |= {"survival": True} if fields["survival"] else {}
    description["is_finite"] = not any(bool(non_finite_samples(part).any()) for part in as_parts(x).values())
    text = json.dumps(description, default=_to_json).encode()
    tensors = {"y": y} | _pack_indices(fields) | {"description": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    digest, end = sha256(), file.seek(0, os.SEEK_END) - first
    for name, tensor in tensors.items():
        _append(entries, name, tensor.dtype, list(tensor.shape), end)
        end = entries[name]["data_offsets"][1]
        file.write(tensor_bytes(tensor))
        digest.update(tensor_bytes(tensor))
    metadata = {"format": FORMAT, "sha256": header_checksum(entries, digest.digest())}
    header = json.dumps({"__metadata__": metadata} | entries).encode()
    if len(header) > min(first - 8, MAX_HEADER):
        raise DataError("The inputs have too many parts, or parts with too long names, for a federation file.")
    file.seek(0)
    file.write((first - 8).to_bytes(8, "little") + header.ljust(first - 8))
    file.flush()
    os.fsync(file.fileno())


def _to_json(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)  # a number of NumPy; a path, for example


def _pack_indices(fields: Fields) -> dict[str, Tensor]:
    packed = dict[str, Tensor]()
    for split in ("train", "test"):
        packed[split] = torch.cat(fields[split]).long()
        packed[f"{split}_sizes"] = torch.tensor([len(own) for own in fields[split]])
    common = fields["common_test"]
    return packed if common is None else packed | {"common_test": common.long()}
