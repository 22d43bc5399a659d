"""Named data sets and their partition into clients."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.federation import Federation
from fedtailor.data.partition import PARTITIONS, hold_out_common, partition_samples
from fedtailor.errors import DataError, unknown_name

Arrays = tuple[NDArray[Any], NDArray[Any]]  # inputs and labels
_OWN_SETTINGS = {  # of data sets that are already split into clients; a run sets the seed of any data set
    "folder": ("name", "folder", "test", "seed", "classes", "regression", "normalize"),
    "pfllib": ("name", "folder", "seed", "normalize"),
    "file": ("name", "file", "seed", "normalize"),
}


@dataclass(frozen=True)
class Dataset:
    """How to read a data set and normalize its inputs."""

    read: Callable[[Path | None], Arrays]
    network: str  # default network
    description: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def _digits(folder: Path | None) -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)


def _published_reader(name: str) -> Callable[[Path | None], Arrays]:
    def read(folder: Path | None) -> Arrays:
        from fedtailor.data import download  # requires pillow and rich, which training does not need

        return download.load_arrays(name, folder)

    return read


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(_digits, "mlp", "1,797 handwritten digits, 8×8, part of scikit-learn"),
    "fashion-mnist": Dataset(
        _published_reader("fashion-mnist"), "lenet5", "70,000 images of clothes, 28×28",
        (0.2860,), (0.3530,),
    ),
    "mnist": Dataset(
        _published_reader("mnist"), "lenet5", "70,000 handwritten digits, 28×28", (0.1307,), (0.3081,)
    ),
    "cifar10": Dataset(
        _published_reader("cifar10"), "lenet5", "60,000 color images, 32×32",
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
}  # fmt: skip

OWN_DATA = {  # readers of your own files, which data.folder or data.file names -> description
    "folder": "your own data: one .npz file or one folder of images per client",
    "pfllib": "a data set that PFLlib generated: config.json, train/0.npz, test/0.npz, and so on",
    "file": "a federation in one file, for data larger than memory (fedtailor data convert)",
}


def known_data() -> list[str]:
    """Return the names of all data sets.

    >>> known_data()[0]
    'digits'
    """
    return [*DATASETS, *OWN_DATA]


@dataclass(frozen=True)
class Data:
    """A data set and its split into clients.

    The publisher's training and test sets are pooled. Each client holds out a fraction of its samples for testing, with
    the same proportions of classes as its training data.
    """

    name: Annotated[str, "digits, fashion-mnist, mnist, cifar10; your own data: folder, pfllib, file"] = "digits"
    clients: Annotated[int, "number of clients; your own data has its own"] = 20
    partition: Annotated[str, "iid, dirichlet, pathological, or power_law"] = "dirichlet"
    alpha: Annotated[float, "of dirichlet; small: clients with few classes each, large: similar clients"] = 0.1
    classes_per_client: Annotated[int | None, "of pathological (default 2) and power_law (default all)"] = None
    exponent: Annotated[float, "of power_law"] = 1.0
    min_size: Annotated[int, "minimum number of samples per client"] = 10
    test: Annotated[float, "fraction of each client's samples that is held out for testing"] = 0.25
    common_test: Annotated[
        float | None, "fraction of all samples that is held out as a test set common to all clients"
    ] = None
    folder: Annotated[str | None, "folder of the publisher's files, or of your own data"] = None
    file: Annotated[str | None, "the federation file, with --data file"] = None
    seed: Annotated[int | None, "of the split; default: the run's seed"] = None
    classes: Annotated[int | None, "number of classes in the folder, if some have no samples"] = None
    regression: Annotated[bool | None, "whether the folder's targets are numbers, if they could be classes"] = None

    normalize: Annotated[
        bool, "normalize each channel by its mean and standard deviation over the training samples of all clients"
    ] = False

    def load(self) -> Federation:
        """Return the federation that these settings describe."""
        fed = self._load()
        return fed.with_normalization() if self.normalize else fed

    def _load(self) -> Federation:
        seed = self.seed or 0
        if self.name in OWN_DATA:
            return self._load_own(seed)
        if self.classes is not None or self.regression is not None:
            raise DataError("data.classes and data.regression apply only to the data set 'folder'.")
        if self.file is not None:
            raise DataError("data.file applies only to the data set 'file'; use --data file.")
        if self.name not in DATASETS:
            raise unknown_name("data set", self.name, known_data())
        if self.partition == "by_owner":
            raise DataError(f"{self.name} has no owners to split by; use Federation.from_dataset(dataset, owners).")
        if self.partition not in PARTITIONS:  # checked before the download
            raise unknown_name("partition", self.partition, PARTITIONS)
        dataset = DATASETS[self.name]
        x, y = dataset.read(None if self.folder is None else Path(self.folder))
        rest, common = np.arange(len(y)), None
        if self.common_test is not None:
            rest, common = hold_out_common(y, rest, self.common_test, seed)
        owned = partition_samples(
            y[rest], self.clients, self.partition, alpha=self.alpha, classes_per_client=self.classes_per_client,
            exponent=self.exponent, min_size=self.min_size, seed=seed,
        )  # fmt: skip
        return Federation.from_owners(
            x, y, [rest[own] for own in owned], test=self.test, seed=seed, classes=int(y.max()) + 1, common_test=common,
            mean=dataset.mean, std=dataset.std, settings=asdict(self) | {"seed": seed},
        )  # fmt: skip

    def _own_path(self) -> str:
        """Return the folder or file of the user's own data."""
        source = "file" if self.name == "file" else "folder"
        path: str | None = getattr(self, source)
        if path is None:
            raise DataError(f"The data set '{self.name}' needs data.{source}, the {source} of your clients.")
        for f in fields(self):
            if f.name not in _OWN_SETTINGS[self.name] and getattr(self, f.name) != f.default:
                raise DataError(f"The data set '{self.name}' is already split into clients; remove data.{f.name}.")
        return path

    def _load_own(self, seed: int) -> Federation:
        path = self._own_path()
        if self.name == "folder":
            return Federation.from_folder(
                path, test=self.test, seed=seed, classes=self.classes, regression=self.regression
            )
        fed = Federation.from_pfllib(path) if self.name == "pfllib" else Federation.from_file(path)
        return replace(fed, settings={**fed.settings, "seed": seed})  # recorded for every data set

    def convert(self, path: str | Path) -> Federation:
        """Write the data set to a federation file and open it; a folder's clients are read one after another.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Data("digits", clients=4).convert(f"{folder}/digits.safetensors").num_clients
        4
        """
        if self.name == "folder":
            return self._convert_folder(path)
        self.load().save(path)
        return Federation.from_file(path)

    def _convert_folder(self, path: str | Path) -> Federation:
        from fedtailor.data.client_folders import list_clients  # requires pillow

        found = list_clients(Path(self._own_path()), test=self.test, seed=self.seed or 0)
        extra: dict[str, Any] = {} if found.class_names is None else {"class_names": found.class_names}
        clients = ((name, *arrays) for name, arrays in found.read())
        return Federation.write(
            path, clients, classes=self.classes, regression=self.regression, settings=asdict(self), **extra
        )


def load(name: str, **settings: Any) -> Federation:
    """Load a named data set, split into clients; the settings are the fields of `Data`.

    >>> load("digits", clients=5, partition="iid").num_clients
    5
    """
    known = [f.name for f in fields(Data)]
    for setting in settings:
        if setting not in known:
            raise unknown_name("setting of a data set", setting, known)
    return Data(name, **settings).load()
