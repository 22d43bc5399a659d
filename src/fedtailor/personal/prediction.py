"""What a client's own model says of samples in a file: .npz, .npy, a picture, or a folder of pictures."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from fedtailor import screen
from fedtailor.batch import pick
from fedtailor.data.arrays import read_npz
from fedtailor.data.entries import inside
from fedtailor.data.pictures import is_picture, read_picture, read_size
from fedtailor.errors import Refused
from fedtailor.files import write, writing
from fedtailor.intake import ONE, Intake
from fedtailor.model import Inputs
from fedtailor.personal.origin import About
from fedtailor.room import check_room

_AT_ONCE = 256  # samples
_SHOWN = 50  # rows on a screen
Array = NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """One row a sample. Of a classifier: the class and its probability, the softmax of the outputs."""

    samples: Sequence[str]  # what each is called: its place in the file, or its picture's name
    outputs: Tensor  # [samples, ...]
    classify: bool

    @property
    def probabilities(self) -> Tensor:
        return torch.softmax(self.outputs, 1)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Headings and rows for people.

        >>> Predictions(["0"], torch.tensor([[0.0, 0.0]]), classify=True).rows()
        (['sample', 'class', 'probability'], [['0', 0, 0.5]])
        """
        if self.classify:
            best = self.probabilities.max(1)
            table = zip(self.samples, best.indices.tolist(), best.values.tolist(), strict=True)
            return ["sample", "class", "probability"], [list(row) for row in table]
        flat = self.outputs.reshape(len(self.samples), -1)
        heads = ["prediction"] if flat.shape[1] == 1 else [f"prediction_{i}" for i in range(flat.shape[1])]
        return ["sample", *heads], [[name, *row] for name, row in zip(self.samples, flat.tolist(), strict=True)]

    def save(self, path: Path) -> None:
        """All of it as .csv or .npz."""
        if path.suffix not in (".csv", ".npz"):
            raise Refused(f"Predictions are written as .csv or .npz, and '{path.name}' ends with neither.")
        with writing(f"'{path}' cannot be written"):
            write(path, self._csv() if path.suffix == ".csv" else self._npz())

    def _csv(self) -> bytes:
        heads, rows = self.rows()
        if self.classify:
            heads = [*heads, *(f"probability_{i}" for i in range(self.outputs.shape[1]))]
            rows = [[*row, *all_of] for row, all_of in zip(rows, self.probabilities.tolist(), strict=True)]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([heads, *([_no_formula(name), *row] for name, *row in rows)])
        return text.getvalue().encode()

    def _npz(self) -> bytes:
        arrays = {"sample": np.array(self.samples), "outputs": self.outputs.numpy()}
        if self.classify:
            best = self.probabilities.argmax(1)
            arrays |= {"class": best.numpy(), "probabilities": self.probabilities.numpy()}
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()


