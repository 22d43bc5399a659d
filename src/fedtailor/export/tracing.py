"""Traces a personal model into a graph of PyTorch operations."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedtailor.errors import FedTailorError, reason
from fedtailor.export.personal_model import PersonalModel
from fedtailor.runs.run import method_label

_NOISY_LOGGERS = ("torch.onnx", "torch.export", "torch._export", "torch._dynamo", "onnxscript", "onnx_ir")


@torch.no_grad()
def trace(model: PersonalModel) -> torch.export.ExportedProgram:
    """Return the model as a graph for any batch size, without the paths of source files."""
    x, batch = model.info.inputs.random_samples(3), torch.export.Dim("batch")
    dynamic: Any = {name: {0: batch} for name in x} if isinstance(x, dict) else {0: batch}
    try:
        with suppress_output():
            program = torch.export.export(model, (x,), dynamic_shapes=(dynamic,))
    except Exception as error:
        raise graph_error(model, error, "cannot be traced") from error
    for graph in program.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)
    return program


def graph_error(model: PersonalModel, error: Exception, problem: str) -> FedTailorError:
    """Return the error for a model that cannot be exported as a graph."""
    why = reason(error)
    if "specialized it to be a constant" in str(error):
        why = "its code fixes the batch size, for example by len(x) instead of x.shape[0]"
    return FedTailorError(
        f"A model of {method_label(model.info.method)} with this network {problem}: {why}; use safetensors instead."
    )


@contextmanager
def suppress_output() -> Iterator[None]:
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
