"""Evaluate personal models on the samples of their clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, isnan

import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Method
from fedtailor.core.model import Model
from fedtailor.core.system import to_float64
from fedtailor.core.trees import Tree, take
from fedtailor.runs.records import COMMON, GLOBAL, TRAIN, Values
from fedtailor.training.engines import Engine, EngineChoice
from fedtailor.training.sample_index import SampleIndex

PREFIXES = {"test": "", "common": COMMON, "train": TRAIN}  # split -> prefix of the metrics on its samples


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Computes the loss and metrics of personal models on the samples of their clients."""

    method: Method
    shared: SharedContext  # of training
    engine_choice: EngineChoice
    _engines: dict[SampleIndex, Engine] = field(default_factory=dict)

    @cached_property
    def _context(self) -> SharedContext:
        """The context with the model as it is exported and deployed: in evaluation mode and in float32."""
        return replace(self.shared, model=self.shared.model.eval_mode.with_precision("float32"))

    @torch.no_grad()
    def __call__(
        self, clients: Sequence[int], personal: Tree, samples: SampleIndex, only: str | None = None
    ) -> dict[str, Values]:
        """Return metric -> client -> value for stacked personal models: the loss and all metrics, or `only` one.

        Clients without samples are omitted. A client for which a metric is undefined (NaN), such as the AUC with one
        class, is omitted from that metric. If its loss is not finite either, its model diverged: the NaN is kept, and
        the mean becomes NaN too.
        """
        model = self._context.model
        results: dict[str, Values] = {name: {} for name in ("loss", *model.metrics) if only in (None, name)}
        positions = [position for position, client in enumerate(clients) if samples.sizes[client]]
        if not positions:
            return results
        clients, personal = [clients[position] for position in positions], take(personal, torch.tensor(positions))
        outputs = self._outputs(clients, personal, samples)
        targets = [self.shared.y[samples[client]] for client in clients]
        losses = _mean_losses(model, outputs, targets)
        if results.keys() != {"loss"}:  # metrics read many single values
            outputs, targets = outputs.cpu(), _to_cpu(targets)
        for client, loss, own_outputs, own_targets in zip(clients, losses, outputs, targets, strict=True):
            for name, values in results.items():
                metric = model.metrics.get(name)
                value = loss if metric is None else float(metric.function(own_outputs[: len(own_targets)], own_targets))
                if not (isnan(value) and isfinite(loss)):
                    values[client] = value
        return results

    def _outputs(self, clients: Sequence[int], personal: Tree, samples: SampleIndex) -> Tensor:
        """Return the models' outputs for their clients' samples: [clients, largest number of samples, ...]."""
        width = int(samples.sizes[clients].max())

        def predict(ctx: ClientContext, model: Tree) -> Tree:
            return {"outputs": ctx.map_samples(lambda x: self.method.logits(ctx.model, model, x), width)}

        if samples not in self._engines:
            self._engines[samples] = self.engine_choice.build(self._context, samples)
        outputs: Tensor = self._engines[samples].apply(predict, 0, clients, personal)["outputs"]
        return outputs


# Both make one transfer for all clients, because every transfer waits for the device.


def _mean_losses(model: Model, outputs: Tensor, targets: Sequence[Tensor]) -> list[float]:
    """Return the mean loss of each client; outputs beyond its targets are ignored."""
    pairs = zip(outputs, targets, strict=True)
    losses = [to_float64(model.losses(own[: len(wanted)], wanted)).mean() for own, wanted in pairs]
    return [float(loss) for loss in torch.stack(losses).tolist()]


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.split(torch.cat(list(tensors)).cpu(), [len(tensor) for tensor in tensors]))


def scores(
    evaluator: Evaluator, clients: Sequence[int], personal: Tree, moment: str, samples: Mapping[str, SampleIndex]
) -> dict[str, Values]:
    """Return the values of these clients' models at a moment, by their names in the record.

    `samples` are those to evaluate on, by split: all metrics on test, common, and train; the score on validation.
    """
    results: dict[str, Values] = {}
    for split, prefix in PREFIXES.items():
        if split in samples:
            found = evaluator(clients, personal, samples[split])
            results |= {f"{prefix}{name}_{moment}": values for name, values in found.items()}
    if "validation" in samples and samples["validation"].sizes[list(clients)].any():
        score = evaluator.shared.model.score
        results[f"validation_{moment}"] = evaluator(clients, personal, samples["validation"], only=score)[score]
    return results


def global_scores(evaluator: Evaluator, clients: Sequence[int], messages: Tree, test: SampleIndex) -> dict[str, Values]:
    """Return the values of the global model in these clients' messages on their test samples, by their names in the
    record. The global model is the network with the received parameters, without the method's own outputs."""
    found = replace(evaluator, method=Method())(clients, messages["params"], test)
    return {f"{GLOBAL}{name}_received": values for name, values in found.items()}
