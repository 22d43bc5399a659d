"""A client's personal model as a module that can be evaluated, exported, or trained further.

The module takes samples as the data set stores them (bytes, or floats before normalization) and returns the outputs of
the evaluation, also for methods whose personal model is more than the network.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.core.client_models import AnyModelLike, ClientModels
from fedtailor.core.code_reference import is_reference
from fedtailor.core.method import Method
from fedtailor.core.model import Inputs, Model, ModelLike, as_model
from fedtailor.core.trees import Params, unflatten
from fedtailor.data.federation import Federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.errors import RunError, reason, unknown_name
from fedtailor.experiments.own_code import CodeConsent, rename_part
from fedtailor.experiments.own_parts import build_network, make_model
from fedtailor.experiments.parsing import build_named
from fedtailor.export.model_source import ModelInfo, find_model
from fedtailor.export.table_encoder import TableEncoder
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.reader import is_run_folder, read_info, read_settings
from fedtailor.runs.run import MOMENTS, all_clients, architecture_of, method_label

HOW_TO_CONSENT = (  # to give consent to import own code
    "if you trust it, name it in the command or add --allow-code; in Python, pass it (method=..., model=..., fed=...) "
    "or allow_code=True"
)
_MAX_DEPTH, _MAX_NAME_LENGTH = 32, 1000  # of a tensor's name


class PersonalModel(nn.Module):
    """A client's personal model. `network` is the network with its weights; `info` describes the model's origin."""

    def __init__(self, method: Method, model: Model, state: Params, info: ModelInfo) -> None:
        super().__init__()
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._model = model.to(torch.device("cpu"), dtype).with_initial_weights(state).eval_mode
        self._method, self._samples = method, info.inputs.features.dummy_federation()
        table = info.inputs.table if info.inputs.takes_rows else None
        self.encoder = None if table is None else TableEncoder(table)
        self.info, self.network = info, self._model.module
        self._extra, self._buffer_names = nn.Module(), dict[str, str]()  # tensors that the method adds to the network
        for name in sorted(state.keys() - self.network.state_dict().keys()):
            self._buffer_names[name] = f"{len(self._buffer_names)}_" + "".join(c if c.isalnum() else "_" for c in name)
            leaf = state[name].to(dtype) if state[name].is_floating_point() else state[name]
            self._extra.register_buffer(self._buffer_names[name], leaf)
        self._preprocess: dict[tuple[torch.dtype, torch.device], Callable[[Inputs], Inputs]] = {}
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        """Return the outputs for a batch of unpreprocessed samples; a classifier returns one logit per class."""
        x = x if self.encoder is None else self.encoder(x)
        tensors = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        tree = unflatten(self._extra_tensors()) | {name: tensors[name] for name in self._model.names}
        kind = next((leaf.dtype, leaf.device) for leaf in tensors.values() if leaf.is_floating_point())
        if kind not in self._preprocess:
            self._preprocess[kind] = self._samples.make_preprocessing(*kind)
        return self._method.logits(self._model, tree, self._preprocess[kind](x))

    def tensors(self) -> Params:
        """Return all tensors by their names in the run's file: the network's state_dict and the method's additions."""
        return self.network.state_dict() | self._extra_tensors()

    @property
    def parts(self) -> tuple[Method, Model]:
        """The method that computes the outputs, and the network as a `Model`."""
        return self._method, self._model

    def _extra_tensors(self) -> Params:
        return {name: self._extra.get_buffer(buffer) for name, buffer in self._buffer_names.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> "PersonalModel":
        """Change the device or dtype, also of the copy of the network without its head."""
        self._model.body._apply(fn)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def load_personal(
    path: str | Path,
    client: int | None = None,
    moment: str = "trained",
    *,
    method: Method | str | None = None,
    model: AnyModelLike | str | None = None,
    fed: Federation | None = None,
    allow_code: bool = False,
) -> nn.Module:
    """Load a client's personal model as a module in evaluation mode; it takes samples as the data set stores them.

    `path` is a run folder, with the number of a client; a file in it, personal/trained/003.safetensors; an exported
    file, .safetensors or .onnx; or a deployed client's folder, its runs/RUN, or a file in models/. Pass `method` and
    `model` if they are your own, because files contain no code: the objects, or the names of their code, such as
    model="my_module:MyNet". With `allow_code`, the code that the file names is imported. Pass `fed` if the run did not
    record its input format. Files may be untrusted: nothing is unpickled, and no code is imported that you do not name.

    >>> load_personal("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no model in 'nowhere'; give a run folder, a client folder, or an exported file.
    """
    path = Path(path)
    if moment not in MOMENTS:
        raise unknown_name("moment", moment, MOMENTS)
    if client is not None and path.exists() and not is_run_folder(path):
        runs = [entry.name for entry in path.iterdir() if is_run_folder(entry)] if path.is_dir() else []
        fix = f"use '{path / min(runs)}'" if runs else "leave out the client number if it contains one client's model"
        raise RunError(f"'{path}' is not a run folder; {fix}.")
    if path.suffix == ".pt2":
        hint = "if you trust its author, use torch.export.load(path).module()"
        raise RunError(
            f"'{path.name}' is not loaded, because torch unpickles .pt2 files, which can execute code; {hint}."
        )
    if path.suffix == ".onnx":
        from fedtailor.export.onnx_model import read_onnx  # needs onnxruntime, which is optional

        return read_onnx(path)
    info, state = find_model(path, client, moment, None if fed is None else InputSpec.from_federation(fed))
    if isinstance(model, ClientModels):
        if client is None:
            raise RunError("A file contains one client's model; pass the network of this client instead of all.")
        model = own_network(model, read_info(path), client)
    if moment != "trained" and moment != info.moment:  # an explicit moment that differs from the file's
        raise RunError(f"'{path}' is the model '{info.moment}', not '{moment}'.")
    return build_personal_model(info, state, method, model, f"'{path}'", allow_code)


def load_all_personal(
    folder: str | Path,
    moment: str = "trained",
    *,
    method: Method | str | None = None,
    model: AnyModelLike | str | None = None,
    fed: Federation | None = None,
    allow_code: bool = False,
) -> Iterator[PersonalModel]:
    """Yield the personal models of all clients of a run, held-out ones last, one at a time; see `load_personal`."""
    folder, inputs = Path(folder), None if fed is None else InputSpec.from_federation(fed)
    read_settings(folder)  # raises an error if the folder is not a run
    run_info = read_info(folder)
    for client in range(len(all_clients(run_info))):
        info, state = find_model(folder, client, moment, inputs)
        if info.inputs.table is None:  # the same for all clients, so data are read at most once
            inputs = info.inputs
        own = own_network(model, run_info, client)
        yield build_personal_model(info, state, method, own, f"The file of client {client}", allow_code)


def own_network(model: AnyModelLike | str | None, run_info: Mapping[str, Any], client: int) -> ModelLike | str | None:
    """Return the network of a client of a run, if networks of different architectures are given."""
    return model.models[architecture_of(run_info, client)] if isinstance(model, ClientModels) else model


def build_personal_model(
    info: ModelInfo,
    state: Params,
    method: Method | str | None = None,
    model: ModelLike | str | None = None,
    source: str = "The file",
    allow_code: bool = False,
) -> PersonalModel:
    """Build the module from its metadata and tensors, and evaluate it once to check that these match."""
    if isinstance(method, str):
        info = replace(info, method=rename_part("method", info.method, method))
    if isinstance(model, str):
        info = replace(info, network=rename_part("network", info.network, model))
    named = frozenset(name for name in (method, model) if isinstance(name, str))
    consent = CodeConsent(named, allow_code, HOW_TO_CONSENT)
    method = method if isinstance(method, Method) else _make_method(info.method, consent)
    built = _make_network(info, consent) if model is None or isinstance(model, str) else as_model(model)
    missing = [name for name in built.names if name not in state]
    try:
        if missing or not _is_tree(state):
            raise RunError(f"it has no tensor '{missing[0]}'" if missing else "its tensor names are not a valid tree")
        personal = PersonalModel(method, built, state, info)
        with torch.no_grad():
            personal(info.inputs.random_samples(2))
    except Exception as error:  # networks and methods raise any exception for tensors that do not fit
        label = method_label(info.method)
        raise RunError(f"{source} does not contain a model of {label} for these inputs: {reason(error)}.") from error
    return personal


def _is_tree(state: Params) -> bool:
    """Return whether names with "/" are valid paths: not too deep, and none is both a tensor and a subtree."""
    if any(name.count("/") > _MAX_DEPTH or len(name) > _MAX_NAME_LENGTH for name in state):
        return False
    parents = {"/".join(name.split("/")[:depth]) for name in state for depth in range(1, name.count("/") + 1)}
    return not parents & state.keys()


def _make_method(settings: Mapping[str, Any], consent: CodeConsent) -> Method:
    innermost = settings
    while isinstance(innermost.get("inner"), Mapping):
        innermost = innermost["inner"]
    name = str(innermost.get("name"))
    if name not in METHODS and not is_reference(name):
        label = method_label(settings)
        raise RunError(f"The method '{label}' is not part of FedTailor; pass it: ft.load_personal(path, method=...).")
    method: Method = build_named("method", settings, METHODS, None, consent)
    return method


def _make_network(info: ModelInfo, consent: CodeConsent) -> Model:
    name = info.network["name"]
    if name not in NETWORKS and not is_reference(name):
        raise RunError(f"The network '{name}' is not part of FedTailor; pass it: ft.load_personal(path, model=...).")
    settings = dict(info.network)
    if name in NETWORKS:
        settings.pop("pretrained", None)  # these tensors are in the state, and no other file may be read
    spec = build_network(settings, consent)
    assert spec is not None  # it has a name
    return make_model(spec, info.inputs.features.dummy_federation())
