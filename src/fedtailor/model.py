"""A network as pure functions of its parameters.

`Model` keeps the module as a skeleton: its weights are never used, they come in as `params` with every call. Layers
that carry hidden state in PyTorch are replaced in the skeleton (see `pure.py`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.errors import Refused, unknown
from fedtailor.metrics import Metric, accuracy, auc, macro_f1
from fedtailor.pure import BatchNorm, Dropout, join, purify
from fedtailor.trees import Params

Inputs = Any  # a tensor, or a dict of tensors, samples on the leading axis
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one loss an example

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """One squared error an example, averaged over its outputs."""
    return (outputs - targets.reshape(outputs.shape)).square().reshape(len(outputs), -1).mean(1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


LOSSES: dict[str, tuple[Loss, dict[str, Metric]]] = {
    "classification": (cross_entropy, {"accuracy": Metric(accuracy), "macro_f1": Metric(macro_f1), "auc": Metric(auc)}),
    "regression": (squared_error, {"mse": Metric(lambda o, t: squared_error(o, t).mean(), higher_is_better=False)}),
}


@dataclass(frozen=True, eq=False)
class Model:
    """A network, its loss and its metrics; all functions are pure."""

    module: nn.Module  # the skeleton, in training or in evaluation mode
    body: nn.Module  # the same, stopped before its head: gives features
    head: str | None  # name of the last layer
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    build: Callable[[], nn.Module] | None = None  # makes fresh weights; None: the module's own are the start
    description: Mapping[str, Any] = field(default_factory=dict)  # for the record
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # layers by the names `split` takes

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of running statistics (batch normalisation): they cross like parameters but no gradient moves them."""
        layers = [m for m in self.module.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        return tuple(join(m.path, kind) for m in layers for kind in ("running_mean", "running_var"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all that Params hold: what is trained, then running statistics; tied weights have one name."""
        return (*(name for name, p in self.module.named_parameters() if p.requires_grad), *self.statistics)

    def init(self, seed: int) -> Params:
        """Start parameters: a named network's from the seed, a module instance's its own."""
        module = self.module
        if self.build is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would also touch the GPUs' generators
                module = self.build()
        state, like = module.state_dict(), self.module.state_dict()
        return {name: state[name].to(like[name], copy=True) for name in self.names}

    def logits(self, params: Params, x: Inputs) -> Tensor:
        """The module's output."""
        return self._call(self.module, params, x)

    def features(self, params: Params, x: Inputs) -> Tensor:
        """What goes into the head."""
        if self.head is None:
            raise Refused("This model has no head: name its last layer, ft.wrap(module, head='...').")
        try:
            self._call(self.body, params, x)
        except _Reached as reached:
            features: Tensor = reached.args[0]
            return features
        raise Refused(f"The model's forward never calls its head '{self.head}', so there are no features.")

    def answer(self, params: Params, features: Tensor) -> Tensor:
        """What the head makes of features, the output of a model that ends with its head; of the parameters only the
        head's are needed."""
        head = self._head
        names = {place.removeprefix(f"{self.head}."): name for layer, place, name in self._places if layer is head}
        if missing := [name for name in names.values() if name not in params]:
            raise Refused(f"The head's '{missing[0]}' is another layer's too, and this method needs a head of its own.")
        placed = {place: params[name] for place, name in names.items()}
        return functional_call(head, placed, (features,))  # type: ignore[no-any-return]

    @property
    def head_size(self) -> tuple[int, int]:
        """(classes, features) of a linear head."""
        classes, features = self._head.weight.shape
        return int(classes), int(features)

    def split(self, params: Params, part: str | Sequence[str] = "head") -> tuple[Params, Params]:
        """(rest, part): `rest | part` is the whole again. A weight that both use (tied) is the rest's.

        A part is "head" (the last layer: then the rest is the body), "input" (the first layer), "output" (the head,
        or what the network lists), "split_input" (what the network lists), "batch_norm" (every batch normalisation,
        found by its type), a layer's name or a list of them.
        """
        names = self._names_of(part)
        chosen = {name: p for name, p in params.items() if name in names}
        return {name: p for name, p in params.items() if name not in chosen}, chosen

    def layers(self) -> dict[str, list[str]]:
        """Every layer that owns parameters and their names, in order; normalisation is left out."""
        found: dict[str, list[str]] = {}
        for layer, place, name in self._places:
            if place == name and not isinstance(layer, NORMALISATION):
                found.setdefault(name.rpartition(".")[0] or type(layer).__name__, []).append(name)
        return found

    def mode(self, training: bool) -> "Model":
        """The same model for training or for evaluation."""
        module, body = copy.deepcopy((self.module, self.body))
        return replace(self, module=module.train(training), body=body.train(training))

    @cached_property
    def serving(self) -> "Model":
        """The same model for evaluation: no dropout, running statistics instead of a batch's."""
        return self.mode(training=False)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """The same model with its constants (frozen weights, buffers) on a device and in a dtype."""
        module, body = copy.deepcopy((self.module, self.body))
        return replace(self, module=module.to(device, dtype), body=body.to(device, dtype))

    def state_dict(self, params: Params) -> Params:
        """An ordinary state_dict: the parameters together with the module's constants."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(params, strict=False)
        return {name: value.detach().cpu() for name, value in module.state_dict().items()}

    def starting_from(self, state: Mapping[str, Tensor]) -> "Model":
        """The same model with the weights and constants of an ordinary state_dict as its start."""
        if not isinstance(state, Mapping):
            raise Refused("The initial weights are a state_dict: module.state_dict(), not the module.")
        own = self.module.state_dict()
        for name in self.names:
            if name not in state:
                raise Refused(f"The initial state_dict has no '{name}'; it must hold every parameter of the model.")
            if state[name].shape != own[name].shape:
                shapes = (
                    f"{tuple(state[name].shape)} in the initial state_dict and {tuple(own[name].shape)} in the model"
                )
                raise Refused(f"'{name}' is {shapes}; they must be the same network.")
        module, body = copy.deepcopy((self.module, self.body))
        for part in (module, body):
            part.load_state_dict(state, strict=False)
        return replace(self, module=module, body=body, build=None)

    def trainable(self, params: Params) -> Params:
        """Without running statistics, which no gradient moves."""
        return {name: p for name, p in params.items() if name not in self.statistics}

    @property
    def score(self) -> str:
        """The metric that ranks: the first one, or the loss where there is none."""
        return next(iter(self.metrics), "loss")

    @property
    def higher_is_better(self) -> bool:
        return self.score in self.metrics and self.metrics[self.score].higher_is_better

    def _names_of(self, part: str | Sequence[str]) -> frozenset[str]:
        """Names in Params of the tensors that no layer outside a part uses."""
        key = part if isinstance(part, str) else tuple(part)
        if key not in self._known_parts:
            inside = {layer for name in self._layers_of(part) for layer in self._layer(name).modules()}
            outside = {name for layer, _, name in self._places if layer not in inside}
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
            raise Refused("This network lists no layers for 'split_input'; give the personal layers as a list.")
        last = [] if self.head is None else [self.head]
        norms = [name for name, layer in self.module.named_modules() if isinstance(layer, BatchNorm)]
        usual = {"head": last, "output": last, "input": list(self.layers())[:1], "batch_norm": norms}
        return usual.get(part, [part])

    @property
    def _head(self) -> nn.Linear:
        """The head of a model that classifies by a linear last layer, which some methods need."""
        layer = None if self.head is None else self.module.get_submodule(self.head)
        if not isinstance(layer, nn.Linear) or self.loss is not cross_entropy:
            raise Refused("This method is for models that classify, with a linear layer as their head.")
        return layer

    def _layer(self, name: str) -> nn.Module:
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            raise unknown("layer", name, self.layers()) from None

    @cached_property
    def _places(self) -> list[tuple[nn.Module, str, str]]:
        """Where every tensor of Params goes: (layer, name in the module, name in Params); a tied one has two places."""
        known = {id(t): name for name, t in (*self.module.named_parameters(), *self.module.named_buffers())}
        return [
            (layer, join(path, own), known[id(tensor)])
            for path, layer in self.module.named_modules()
            for own, tensor in (layer._parameters | layer._buffers).items()
            if tensor is not None and known.get(id(tensor)) in self.names
        ]

    @property
    def has_dropout(self) -> bool:
        return bool(self._dropouts)

    @cached_property
    def _dropouts(self) -> list["Dropout"]:
        return [m for m in (*self.module.modules(), *self.body.modules()) if isinstance(m, Dropout)]

    def _call(self, module: nn.Module, params: Params, x: Inputs) -> Tensor:
        """Run with these parameters and no others: a missing one would silently be the skeleton's."""
        if missing := [name for name in self.names if name not in params]:
            raise Refused(f"The model needs all its parameters, and '{missing[0]}' is not among those given.")
        for layer in self._dropouts:
            layer.uses = 0
        placed = {place: params[name] for _, place, name in self._places}
        # tie_weights would leave the given tensors behind in a layer that stands in two places
        return functional_call(module, placed, (x,), tie_weights=False)  # type: ignore[no-any-return]


def wrap(
    module: nn.Module,
    head: str | None = "head",
    loss: str | Loss = "classification",
    metrics: Mapping[str, Metric | Callable[[Tensor, Tensor], Tensor]] | None = None,
    parts: Mapping[str, Sequence[str]] | None = None,
) -> Model:
    """Any module as a Model. `head` names its last layer; `loss` is "classification", "regression" or a function of
    (outputs, targets) that gives one loss an example; `metrics` are functions of all of a client's (outputs, targets)
    that give one number, and the first one ranks. More of it is better in classification, less elsewhere, as of an
    error; to say otherwise, give ft.Metric(function, higher_is_better=...). `parts` names layers for methods that split
    the model: parts={"split_input": ["camera"]}.

    >>> wrap(nn.Sequential(nn.Linear(4, 3)), head="0").head
    '0'
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    function, usual = LOSSES[loss] if isinstance(loss, str) else (loss, {})
    rising = loss == "classification"
    own = {name: m if isinstance(m, Metric) else Metric(m, rising) for name, m in (metrics or {}).items()}
    if "loss" in own:
        raise Refused("A metric cannot be named 'loss', for the loss is recorded under that name.")
    skeleton = purify(copy.deepcopy(module))
    layers = {name: layer for name, layer in skeleton.named_modules(remove_duplicate=False) if name}
    if head is not None and head not in layers:
        last = [name for name, layer in layers.items() if layer._parameters][-1:]
        hint = f"ft.wrap(module, head='{last[0]}')" if last else "ft.wrap(module, head=None)"
        raise Refused(f"The model has no layer '{head}'; name its last layer, for example {hint}.")
    body = copy.deepcopy(skeleton)
    if head is not None:
        body.get_submodule(head).register_forward_pre_hook(_stop)
    description = {"name": type(module).__name__}
    chosen = usual if metrics is None else own
    model = Model(skeleton.train(), body.train(), head, function, chosen, description=description, parts=parts or {})
    for part in parts or {}:
        model.split({}, part)  # refuses names that are not there
    return model


def as_model(model: Model | nn.Module) -> Model:
    if not isinstance(model, (Model, nn.Module)):
        raise Refused(f"A model is an nn.Module, ft.wrap(module) or ft.network(name, fed), not {model!r}.")
    return model if isinstance(model, Model) else wrap(model)


class _Reached(Exception):
    """Carries what goes into the head out of the network."""


def _stop(head: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _Reached(inputs[0])
