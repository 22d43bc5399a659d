"""Loads exported ONNX files as modules that ONNX Runtime evaluates."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.core.model import Inputs
from fedtailor.data.input_spec import SINGLE_INPUT
from fedtailor.errors import ConfigError, reason
from fedtailor.export.model_source import METADATA_KEY, ModelInfo
from fedtailor.runs.files import read_bytes

MISSING_LIBRARIES = "ONNX support is not installed: pip install 'fedtailor[export]'."


class OnnxModel(nn.Module):
    """A personal model that ONNX Runtime evaluates; it cannot be trained. `info` describes its origin."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        metadata = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        if metadata is None:
            raise ConfigError("This ONNX file was not exported by FedTailor; open it with onnxruntime.")
        self.info, self._session = ModelInfo.from_json(metadata), session
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        """Return the outputs for a batch of unpreprocessed samples, which must have the exported dtype."""
        given = x if isinstance(x, dict) else {graph_input_name(SINGLE_INPUT): x}
        dtypes = {graph_input_name(part): dtype for part, (dtype, _) in self.info.inputs.parts.items()}
        if given.keys() != dtypes.keys():
            raise ConfigError(
                f"The model takes the inputs {', '.join(sorted(dtypes))}, not {', '.join(sorted(given))}."
            )
        arrays = {name: _convert(part, dtypes[name]).cpu().numpy() for name, part in given.items()}
        outputs: Tensor = torch.from_numpy(self._session.run(None, arrays)[0])
        return outputs


def _convert(part: Tensor, dtype_name: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    if part.dtype != dtype and not (part.is_floating_point() and dtype.is_floating_point):
        given = str(part.dtype).removeprefix("torch.")
        raise ConfigError(
            f"This file was exported for {dtype_name} samples, got {given}; export with --inputs {given}."
        )
    return part.to(dtype)


def graph_input_name(part: str) -> str:
    """Return the name of an input part in a graph.

    >>> graph_input_name(SINGLE_INPUT), graph_input_name("age")
    ('inputs', 'age')
    """
    return "inputs" if part == SINGLE_INPUT else part


def read_onnx(path: Path) -> OnnxModel:
    """Load an exported file; it is passed to ONNX Runtime as bytes, so it cannot reference other files.

    >>> read_onnx(Path("nowhere.onnx"))
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: 'nowhere.onnx' cannot be read: No such file or directory.
    """
    try:
        path.stat()  # raises an error that says why
        data = read_bytes(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read: {reason(error)}.") from error
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ConfigError(MISSING_LIBRARIES) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised below
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common public base class
        raise ConfigError(f"'{path}' is not a valid ONNX model.") from error
    return OnnxModel(session)
