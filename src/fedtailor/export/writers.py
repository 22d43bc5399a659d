"""Exports personal models as safetensors, ONNX, or PyTorch exported programs (.pt2).

Every file is read back before it gets its final name, and its outputs must match those of the model. Graphs take
samples as the data set stores them, in batches of any size. They are traced with random samples, because a .pt2 file
contains these.
"""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedtailor.core.model import Inputs
from fedtailor.errors import ConfigError, FedTailorError, reason, unknown_name
from fedtailor.export.model_source import METADATA_KEY, ModelInfo, load_exported
from fedtailor.export.onnx_model import MISSING_LIBRARIES, graph_input_name, read_onnx
from fedtailor.export.personal_model import PersonalModel, build_personal_model
from fedtailor.runs.files import (
    TEMPORARY_SUFFIX,
    atomic_folder,
    remove_folder,
    safe_file_name,
    sync_folder,
    write_and_sync,
    write_errors,
)
from fedtailor.runs.run import method_label
from fedtailor.version import VERSION

_OPSET = 20  # of ONNX; ONNX Runtime reads it since version 1.17
_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # of the outputs, relative to the largest one
_ROUNDING_STEPS = 8  # in units of the dtype's epsilon: the absolute difference that is always accepted
_INPUT_DTYPES = ("uint8", "float16", "float32", "float64")  # the choices for `input_dtype`
_CHECKED_BATCH_SIZES = (1, 2, 5)
_NOISY_LOGGERS = ("torch.onnx", "torch.export", "torch._export", "torch._dynamo", "onnxscript", "onnx_ir")
_MAX_ONNX_BYTES = 2**31 - 2**20  # protobuf's limit, minus room for the graph


def export_model(
    model: nn.Module, path: str | Path, file_format: str | None = None, *, input_dtype: str | None = None
) -> Path:
    """Write a model from `ft.load_personal` to a file; by default, the suffix of the file sets the format.

    `input_dtype` is the dtype of the inputs of a graph, if it differs from that of the run's data.

    >>> export_model(nn.Linear(2, 1), "model.onnx")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: Only models from ft.load_personal can be exported, except those from ONNX files.
    """
    path = Path(path)
    suffix = path.suffix.removeprefix(".")
    file_format = file_format or suffix
    _check_target(path, file_format)
    if suffix in FORMATS and suffix != file_format:
        raise ConfigError(f"'{path.name}' ends with .{suffix}, but the format is {file_format}; leave out one of them.")
    with write_errors(f"'{path}' cannot be written"):
        _write_checked(_WRITERS[file_format](), _prepare(model, file_format, input_dtype), path)
        sync_folder(path.parent)
    return path


def export_models(
    models: Iterable[nn.Module], folder: str | Path, file_format: str, *, input_dtype: str | None = None
) -> Path:
    """Write the models of several clients of one run to a new folder: all of them, or none if one fails."""
    folder = Path(folder)
    _check_target(folder, file_format)
    writer = _WRITERS[file_format]()
    try:
        with write_errors(f"'{folder}' cannot be written"), atomic_folder(folder) as temporary:
            for model in models:
                personal = _prepare(model, file_format, input_dtype)
                _write_checked(writer, personal, temporary / f"{client_file_name(personal.info)}.{file_format}")
    except BaseException:
        remove_folder(folder.with_name(folder.name + TEMPORARY_SUFFIX))
        raise
    return folder


def client_file_name(info: ModelInfo) -> str:
    """Return a client's number or its name as a valid file name; the name may come from an untrusted file."""
    return f"{int(info.client):03d}" if info.client.isdecimal() else safe_file_name(info.client)


def _check_target(path: Path, file_format: str) -> None:
    if file_format not in FORMATS:
        raise unknown_name("format", file_format, FORMATS)
    if path.exists():
        raise ConfigError(f"'{path}' already exists; remove it, or choose another name.")


def require_personal(model: nn.Module) -> PersonalModel:
    """Return the model; raise `ConfigError` if it cannot be exported."""
    if not isinstance(model, PersonalModel):
        raise ConfigError("Only models from ft.load_personal can be exported, except those from ONNX files.")
    return model


