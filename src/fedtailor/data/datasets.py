"""Named data sets."""

from dataclasses import fields
from typing import Any

from fedtailor.data.clinical.datasets import TCGABRCA, Heart
from fedtailor.data.dataset import Data
from fedtailor.data.features.datasets import CremaD, CrisisMMD
from fedtailor.data.federation import Federation
from fedtailor.data.generated import Gaussian, Rectangles
from fedtailor.data.images.datasets import CIFAR10, CIFAR100, EMNIST, MNIST, Digits, FashionMNIST, TinyImageNet
from fedtailor.data.leaf.datasets import FEMNIST, FEMNISTLetters, Sent140, Shakespeare
from fedtailor.data.sensors.datasets import HAPT, KUHAR
from fedtailor.data.text.datasets import FilmReviews, ShakespearePlays
from fedtailor.data.user_data import FileData, FolderData, PFLlibData, TablesData
from fedtailor.errors import unknown_name

DATASETS: dict[str, type[Data]] = {
    kind.name: kind
    for kind in (
        Digits, FashionMNIST, MNIST, EMNIST, CIFAR10, CIFAR100, TinyImageNet,
        FEMNIST, FEMNISTLetters, Sent140, Shakespeare, ShakespearePlays, FilmReviews,
        HAPT, KUHAR, CremaD, CrisisMMD, Heart, TCGABRCA, Gaussian, Rectangles,
        FolderData, TablesData, PFLlibData, FileData,
    )
}  # fmt: skip


def load(name: str, **settings: Any) -> Federation:
    """Load a named data set, split into clients; `fedtailor list data NAME` shows its settings.

    >>> load("digits", clients=5, partition="iid").num_clients
    5
    """
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    known = [f.name for f in fields(DATASETS[name])]
    for setting in settings:
        if setting not in known:
            raise unknown_name(f"setting of the data set {name}", setting, known)
    return DATASETS[name](**settings).load()
