"""Survival analysis: targets are (event, time) with event 1 if it was observed at that time, and 0 if the sample was
censored then, that is, nothing is known after it. A model has one output, the log of the relative risk."""

import torch
from torch import Tensor

from fedtailor.errors import ConfigError

_NEVER = -1e30  # log of the risk of padding; with −∞, gradients would be NaN
_BLOCK_SIZE = 2**22  # pairs of samples that are compared at once; this limits memory


def cox_loss(outputs: Tensor, targets: Tensor, sample_weight: Tensor) -> Tensor:
    """Return one term of Cox's negative log partial likelihood per example, with Breslow's method for ties.

    The term of an example with an event is log Σ exp(score) over its risk set, minus its own score; that of a censored
    example is 0. The risk set contains the examples whose time is not shorter, among those with a weight above 0, so
    terms depend on the other examples of a batch, and a batch without events has no gradient.

    >>> event_and_time = torch.tensor([[1.0, 5.0], [0.0, 9.0]])
    >>> cox_loss(torch.zeros(2, 1), event_and_time, torch.ones(2))  # one of two at risk has the event: log 2
    tensor([0.6931, 0.0000])
    """
    scores, event, time = _scores(outputs), targets[:, 0], targets[:, 1]
    at_risk = sample_weight > 0
    order = time.argsort(descending=True, stable=True)
    risks = torch.where(at_risk, scores, _NEVER)[order].logcumsumexp(0)
    last = torch.searchsorted(-time[order], -time, right=True) - 1  # the last of those with the same time
    return torch.where(at_risk & (event > 0), risks[last] - scores, 0)


def c_index(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return Harrell's concordance index: the fraction of comparable pairs in which the sample with the earlier event
    has the larger output. Equal outputs count half.

    A pair is comparable if one has an event, and the other has a later time or was censored at the same time. The index
    is NaN if there is no such pair or if outputs are NaN; 1/2 is chance.

    >>> targets = torch.tensor([[1.0, 2.0], [0.0, 3.0], [1.0, 4.0]])
    >>> float(c_index(torch.tensor([[0.5], [0.7], [0.1]]), targets))  # of the pairs with the first, one is in order
    0.5
    """
    scores, event, time = _scores(outputs), targets[:, 0] > 0, targets[:, 1]
    if bool(scores.isnan().any()):
        return scores.new_full((), torch.nan, dtype=torch.float64)
    pairs, concordant = 0, 0.0
    for first in torch.split(event.nonzero(), max(1, _BLOCK_SIZE // len(time))):  # [block, 1]
        comparable = (time > time[first]) | ((time == time[first]) & ~event)
        pairs += int(comparable.sum())
        concordant += int((comparable & (scores[first] > scores)).sum())
        concordant += int((comparable & (scores[first] == scores)).sum()) / 2
    return torch.tensor(concordant / pairs if pairs else torch.nan, dtype=torch.float64)


def _scores(outputs: Tensor) -> Tensor:
    if outputs.numel() != len(outputs):
        shape = tuple(outputs.shape[1:])
        raise ConfigError(f"A survival model needs one output, the log of the relative risk, got the shape {shape}.")
    return outputs.reshape(len(outputs))
