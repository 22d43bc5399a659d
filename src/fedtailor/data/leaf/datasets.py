"""LEAF's data sets by name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from fedtailor.core.fields import PositiveInt
from fedtailor.data.dataset import OwnedData
from fedtailor.data.download.cache import files_fingerprint
from fedtailor.data.images.datasets import EMNIST
from fedtailor.data.leaf.femnist import read_femnist
from fedtailor.data.leaf.files import find_files, how_to_make
from fedtailor.data.leaf.letters import select_letters
from fedtailor.data.leaf.sent140 import read_sent140
from fedtailor.data.leaf.shakespeare import read_shakespeare
from fedtailor.data.sample_table import SampleTable


@dataclass(frozen=True, kw_only=True)
class LeafData(OwnedData):
    """A data set that LEAF's scripts write as JSON files, which are converted once."""

    caches_folder: ClassVar[bool] = True
    leaf_folder: ClassVar[str]  # of the data set in LEAF's repository, below data

    folder: Annotated[
        str | None, "LEAF's folder of the data set, with JSON files in data/train, data/test, or data/all_data"
    ] = None

    @property
    def how_to_get(self) -> str:
        return f"make it with {how_to_make(self.leaf_folder)}"

    def fingerprint(self, folder: Path) -> str:
        # of the files that are read; the folder also has LEAF's intermediate files, for FEMNIST 800,000 images
        return files_fingerprint(path for paths, _ in find_files(folder, self.leaf_folder) for path in paths)


@dataclass(frozen=True, kw_only=True)
class FEMNIST(LeafData):
    """Handwritten digits and letters by their writers, 28×28, 62 classes."""

    name: ClassVar[str] = "femnist"
    leaf_folder: ClassVar[str] = "femnist"
    network: ClassVar[str | None] = "cnn"
    samples: ClassVar[str] = "805,263"
    owners: ClassVar[str] = "3,550 writers"
    publisher: ClassVar[str] = "LEAF, from NIST Special Database 19"
    license: ClassVar[str] = "public domain (NIST)"

    def read_folder(self, folder: Path) -> SampleTable:
        return read_femnist(folder)


@dataclass(frozen=True, kw_only=True)
class FEMNISTLetters(FEMNIST):
    """Handwritten letters a to j, 28×28, split as in FedProx and Self-FL.

    The images are those of LEAF's FEMNIST if `folder` names it, and otherwise those of EMNIST, which is downloaded.
    Client u has the letters u, u + 1, ... modulo 10 and lognormal(4, 1) + 5 samples. In FedProx's script, clients have
    three letters, and share images because it starts again with the same ones for almost every client; here, every
    image belongs to at most one client.
    """

    name: ClassVar[str] = "femnist-letters"
    network: ClassVar[str | None] = "logistic"
    samples: ClassVar[str] = "18,000 to 20,000"
    owners: ClassVar[str] = "3,550 writers with data.folder"
    publisher: ClassVar[str] = "LEAF or EMNIST, from NIST Special Database 19"

    clients: Annotated[int | None, "number of clients; with by_owner, none: all owners, else drawn at random"] = 200
    partition: Annotated[str, "lognormal, by_owner, or another partition"] = "lognormal"
    classes_per_client: Annotated[int | None, "letters per client; FedProx has 3"] = 5
    folder: Annotated[str | None, "LEAF's folder of FEMNIST; default: download EMNIST"] = None
    log_mean: Annotated[float | None, "of lognormal, mean of the logarithm of sizes"] = 4.0
    log_std: Annotated[float, "of lognormal, standard deviation of the logarithm of sizes"] = 1.0
    min_size: Annotated[int, "samples of a client in addition to the log-normal number"] = 5
    test: Annotated[
        float | Literal["publisher"],
        "fraction of each client's samples that is held out for testing; publisher: LEAF's",
    ] = 0.1

    @property
    def cache_name(self) -> str:
        return FEMNIST.name

    def read(self) -> SampleTable:
        return select_letters(EMNIST().read() if self.folder is None else super().read())

    def download(self) -> Path | None:
        return EMNIST().download() if self.folder is None else super().download()

    @property
    def is_available(self) -> bool | None:
        return EMNIST().is_available or super().is_available


@dataclass(frozen=True, kw_only=True)
class Sent140(LeafData):
    """Tweets by their accounts, 25 words, positive or negative."""

    name: ClassVar[str] = "sent140"
    leaf_folder: ClassVar[str] = "sent140"
    network: ClassVar[str | None] = "lstm"
    samples: ClassVar[str] = "1,600,498"
    owners: ClassVar[str] = "660,120 Twitter accounts, most with one or two tweets"
    publisher: ClassVar[str] = "LEAF, from Sentiment140"
    license: ClassVar[str] = "not stated by the publisher; cite Go, Bhayani, and Huang 2009"

    min_size: Annotated[int, "minimum number of tweets per account; smaller accounts are left out"] = 30
    words: Annotated[PositiveInt | None, "size of the vocabulary, the most frequent words; none: all words"] = 10_000

    def read_folder(self, folder: Path) -> SampleTable:
        return read_sent140(folder)

    def read(self) -> SampleTable:
        table = super().read()
        if self.words is None or table.vocabulary is None or self.words >= len(table.vocabulary):
            return table
        assert isinstance(table.x, np.ndarray)  # words are numbered by their frequency
        return replace(table, x=np.where(table.x > self.words, 0, table.x), vocabulary=table.vocabulary[: self.words])


@dataclass(frozen=True, kw_only=True)
class Shakespeare(LeafData):
    """Lines of roles in plays, 80 characters, of which the next one is predicted."""

    name: ClassVar[str] = "shakespeare"
    leaf_folder: ClassVar[str] = "shakespeare"
    network: ClassVar[str | None] = "lstm"
    samples: ClassVar[str] = "4,226,158"
    owners: ClassVar[str] = "1,129 roles"
    publisher: ClassVar[str] = "LEAF, from Project Gutenberg"
    license: ClassVar[str] = "public domain"

    @property
    def how_to_get(self) -> str:
        return f"use shakespeare-plays, which is downloaded, or {super().how_to_get}"

    def read_folder(self, folder: Path) -> SampleTable:
        return read_shakespeare(folder)
