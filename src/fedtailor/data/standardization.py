"""Standardization of inputs by each client's own training samples."""

from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.data.tables.table_format import Statistics, TableFormat
from fedtailor.errors import DataError


def standardize_by_client(fed: Federation) -> Federation:
    """Return the federation with inputs (x − mean) / std, by the mean and standard deviation of each number of an input
    over the client's own training samples; no statistics leave a client.

    A number that is constant in a client's training samples is only shifted. Samples of the common test set, which
    belong to no client, are standardized by the training samples of all clients. If the inputs were computed from a
    table, `fed.table` then contains the statistics, so that predictions of raw rows are standardized too. `resplit`
    standardizes anew.

    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1])
    >>> fed = Federation.from_arrays([(x, y, x, y), (10 * x, y, x, y)])
    >>> standardize_by_client(fed).x[fed.train[1]].flatten().tolist()
    [-0.7071067690849304, 0.7071067690849304]
    """
    if isinstance(fed.x, dict) or not fed.x.is_floating_point():
        raise DataError("Inputs can be standardized by client only if they are floats with a single part.")
    return fed.with_preprocessing(_standardize_clients)


def _standardize_clients(fed: Federation) -> Federation:
    assert isinstance(fed.x, Tensor)
    x = fed.x.clone()
    groups = [(train, torch.cat([train, test])) for train, test in zip(fed.train, fed.test, strict=True)]
    groups += [] if fed.common_test is None else [(torch.cat(fed.train), fed.common_test)]
    fitted = [_fit(fed.x[train]) for train, _ in groups]
    for (_, samples), (mean, std) in zip(groups, fitted, strict=True):
        x[samples] = ((fed.x[samples] - mean) / std).to(x.dtype)
    if fed.table is None:
        return replace(fed, x=x)
    statistics = {name: _statistics(fed.table, *found) for name, found in zip(fed.names, fitted, strict=False)}
    return replace(fed, x=x, table=replace(fed.table, statistics=statistics))


def _fit(train: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = train.double().mean(0), train.double().std(0)
    return mean, torch.where(std > 0, std, 1)  # std is NaN for a single sample


def _statistics(table: TableFormat, mean: Tensor, std: Tensor) -> Statistics:
    """Return statistics that also fill in missing values: by the mean, or by the most frequent category."""
    means, fill = tuple(mean.tolist()), list[float]()
    for number, column in enumerate(table.columns):
        own = {f.category: value for f, value in zip(table.features, means, strict=True) if f.column == number}
        shares = [own.get(category, 1 - sum(own.values())) for category in range(len(column.categories))]
        fill.append(float(shares.index(max(shares))) if shares else own[None])
    return Statistics(tuple(fill), means, tuple(std.tolist()))
