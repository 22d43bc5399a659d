"""All readers either read untrusted input or raise a FedTailorError, in bounded time and memory."""

import bz2
from dataclasses import fields
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import fedtailor as ft
from fedtailor import networks
from fedtailor.core import memory_limits
from fedtailor.core.batch import take_samples
from fedtailor.data.datasets import DATASETS
from fedtailor.data.features.crema_d import read_audio
from fedtailor.data.features.files import read_crema_d
from fedtailor.data.formats.dataframe_pickle import unpickle_data_frames
from fedtailor.data.formats.text_tables import parse_table
from fedtailor.data.images.cifar import parse_sheet
from fedtailor.data.images.datasets import MNIST, Digits
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.tables.agreement import agree
from fedtailor.data.tables.columns import read_columns
from fedtailor.data.tables.encoding import join_sites, with_known_classes
from fedtailor.data.tables.loading import read_schema, read_summary
from fedtailor.data.tables.reading import read_table
from fedtailor.data.tables.settings import SiteSettings, TableSettings
from fedtailor.data.tables.site import open_site
from fedtailor.data.text.plays import join_roles
from fedtailor.data.text.reviews import parse_reviews
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.serialization import pack, unpack
from fedtailor.runs.toml import to_toml
from fedtailor.training.channel.channel import Channel
from fedtailor.training.participation import make_schedule
from fedtailor.training.unreliable import Unreliable, read_trace
from support import corrupted_files
from support.data_frame_pickles import data_frames
from support.feature_files import feature_file, wav_bytes
from support.fuzzing import Reader, fuzz
from support.mutations import ODD, damaged, odd_settings
from support.table_files import table_files

MEMORY = 2**26  # bytes of memory that readers believe the machine has


FRAMES = data_frames({1: [{"a": np.zeros(2), "label": np.zeros(2, np.int64)}]})
TABLE = b"1,-2.5,3\n4,5e-3,6\n"
RAW_TABLE, CSV, PARQUET, SUMMARY, SCHEMA = table_files()
PLAY = b"ACT I\n\n[Enter ANN]\n\nANN.\nGood\nday! [Exit.\n\nFIRST LORD.\nAdieu.\n\nHor.\nO!\n"
REVIEWS = b'category,text,movie_name,has_plot_and_reviews\nfresh,"A ""good""\nfilm",a,True\nrotten,Bad,b,False\n'
FEATURES, WAV = feature_file(), wav_bytes(np.arange(800, dtype=np.int16))


def _fields(kind: type[Any], prefix: str) -> list[str]:
    return [f"{prefix}{f.name}" for f in fields(kind)]


COMMON_FIELDS = [
    *(name for name in _fields(Experiment, "") if name not in ("method", "data", "network")),
    *(name for kind in DATASETS.values() for name in _fields(kind, "data.")),
    *_fields(ft.Augmentation, "augmentation."), *_fields(Channel, "channel."),
    *_fields(Unreliable, "unreliable."),
    *(name for kind in NETWORKS.values() for name in _fields(kind, "network.")),
    "method", "data", "network", "network.name", "nonsense", "method.nonsense", "method.inner.lr", "method.inner", "",
]  # fmt: skip
FIELDS = {name: [*_fields(kind, "method."), *COMMON_FIELDS] for name, kind in METHODS.items()}
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "participation": [0.5, 1.0],
    "method": {"name": "fedprox", "mu": 0.3},
    "data": {"name": "digits", "clients": 6, "alpha": 1.0},
    "network": {"name": "mlp", "hidden": [16, 8]},
    "unreliable": {"dropout": 0.1, "trace": [[0, 1, 2], [1]]},
}


def use(experiment: Experiment) -> None:
    """Build everything that is derived from the settings before training."""
    fed = experiment.load()
    experiment.model(fed)
    if (experiment.rounds or 20) <= 50:
        drawn = (experiment.rounds, experiment.participation, experiment.seed)
        make_schedule(fed.num_clients, *drawn, experiment.schedule, experiment.unreliable)
    assert experiment.torch_device.type in ("cpu", "cuda") and experiment.torch_dtype.is_floating_point


def read_toml(data: bytes, folder: Path) -> None:
    (folder / "experiment.toml").write_bytes(data)
    use(make_experiment(read_experiment_file(folder / "experiment.toml")))


def read_flags(words: list[str], folder: Path) -> None:
    use(make_experiment(parse_overrides(words).apply_to({})))


def read_npz(data: bytes, folder: Path) -> None:
    (folder / "client.npz").write_bytes(data)
    ft.Federation.from_folder(folder)


def read_image(data: bytes, folder: Path) -> None:
    """Read one image from a folder that also contains a valid one."""
    images = folder / "client" / "class"
    images.mkdir(parents=True, exist_ok=True)
    (images / "0.png").write_bytes(data)
    (images / "1.png").write_bytes(corrupted_files.IMAGES[0])
    ft.Federation.from_folder(folder)


