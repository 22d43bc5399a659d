"""A network as pure functions of its parameters.

`Model` keeps the module as a skeleton: its weights are never used, they come in as `params` with every call. Two
kinds of layer carry hidden state in PyTorch and are replaced in the skeleton, so that every engine computes the same:
dropout takes its random numbers from the key of the batch, batch normalisation uses the statistics of the batch while
training and reports them to whoever listens (see `listen`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor import hashing
from fedtailor.errors import Refused, unknown
from fedtailor.trees import Params

Inputs = Any  # a tensor, or a dict of tensors, samples on the leading axis
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one loss an example

batch_key: ContextVar[int | Tensor] = ContextVar("batch_key")  # what dropout draws from while a batch is in work
_heard: ContextVar[Params | None] = ContextVar("heard", default=None)

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Metric:
    """A number to report: a function of all outputs and targets of a client."""

    function: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """One squared error an example, averaged over its outputs."""
    return (outputs - targets.reshape(outputs.shape)).square().flatten(1).mean(1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


LOSSES: dict[str, tuple[Loss, dict[str, Metric]]] = {
    "classification": (cross_entropy, {"accuracy": Metric(accuracy)}),
    "regression": (squared_error, {"mse": Metric(lambda o, t: squared_error(o, t).mean(), higher_is_better=False)}),
}


@dataclass(frozen=True, eq=False)
class Model:
    """A network, its loss and its metrics; all functions are pure."""

    module: nn.Module  # the skeleton, in training or in evaluation mode
    body: nn.Module  # the same without its head: gives features
    head: str | None  # name of the last layer
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    build: Callable[[], nn.Module] | None = None  # makes fresh weights; None: the module's own are the start
    description: Mapping[str, Any] = field(default_factory=dict)  # for the record

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of running statistics (batch normalisation): they cross like parameters but no gradient moves them."""
        layers = [(name, m) for name, m in self.module.named_modules() if isinstance(m, BatchNorm)]
        return tuple(f"{name}.{kind}" for name, m in layers if m.tracks for kind in ("running_mean", "running_var"))

    def init(self, seed: int) -> Params:
        """Start parameters: a named network's from the seed, a module instance's its own."""
        module = self.module
        if self.build is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = self.build()
        state = module.state_dict(keep_vars=True)
        trainable = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return {name: state[name].detach().clone() for name in (*trainable, *self.statistics)}

    def logits(self, params: Params, x: Inputs) -> Tensor:
        """The module's output."""
        return functional_call(self.module, params, (x,))  # type: ignore[no-any-return]

    def features(self, params: Params, x: Inputs) -> Tensor:
        """What goes into the head."""
        self._need_head()
        return functional_call(self.body, self.split(params)[0], (x,))  # type: ignore[no-any-return]

    def split(self, params: Params) -> tuple[Params, Params]:
        """(body, head): `body | head` is the whole again."""
        head = {name: p for name, p in params.items() if self.head and name.startswith(f"{self.head}.")}
        return {name: p for name, p in params.items() if name not in head}, head

    def layers(self) -> dict[str, list[str]]:
        """Every layer that owns parameters and their names, in order; normalisation is left out."""
        return {
            name: own
            for name, module in self.module.named_modules()
            if not isinstance(module, NORMALISATION)
            and (own := [f"{name}.{p}" for p, v in module.named_parameters(recurse=False) if v.requires_grad])
        }

    def mode(self, training: bool) -> "Model":
        """The same model for training or for evaluation."""
        module, body = copy.deepcopy((self.module, self.body))
        return replace(self, module=module.train(training), body=body.train(training))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """The same model with its constants (frozen weights, buffers) on a device and in a dtype."""
        module, body = copy.deepcopy((self.module, self.body))
        return replace(self, module=module.to(device, dtype), body=body.to(device, dtype))

    def state_dict(self, params: Params) -> Params:
        """An ordinary state_dict: the parameters together with the module's constants."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(params, strict=False)
        return {name: value.detach().cpu() for name, value in module.state_dict().items()}

    def from_state_dict(self, state: Mapping[str, Tensor], like: Params) -> Params:
        """Parameters taken from an ordinary state_dict, matched by name and shape."""
        for name, param in like.items():
            if name not in state:
                raise Refused(f"The initial state_dict has no '{name}'; it must hold every parameter of the model.")
            if state[name].shape != param.shape:
                shapes = f"{tuple(state[name].shape)} in the initial state_dict and {tuple(param.shape)} in the model"
                raise Refused(f"'{name}' is {shapes}; they must be the same network.")
        return {name: state[name].detach().clone() for name in like}

    @property
    def score(self) -> str:
        """The metric that ranks: the first one, or the loss where there is none."""
        return next(iter(self.metrics), "loss")

    @property
    def higher_is_better(self) -> bool:
        return self.score in self.metrics and self.metrics[self.score].higher_is_better

    def _need_head(self) -> None:
        if self.head is None:
            raise Refused("This model has no head: name its last layer, ft.wrap(module, head='...').")


def wrap(
    module: nn.Module,
    head: str | None = "head",
    loss: str | Loss = "classification",
    metrics: Mapping[str, Metric | Callable[[Tensor, Tensor], Tensor]] | None = None,
) -> Model:
    """Any module as a Model. `head` names its last layer; `loss` is "classification", "regression" or a function of
    (outputs, targets) that gives one loss an example; `metrics` are functions that give one number for a client.

    >>> wrap(nn.Sequential(nn.Linear(4, 3)), head="0").head
    '0'
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    function, usual = LOSSES[loss] if isinstance(loss, str) else (loss, {})
    chosen = usual if metrics is None else {k: m if isinstance(m, Metric) else Metric(m) for k, m in metrics.items()}
    skeleton = _purify(copy.deepcopy(module))
    if head is not None and not any(name == head for name, _ in skeleton.named_modules()):
        last = [name for name, m in skeleton.named_modules() if name and not list(m.children())][-1:]
        hint = f"ft.wrap(module, head='{last[0]}')" if last else "ft.wrap(module, head=None)"
        raise Refused(f"The model has no layer '{head}'; name its last layer, for example {hint}.")
    body = copy.deepcopy(skeleton)
    if head is not None:
        body.set_submodule(head, nn.Identity())
    description = {"name": type(module).__name__}
    return Model(skeleton.train(), body.train(), head, function, chosen, description=description)