def _prepare(model: nn.Module, file_format: str, input_dtype: str | None) -> PersonalModel:
    """Return the model that a file contains, with other input dtypes if given. A graph for tables takes their rows and
    contains the preprocessing."""
    personal = require_personal(model)
    if personal.info.inputs.table is not None and file_format != "safetensors":
        info = replace(personal.info, inputs=personal.info.inputs.rows)
        personal = PersonalModel(*personal.parts, personal.tensors(), info)
    return personal if input_dtype is None else _with_input_dtype(personal, input_dtype)


def _with_input_dtype(model: PersonalModel, input_dtype: str) -> PersonalModel:
    if input_dtype not in _INPUT_DTYPES:
        raise unknown_name("input dtype", input_dtype, _INPUT_DTYPES)
    changed, inputs = copy.copy(model), model.info.inputs
    convertible = [name for name, (dtype, _) in inputs.parts.items() if dtype == "uint8" or "float" in dtype]
    if not convertible:
        dtypes = ", ".join(sorted({dtype for dtype, _ in inputs.parts.values()}))
        raise ConfigError(f"The dtype of the run's samples ({dtypes}) cannot be changed; leave out --inputs.")
    parts = {
        name: (input_dtype if name in convertible else dtype, shape) for name, (dtype, shape) in inputs.parts.items()
    }
    changed.info = replace(model.info, inputs=replace(inputs, parts=parts, dtype_is_assumed=False))
    return changed


def _write_checked(writer: "_Writer", model: PersonalModel, path: Path) -> None:
    """Write a temporary file, and rename it if its outputs match those of the model."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            write_and_sync(file, writer.write(model))
        _check_outputs(model, writer.read(temporary, model), path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@torch.no_grad()
def _check_outputs(model: PersonalModel, exported: Callable[[Inputs], Tensor], path: Path) -> None:
    """Raise `ConfigError` if the outputs of a file differ from those of the model."""
    samples = {count: model.info.inputs.random_samples(count, seed=count) for count in _CHECKED_BATCH_SIZES}
    expected = {count: model(x) for count, x in samples.items()}
    largest = max(float(outputs.nan_to_num(0, 0, 0).abs().max()) for outputs in expected.values())
    epsilon = torch.finfo(getattr(torch, model.info.dtype)).eps
    tolerance = max(_TOLERANCE[model.info.dtype] * largest, _ROUNDING_STEPS * epsilon)
    for count, outputs in expected.items():
        try:
            found = exported(samples[count])
        except Exception as error:  # other runtimes raise any exception
            raise ConfigError(f"'{path.name}' fails for a batch of size {count}: {reason(error)}.") from error
        if outputs.shape != found.shape or not torch.allclose(found, outputs, rtol=0, atol=tolerance, equal_nan=True):
            difference = float((found - outputs).abs().max()) if outputs.shape == found.shape else float("nan")
            raise ConfigError(
                f"'{path.name}' was not written: its outputs differ from those of the model by {difference:.1g}."
            )


class _SafetensorsWriter:
    """Writes the tensors, and the metadata that is needed to build the module."""

    def write(self, model: PersonalModel) -> bytes:
        tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in model.tensors().items()}
        return save(tensors, metadata={"format": "pt", METADATA_KEY: model.info.to_json(), **_metadata(model)})

    def read(self, path: Path, model: PersonalModel) -> Callable[[Inputs], Tensor]:
        info, state = load_exported(path, None)
        return build_personal_model(info, state, *model.parts)


class _GraphWriter:
    """Traces the first model of each network; for other clients with this network, only the weights in the graph are
    replaced."""

    def __init__(self) -> None:
        self._traced: dict[str, tuple[PersonalModel, Any]] = {}  # by network: a model, and the program that shares it

    def _program_of(self, model: PersonalModel) -> Any:
        """Return the program with the weights of a model."""
        network = f"{model.info.network} {model.network}"
        if network not in self._traced:
            traced = copy.deepcopy(model)
            self._traced[network] = traced, self._make_program(traced)
        traced, program = self._traced[network]
        traced.load_state_dict(model.state_dict())  # in place: the program shares these tensors
        return program

    def _make_program(self, model: PersonalModel) -> Any:
        return _trace(model)


class _ExportedProgramWriter(_GraphWriter):
    """Writes PyTorch exported programs."""

    def write(self, model: PersonalModel) -> bytes:
        file = io.BytesIO()
        with _suppress_output():
            extra_files = {f"{METADATA_KEY}.json": model.info.to_json()}
            torch.export.save(self._program_of(model), file, extra_files=extra_files)
        return file.getvalue()

    def read(self, path: Path, model: PersonalModel) -> Callable[[Inputs], Tensor]:
        with _suppress_output():  # torch unpickles the file, which was just written here
            module: Callable[[Inputs], Tensor] = torch.export.load(io.BytesIO(path.read_bytes())).module()
        return module


class _OnnxWriter(_GraphWriter):
    """Writes ONNX with PyTorch's exporter."""

    def _make_program(self, model: PersonalModel) -> Any:
        if not (find_spec("onnxruntime") and find_spec("onnxscript")):
            raise ConfigError(MISSING_LIBRARIES)
        size = sum(leaf.numel() * leaf.element_size() for leaf in model.state_dict().values())
        if size > _MAX_ONNX_BYTES:
            raise ConfigError(f"An ONNX file has at most 2 GB, but this model has {size / 1e9:.1f} GB; use pt2.")
        names = [graph_input_name(part) for part in model.info.inputs.parts]
        program = _trace(model)
        try:
            with _suppress_output():  # without optimization, which would fold one client's weights into constants
                converted: Any = torch.onnx.export(
                    program, dynamo=True, verbose=False, optimize=False, opset_version=_OPSET,
                    input_names=names, output_names=["outputs"],
                )  # fmt: skip
        except Exception as error:
            raise _graph_error(model, error, "cannot be converted to ONNX") from error
        return converted

    def write(self, model: PersonalModel) -> bytes:
        proto = self._program_of(model).model_proto
        proto.producer_name, proto.producer_version = "fedtailor", VERSION
        del proto.metadata_props[:]
        for name, text in {METADATA_KEY: model.info.to_json(), **_metadata(model), "opset": str(_OPSET)}.items():
            proto.metadata_props.add(key=name, value=text)
        graph = proto.graph
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField("metadata_props")  # contains paths on this machine
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
        for value in graph.value_info[:]:
            graph.value_info.remove(value)  # shapes of intermediate values, which readers infer
        data: bytes = proto.SerializeToString()
        return data

    def read(self, path: Path, model: PersonalModel) -> Callable[[Inputs], Tensor]:
        return read_onnx(path)


