"""FedAF: clients share condensed synthetic samples instead of models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.batch import Batch, SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import Constraint, Fraction, NonNegative, Positive, PositiveInt
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.model import Inputs
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Params, Rows, Tree, repeat
from fedtailor.errors import ConfigError
from fedtailor.methods._shared.class_statistics import class_means, membership, merge_rows

_START, _DIRECTIONS, _FRESH = 0, 1, 2  # salts of random numbers; _FRESH and above: one per parameter
_MIN_PROBABILITY = 1e-12  # lower bound of probabilities, so that their logarithms are finite
_Noise = Annotated[float, Constraint("above 0, so that no real sample is sent unchanged", lambda value: value > 0)]


@dataclass(frozen=True)
class FedAF(WeightedMethod, ScheduledMethod):
    """Wang et al., "An Aggregation-Free Federated Learning for Tackling Data Heterogeneity", CVPR 2024.

    Each client learns a few synthetic samples per class, anew in each round, such that a network responds to them as to
    the real samples: with the same mean features (L_DM), and with logits close to the mean logits V_c of all clients in
    a sliced Wasserstein distance. The server trains the global model on the synthetic samples of all clients and
    matches its soft labels to those that the clients computed from real data.

    Privacy: synthetic samples are optimized to resemble private data, and the server sees them. Samples that start at
    real ones still look like them, and in a class with few samples, individual samples may be recognizable. `noise`
    ensures that no real sample is sent unchanged; it gives no formal privacy guarantee. With start="noise", no real
    sample is used as a starting point; learning is slow (increase `steps`), and the samples tend to the class mean,
    which is the sample itself for a class with one sample.

    The authors have not published code. Implementation choices: the means of real data are over all samples, because
    the network is fixed; the distance is the squared one of order 2, to V_c as a single point; V_c is that of the
    previous round, and classes that no client has reported yet have none; w̃ has the usual initialization of linear and
    convolutional layers and differs by client and round; logits and soft labels are those of w_k, so the latter follow
    from the former but are sent nonetheless, as in the paper; T_c is the mean over a batch.
    """

    lr: Annotated[Positive, "learning rate of the synthetic samples"] = 1.0
    steps: Annotated[PositiveInt, "steps of the synthetic samples per round"] = 10
    per_class: Annotated[PositiveInt, "ipc, synthetic samples per class of a client"] = 10
    start: Annotated[Literal["real", "noise"], "where synthetic samples start: real samples plus noise, or noise"] = (
        "real"
    )
    noise: Annotated[_Noise, "standard deviation of the noise"] = 0.1
    gamma: Annotated[
        Fraction, "γ, share of the received model w in w_k = γ w + (1 − γ) w̃, on which samples are learned"
    ] = 0.9
    tau: Annotated[Positive, "τ, temperature of the soft labels"] = 2.0
    local_weight: Annotated[NonNegative, "λ_loc, weight of the distance between logits"] = 0.8
    server_weight: Annotated[NonNegative, "λ_glob, weight of the distance between soft labels"] = 0.8
    projections: Annotated[PositiveInt, "number of projections of the sliced distance"] = 100
    server_lr: Annotated[Positive, "server learning rate (0.001 in a re-implementation)"] = 0.1
    server_epochs: Annotated[PositiveInt, "server epochs over all synthetic samples"] = 20
    server_batch: Annotated[PositiveInt, "server batch size"] = 256
    weights: Annotated[
        ClientWeights, "client weights in mean logits and soft labels: uniform or by number of samples"
    ] = "uniform"
    personal: ClassVar[bool] = False
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd(
        "its clients train no model; they learn samples by plain SGD"
    )
    download: ClassVar[str] = "model, mean logits per class"
    upload: ClassVar[str] = "synthetic samples, mean logits and soft labels per class"
    newcomer_start: ClassVar[str] = "the global model, the mean logits per class"

    def init_server(self, setup: Setup) -> Tree:
        classes, _ = setup.model.head_size
        like = setup.like
        seed = torch.tensor(setup.seed, device=like.device)
        return {"params": setup.params, "class_logits": like.new_zeros(classes, classes), "seed": seed}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({name: server[name] for name in ("params", "class_logits")}, len(clients))

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, target, model = self._resample(ctx, message["params"]), message["class_logits"], ctx.model.eval_mode
        classes, width = model.head_size

        def outputs(x: Inputs) -> Tensor:
            features = model.features(params, x)
            return torch.cat([features, model.head_output(params, features)], 1)

        real = class_means(ctx, lambda batch: outputs(_require_tensor(batch.x)))
        features, logits = real.values[:, :width], real.values[:, width:]
        known = (target != 0).any(1) & real.present  # a row of zeros: no client has reported this class yet
        directions = F.normalize(_normal(ctx, (self.projections, classes), _DIRECTIONS), dim=1)

        def objective(learned: Tree, _: Batch) -> Tensor:
            synthetic = outputs(learned["samples"].flatten(0, 1)).reshape(classes, self.per_class, -1)
            matching = (synthetic[..., :width].mean(1) - features).square().sum(1)  # [classes]
            sliced = ((synthetic[..., width:] - target[:, None]) @ directions.T).square().mean((1, 2))
            total: Tensor = (matching * real.present).sum() + self.local_weight * (sliced * known).sum()
            return total

        start, lr = {"samples": self._initial_samples(ctx, classes)}, self.scheduled(ctx, self.lr)
        learned = ctx.optimize(objective, start, lr=lr, steps=self.steps)
        return state, {
            "samples": Rows(learned["samples"], real.present),
            "own_logits": Rows(logits, real.present),
            "soft_labels": Rows(F.softmax(logits / self.tau, 1), real.present),
        }

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        samples, present = exchange.received["samples"]  # [clients, classes, per_class, ...], [clients, classes]
        old, given = Rows(server["class_logits"], torch.ones_like(present[0])), self.round_weights(exchange)
        weights = present if given is None else given[:, None].expand_as(present)
        logits, soft = (
            merge_rows(old, exchange.received[name], weights).values for name in ("own_logits", "soft_labels")
        )
        labels = torch.arange(len(soft), device=present.device).expand_as(present)[present]
        x, y = samples[present].flatten(0, 1), labels.repeat_interleave(self.per_class)
        context = _server_context(exchange, x, y, self.server_batch, int(server["seed"]))

        def objective(params: Tree, batch: Batch) -> Tensor:
            outputs, member = context.model.logits(params, batch.x), membership(batch, len(soft))
            counts = member.sum(0)
            own = member.T @ F.softmax(outputs / self.tau, 1) / counts.clamp(min=1)[:, None]  # T_c
            ratio = own.clamp(min=_MIN_PROBABILITY).log() - soft.clamp(min=_MIN_PROBABILITY).log()
            matching = ((own - soft) * ratio).sum(1) / 2  # half of KL(R_c‖T_c) + KL(T_c‖R_c)
            losses = F.cross_entropy(outputs, batch.y, reduction="none")
            return batch.mean(losses) + self.server_weight * (matching * (counts > 0)).sum()

        params = context.optimize(objective, server["params"], lr=self.server_lr, epochs=self.server_epochs)
        return server | {"params": params, "class_logits": logits}

    def _resample(self, ctx: ClientContext, params: Params) -> Params:
        """Return w_k = γ w + (1 − γ) w̃; normalization layers are unchanged."""
        fresh: Params = {}
        for names in ctx.model.layers().values():
            bound = max(math.prod(params[name].shape[1:]) for name in names) ** -0.5  # 1/√fan_in
            for name in names:
                draws = ctx.uniform(tuple(params[name].shape), _FRESH + len(fresh))
                fresh[name] = self.gamma * params[name] + (1 - self.gamma) * bound * (2 * draws - 1)
        return params | fresh

    def _initial_samples(self, ctx: ClientContext, classes: int) -> Tensor:
        """Return the initial synthetic samples, [classes, per_class, ...]; none is an unmodified real sample."""
        shape = (classes, self.per_class, *ctx.map_samples(_require_tensor, 1).shape[1:])
        noise = self.noise * _normal(ctx, shape, _START)
        return noise if self.start == "noise" else self._real_samples(ctx, torch.zeros_like(noise)) + noise

    def _real_samples(self, ctx: ClientContext, zeros: Tensor) -> Tensor:
        """Return the first samples of each class in the order of this round, repeated if a class has too few."""
        classes, slots = len(zeros), torch.arange(self.per_class, device=zeros.device)

        def collect(carry: Tree, batch: Batch) -> Tree:
            member = membership(batch, classes)
            rank = carry["counts"] + member.cumsum(0) - 1  # [examples, classes]
            chosen = member[..., None] * (rank[..., None] == slots)  # [examples, classes, slots]
            selected = torch.tensordot(chosen, batch.x, dims=([0], [0]))
            return {"samples": carry["samples"] + selected, "counts": carry["counts"] + member.sum(0)}

        end = ctx.scan(collect, {"samples": zeros, "counts": zeros.flatten(1)[:, 0]}, epochs=1)
        source = slots.to(zeros.dtype) % end["counts"].clamp(min=1)[:, None]
        copies = (source[..., None] == slots).to(zeros.dtype)  # [classes, slots, slots]
        samples: Tensor = copies @ end["samples"].flatten(2)
        return samples.reshape(zeros.shape)


def _require_tensor(x: Inputs) -> Tensor:
    """Check that the inputs are one tensor of floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ConfigError(
            "FedAF learns samples by gradient descent, so inputs must be one tensor of floats, such as images."
        )
    return x


def _normal(ctx: ClientContext, shape: tuple[int, ...], salt: int) -> Tensor:
    """Draw standard normal random numbers."""
    numbers: Tensor = torch.special.ndtri(ctx.uniform(shape, salt))
    return numbers


def _server_context(exchange: Exchange, x: Tensor, y: Tensor, batch_size: int, seed: int) -> ClientContext:
    """Create a context in which the server trains on all synthetic samples, like a client on its data."""
    shared = SharedContext(
        model=exchange.model.mode(training=True),
        x=x,
        y=y,
        prepare=lambda x: x,
        # batch statistics need two samples
        batch_size=max(min(batch_size, len(y)), 2 if exchange.model.running_stats else 1),
        rounds=exchange.round,
        num_clients=1,
        total_size=len(y),
        seed=seed,
        dtype=x.dtype,
    )
    indices = torch.arange(len(y), device=y.device)
    return ClientContext(shared, exchange.round, indices.new_zeros(()), indices.new_tensor(len(y)), indices)
