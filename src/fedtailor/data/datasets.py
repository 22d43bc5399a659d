"""Named data sets, partitioned into clients."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.partition import PARTITIONS, divide
from fedtailor.errors import Refused, unknown
from fedtailor.federation import Federation

Arrays = tuple[NDArray[Any], NDArray[Any]]  # inputs and labels


@dataclass(frozen=True)
class Dataset:
    """Where a data set comes from and how its inputs are normalised."""

    read: Callable[[Path | None], Arrays]
    network: str  # what to train on it unless told otherwise
    about: str
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None


def _digits(folder: Path | None) -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)


def _published(name: str) -> Callable[[Path | None], Arrays]:
    def read(folder: Path | None) -> Arrays:
        from fedtailor.data import fetch  # needs pillow and rich, which training does not

        return fetch.raw(name, folder)

    return read


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(_digits, "mlp", "1,797 handwritten digits, 8×8, inside scikit-learn"),
    "fashion-mnist": Dataset(
        _published("fashion-mnist"), "lenet5", "70,000 pictures of clothes, 28×28",
        (0.2860,), (0.3530,),
    ),
    "mnist": Dataset(
        _published("mnist"), "lenet5", "70,000 handwritten digits, 28×28", (0.1307,), (0.3081,)
    ),
    "cifar10": Dataset(
        _published("cifar10"), "lenet5", "60,000 colour pictures, 32×32",
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """A data set and its split. The publisher's training and test parts are pooled; every client holds out a share of
    its own samples for testing, in its own proportions of classes."""

    name: str = "digits"
    clients: int = 20
    partition: str = "dirichlet"  # iid, dirichlet, pathological or power_law
    alpha: float = 0.1  # of dirichlet: small, every client its own classes; large, all alike
    classes_per_client: int | None = None  # of pathological (2 if not given) and power_law (all)
    exponent: float = 1.0  # of power_law
    min_size: int = 10  # samples of the smallest client
    test: float = 0.25  # share of a client's samples that it is tested on
    folder: str | None = None  # where the publisher's files are; for the data set "folder", your clients
    seed: int | None = None  # of the split; the run's seed if not given

    def load(self) -> Federation:
        """The federation these settings describe."""
        seed = self.seed or 0
        if self.name == "folder":
            if self.folder is None:
                raise Refused("The data set 'folder' needs the folder of your clients: data.folder.")
            for f in fields(self):
                if f.name not in ("name", "folder", "test", "seed") and getattr(self, f.name) != f.default:
                    raise Refused(f"A folder has its clients already, so data.{f.name} has no meaning for it.")
            return Federation.from_folder(self.folder, test=self.test, seed=seed)
        if self.name not in DATASETS:
            raise unknown("data set", self.name, [*DATASETS, "folder"])
        if self.partition == "by_owner":
            raise Refused(f"{self.name} has no owners to split by; use Federation.from_dataset(dataset, owners).")
        if self.partition not in PARTITIONS:  # said before anything is downloaded
            raise unknown("partition", self.partition, PARTITIONS)
        dataset = DATASETS[self.name]
        x, y = dataset.read(None if self.folder is None else Path(self.folder))
        owned = divide(
            y, self.clients, self.partition, alpha=self.alpha, classes_per_client=self.classes_per_client,
            exponent=self.exponent, min_size=self.min_size, seed=seed,
        )  # fmt: skip
        return Federation.from_owners(
            x, y, owned, test=self.test, seed=seed, classes=int(y.max()) + 1, mean=dataset.mean,
            deviation=dataset.deviation, settings=asdict(self) | {"seed": seed},
        )  # fmt: skip


def load(name: str, **settings: Any) -> Federation:
    """A named data set, split into clients; the settings are the fields of `Data`.

    >>> load("digits", clients=5, partition="iid").num_clients
    5
    """
    known = [f.name for f in fields(Data)]
    for setting in settings:
        if setting not in known:
            raise unknown("setting of a data set", setting, known)
    return Data(name, **settings).load()
