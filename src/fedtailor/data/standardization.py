"""Standardization of inputs by each client's own training samples."""

from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.errors import DataError


def standardize_by_client(fed: Federation) -> Federation:
    """Return the federation with inputs (x − mean) / std, by the mean and standard deviation of each number of an input
    over the client's own training samples; no statistics leave a client.

    A number that is constant in a client's training samples is only shifted. Samples of the common test set, which
    belong to no client, are standardized by the training samples of all clients. `resplit` standardizes anew.

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
    for train, samples in groups:
        x[samples] = _standardize(fed.x[samples], fed.x[train])
    return replace(fed, x=x)


def _standardize(x: Tensor, train: Tensor) -> Tensor:
    mean, std = train.double().mean(0), train.double().std(0)
    return ((x - mean) / torch.where(std > 0, std, 1)).to(x.dtype)  # std is NaN for a single sample
