"""A client's own model as a module: to use, to export, to go on with.

It takes samples as the data set holds them (bytes, or numbers that are not normalised yet) and answers what it answered
in the evaluation, also where a method's personal model is more than the network.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.errors import Refused, unknown
from fedtailor.experiment import choose
from fedtailor.federation import Federation
from fedtailor.intake import Intake
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.model import Inputs, Model, as_model
from fedtailor.networks import NETWORKS, network
from fedtailor.personal.origin import About, find
from fedtailor.record import holds_run, read_info, read_settings
from fedtailor.run import MOMENTS, name_of
from fedtailor.trees import Params, unflatten

_DEEPEST, _LONGEST = 32, 1000  # subtrees in a tensor's name, and its letters


class Personal(nn.Module):
    """A client's own model. `network` is the network with its weights; `about` says whose it is."""

    def __init__(self, method: Method, model: Model, state: Params, about: About) -> None:
        super().__init__()
        dtype: torch.dtype = getattr(torch, about.dtype)
        self._model = model.to(torch.device("cpu"), dtype).starting_from(state).serving
        self._method, self._samples = method, about.inputs.federation()
        self.about, self.network = about, self._model.module
        self._more, self._places = nn.Module(), dict[str, str]()  # what a method adds to the network, by its paths
        for name in sorted(state.keys() - self.network.state_dict().keys()):
            self._places[name] = f"{len(self._places)}_" + "".join(c if c.isalnum() else "_" for c in name)
            leaf = state[name].to(dtype) if state[name].is_floating_point() else state[name]
            self._more.register_buffer(self._places[name], leaf)
        self._prepare: dict[tuple[torch.dtype, torch.device], Callable[[Inputs], Inputs]] = {}
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        """The outputs for a batch of samples as the data set holds them: of a classifier, one number a class."""
        own = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        tree = unflatten(self._added()) | {name: own[name] for name in self._model.names}
        kind = next((leaf.dtype, leaf.device) for leaf in own.values() if leaf.is_floating_point())
        if kind not in self._prepare:
            self._prepare[kind] = self._samples.preparation(*kind)
        return self._method.logits(self._model, tree, self._prepare[kind](x))

    def tensors(self) -> Params:
        """All it is made of, by the names of the run's file: an ordinary state_dict, and what a method adds to it."""
        return self.network.state_dict() | self._added()

    @property
    def parts(self) -> tuple[Method, Model]:
        """The method whose answers it gives, and its network as a model."""
        return self._method, self._model

    def _added(self) -> Params:
        return {name: self._more.get_buffer(place) for name, place in self._places.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> "Personal":
        """Another device or dtype: also for the copy of the network that stops before the head."""
        self._model.body._apply(fn)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def load_personal(
    path: str | Path,
    client: int | None = None,
    moment: str = "trained",
    *,
    method: Method | None = None,
    model: Model | nn.Module | None = None,
    fed: Federation | None = None,
) -> nn.Module:
    """A client's own model as a module in evaluation mode, which takes samples as the data set holds them.

    `path` is a run's folder, with the number of a client; a file in it, personal/trained/003.safetensors; an exported
    file, .safetensors or .onnx; or a real client's folder, its runs/RUN or a file in models/. What these cannot
    describe (a method or a network of your own) is given again; `fed` is needed where a run does not say what its
    samples are like. Files may come from anybody: nothing is unpickled.

    >>> load_personal("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no model in 'nowhere': it is no run, no client's folder and no exported file.
    """
    path = Path(path)
    if moment not in MOMENTS:
        raise unknown("moment", moment, MOMENTS)
    if client is not None and path.exists() and not holds_run(path):
        raise Refused(f"Only a run's folder has clients by their numbers, and '{path}' is none; leave out the client.")
    if path.suffix == ".pt2":
        hint = "if you trust who wrote it, torch.export.load(path).module() opens it"
        raise Refused(f"'{path.name}' is an exported program, which torch unpickles, so it could run anything; {hint}.")
    if path.suffix == ".onnx":
        from fedtailor.personal.onnx_model import read_onnx  # needs onnxruntime, which others do not

        return read_onnx(path)
    about, state = find(path, client, moment, None if fed is None else Intake.of(fed))
    if moment != "trained" and moment != about.moment:  # told, and of a file that is of one moment
        raise Refused(f"'{path}' is of the moment {about.moment}, not {moment}.")
    return assemble(about, state, method, model, f"'{path}'")


def load_everyone(
    folder: str | Path,
    moment: str = "trained",
    *,
    method: Method | None = None,
    model: Model | nn.Module | None = None,
    fed: Federation | None = None,
) -> Iterator[Personal]:
    """Every client's own model of a run's folder, one after the other; see `load_personal`."""
    folder, inputs = Path(folder), None if fed is None else Intake.of(fed)
    read_settings(folder)  # refuses what is no run
    for client in range(len(read_info(folder)["clients"])):
        about, state = find(folder, client, moment, inputs)
        inputs = about.inputs  # all clients' are alike, and an old run's data need not be read again
        yield assemble(about, state, method, model, f"Client {client}'s file")


def assemble(
    about: About,
    state: Params,
    method: Method | None = None,
    model: Model | nn.Module | None = None,
    what: str = "The file",
) -> Personal:
    """The module of what is said of a model and its tensors; tried out once, so that what does not fit is said here."""
    method = _method(about.method) if method is None else method
    made = _network(about) if model is None else as_model(model)
    missing = [name for name in made.names if name not in state]
    try:
        if missing or not _is_tree(state):
            raise Refused(f"it has no '{missing[0]}'" if missing else "its names make no tree")
        personal = Personal(method, made, state, about)
        with torch.no_grad():
            personal(about.inputs.examples(2))
    except Exception as error:  # whatever a network or a method says of numbers that are not its own
        why = str(error).splitlines()[0].rstrip(".")[:200] if str(error) else type(error).__name__
        raise Refused(f"{what} holds no model of {name_of(about.method)} for these inputs: {why}.") from error
    return personal


def _is_tree(state: Params) -> bool:
    """Whether names with "/" can be subtrees: not too deep, and nothing is a tensor and a subtree."""
    if any(name.count("/") > _DEEPEST or len(name) > _LONGEST for name in state):
        return False
    parents = {"/".join(name.split("/")[:depth]) for name in state for depth in range(1, name.count("/") + 1)}
    return not parents & state.keys()


def _method(said: Mapping[str, Any]) -> Method:
    innermost = said
    while isinstance(innermost.get("inner"), Mapping):
        innermost = innermost["inner"]
    if innermost.get("name") not in METHODS:
        raise Refused(f"The method '{name_of(said)}' is your own; give it again: ft.load_personal(path, method=...).")
    made: Method = choose("method", said, METHODS, None)
    return made


def _network(about: About) -> Model:
    name = about.network["name"]
    if name not in NETWORKS:
        raise Refused(f"The network '{name}' is your own; give it again: ft.load_personal(path, model=...).")
    spec = choose("network", about.network, NETWORKS, None)
    return network(name, about.inputs.federation(), **vars(spec))