_Writer = _SafetensorsWriter | _ExportedProgramWriter | _OnnxWriter
_WRITERS: dict[str, type[_Writer]] = {
    "safetensors": _SafetensorsWriter, "onnx": _OnnxWriter, "pt2": _ExportedProgramWriter,
}  # fmt: skip
FORMATS = tuple(_WRITERS)


def _metadata(model: PersonalModel) -> dict[str, str]:
    """Return metadata for people; `ModelInfo` has the complete description."""
    info = model.info
    origin = {"run": info.run, "client": info.client, "moment": info.moment, "method": method_label(info.method)}
    return origin | {"fedtailor_version": VERSION, "torch_version": torch.__version__}


@torch.no_grad()
def _trace(model: PersonalModel) -> torch.export.ExportedProgram:
    """Return the model as a graph for any batch size, without the paths of source files."""
    x, batch = model.info.inputs.random_samples(3), torch.export.Dim("batch")
    dynamic: Any = {name: {0: batch} for name in x} if isinstance(x, dict) else {0: batch}
    try:
        with _suppress_output():
            program = torch.export.export(model, (x,), dynamic_shapes=(dynamic,))
    except Exception as error:
        raise _graph_error(model, error, "cannot be traced") from error
    for graph in program.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)
    return program


def _graph_error(model: PersonalModel, error: Exception, problem: str) -> FedTailorError:
    """Return the error for a model that cannot be exported as a graph."""
    why = reason(error)
    if "specialized it to be a constant" in str(error):
        why = "its code fixes the batch size, for example by len(x) instead of x.shape[0]"
    return FedTailorError(
        f"A model of {method_label(model.info.method)} with this network {problem}: {why}; use safetensors instead."
    )


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress the warnings and log messages of PyTorch's exporters."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
