"""How good personal models are: numbers of every client, and over all of them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.engines import Engine, Way
from fedtailor.lines import Record, Values, by_client, extend, join, plain
from fedtailor.local import LocalView
from fedtailor.method import Method
from fedtailor.samples import Samples
from fedtailor.trees import Tree, add, map_leaves, take

if TYPE_CHECKING:
    from fedtailor.rounds import Rounds

_COHORT = 64  # clients evaluated at once


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


@torch.no_grad()
def evaluate_round(loop: "Rounds", line: Record, who: str | int, last: bool) -> Record:
    """Add both moments to a round's record: `received` as if a further round began, `trained` for its clients."""
    started, following = time.perf_counter(), line["round"] + 1
    chosen, here = _chosen(loop, line["clients"], who), set(line["clients"])
    values: dict[str, Values] = {}
    measured: dict[str, Values] = {}
    totals: Tree = {}
    for cohort in _cohorts(chosen):
        extend(values, _scores(loop, cohort, loop.received(cohort, following), "received"))
        if loop.method.measures:
            stacked = loop.ask(loop.method.measure, loop.method.send, loop.server, cohort, following)
            extend(measured, by_client(cohort, stacked))
            sums = map_leaves(lambda leaf: leaf.sum(0), stacked)
            totals = add(totals, sums) if totals else sums
    for cohort in _cohorts([client for client in chosen if client in here]):
        personal = loop.as_trained(cohort)
        extend(values, _scores(loop, cohort, personal, "trained"))
        extend(values, {"loss": loop.evaluator(cohort, personal, loop.train, only="loss")["loss"]})
    line = add_means(line, values, {name: getattr(loop, name).sizes for name in ("train", "validation", "test")})
    overall = loop.method.overall(totals) if totals else {}
    line["monitor"] |= {name: plain(value) for name, value in overall.items()}
    line |= {f"{name}_mean": plain_mean(found) for name, found in measured.items()}
    if last:
        absent = [client for client in chosen if client not in here]
        line["last_trained"] = last_trained(_with_absent(loop, values, absent))
    line["per_client"] = join(line["per_client"], join(values, measured))
    return line | {"seconds_evaluating": time.perf_counter() - started}


def add_means(line: Record, values: Mapping[str, Values], sizes: Mapping[str, Sequence[int]]) -> Record:
    """Add to a round's record, for every number that clients have, its mean over samples and over clients, and whose
    model diverged. `sizes` are everyone's samples by kind: train, validation, test."""
    means: Record = {}
    for name, found in values.items():
        kind = "train" if name == "loss" else "validation" if name.startswith("validation_") else "test"
        means |= {name: weighted_mean(found, sizes[kind]), f"{name}_mean": plain_mean(found)}
    losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
    return line | means | {"diverged": sorted({c for found in losses for c, v in found.items() if not isfinite(v)})}


def _chosen(loop: "Rounds", clients: Sequence[int], who: str | int) -> list[int]:
    if who == "participants":
        return list(clients)
    everyone = np.arange(loop.common.num_clients)
    if who == "all" or int(who) >= len(everyone):
        return everyone.tolist()
    return sorted(np.random.default_rng([loop.common.seed, 3]).choice(everyone, int(who), replace=False).tolist())


def _scores(loop: "Rounds", clients: Sequence[int], personal: Tree, moment: str) -> dict[str, Values]:
    return scores(loop.evaluator, clients, personal, moment, loop.test, loop.validation)


def scores(
    evaluator: Evaluator, clients: Sequence[int], personal: Tree, moment: str, test: Samples, validation: Samples
) -> dict[str, Values]:
    """All that is known of these clients' models at a moment, by its name in the record."""
    found = {f"{name}_{moment}": values for name, values in evaluator(clients, personal, test).items()}
    if validation.sizes[list(clients)].any():
        score = evaluator.common.model.score
        found[f"validation_{moment}"] = evaluator(clients, personal, validation, only=score)[score]
    return found


def _with_absent(loop: "Rounds", values: dict[str, Values], absent: Sequence[int]) -> dict[str, Values]:
    """Every client's numbers as it last trained: those of this round are known, the absent are evaluated."""
    found = {f"{name}_trained": dict[int, float]() for name in ("loss", *loop.model.metrics)}
    extend(found, {name: numbers for name, numbers in values.items() if name.endswith("_trained")})
    for cohort in _cohorts(absent):
        extend(found, _scores(loop, cohort, loop.as_trained(cohort), "trained"))
    return found


def last_trained(values: Mapping[str, Values]) -> dict[str, Values]:
    """The numbers as trained, by their names alone.

    >>> last_trained({"accuracy_trained": {0: 0.5}, "accuracy_received": {0: 0.4}})
    {'accuracy': {0: 0.5}}
    """
    return {name.removesuffix("_trained"): found for name, found in values.items() if name.endswith("_trained")}


def _cohorts(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    """A few clients at a time, so that evaluating everyone takes no more memory than evaluating some."""
    for start in range(0, len(clients), _COHORT):
        yield clients[start : start + _COHORT]


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
