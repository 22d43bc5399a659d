"""`Model`: a network as pure functions of its parameters.

A `Model` contains the module as a skeleton: every call passes the parameters as `params`, and the module's own weights
are only the initial values. Stateful layers are replaced (see `functional_layers`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.core.code_reference import reference_to, short_name
from fedtailor.core.dropout import Dropout, FunctionalDropout
from fedtailor.core.functional_layers import BatchNorm, join_path, make_functional
from fedtailor.core.losses import (
    LOSSES,
    Loss,
    WeightedCrossEntropy,
    check_class_weights,
    cross_entropy,
    is_classification_loss,
    takes_sample_weight,
)
from fedtailor.core.metrics import (
    DEFAULT_METRICS,
    METRICS,
    RESERVED_PREFIXES,
    Metric,
    MetricFunction,
    Task,
    as_metric,
    find_metrics,
)
from fedtailor.core.precision import Precision, forward_precision, to_float32
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError, reason, unknown_name

Inputs = Any  # a tensor, or a dict of tensors, with samples on the leading axis

NORMALIZATION_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, eq=False)
class Model:
    """A network with its loss and metrics. All methods are pure functions; `wrap` makes a Model from a module."""

    module: nn.Module  # the skeleton, in training or evaluation mode
    body: nn.Module  # a copy that stops before the head, for `features`
    head: str | None  # name of the last layer; None: unknown
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    metrics_are_default: bool = False  # the user named no metrics
    build: Callable[[], nn.Module] | None = None  # makes initial weights; None: use those of the module
    description: Mapping[str, Any] = field(default_factory=dict)  # of the network, for the run folder
    parts: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # layer names by the part names that `split` accepts
    calls_dropout: bool = False  # its code calls F.dropout or the like; see `training.preflight`
    precision: Precision = "float32"  # of forward and backward passes; inputs, outputs, and weights are float32

    def __repr__(self) -> str:
        name = short_name(self.description.get("name", type(self.module).__name__))
        parameters = f"{sum(p.numel() for p in self.module.parameters() if p.requires_grad):,} parameters"
        head = "no head" if self.head is None else f"head {self.head!r}"
        loss = f"loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        metrics = [f"metrics {', '.join(self.metrics)}"] if self.metrics else []
        return f"Model({', '.join([name, parameters, head, loss, *metrics])})"

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.model import model_html

        return model_html(self)

    @cached_property
    def running_stats(self) -> tuple[str, ...]:
        """Names of batch-normalization statistics, which are sent like parameters but have no gradient."""
        layers = [m for m in self.module.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        return tuple(join_path(m.path, kind) for m in layers for kind in ("running_mean", "running_var"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in Params: trainable parameters, then running statistics. Tied weights have one name."""
        return (*(name for name, p in self.module.named_parameters() if p.requires_grad), *self.running_stats)

    def init(self, seed: int) -> Params:
        """Return the initial parameters: drawn from the seed if the model has a `build`, else the module's weights."""
        module = self.module if self.build is None else _build(self.build, seed)
        state, like = module.state_dict(), self.module.state_dict()
        return {name: state[name].to(like[name], copy=True) for name in self.names}

    def logits(self, params: Params, x: Inputs) -> Tensor:
        """Return the output of the network."""
        return self._call(self.module, params, x)

    def features(self, params: Params, x: Inputs) -> Tensor:
        """Return the input of the head."""
        if self.head is None:
            raise ConfigError("This model has no head; name its last layer with ft.wrap(module, head='...').")
        try:
            self._call(self.body, params, x)
        except _HeadReached as reached:
            return self._full(reached.args[0])
        raise ConfigError(f"The model's forward never calls its head '{self.head}', so there are no features.")

    def head_output(self, params: Params, features: Tensor) -> Tensor:
        """Return the output of the head for these features; `params` needs to contain only the head's parameters."""
        head = self._head
        names = {path.removeprefix(f"{self.head}."): name for layer, path, name in self._tensor_uses if layer is head}
        if missing := [name for name in names.values() if name not in params]:
            raise ConfigError(f"The head shares '{missing[0]}' with another layer; this method needs separate weights.")
        by_path = {path: params[name] for path, name in names.items()}
        with forward_precision(self.precision, features.device):
            return self._full(functional_call(head, by_path, (features,)))

    @property
    def head_size(self) -> tuple[int, int]:
        """(classes, features) of a linear head."""
        classes, features = self._head.weight.shape
        return int(classes), int(features)

    def split(self, params: Params, part: str | Sequence[str] = "head") -> tuple[Params, Params]:
        """Split parameters into (rest, part). Weights that both use (tied weights) are in the rest.

        A part is "head" (the last layer; the rest is the body), "input" (the first layer), "output" (the head, or the
        layers that the network lists), "split_input" (the layers that the network lists), "batch_norm" (all
        batch-normalization layers), a layer's name, or a list of layer names.
        """
        names = self._names_of(part)
        chosen = {name: p for name, p in params.items() if name in names}
        return {name: p for name, p in params.items() if name not in chosen}, chosen

    def layers(self) -> dict[str, list[str]]:
        """Return the parameter names of each layer that has parameters, in order, without normalization layers."""
        found: dict[str, list[str]] = {}
        for layer, path, name in self._tensor_uses:
            if path == name and not isinstance(layer, NORMALIZATION_LAYERS):
                found.setdefault(name.rpartition(".")[0] or type(layer).__name__, []).append(name)
        return found

    def mode(self, training: bool) -> "Model":
        """Return the model in training or evaluation mode."""
        module, body = copy.deepcopy((self.module, self.body))
        return replace(self, module=module.train(training), body=body.train(training))

    @cached_property
    def eval_mode(self) -> "Model":
        """The model in evaluation mode: no dropout, and running statistics instead of batch statistics."""
        return self.mode(training=False)

    def with_precision(self, precision: Precision) -> "Model":
        """Return the model that computes in this precision: "float32", "tf32", or "bf16"."""
        return self if precision == self.precision else replace(self, precision=precision)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """Return the model with its constants (frozen weights, buffers) on a device and in a dtype."""
        module, body = copy.deepcopy((self.module, self.body))
        loss = copy.deepcopy(self.loss).to(device, dtype) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, module=module.to(device, dtype), body=body.to(device, dtype), loss=loss)

    def state_dict(self, params: Params) -> Params:
        """Return an ordinary state_dict: the parameters together with the module's constants."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(params, strict=False)
        return {name: value.detach().cpu() for name, value in module.state_dict().items()}

    def with_initial_weights(self, state: Mapping[str, Tensor]) -> "Model":
        """Return the model with the weights and constants of an ordinary state_dict as initial values."""
        if not isinstance(state, Mapping):
            raise ConfigError(
                "The initial weights must be a state_dict; pass module.state_dict() instead of the module."
            )
        own = self.module.state_dict()
        for name in self.names:
            if name not in state:
                raise ConfigError(
                    f"The initial state_dict has no '{name}'; it must contain every parameter of the model."
                )
            if state[name].shape != own[name].shape:
                shapes = (
                    f"{tuple(state[name].shape)} in the initial state_dict but {tuple(own[name].shape)} in the model"
                )
                raise ConfigError(f"'{name}' is {shapes}; both must be the same network.")
        module, body = copy.deepcopy((self.module, self.body))
        for part in (module, body):
            part.load_state_dict(state, strict=False)
        return replace(self, module=module, body=body, build=None)

    def trainable(self, params: Params) -> Params:
        """Return the parameters without running statistics, which have no gradient."""
        return {name: p for name, p in params.items() if name not in self.running_stats}

    def losses(self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return one loss per example of a batch, to be averaged with `batch.mean`. `sample_weight` is 0 for padding;
        None: there is none."""
        if not self._loss_takes_weight:
            return self.loss(outputs, targets)
        weight = outputs.new_ones(len(outputs)) if sample_weight is None else sample_weight
        return self.loss(outputs, targets, weight)

    @cached_property
    def _loss_takes_weight(self) -> bool:
        return takes_sample_weight(self.loss)

    @property
    def is_classifier(self) -> bool:
        """Whether the loss is the cross-entropy, so that the outputs are logits of classes."""
        return is_classification_loss(self.loss)

    def with_class_weights(self, weights: Sequence[float] | None, classes: int | None) -> "Model":
        """Return the model whose cross-entropy has these weights, one per class; None: the same model."""
        if weights is None:
            return self
        check_class_weights(weights, classes)
        if not self.is_classifier:
            raise ConfigError("class_weights applies to the loss 'classification'; weight classes in your own loss.")
        return replace(self, loss=WeightedCrossEntropy(weights))

    def with_metrics_for(
        self, task: Task, classes: int | None, output_shape: Sequence[int], names: Sequence[str] | None = None
    ) -> "Model":
        """Return the model with the metrics `names`: those for the targets, or the model's own. Metrics of classifiers
        need outputs with one value per class.

        Without `names`, the model keeps its metrics. If the user passed none to `wrap`, a custom loss on class targets
        has the default classification metrics.
        """
        has_class_outputs = classes is not None and len(output_shape) == 1 and output_shape[0] >= max(classes, 2)
        if names is not None:
            known = METRICS[task] if has_class_outputs or task != "classification" else {}
            return replace(self, metrics=find_metrics(names, {**known, **self.metrics}, task))
        if not self.metrics_are_default or self.is_classifier or not has_class_outputs:
            return self
        return replace(self, metrics=DEFAULT_METRICS["classification"])

    @property
    def score(self) -> str:
        """Name of the metric that ranks models: the first metric, or the loss if there is none."""
        return next(iter(self.metrics), "loss")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher `score` is better."""
        return self.score in self.metrics and self.metrics[self.score].higher_is_better

    def _names_of(self, part: str | Sequence[str]) -> frozenset[str]:
        """Return the names in Params of the tensors that are used only inside a part."""
        key = part if isinstance(part, str) else tuple(part)
        if key not in self._known_parts:
            inside = {layer for name in self._layers_of(part) for layer in self._layer(name).modules()}
            outside = {name for layer, _, name in self._tensor_uses if layer not in inside}
            self._known_parts[key] = frozenset(self.names) - outside
        return self._known_parts[key]

    @cached_property
    def _known_parts(self) -> dict[str | tuple[str, ...], frozenset[str]]:
        return {}

    def _layers_of(self, part: str | Sequence[str]) -> Sequence[str]:
        if not isinstance(part, str):
            return part
        if part in self.parts:
            named = self.parts[part]
            return [named] if isinstance(named, str) else named
        if part == "split_input":
            raise ConfigError("This network lists no layers for 'split_input'; pass the personal layers as a list.")
        last = [] if self.head is None else [self.head]
        norms = [name for name, layer in self.module.named_modules() if isinstance(layer, BatchNorm)]
        standard = {"head": last, "output": last, "input": list(self.layers())[:1], "batch_norm": norms}
        return standard.get(part, [part])

    @property
    def _head(self) -> nn.Linear:
        """The linear head of a classifier, which some methods require."""
        layer = None if self.head is None else self.module.get_submodule(self.head)
        if not isinstance(layer, nn.Linear) or not self.is_classifier:
            raise ConfigError("This method requires a classification model with a linear layer as its head.")
        return layer

    def _layer(self, name: str) -> nn.Module:
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            raise unknown_name("layer", name, self.layers()) from None

    @cached_property
    def _tensor_uses(self) -> list[tuple[nn.Module, str, str]]:
        """(layer, path in the module, name in Params) of every use of a tensor; tied weights have several uses."""
        known = {id(t): name for name, t in (*self.module.named_parameters(), *self.module.named_buffers())}
        return [
            (layer, join_path(path, own), known[id(tensor)])
            for path, layer in self.module.named_modules()
            for own, tensor in (layer._parameters | layer._buffers).items()
            if tensor is not None and known.get(id(tensor)) in self.names
        ]

    @property
    def has_dropout(self) -> bool:
        """Whether the network has dropout layers, or calls dropout as a function."""
        return bool(self._dropouts) or self.calls_dropout

    @cached_property
    def _dropouts(self) -> list["Dropout"]:
        return [m for m in (*self.module.modules(), *self.body.modules()) if isinstance(m, Dropout)]

    def _call(self, module: nn.Module, params: Params, x: Inputs) -> Tensor:
        """Run a module with these parameters. None may be missing, or the skeleton's would be used instead."""
        if missing := [name for name in self.names if name not in params]:
            raise ConfigError(f"The model needs all its parameters, but '{missing[0]}' is missing.")
        for layer in self._dropouts:
            layer.uses = 0
        calls = FunctionalDropout() if self.calls_dropout else nullcontext()
        device = params[self.names[0]].device if self.names else torch.device("cpu")
        slots = self._slots[module]
        # What `torch.func.functional_call` does, which looks up every layer by its path in every call
        own = [tensors[key] for tensors, key, _ in slots]
        try:
            for tensors, key, name in slots:
                tensors[key] = params[name]
            with calls, forward_precision(self.precision, device):
                return self._full(module(x))
        finally:
            for (tensors, key, _), tensor in zip(slots, own, strict=True):
                tensors[key] = tensor

    @cached_property
    def _slots(self) -> dict[nn.Module, list[tuple[dict[str, Tensor | None], str, str]]]:
        """For the network and its body: (tensors of a layer, name among them, name in Params) of every use."""
        modules = (self.module, self.body)
        return {module: [_slot(module, path, name) for _, path, name in self._tensor_uses] for module in modules}

    def _full(self, outputs: Tensor) -> Tensor:
        """Return outputs of the network in the dtype of its weights, for losses and sums."""
        full: Tensor = to_float32(outputs) if self.precision == "bf16" else outputs
        return full