def as_model(model: Model | nn.Module) -> Model:
    return model if isinstance(model, Model) else wrap(model)


@contextmanager
def listen() -> Iterator[Params]:
    """Collect the batch statistics of every normalisation layer that runs inside."""
    heard: Params = {}
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


class BatchNorm(nn.modules.batchnorm._NormBase):
    """Batch normalisation without side effects; `path` is its name in the network."""

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, path: str) -> None:
        self.tracks = bool(original.track_running_stats)
        super().__init__(original.num_features, original.eps, affine=original.affine, track_running_stats=self.tracks)
        self.load_state_dict(original.state_dict())
        for ours, theirs in zip(self.parameters(), original.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.tracks:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        heard = _heard.get()
        if heard is not None:
            over = [axis for axis in range(x.ndim) if axis != 1]
            heard[f"{self.path}.running_mean"] = x.mean(over)
            heard[f"{self.path}.running_var"] = x.var(over)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Dropout(nn.Module):
    """Dropout whose mask is a function of the batch's key; `channels` drops whole feature maps."""

    def __init__(self, share: float, salt: int, channels: bool) -> None:
        super().__init__()
        self.share, self.salt, self.channels = share, salt, channels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.channels else tuple(x.shape)
        noise = hashing.uniform(hashing.key(batch_key.get(), self.salt), shape, x.dtype, x.device)
        return x * (noise >= self.share) / (1 - self.share)


def _purify(module: nn.Module) -> nn.Module:
    """Replace the layers that carry hidden state, in place."""
    for salt, (path, layer) in enumerate(list(module.named_modules())):
        pure: nn.Module | None = None
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            pure = BatchNorm(layer, path)
        elif isinstance(layer, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            pure = Dropout(layer.p, salt, channels=not isinstance(layer, nn.Dropout))
        elif _draws_by_itself(layer):
            kind = type(layer).__name__
            raise Refused(f"Dropout inside {kind} '{path}' cannot be repeated; set it to 0 and add nn.Dropout layers.")
        if pure is not None and path:
            module.set_submodule(path, pure)
        elif pure is not None:
            return pure
    return module


def _draws_by_itself(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return layer.dropout > 0
    return isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