def _no_formula(name: str) -> str:
    """A name that a spreadsheet does not compute: pictures may have been named by anybody."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def predict_command(model: nn.Module, file: Path, out: Path | None) -> None:
    """What `fedtailor predict` does, and says."""
    if out is not None and out.exists() and out.samefile(file):
        raise Refused(f"'{out}' holds the samples; name another file with --out.")
    found = predict(model, file)
    if out is not None:
        found.save(out)
    screen.out.print(_table(found))
    count = len(found.samples)
    if out is not None:
        screen.say(f"All {count:,} predictions lie in {out}" if count > 1 else f"The prediction lies in {out}")
    elif count > _SHOWN:
        screen.say(f"and {count - _SHOWN:,} more; --out keeps them all")


def _table(predictions: Predictions) -> Table:
    """The first predictions for a screen."""
    heads, rows = predictions.rows()
    shown = Table(box=box.SIMPLE)
    for number, head in enumerate(heads):
        shown.add_column(head.replace("_", " "), justify="right" if number else "left")
    for row in rows[:_SHOWN]:
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else escape(str(value)) for value in row))
    return shown


@torch.no_grad()
def predict(model: nn.Module, path: str | Path) -> Predictions:
    """What a model of `ft.load_personal` says of the samples in a file or a folder of pictures."""
    about: About = getattr(model, "about", None) or _no_about()
    names, x = read_samples(Path(path), about.inputs)
    outputs = torch.cat([model(pick(x, slice(at, at + _AT_ONCE))) for at in range(0, len(names), _AT_ONCE)])
    if outputs.isnan().any():  # samples have no NaN, so it is the model
        raise Refused(f"The model of client {about.client} answers with what is no number: it diverged in training.")
    classes = about.inputs.classes
    return Predictions(
        names, outputs, classes is not None and outputs.ndim == 2 and outputs.shape[1] >= max(2, classes)
    )


def _no_about() -> About:
    raise Refused("Predictions are made by a model of ft.load_personal.")


def read_samples(path: Path, intake: Intake) -> tuple[list[str], Inputs]:
    """Samples by their names, in the shape that a run's are of.

    >>> read_samples(Path("nowhere.npz"), Intake({"": ("uint8", (3,))}, 2))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no file or folder 'nowhere.npz'.
    """
    if not path.exists():
        raise Refused(f"There is no file or folder '{path}'.")
    try:
        if path.is_dir() or is_picture(path):
            names, arrays = _pictures(path, intake)
        else:
            arrays = _arrays(path, intake)
            names = [str(number) for number in range(min(len(array) if array.ndim else 0 for array in arrays.values()))]
    except OSError as error:
        raise Refused(f"'{path}' cannot be read: {error.strerror}.") from error
    if not names:
        raise Refused(f"There is no sample in '{path}'.")
    parts = {name: _fitting(array, name, len(names), intake, path) for name, array in arrays.items()}
    return names, parts.get(ONE, parts)


def _pictures(path: Path, intake: Intake) -> tuple[list[str], dict[str, Array]]:
    shape = intake.shape
    if shape is None or len(shape) != 3:
        raise Refused(f"The run's samples are no pictures, and '{path}' is; give a .npz.")
    files = [path] if path.is_file() else inside(path, "**/*", is_picture, path)
    check_room(len(files) * shape[0] * shape[1] * shape[2], f"The pictures in '{path}'")
    pictures = []
    for file in files:
        picture = read_picture(file, (shape[2], shape[1]))
        if picture is None or picture.shape != shape:
            width, height = read_size(file)
            found = "" if picture is None else f" in {_channels(picture.shape[0])}"
            wanted = f"{shape[2]}×{shape[1]} in {_channels(shape[0])}"
            raise Refused(f"'{file.name}' has {width}×{height} pixels{found}, and the run's samples have {wanted}.")
        pictures.append(picture)
    names = [file.name if path.is_file() else str(file.relative_to(path)) for file in files]
    return names, {ONE: np.stack(pictures) if pictures else np.empty((0, *shape), np.uint8)}


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def _arrays(path: Path, intake: Intake) -> dict[str, Array]:
    several = ONE not in intake.parts
    if path.suffix == ".npy" and not several:
        return {ONE: _read_npy(path)}
    if path.suffix != ".npz":
        kinds = ".npz" if several else ".npz, .npy, a picture or a folder of pictures"
        raise Refused(f"'{path.name}' is not what samples are read from: {kinds}.")
    names = list(intake.parts) if several else ["x", "x_test"]
    arrays, found = read_npz(path, names)
    if several:
        if missing := [name for name in names if name not in arrays]:
            raise Refused(f"'{path.name}' must hold one array for every part of a sample, and has no '{missing[0]}'.")
        return arrays
    if not arrays:
        raise Refused(
            f"'{path.name}' must hold the samples as x, or x_test; it has {', '.join(found[:5]) or 'nothing'}."
        )
    return {ONE: arrays["x"] if "x" in arrays else arrays["x_test"]}


def _read_npy(path: Path) -> Array:
    """An array from whoever's file; mapped first, for then a file cannot claim more than it holds."""
    check_room(path.stat().st_size, repr(path.name))
    try:
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError, MemoryError) as error:
        raise Refused(f"'{path.name}' cannot be read as a .npy of numbers; write it with numpy.save.") from error


def _fitting(array: Array, name: str, count: int, intake: Intake, path: Path) -> Tensor:
    """An array as the model's input, or a sentence that says why not."""
    kind, shape = intake.parts[name]
    what = f"The samples in '{path.name}'" if name == ONE else f"'{name}' in '{path.name}'"
    if array.shape[1:] != shape or len(array) != count:
        raise Refused(f"{what} are {array.shape[1:]}, and the run's are {shape}; the first axis is the samples'.")
    if array.dtype.kind not in "biuf":
        raise Refused(f"{what} are no numbers.")
    tensor = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    is_float, wants_float = tensor.is_floating_point(), "float" in kind
    if is_float and not (finite := tensor.isfinite().reshape(count, -1).all(1)).all():
        raise Refused(f"{what} have NaN or infinite numbers, the first in sample {finite.tolist().index(False)}.")
    if kind == "uint8" and tensor.dtype != torch.uint8 and not (is_float and tensor.min() >= 0 and tensor.max() <= 1):
        raise Refused(f"{what} are {array.dtype}, and the run's are bytes; save them as uint8, or from 0 to 1.")
    if wants_float and not is_float and not (intake.guessed and tensor.dtype == torch.uint8):
        raise Refused(f"{what} are {array.dtype}, and the run's are {kind}; give {kind} in a .npz, as its data are.")
    if is_float and not wants_float and kind != "uint8":
        raise Refused(f"{what} are {array.dtype}, and the run's are whole numbers.")
    return tensor
