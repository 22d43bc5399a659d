"""Predicts samples from a file with a personal model: .csv, .parquet, .npz, .npy, an image, or a folder of images."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.analysis.table_formats import escape_formula
from fedtailor.core.batch import take_samples
from fedtailor.core.memory_limits import check_memory
from fedtailor.core.model import Inputs
from fedtailor.data.formats.folder_entries import list_entries
from fedtailor.data.formats.image_files import is_image, read_image, read_image_size
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.input_spec import SINGLE_INPUT, InputSpec
from fedtailor.data.tables.loading import model_rows
from fedtailor.data.tables.reading import SUFFIXES as TABLE_SUFFIXES
from fedtailor.data.tables.reading import RawTable, first_row, from_frame, read_table
from fedtailor.errors import ConfigError
from fedtailor.export.model_source import ModelInfo
from fedtailor.networks import NETWORKS
from fedtailor.runs.files import write_atomic, write_errors

_BATCH_SIZE = 256
Array = NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """One row per sample. For a classifier: the class and its probability, the softmax of the outputs."""

    samples: Sequence[str | int]  # the index in the file or the federation, or the image's name
    outputs: Tensor  # [samples, ...]
    classify: bool
    class_names: Sequence[str] | None = None  # None: classes have only numbers

    @property
    def probabilities(self) -> Tensor:
        return torch.softmax(self.outputs, 1)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and rows of a table.

        >>> Predictions(["0"], torch.tensor([[0.0, 0.0]]), classify=True).rows()
        (['sample', 'class', 'probability'], [['0', 0, 0.5]])
        """
        if self.classify:
            best = self.probabilities.max(1)
            found = (self.labels[index] for index in best.indices.tolist())
            table = zip(self.samples, found, best.values.tolist(), strict=True)
            return ["sample", "class", "probability"], [list(row) for row in table]
        flat = self.outputs.reshape(len(self.samples), -1)
        columns = ["prediction"] if flat.shape[1] == 1 else [f"prediction_{i}" for i in range(flat.shape[1])]
        return ["sample", *columns], [[name, *row] for name, row in zip(self.samples, flat.tolist(), strict=True)]

    @property
    def labels(self) -> Sequence[Any]:
        """The names of the classes, or their numbers."""
        return self.class_names or range(self.outputs.shape[1])

    def save(self, path: Path) -> None:
        """Write all predictions to a .csv or .npz file."""
        if path.suffix not in (".csv", ".npz"):
            raise ConfigError(f"'{path.name}' must end with .csv or .npz.")
        with write_errors(f"'{path}' cannot be written"):
            write_atomic(path, self._csv() if path.suffix == ".csv" else self._npz())

    def _csv(self) -> bytes:
        columns, rows = self.rows()
        if self.classify:
            columns = [*columns, *(f"probability_{label}" for label in self.labels)]
            rows = [[*row, *values] for row, values in zip(rows, self.probabilities.tolist(), strict=True)]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [columns, *([escape_formula(value) for value in row] for row in rows)]
        )
        return text.getvalue().encode()

    def _npz(self) -> bytes:
        arrays = {"sample": np.array(self.samples), "outputs": self.outputs.numpy()}
        if self.classify:
            best = np.array(self.labels)[self.probabilities.argmax(1).numpy()]
            arrays |= {"class": best, "probabilities": self.probabilities.numpy()}
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()


def predict(
    model: nn.Module, source: Any, *, decimal: str | None = None, date_format: str | None = None
) -> Predictions:
    """Predict the samples in a file or folder with a model from `ft.load_personal`.

    For a model that was trained on tables, the samples may also be a pandas DataFrame with the original columns, and
    `decimal` and `date_format` say how to read numbers and dates that could be two things, as in `from_tables`.
    """
    info: ModelInfo | None = getattr(model, "info", None)
    writing = {"decimal": decimal, "date_format": date_format}
    if info is None:
        raise ConfigError("predict takes a model from ft.load_personal.")
    if isinstance(source, str | Path):
        return predict_samples(model, info, *read_samples(Path(source), info.inputs, **writing))
    if info.inputs.table is None:
        raise ConfigError("predict takes a file or folder; only models of tables take a data frame.")
    raw = from_frame(source, "the data frame")
    return predict_samples(model, info, [str(label) for label in raw.rows], _encode(raw, info.inputs, **writing))


@torch.no_grad()
def predict_samples(model: nn.Module, info: ModelInfo, samples: Sequence[str | int], x: Inputs) -> Predictions:
    """Predict samples in the input format of the model; `samples` are their names."""
    _check_tokens(x, info)
    batches = [take_samples(x, slice(start, start + _BATCH_SIZE)) for start in range(0, len(samples), _BATCH_SIZE)]
    outputs = torch.cat([model(batch) for batch in batches])
    if outputs.isnan().any():  # samples are finite, so the model is the cause
        raise ConfigError(f"The model of client {info.client} diverged in training: its outputs are NaN.")
    classes = info.inputs.classes
    classify = classes is not None and outputs.ndim == 2 and outputs.shape[1] >= max(2, classes)
    known = info.inputs.class_names
    return Predictions(samples, outputs, classify, known if known and len(known) == outputs.shape[1] else None)


def _check_tokens(x: Inputs, info: ModelInfo) -> None:
    """Raise `ConfigError` if a built-in network has no embedding for a token."""
    size = info.network.get("vocabulary") if info.network["name"] in NETWORKS else None
    if isinstance(size, int) and not bool(((x >= 0) & (x < size)).all()):
        raise ConfigError(f"The model knows the tokens 0 to {size - 1}, but the samples have others; map these to 0.")


