"""Drift: how far the models of a round's clients are from their mean, and from what the clients received.

Both are recorded for each client of the round, about its personal model after training (moment `trained`). Running
statistics of batch normalization do not count, and the time of these measurements is not training time.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.core.model import Model
from fedtailor.core.trees import Tree, flatten
from fedtailor.runs.records import update_values, values_by_client
from fedtailor.training.round_state import RoundState

MODEL_DRIFT, SHARED_DRIFT = "model_drift", "shared_drift"  # names in the record


def record_model_drift(round_state: RoundState, model: Model, trained: Tree, center: Tree | None = None) -> None:
    """Record `model_drift` of all clients of the round, whose stacked models are given."""
    started = time.perf_counter()
    _record(round_state, round_state.clients, {MODEL_DRIFT: model_drift(model, trained, center)}, started)


def record_shared_drift(
    round_state: RoundState, clients: Sequence[int], model: Model, trained: Tree, sent: Tree
) -> None:
    """Record `shared_drift` of these clients, whose stacked models and messages are given, if they received a model."""
    started = time.perf_counter()
    drift = shared_drift(model, trained, sent)
    _record(round_state, clients, {} if drift is None else {SHARED_DRIFT: drift}, started)


def _record(round_state: RoundState, clients: Sequence[int], drift: Tree, started: float) -> None:
    update_values(round_state.client_metrics, values_by_client(clients, drift))
    round_state.metrics_seconds += time.perf_counter() - started


def model_drift(model: Model, trained: Tree, center: Tree | None = None) -> Tensor:
    """Return the Euclidean distance of each model from the unweighted mean of these stacked models, or from `center`.

    >>> from torch import nn
    >>> from fedtailor.core.model import wrap
    >>> linear = wrap(nn.Linear(2, 1, bias=False), head=None)
    >>> model_drift(linear, {"weight": torch.tensor([[[0.0, 0.0]], [[6.0, 8.0]]])})
    tensor([5., 5.])
    """
    given = {} if center is None else _weights(model, center)
    # one at a time, to save memory
    gaps = (leaf - given.get(name, leaf.mean(0)) for name, leaf in _weights(model, trained).items())
    return torch.stack([gap.reshape(len(gap), -1).square().sum(1) for gap in gaps]).sum(0).sqrt()


def shared_drift(model: Model, trained: Tree, sent: Tree) -> Tensor | None:
    """Return the distance of each model from the parameters in the message `sent` to its client, as a sum over tensors
    of the Euclidean norm of their difference; None if the client received no part of its model.

    This is the measure of Figure 5 of FedAPM. Only tensors that were received count, so personal layers do not.

    >>> from torch import nn
    >>> from fedtailor.core.model import wrap
    >>> linear = wrap(nn.Linear(1, 1), head=None)
    >>> trained, received = ({"weight": torch.full((2, 1, 1), w), "bias": torch.full((2, 1), w)} for w in (3.0, 1.0))
    >>> shared_drift(linear, trained, {"params": received})
    tensor([4., 4.])
    """
    own, common = _weights(model, trained), _weights(model, sent.get("params", {}))
    names = [name for name, leaf in common.items() if name in own and own[name].shape == leaf.shape]
    gaps = (own[name] - common[name] for name in names)
    return torch.stack([gap.reshape(len(gap), -1).norm(dim=1) for gap in gaps]).sum(0) if names else None


def _weights(model: Model, stacked: Tree) -> dict[str, Tensor]:
    """Return the tensors of stacked models by name, without running statistics."""
    return {name: leaf for name, leaf in flatten(model.trainable(stacked)).items() if leaf.is_floating_point()}
