"""Personal models as files for other programs: safetensors, ONNX, or torch's exported program (.pt2).

Every file is read back before it gets its name, and must answer as the model itself does. Graphs take samples as the
data set holds them, any number at once; they are traced with samples that are made up, for a .pt2 keeps these.
"""

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedtailor.errors import Refused, unknown
from fedtailor.files import WRITING, file_name, new_folder, put, remove, sync_folder, writing
from fedtailor.model import Inputs
from fedtailor.personal.module import Personal, assemble, load_everyone, load_personal
from fedtailor.personal.onnx_model import NEEDED, name_in_graph, read_onnx
from fedtailor.personal.origin import ABOUT, About, of_file
from fedtailor.personal.tracing import no_graph, quiet, trace
from fedtailor.run import name_of
from fedtailor.version import VERSION

FORMATS = ("safetensors", "onnx", "pt2")
_OPSET = 20  # of ONNX, from 2023: what torch writes best, and ONNX Runtime reads from 1.17 on
_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # of outputs, beside the largest of them
_ROUNDING = 8  # times the smallest step of a dtype: what sums of ordinary numbers may differ by
_TAKEN = ("uint8", "float16", "float32", "float64")  # dtypes of samples between which one may choose
_BATCHES = (1, 2, 5)  # samples at once with which a file is tried
_MOST_ONNX = 2**31 - 2**20  # bytes that fit into one message of ONNX


def export_model(model: nn.Module, path: str | Path, kind: str | None = None, *, takes: str | None = None) -> Path:
    """Write a model of `ft.load_personal` to a file, whose ending says the format unless `kind` does. `takes` is the
    dtype of samples that a graph takes, if not that of the run's data.

    >>> export_model(nn.Linear(2, 1), "model.onnx")
    Traceback (most recent call last):
    fedtailor.errors.Refused: Only a model of ft.load_personal can be exported, and no ONNX file of one again.
    """
    path = Path(path)
    ending = path.suffix.removeprefix(".")
    kind = kind or ending
    _check_new(path, kind)
    if ending in FORMATS and ending != kind:
        raise Refused(f"'{path.name}' ends with .{ending}, and the format is {kind}; leave out one of the two.")
    with writing(f"'{path}' cannot be written"):
        _put_checked(_writer(kind), _own(model, takes), path)
        sync_folder(path.parent)
    return path


def export_models(models: Iterable[nn.Module], folder: str | Path, kind: str, *, takes: str | None = None) -> Path:
    """Write several clients' models of one run to a new folder, each named by its client: all of them or none."""
    folder = Path(folder)
    _check_new(folder, kind)
    writer = _writer(kind)
    try:
        with writing(f"'{folder}' cannot be written"), new_folder(folder) as beside:
            for model in models:
                own = _own(model, takes)
                _put_checked(writer, own, beside / f"{_whose(own.about)}.{kind}")
    except BaseException:
        remove(folder.with_name(folder.name + WRITING))
        raise
    return folder


def export_command(
    run: Path, client: int | None, everyone: bool, kind: str | None, moment: str, takes: str | None, out: Path | None
) -> str:
    """What `fedtailor export` does, and says."""
    if everyone and client is not None:
        raise Refused("export takes --client, or --all, not both.")
    ending = "" if out is None or everyone else out.suffix.removeprefix(".")
    kind = kind or ending or "safetensors"
    late = "" if moment == "trained" else f"-{moment}"
    if everyone:
        folder = out or Path(f"{run.resolve().name}-models{late}")
        export_models(load_everyone(run, moment), folder, kind, takes=takes)
        return f"The models of all {len([*folder.iterdir()])} clients lie in {folder}; each answers as in the run."
    model = load_personal(run, client, moment)
    about = _own(model, None).about
    path = out or Path(f"{file_name(about.run)}-client-{_whose(about)}{late}.{kind}")
    export_model(model, path, kind, takes=takes)
    whose = f"client {about.client} ({name_of(about.method)}, {about.moment})"
    return f"The model of {whose} lies in {path}; it answers as in the run."


def _whose(about: About) -> str:
    """A client in a file's name: real ones have names, and an exported file may say anything."""
    return f"{int(about.client):03d}" if about.client.isdecimal() else file_name(about.client)


def _check_new(path: Path, kind: str) -> None:
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    if path.exists():
        raise Refused(f"'{path}' is there already; remove it, or name another.")


def _own(model: nn.Module, takes: str | None) -> Personal:
    if not isinstance(model, Personal):
        raise Refused("Only a model of ft.load_personal can be exported, and no ONNX file of one again.")
    if takes is None:
        return model
    if takes not in _TAKEN:
        raise unknown("dtype of samples", takes, _TAKEN)
    other, inputs = copy.copy(model), model.about.inputs
    free = [name for name, (kind, _) in inputs.parts.items() if kind == "uint8" or "float" in kind]
    if not free:
        kinds = ", ".join(sorted({kind for kind, _ in inputs.parts.values()}))
        raise Refused(f"The run's samples are {kinds}, for which there is no other dtype; leave out --inputs.")
    parts = {name: (takes if name in free else kind, shape) for name, (kind, shape) in inputs.parts.items()}
    other.about = replace(model.about, inputs=replace(inputs, parts=parts, guessed=False))
    return other


