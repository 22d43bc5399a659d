"""How good personal models are: numbers of every client, and over all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.engines import Engine, Way
from fedtailor.local import LocalView
from fedtailor.method import Method
from fedtailor.samples import Samples
from fedtailor.trees import Tree, take

Values = dict[int, float]  # client -> number


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates personal models on samples of their own client."""

    method: Method
    common: Common  # with the model in evaluation mode
    way: Way
    _engines: dict[Samples, Engine] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(
        self, clients: Sequence[int], personal: Tree, samples: Samples, only: str | None = None
    ) -> dict[str, Values]:
        """Metric -> client -> value, for stacked personal models: the loss and all metrics, or `only` this one.

        A client without samples is left out, and so is one whose samples leave a metric undefined (NaN) from that
        metric. Where the loss is no finite number either, the model diverged: then its NaN stays and spoils the means.
        """
        model = self.common.model
        found: dict[str, Values] = {name: {} for name in ("loss", *model.metrics) if only in (None, name)}
        there = [position for position, client in enumerate(clients) if samples.sizes[client]]
        if not there:
            return found
        clients, personal = [clients[position] for position in there], take(personal, torch.tensor(there))
        answers = self._outputs(clients, personal, samples)
        copies = answers.cpu()  # in one piece: metrics ask for many single numbers
        for position, client in enumerate(clients):
            targets = self.common.y[samples[client]]
            loss = float(model.loss(answers[position, : len(targets)], targets).double().mean())
            outputs, targets = copies[position, : len(targets)], targets.cpu()
            for name, values in found.items():
                value = loss if name == "loss" else float(model.metrics[name].function(outputs, targets))
                if not (isnan(value) and isfinite(loss)):
                    values[client] = value
        return found

    def _outputs(self, clients: Sequence[int], personal: Tree, samples: Samples) -> Tensor:
        """What the models answer to their clients' samples, [clients, most samples, ...]."""
        width = int(samples.sizes[clients].max())

        def answer(local: LocalView, own: Tree) -> Tree:
            return {"outputs": local.outputs(lambda x: self.method.logits(local.model, own, x), width)}

        if samples not in self._engines:
            self._engines[samples] = self.way.build(self.common, samples)
        outputs: Tensor = self._engines[samples].apply(answer, 0, clients, personal)["outputs"]
        return outputs


def weighted_mean(values: Mapping[int, float], weights: Sequence[int] | NDArray[np.int64]) -> float | None:
    """Over all test samples: a client counts by how many it has.

    >>> weighted_mean({0: 1.0, 1: 0.0}, [3, 1])
    0.75
    """
    total = sum(int(weights[client]) for client in values)
    return sum(value * int(weights[client]) for client, value in values.items()) / total if total else None


def plain_mean(values: Mapping[int, float]) -> float | None:
    """Every client counts alike."""
    return sum(values.values()) / len(values) if values else None


def worst_tenth(values: Mapping[int, float], higher_is_better: bool = True) -> float | None:
    """The mean of the worst 10 % of clients, at least one; the worst of all are those that diverged.

    >>> worst_tenth({client: float(client) for client in range(20)})
    0.5
    """
    sign = 1 if higher_is_better else -1
    return _first_tenth(sorted(values.values(), key=lambda value: -inf if isnan(value) else sign * value))


def largest_tenth(values: Mapping[int, float], sizes: Sequence[int]) -> float | None:
    """The mean of the 10 % of clients with most samples, at least one; of clients as large as each other the first.

    >>> largest_tenth({0: 0.5, 1: 0.9, 2: 0.7}, sizes=[10, 30, 30])
    0.9
    """
    return _first_tenth([values[client] for client in sorted(values, key=lambda client: (-sizes[client], client))])


def _first_tenth(ranked: Sequence[float]) -> float | None:
    first = ranked[: max(1, round(len(ranked) / 10))]
    return sum(first) / len(first) if first else None
