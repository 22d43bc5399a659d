"""The preprocessing of a table as a module, so that exported graphs contain it."""

import torch
from torch import Tensor, nn

from fedtailor.data.tables.table_format import TableFormat


class TableEncoder(nn.Module):
    """Computes the features of rows with one number per column, as `TableFormat.encode` does.

    >>> from fedtailor.data.tables.table_format import ALL_SITES, Feature, Statistics, TableColumn
    >>> columns, features = (TableColumn("age", "number"),), (Feature(0), Feature(0, is_missing=True))
    >>> table = TableFormat(columns, features, {ALL_SITES: Statistics((50,), (50, 0), (10, 1))})
    >>> TableEncoder(table)(torch.tensor([[70.0], [float("nan")]])).tolist()
    [[2.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, table: TableFormat) -> None:
        super().__init__()
        arrays = [torch.from_numpy(array) for array in table.arrays(table.only_statistics())]
        source, category, is_missing, fill, mean, std = arrays
        buffers = {"source": source, "is_missing": is_missing, "is_number": category.isnan()}
        buffers |= {"category": category.nan_to_num(-2.0), "fill": fill, "mean": mean, "std": std}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the features in float32."""
        own = dict(self.named_buffers())
        value = rows.double()[:, own["source"]]
        absent = value.isnan()
        filled = torch.where(absent, own["fill"], value)
        features = torch.where(own["is_number"], filled, (filled == own["category"]).double())
        features = torch.where(own["is_missing"], absent.double(), features)
        return ((features - own["mean"]) / own["std"]).float()