def wrap(
    module: nn.Module | Callable[[], nn.Module],
    head: str | None = "head",
    loss: str | Loss = "classification",
    metrics: Mapping[str, Metric | MetricFunction] | None = None,
    parts: Mapping[str, Sequence[str]] | None = None,
) -> Model:
    """Make a Model from any module, or from a class or function that builds one.

    A module starts every run with the weights that it has. A class or function, such as `ft.wrap(MyNet)`, is called for
    every run, so that its initial weights depend on the run's seed.

    `head` is the name of its last layer. `loss` is "classification", "regression", "survival", or a function of
    (outputs, targets) that returns one loss per example; if its terms depend on the other examples of a batch, it has a
    third parameter `sample_weight`, which is 0 for examples that it must leave out. `metrics` are functions of all
    (outputs, targets) of a client that return a scalar; the first one ranks models. Whether a higher value is better
    follows from a well-known name, such as "accuracy" or "mae"; other metrics need
    `ft.Metric(function, higher_is_better=...)`. By default, the metrics are accuracy, macro F1, and AUC if the targets
    are classes, the mean squared and absolute errors for the loss "regression", the concordance index for "survival",
    and otherwise the loss alone. `parts` lists layers for methods that split the model, such as
    parts={"split_input": ["camera"]}.

    >>> wrap(nn.Sequential(nn.Linear(4, 3)), head="0").head
    '0'
    """
    function, default_metrics = _named_loss(loss) if isinstance(loss, str) else (loss, {})
    if reserved := [name for name in metrics or {} if name == "loss" or name.startswith(RESERVED_PREFIXES)]:
        why = "because the loss, training samples, and the global model are recorded under such names"
        raise ConfigError(f"A metric cannot be named '{reserved[0]}', {why}; choose another name.")
    own = {name: as_metric(name, metric) for name, metric in (metrics or {}).items()}
    build, original = (None, module) if isinstance(module, nn.Module) else (module, _build(module, seed=0))
    skeleton = make_functional(copy.deepcopy(original))
    layers = {name: layer for name, layer in skeleton.named_modules(remove_duplicate=False) if name}
    if head is not None and head not in layers:
        last = [name for name, layer in layers.items() if layer._parameters][-1:]
        hint = f"ft.wrap(module, head='{last[0]}')" if last else "ft.wrap(module, head=None)"
        raise ConfigError(f"The model has no layer '{head}'; name its last layer, for example {hint}.")
    body = copy.deepcopy(skeleton)
    if head is not None:
        body.get_submodule(head).register_forward_pre_hook(_stop_before_head)
    model = Model(
        skeleton.train(),
        body.train(),
        head,
        function,
        default_metrics if metrics is None else own,
        metrics_are_default=metrics is None,
        build=build,
        description={"name": reference_to(_origin(module, original))},
        parts=parts or {},
    )
    for part in parts or {}:
        model.split({}, part)  # raises ConfigError for unknown layers
    return model