def read_samples(path: Path, input_spec: InputSpec, **writing: str | None) -> tuple[list[str], Inputs]:
    """Return the names of the samples, and the samples in the input format; `writing` is that of `model_rows`.

    >>> read_samples(Path("nowhere.npz"), InputSpec({"": ("uint8", (3,))}, 2))
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no file or folder 'nowhere.npz'.
    """
    if not path.exists():
        raise ConfigError(f"There is no file or folder '{path}'.")
    if input_spec.table is not None and path.suffix.lower() in TABLE_SUFFIXES:
        raw = read_table(path)  # without empty rows, which count all the same
        return [str(row - first_row(path)) for row in raw.rows], _encode(raw, input_spec, **writing)
    try:
        if path.is_dir() or is_image(path):
            names, arrays = _read_images(path, input_spec)
        else:
            arrays = _read_arrays(path, input_spec)
            names = [str(number) for number in range(min(len(array) if array.ndim else 0 for array in arrays.values()))]
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}.") from error
    if not names:
        raise ConfigError(f"'{path}' contains no samples.")
    parts = {name: _convert(array, name, len(names), input_spec, path) for name, array in arrays.items()}
    return names, parts.get(SINGLE_INPUT, parts)


def _encode(raw: RawTable, input_spec: InputSpec, **writing: str | None) -> Tensor:
    """Return the rows of a table as the model takes them: its features, or a number per column."""
    assert input_spec.table is not None
    rows = model_rows(raw, input_spec.table, **writing)
    return torch.from_numpy(rows if input_spec.takes_rows else input_spec.table.encode(rows))


def _read_images(path: Path, input_spec: InputSpec) -> tuple[list[str], dict[str, Array]]:
    shape = input_spec.shape
    if shape is None or len(shape) != 3:
        raise ConfigError(f"The run's samples are not images; use a .npz file instead of '{path}'.")
    files = [path] if path.is_file() else list_entries(path, "**/*", is_image, path)
    check_memory(len(files) * shape[0] * shape[1] * shape[2], f"The images in '{path}'")
    images = []
    for file in files:
        image = read_image(file, (shape[2], shape[1]))
        if image is None or image.shape != shape:
            width, height = read_image_size(file)
            channels = "" if image is None else f" in {_channels(image.shape[0])}"
            expected = f"{shape[2]}×{shape[1]} in {_channels(shape[0])}"
            raise ConfigError(
                f"'{file.name}' has {width}×{height} pixels{channels}; the run's samples have {expected}."
            )
        images.append(image)
    names = [file.name if path.is_file() else str(file.relative_to(path)) for file in files]
    return names, {SINGLE_INPUT: np.stack(images) if images else np.empty((0, *shape), np.uint8)}


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def _read_arrays(path: Path, input_spec: InputSpec) -> dict[str, Array]:
    has_parts = SINGLE_INPUT not in input_spec.parts
    if path.suffix == ".npy" and not has_parts:
        return {SINGLE_INPUT: _read_npy(path)}
    if path.suffix != ".npz":
        formats = "a .npz file" if has_parts else "a .npz or .npy file, an image, or a folder of images"
        raise ConfigError(f"'{path.name}' has an unsupported format; use {formats}.")
    names = list(input_spec.parts) if has_parts else ["x", "x_test"]
    arrays, found = read_npz(path, names)
    if has_parts:
        if missing := [name for name in names if name not in arrays]:
            raise ConfigError(
                f"'{path.name}' must contain one array per part of the inputs, but has no '{missing[0]}'."
            )
        return arrays
    if not arrays:
        raise ConfigError(
            f"'{path.name}' must contain the samples as x or x_test, but has {', '.join(found[:5]) or 'no arrays'}."
        )
    return {SINGLE_INPUT: arrays["x"] if "x" in arrays else arrays["x_test"]}


def _read_npy(path: Path) -> Array:
    """Read an array from an untrusted file; it is memory-mapped first, so that a false header allocates no memory."""
    check_memory(path.stat().st_size, repr(path.name))
    try:
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError, MemoryError) as error:
        raise ConfigError(f"'{path.name}' is not a valid .npy file of numbers; write it with numpy.save.") from error


def _convert(array: Array, name: str, count: int, input_spec: InputSpec, path: Path) -> Tensor:
    """Return an array as an input of the model; raise `ConfigError` if it does not match the input format."""
    dtype, shape = input_spec.parts[name]
    what = f"The samples in '{path.name}'" if name == SINGLE_INPUT else f"'{name}' in '{path.name}'"
    verb, subject = ("have", "samples") if name == SINGLE_INPUT else ("has", "inputs")
    if array.shape[1:] != shape or len(array) != count:
        raise ConfigError(f"{what} {verb} shape {array.shape[1:]}; the run's {subject} have shape {shape} per sample.")
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{what} must be numeric, got {array.dtype}.")
    tensor = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    is_float, wants_float = tensor.is_floating_point(), "float" in dtype
    if is_float and not (finite := tensor.isfinite().reshape(count, -1).all(1)).all():
        raise ConfigError(f"{what} must be finite; sample {finite.tolist().index(False)} has NaN or infinite values.")
    if dtype == "uint8" and tensor.dtype != torch.uint8 and not (is_float and tensor.min() >= 0 and tensor.max() <= 1):
        raise ConfigError(f"{what} must be uint8, or floats from 0 to 1, got {array.dtype}.")
    if wants_float and not is_float and not (input_spec.dtype_is_assumed and tensor.dtype == torch.uint8):
        raise ConfigError(f"{what} must be {dtype} like the run's data, got {array.dtype}.")
    if is_float and not wants_float and dtype != "uint8":
        raise ConfigError(f"{what} must be integers like the run's data, got {array.dtype}.")
    return tensor if wants_float or dtype == "uint8" else tensor.to(getattr(torch, dtype))
