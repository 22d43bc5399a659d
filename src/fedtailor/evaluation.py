"""How good personal models are: numbers of every client, and over all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.local import Common, pick
from fedtailor.method import Method
from fedtailor.model import Model
from fedtailor.trees import Tree, take

Values = dict[int, float]  # client -> number
_ROWS = 512  # examples at once; bounds memory, changes nothing else


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates personal models on samples of their own client."""

    method: Method
    model: Model  # in evaluation mode
    common: Common

    @torch.no_grad()
    def __call__(self, clients: Sequence[int], personal: Tree, samples: Sequence[Tensor]) -> dict[str, Values]:
        """Metric -> client -> value, for stacked personal models; a client without samples is left out."""
        found: dict[str, Values] = {name: {} for name in ("loss", *self.model.metrics)}
        for position, client in enumerate(clients):
            if not len(samples[client]):
                continue
            outputs, targets = self._outputs(take(personal, position), samples[client])
            found["loss"][client] = float(self.model.loss(outputs, targets).double().mean())
            for name, metric in self.model.metrics.items():
                found[name][client] = float(metric.function(outputs, targets))
        return found

    def _outputs(self, personal: Tree, samples: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [
            self.method.logits(self.model, personal, self.common.prepare(pick(self.common.x, rows)))
            for rows in torch.split(samples, _ROWS)
        ]
        return torch.cat(outputs), self.common.y[samples]


def weighted_mean(values: Mapping[int, float], weights: Sequence[int]) -> float | None:
    """Over all test samples: a client counts by how many it has.

    >>> weighted_mean({0: 1.0, 1: 0.0}, [3, 1])
    0.75
    """
    total = sum(weights[client] for client in values)
    return sum(value * weights[client] for client, value in values.items()) / total if total else None


def plain_mean(values: Mapping[int, float]) -> float | None:
    """Every client counts alike."""
    return sum(values.values()) / len(values) if values else None


def worst_tenth(values: Mapping[int, float], higher_is_better: bool = True) -> float | None:
    """The mean of the worst 10 % of clients, at least one.

    >>> worst_tenth({client: float(client) for client in range(20)})
    0.5
    """
    ranked = sorted(values.values(), reverse=not higher_is_better)
    worst = ranked[: max(1, round(len(ranked) / 10))]
    return sum(worst) / len(worst) if worst else None