def _named_loss(name: str) -> tuple[Loss, Mapping[str, Metric]]:
    for task, loss in LOSSES.items():
        if task == name:
            return loss, DEFAULT_METRICS[task]
    raise unknown_name("loss", name, LOSSES)


ModelLike = Model | nn.Module | Callable[[], nn.Module]


def as_model(model: ModelLike) -> Model:
    """Return a Model as it is and wrap a module, or a class or function that builds one."""
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module) or callable(model):
        return wrap(model)
    raise ConfigError(
        "A model must be an nn.Module, a class or function that builds one, ft.wrap(...), or ft.network(name, fed), "
        f"got {model!r}."
    )


def _build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a module whose initial weights are drawn from a seed, without changing torch's generators."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the generators of the GPUs
        try:
            module = factory()
        except TypeError as error:
            name = getattr(factory, "__name__", repr(factory))
            raise ConfigError(
                f"{name} cannot be called without arguments to build the model ({reason(error)}); pass a function such "
                f"as lambda: {name}(...), or an instance."
            ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"The function that builds the model must return an nn.Module, got {module!r}.")
    return module


def _origin(module: Any, built: nn.Module) -> type[Any] | Callable[..., Any]:
    """Return the class or function that names a model: the one passed to `wrap`, or else the class of the module."""
    is_named = isinstance(module, type | FunctionType) and module.__name__ != "<lambda>"
    return module if is_named else type(built)


def _slot(module: nn.Module, path: str, name: str) -> tuple[dict[str, Tensor | None], str, str]:
    parent, _, key = path.rpartition(".")
    layer = module.get_submodule(parent)
    return cast(dict[str, Tensor | None], layer._parameters if key in layer._parameters else layer._buffers), key, name


class _HeadReached(Exception):
    """Carries the input of the head out of the network's forward pass."""


def _stop_before_head(head: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _HeadReached(inputs[0])
