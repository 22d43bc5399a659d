"""Data sets of features of audio, video, images, and text, which docs/data.md explains how to compute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from fedtailor.data.dataset import OwnedData, PublishedData
from fedtailor.data.features.files import read_crema_d, read_crisis_mmd
from fedtailor.data.sample_table import SampleTable


class _FeatureFile:
    """Features in one .npz file, which cannot be downloaded."""

    publisher: ClassVar[str]

    @property
    def how_to_get(self) -> str:
        return f"get it from {self.publisher}, write its features with examples/feature_files.py,"


@dataclass(frozen=True, kw_only=True)
class CremaD(_FeatureFile, OwnedData):
    """Spoken sentences with four emotions: features of audio and video."""

    name: ClassVar[str] = "crema-d"
    network: ClassVar[str | None] = "audio_video"
    samples: ClassVar[str] = "4,798"
    owners: ClassVar[str] = "91 speakers"
    publisher: ClassVar[str] = "https://github.com/CheyneyComputerScience/CREMA-D"
    license: ClassVar[str] = "ODbL 1.0"

    folder: Annotated[str | None, "folder of crema-d.npz, or this file"] = None

    def read_folder(self, folder: Path) -> SampleTable:
        return read_crema_d(folder)


@dataclass(frozen=True, kw_only=True)
class CrisisMMD(_FeatureFile, PublishedData):
    """Tweets about disasters, eight humanitarian categories: features of images and texts."""

    name: ClassVar[str] = "crisis-mmd"
    network: ClassVar[str | None] = "image_text"
    samples: ClassVar[str] = "15,845"
    publisher: ClassVar[str] = "https://crisisnlp.qcri.org/crisismmd (version 2.0)"
    license: ClassVar[str] = "CC BY-NC-SA 4.0"

    alpha: Annotated[float, "of dirichlet; small: clients with few classes each, large: similar clients"] = 1.0
    common_test: Annotated[
        float | Literal["publisher"] | None,
        "fraction of all samples that is held out as a test set common to all clients; publisher: its own test set",
    ] = "publisher"
    dev: Annotated[bool, "use the publisher's development part as training data as well"] = False
    folder: Annotated[str | None, "folder of crisis-mmd.npz, or this file"] = None

    def read_folder(self, folder: Path) -> SampleTable:
        return read_crisis_mmd(folder, self.dev)
