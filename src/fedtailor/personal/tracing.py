"""A personal model as a graph of torch's own operations."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedtailor.errors import Refused
from fedtailor.personal.module import Personal
from fedtailor.run import name_of

_NOISY = ("torch.onnx", "torch.export", "torch._export", "torch._dynamo", "onnxscript", "onnx_ir")


@torch.no_grad()
def trace(model: Personal) -> torch.export.ExportedProgram:
    """The model as a graph for any number of samples, without a word of where the code lies."""
    x, batch = model.about.inputs.examples(3), torch.export.Dim("batch")
    free: Any = {name: {0: batch} for name in x} if isinstance(x, dict) else {0: batch}
    try:
        with quiet():
            program = torch.export.export(model, (x,), dynamic_shapes=(free,))
    except Exception as error:
        raise no_graph(model, error, "cannot be made a graph") from error
    for graph in program.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)
    return program


def no_graph(model: Personal, error: Exception, what: str) -> Refused:
    """Why a model is no graph, in one sentence."""
    why = str(error).splitlines()[0].rstrip(".:")[:200] if str(error) else type(error).__name__
    if "specialized it to be a constant" in str(error):
        why = "its code takes one number of samples for all, as len(x) does where x.shape[0] would not"
    return Refused(f"A model of {name_of(model.about.method)} with this network {what}: {why}; take safetensors.")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch and its exporter tell developers."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
