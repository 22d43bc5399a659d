"""Every reader serves hostile input or refuses it in one sentence: nothing else is raised, nothing hangs or grows."""

import io
from dataclasses import fields
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import fedtailor as ft
import odd_files
from fedtailor import networks, room
from fedtailor.channel import Channel
from fedtailor.data import datasets, images
from fedtailor.data.datasets import Data, Dataset
from fedtailor.experiment import Experiment, from_toml, make
from fedtailor.flags import read_flags
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.packing import pack, unpack
from fedtailor.schedule import make_schedule
from fedtailor.toml import to_toml
from fedtailor.unreliable import Unreliable, read_trace
from fuzzing import Reader, fuzz
from mutations import ODD, damaged, odd_settings

MEMORY = 2**26  # bytes that this machine has, as readers are told


def _fields(kind: type[Any], prefix: str) -> list[str]:
    return [f"{prefix}{f.name}" for f in fields(kind)]


COMMON = [
    *(name for name in _fields(Experiment, "") if name not in ("method", "data", "network")),
    *_fields(Data, "data."), *_fields(Channel, "channel."), *_fields(Unreliable, "unreliable."),
    *(name for kind in NETWORKS.values() for name in _fields(kind, "network.")),
    "method", "data", "network", "network.name", "nonsense", "method.nonsense", "method.inner.lr", "method.inner", "",
]  # fmt: skip
NAMES = {name: [*_fields(kind, "method."), *COMMON] for name, kind in METHODS.items()}
ASKED: dict[str, Any] = {
    "rounds": 3,
    "participation": [0.5, 1.0],
    "method": {"name": "fedprox", "mu": 0.3},
    "data": {"name": "digits", "clients": 6, "alpha": 1.0},
    "network": {"name": "mlp", "hidden": [16, 8]},
    "unreliable": {"dropout": 0.1, "trace": [[0, 1, 2], [1]]},
}


def use(experiment: Experiment) -> None:
    """Everything that is made of settings before training."""
    fed = experiment.load()
    experiment.model(fed)
    if (experiment.rounds or 20) <= 50:
        asked = experiment.rounds, experiment.participation, experiment.seed, experiment.schedule, experiment.unreliable
        make_schedule(fed.num_clients, *asked)
    assert experiment.torch_device.type in ("cpu", "cuda") and experiment.torch_dtype.is_floating_point


def read_toml(data: bytes, folder: Path) -> None:
    (folder / "experiment.toml").write_bytes(data)
    use(make(from_toml(folder / "experiment.toml")))


def read_words(words: list[str], folder: Path) -> None:
    use(make(read_flags(words).over({})))


def read_npz(data: bytes, folder: Path) -> None:
    (folder / "client.npz").write_bytes(data)
    ft.Federation.from_folder(folder)


def read_picture(data: bytes, folder: Path) -> None:
    """One picture beside an honest one."""
    place = folder / "client" / "class"
    place.mkdir(parents=True, exist_ok=True)
    (place / "0.png").write_bytes(data)
    (place / "1.png").write_bytes(odd_files.PICTURES[0])
    ft.Federation.from_folder(folder)


def read_published(files: dict[str, bytes], folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    images.from_folder(images.MNIST, folder)


def read_archive(data: bytes, folder: Path) -> None:
    images.from_archive(images.MNIST, io.BufferedReader(io.BytesIO(data)), "The archive")


def read_trace_file(data: bytes, folder: Path) -> None:
    (folder / "trace.json").write_bytes(data)
    read_trace(folder / "trace.json")


def read_packed(data: bytes, folder: Path) -> None:
    assert len(pack(unpack(data, most=10**6))) < len(data) + 10_000, "nothing larger than the bytes themselves"


_WORDS = st.tuples(st.sampled_from(COMMON), st.sampled_from(ODD).map(lambda value: str(value)[:6000])).map(
    lambda pair: [f"--{pair[0].replace('_', '-')}", pair[1]]
)
_TEXTS = st.lists(st.text(max_size=8).map(lambda text: [text]) | _WORDS, min_size=1, max_size=4)
_PUBLISHED = st.builds(
    lambda name, data: odd_files.MNIST | {name: data},
    st.sampled_from(sorted(odd_files.MNIST)),
    damaged([*odd_files.MNIST.values(), *odd_files.IDX]),
)
_PNGS = damaged([picture for picture in odd_files.PICTURES if picture[1:4] == b"PNG"]).map(odd_files.mended_png)

READERS = {
    "settings": Reader(lambda given, folder: use(make(given)), ASKED, odd_settings(NAMES)),
    "toml": Reader(read_toml, to_toml(ASKED).encode(), damaged([to_toml(ASKED).encode()])),
    "flags": Reader(read_words, ["--method", "ditto", "--rounds=3"], _TEXTS.map(lambda parts: list(chain(*parts)))),
    "npz": Reader(read_npz, odd_files.NPZ[0], damaged(odd_files.NPZ) | odd_files.lying_npz()),
    "pictures": Reader(read_picture, odd_files.PICTURES[0], damaged(odd_files.PICTURES) | _PNGS),
    "published": Reader(read_published, odd_files.MNIST, _PUBLISHED),
    "sheets": Reader(
        lambda data, folder: images.sheet(data),
        odd_files.SHEET,
        damaged([odd_files.SHEET]) | damaged([odd_files.SHEET]).map(odd_files.mended_png),
    ),
    "archives": Reader(read_archive, odd_files.ARCHIVES[0], damaged(odd_files.ARCHIVES) | odd_files.lying_tar()),
    "traces": Reader(read_trace_file, b"[[0, 1], [2], []]", damaged([b"[[0, 1], [2], []]"])),
    "tensors": Reader(read_packed, odd_files.PACKED[0], damaged(odd_files.PACKED) | odd_files.lying_safetensors()),
}


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory and a tiny data set, so that what is allowed is also quick."""
    for module in (networks, room):
        monkeypatch.setattr(module, "total_memory", lambda device: MEMORY)
    x, y = np.zeros((240, 1, 28, 28), np.uint8), np.arange(240) % 3
    monkeypatch.setitem(datasets.DATASETS, "digits", Dataset(lambda folder: (x, y), "mlp", "tiny"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # pillow warns of what it then reads or not
@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("name", READERS)
def test_hostile_input_is_served_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 1, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("name", READERS)
def test_a_hundred_thousand_hostile_inputs(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], ceil(100 / len(READERS)), tmp_path)
