"""A model as HTML: its layers, its loss, and its metrics."""

from fedtailor.core.model import Model
from fedtailor.reporting.notebook.markup import block, html_table

_MAX_LAYERS = 100


def model_html(model: Model) -> str:
    """Return the layers of a model with their numbers of parameters."""
    parameters = dict(model.module.named_parameters())
    rows = []
    for layer, names in list(model.layers().items())[:_MAX_LAYERS]:
        shapes = ", ".join("×".join(map(str, parameters[name].shape)) or "1" for name in names)
        size = sum(parameters[name].numel() for name in names)
        rows.append([layer, "head" if layer == model.head else "", shapes, f"{size:,}"])
    omitted = len(model.layers()) - len(rows)
    note = f"{omitted} more layers are not shown. " if omitted else ""
    note += "Normalization layers and frozen parameters are not listed."
    return block(repr(model), html_table(["layer", "part", "shapes", "parameters"], rows, left=3), note=note)