def _put_checked(writer: "_Writer", model: Personal, path: Path) -> None:
    """Write a file, read it back, and let it have its name if it answers as the model does."""
    beside = path.with_name(path.name + WRITING)
    try:
        with beside.open("wb") as file:
            put(file, writer.write(model))
        _check_answers(model, writer.read(beside, model), path)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@torch.no_grad()
def _check_answers(model: Personal, read: Callable[[Inputs], Tensor], path: Path) -> None:
    """Refuse a file whose outputs are not the model's own."""
    samples = {count: model.about.inputs.examples(count, seed=count) for count in _BATCHES}
    answers = {count: model(x) for count, x in samples.items()}
    largest = max(float(own.nan_to_num(0, 0, 0).abs().max()) for own in answers.values())
    smallest_step = torch.finfo(getattr(torch, model.about.dtype)).eps
    tolerance = max(_TOLERANCE[model.about.dtype] * largest, _ROUNDING * smallest_step)
    for count, own in answers.items():
        try:
            found = read(samples[count])
        except Exception as error:  # whatever another runtime raises
            why = str(error).splitlines()[0].rstrip(".")[:200] if str(error) else type(error).__name__
            raise Refused(f"'{path.name}' cannot be used with {count} samples at once: {why}.") from error
        if own.shape != found.shape or not torch.allclose(found, own, rtol=0, atol=tolerance, equal_nan=True):
            apart = float((found - own).abs().max()) if own.shape == found.shape else float("nan")
            raise Refused(f"'{path.name}' answers otherwise than the model does, by {apart:.1g}; it was not written.")


class _Writer:
    """How a format is written and read."""

    def write(self, model: Personal) -> bytes:
        raise NotImplementedError

    def read(self, path: Path, model: Personal) -> Callable[[Inputs], Tensor]:
        raise NotImplementedError


class _Tensors(_Writer):
    """An ordinary state_dict, and what is needed to build the module again."""

    def write(self, model: Personal) -> bytes:
        apart = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in model.tensors().items()}
        return save(apart, metadata={"format": "pt", ABOUT: model.about.text(), **_facts(model)})

    def read(self, path: Path, model: Personal) -> Callable[[Inputs], Tensor]:
        about, state = of_file(path, None)
        return assemble(about, state, *model.parts)


class _Graphs(_Writer):
    """A graph that is traced once; of every further client of the run only its numbers are put into it."""

    def __init__(self) -> None:
        self._vessel: Personal | None = None
        self._program: Any = None

    def _filled(self, model: Personal) -> Any:
        """The program with this model's numbers."""
        if self._vessel is None:
            self._vessel = copy.deepcopy(model)
            self._program = self._trace(self._vessel)
        self._vessel.load_state_dict(model.state_dict())  # in place: the program holds the vessel's tensors
        return self._program

    def _trace(self, vessel: Personal) -> Any:
        return trace(vessel)


class _Programs(_Graphs):
    """Torch's exported program."""

    def write(self, model: Personal) -> bytes:
        file = io.BytesIO()
        with quiet():
            torch.export.save(self._filled(model), file, extra_files={f"{ABOUT}.json": model.about.text()})
        return file.getvalue()

    def read(self, path: Path, model: Personal) -> Callable[[Inputs], Tensor]:
        with quiet():  # torch unpickles here, and these bytes are our own of a moment ago
            read: Callable[[Inputs], Tensor] = torch.export.load(io.BytesIO(path.read_bytes())).module()
        return read


class _Onnx(_Graphs):
    """ONNX, through torch's own exporter."""

    def _trace(self, vessel: Personal) -> Any:
        _check_onnx()
        size = sum(leaf.numel() * leaf.element_size() for leaf in vessel.state_dict().values())
        if size > _MOST_ONNX:
            raise Refused(f"An ONNX file holds at most 2 GB, and this model has {size / 1e9:.1f}; take pt2.")
        names = [name_in_graph(part) for part in vessel.about.inputs.parts]
        program = trace(vessel)
        try:
            with quiet():  # not optimised: that would compute with one client's weights what belongs to all
                made: Any = torch.onnx.export(
                    program, dynamo=True, verbose=False, optimize=False, opset_version=_OPSET,
                    input_names=names, output_names=["outputs"],
                )  # fmt: skip
        except Exception as error:
            raise no_graph(vessel, error, "cannot be said in ONNX") from error
        return made

    def write(self, model: Personal) -> bytes:
        proto = self._filled(model).model_proto
        proto.producer_name, proto.producer_version = "fedtailor", VERSION
        del proto.metadata_props[:]
        for name, text in {ABOUT: model.about.text(), **_facts(model), "opset": str(_OPSET)}.items():
            proto.metadata_props.add(key=name, value=text)
        graph = proto.graph
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField("metadata_props")  # among it, where on this machine the code lies
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
        for value in graph.value_info[:]:
            graph.value_info.remove(value)  # inner shapes, which readers work out by themselves
        data: bytes = proto.SerializeToString()
        return data

    def read(self, path: Path, model: Personal) -> Callable[[Inputs], Tensor]:
        return read_onnx(path)


def _check_onnx() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refused(NEEDED) from error


def _writer(kind: str) -> _Writer:
    return {"safetensors": _Tensors, "onnx": _Onnx, "pt2": _Programs}[kind]()


def _facts(model: Personal) -> dict[str, str]:
    """What people look for in a file's metadata."""
    about = model.about
    whose = {"run": about.run, "client": about.client, "moment": about.moment, "method": name_of(about.method)}
    return whose | {"fedtailor_version": VERSION, "torch_version": torch.__version__}
