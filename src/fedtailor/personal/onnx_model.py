"""An exported ONNX file as a module, run by ONNX Runtime."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.errors import Refused
from fedtailor.intake import ONE
from fedtailor.machine import total_memory
from fedtailor.model import Inputs
from fedtailor.personal.origin import ABOUT, About

NEEDED = "ONNX needs more than is here: pip install 'fedtailor[export]'."


class OnnxModel(nn.Module):
    """A client's own model as ONNX Runtime computes it; it cannot be trained. `about` says whose it is."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        said = session.get_modelmeta().custom_metadata_map.get(ABOUT)
        if said is None:
            raise Refused("This ONNX file was not exported by FedTailor; open it with onnxruntime itself.")
        self.about, self._session = About.read(said), session
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        """The outputs for a batch of samples as the data set holds them, of the dtype that was exported."""
        given = x if isinstance(x, dict) else {name_in_graph(ONE): x}
        kinds = {name_in_graph(part): kind for part, (kind, _) in self.about.inputs.parts.items()}
        if given.keys() != kinds.keys():
            raise Refused(f"The model takes {', '.join(sorted(kinds))}, not {', '.join(sorted(given))}.")
        fed = {name: _as(part, kinds[name]).cpu().numpy() for name, part in given.items()}
        found: Tensor = torch.from_numpy(self._session.run(None, fed)[0])
        return found


def _as(part: Tensor, kind: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    if part.dtype != dtype and not (part.is_floating_point() and dtype.is_floating_point):
        was = str(part.dtype).removeprefix("torch.")
        raise Refused(f"This file was exported for samples of {kind}, not {was}; export one with --inputs {was}.")
    return part.to(dtype)


def name_in_graph(part: str) -> str:
    """What a part of the inputs is called in a graph.

    >>> name_in_graph(ONE), name_in_graph("age")
    ('inputs', 'age')
    """
    return "inputs" if part == ONE else part


def read_onnx(path: Path) -> OnnxModel:
    """The model in an exported file; it is read as bytes, so it can lead to no other file.

    >>> read_onnx(Path("nowhere.onnx"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: 'nowhere.onnx' cannot be read: No such file or directory.
    """
    try:
        if path.stat().st_size > total_memory(torch.device("cpu")) // 4 or not path.is_file():
            raise Refused(f"'{path}' is no file of a size that can be read.")
        data = path.read_bytes()
    except OSError as error:
        raise Refused(f"'{path}' cannot be read: {error.strerror}.") from error
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise Refused(NEEDED) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is said below
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it raises classes of its own for whatever is wrong with a file
        raise Refused(f"'{path}' holds no ONNX model that can be run.") from error
    return OnnxModel(session)