def read_mnist(files: dict[str, bytes], folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    MNIST().read_folder(folder)


def read_features(data: bytes, folder: Path) -> None:
    (folder / "crema-d.npz").write_bytes(data)
    read_crema_d(folder).check()


def read_wav(data: bytes, folder: Path) -> None:
    (folder / "1001_A.wav").write_bytes(data)
    assert np.isfinite(read_audio(folder / "1001_A.wav")).all()


def read_federation(data: bytes, folder: Path) -> None:
    (folder / "fed").write_bytes(data)
    fed = ft.Federation.from_file(folder / "fed", verify=False)
    fed.make_preprocessing(torch.float32, torch.device("cpu"))(take_samples(fed.x, fed.train[0]))
    assert fed.class_counts(fed.train[0]) is None or len(fed.names) == len(fed.train)


def read_csv(data: bytes, folder: Path) -> None:
    (folder / "a.csv").write_bytes(data)
    found = read_columns(read_table(folder / "a.csv"), SiteSettings())
    assert all(np.isfinite(column.numbers).all() for column in found.values() if column.numbers is not None)


def read_parquet(data: bytes, folder: Path) -> None:
    (folder / "a.parquet").write_bytes(data)
    read_columns(read_table(folder / "a.parquet"), SiteSettings())


def read_table_schema(data: bytes, folder: Path) -> None:
    """Read a schema, and encode a table with it."""
    (folder / "schema.json").write_bytes(data)
    schema = read_schema(folder / "schema.json")
    site = with_known_classes(open_site("a", RAW_TABLE, schema.site_settings(), schema.seed), schema)
    found = join_sites([site], schema)
    assert np.isfinite(found["x"]).all()


def read_table_summary(data: bytes, folder: Path) -> None:
    """Read a summary, and agree on a schema with it."""
    (folder / "a.json").write_bytes(data)
    agree([read_summary(folder / "a.json")], TableSettings(target="y"))


def read_trace_file(data: bytes, folder: Path) -> None:
    (folder / "trace.json").write_bytes(data)
    read_trace(folder / "trace.json")


def read_packed(data: bytes, folder: Path) -> None:
    assert len(pack(unpack(data, max_bytes=10**6))) < len(data) + 10_000, "no more memory than the bytes themselves"


_FLAGS = st.tuples(st.sampled_from(COMMON_FIELDS), st.sampled_from(ODD).map(lambda value: str(value)[:6000])).map(
    lambda pair: [f"--{pair[0].replace('_', '-')}", pair[1]]
)
_ARGUMENTS = st.lists(st.text(max_size=8).map(lambda text: [text]) | _FLAGS, min_size=1, max_size=4)
_MNIST_FILES = st.builds(
    lambda name, data: corrupted_files.MNIST | {name: data},
    st.sampled_from(sorted(corrupted_files.MNIST)),
    damaged([*corrupted_files.MNIST.values(), *corrupted_files.IDX]),
)
_PNGS = damaged([picture for picture in corrupted_files.IMAGES if picture[1:4] == b"PNG"]).map(
    corrupted_files.repair_png_checksums
)

READERS = {
    "settings": Reader(lambda given, folder: use(make_experiment(given)), SETTINGS, odd_settings(FIELDS)),
    "toml": Reader(read_toml, to_toml(SETTINGS).encode(), damaged([to_toml(SETTINGS).encode()])),
    "flags": Reader(read_flags, ["--method", "ditto", "--rounds=3"], _ARGUMENTS.map(lambda parts: list(chain(*parts)))),
    "npz": Reader(
        read_npz, corrupted_files.NPZ[0], damaged(corrupted_files.NPZ) | corrupted_files.malformed_npz_files()
    ),
    "images": Reader(read_image, corrupted_files.IMAGES[0], damaged(corrupted_files.IMAGES) | _PNGS),
    "mnist": Reader(read_mnist, corrupted_files.MNIST, _MNIST_FILES),
    "sheets": Reader(
        lambda data, folder: parse_sheet(data),
        corrupted_files.SHEET,
        damaged([corrupted_files.SHEET]) | damaged([corrupted_files.SHEET]).map(corrupted_files.repair_png_checksums),
    ),
    "federation": Reader(
        read_federation,
        corrupted_files.FEDERATION,
        damaged([corrupted_files.FEDERATION])
        | damaged([corrupted_files.FEDERATION]).map(corrupted_files.change_federation),
    ),
    "data frames": Reader(lambda data, folder: unpickle_data_frames(data), FRAMES, damaged([FRAMES])),
    "tables": Reader(lambda data, folder: parse_table(data, 3, ",", "It"), TABLE, damaged([TABLE])),
    "csv": Reader(read_csv, CSV, damaged([CSV])),
    "parquet": Reader(read_parquet, PARQUET, damaged([PARQUET])),
    "schemas": Reader(read_table_schema, SCHEMA, damaged([SCHEMA])),
    "summaries": Reader(read_table_summary, SUMMARY, damaged([SUMMARY])),
    "features": Reader(read_features, FEATURES, damaged([FEATURES])),
    "recordings": Reader(read_wav, WAV, damaged([WAV])),
    "plays": Reader(lambda data, folder: join_roles({"hamlet_gut.txt": data}, "It").check(), PLAY, damaged([PLAY])),
    "reviews": Reader(
        lambda data, folder: parse_reviews(data, "It").check(),
        bz2.compress(REVIEWS),
        damaged([bz2.compress(REVIEWS)]) | damaged([REVIEWS]).map(bz2.compress),
    ),
    "traces": Reader(read_trace_file, b"[[0, 1], [2], []]", damaged([b"[[0, 1], [2], []]"])),
    "tensors": Reader(
        read_packed,
        corrupted_files.PACKED[0],
        damaged(corrupted_files.PACKED) | corrupted_files.malformed_safetensors(),
    ),
}


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has little memory, and use a tiny data set, so that valid input is read quickly."""
    for module in (networks, memory_limits):
        monkeypatch.setattr(module, "total_memory", lambda device: MEMORY)
    x, y = np.zeros((240, 1, 28, 28), np.uint8), np.arange(240) % 3
    monkeypatch.setattr(Digits, "read", lambda data: SampleTable(x, y, 3))


@pytest.mark.filterwarnings("ignore::UserWarning")  # pillow warns about damaged images
@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("thousands", [1, pytest.param(ceil(100 / len(READERS)), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_reader_untrusted_input_is_read_or_rejected(name: str, thousands: int, tmp_path: Path) -> None:
    fuzz(READERS[name], thousands, tmp_path)
