"""Base classes of data sets. Each data set is a frozen dataclass of settings, like a method or a network."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.fields import AtLeastTwo, NonNegativeInt, check_fields
from fedtailor.data.download.cache import download_folder, ensure_cached, folder_fingerprint, is_cached, read_cached
from fedtailor.data.download.source import RemoteFile, Source
from fedtailor.data.federation import Federation
from fedtailor.data.normalization import Normalization
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.splits.class_fractions import PARTITIONS, Indices, SplitSettings
from fedtailor.data.splits.client_indices import read_indices
from fedtailor.data.splits.owners import choose_owners
from fedtailor.data.splits.partition import divide_like, hold_out_common, partition_samples
from fedtailor.errors import ConfigError, DataError, unknown_name

log = logging.getLogger("fedtailor")
BY_OWNER = "by_owner"
BY_INDICES = "indices"
PUBLISHER = "publisher"


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, split into clients."""

    name: ClassVar[str]
    network: ClassVar[str | None] = None  # default network
    samples: ClassVar[str] = ""  # number of samples; empty if it depends on the settings or the user's files
    owners: ClassVar[str] = ""  # natural clients, such as "30 people"; empty if there are none
    publisher: ClassVar[str] = ""  # where the data is published
    license: ClassVar[str] = ""

    seed: Annotated[int | None, "of the split; default: the run's seed"] = None
    normalize: Annotated[
        Literal["published", Normalization],
        "mean and standard deviation of inputs: published (if there are any), none, half (0.5 and 0.5), or channel or "
        "pixel (those of the training samples of all clients)",
    ] = "published"

    repeat: Annotated[
        NonNegativeInt | None,
        "split each client's samples anew into training and test samples; each number is another draw",
    ] = None
    folds: Annotated[AtLeastTwo | None, "of repeat: its numbers 0 to folds − 1 are the folds of a cross-validation"] = (
        None
    )

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.folds is not None and self.repeat is None:
            raise ConfigError("data.folds needs data.repeat, the number of a fold from 0.")

    def load(self) -> Federation:
        """Return the federation that these settings describe."""
        fed = self.make_federation()
        fed = fed if self.normalize == "published" else fed.with_normalization(self.normalize)
        return fed if self.repeat is None else fed.resplit(self.repeat, self.folds)

    def make_federation(self) -> Federation:
        """Return the federation with its published normalization."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the name and the settings, for the record of a run."""
        return {"name": self.name, **asdict(self), "seed": self.seed or 0}

    def convert(self, path: str | Path) -> Federation:
        """Write the data set to a federation file and open it.

        >>> import tempfile
        >>> from fedtailor.data.datasets import DATASETS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DATASETS["digits"](clients=4).convert(f"{folder}/digits.safetensors").num_clients
        4
        """
        self.load().save(path)
        return Federation.from_file(path)

    def download(self) -> Path | None:
        """Download or convert the data set to the cache and return its file; None if it needs no download."""
        raise DataError(f"The data set '{self.name}' is your own data, which cannot be downloaded.")

    @property
    def is_available(self) -> bool | None:
        """Whether the data set can be loaded without a network; None if it is the user's own."""
        return None


@dataclass(frozen=True, kw_only=True)
class PartitionedData(Data):
    """A table of samples that is split into clients.

    By default, the publisher's training and test sets are pooled, and each client holds out a fraction of its samples
    for testing, with the same proportions of classes as its training data.
    """

    mean: ClassVar[tuple[float, ...] | None] = None  # per channel
    std: ClassVar[tuple[float, ...] | None] = None

    clients: Annotated[int | None, "number of clients; with by_owner, none: all owners"] = 20
    partition: Annotated[str, f"{', '.join(PARTITIONS)}, {BY_OWNER}, or {BY_INDICES}: docs/splits.md"] = "dirichlet"
    alpha: Annotated[float, "of dirichlet; small: clients with few classes each, large: similar clients"] = 0.1
    cap: Annotated[bool, "of dirichlet; clients that have 1/clients of all samples get no more"] = True
    classes_per_client: Annotated[
        int | None, "of pathological, blocks, and lognormal (default 2), pfedme (3), and power_law (all)"
    ] = None
    exponent: Annotated[float, "of power_law"] = 1.0
    log_std: Annotated[float, "of lognormal and pfedme, standard deviation of the logarithm of sizes"] = 2.0
    log_mean: Annotated[float | None, "of lognormal, mean of the logarithm of sizes; none: all samples are divided"] = (
        None
    )
    owners_per_client: Annotated[int, "of by_owner"] = 1
    indices: Annotated[str | None, "of indices, a JSON file with one list of sample indices per client"] = None
    min_size: Annotated[int, "minimum number of samples per client"] = 10
    redraw: Annotated[bool, "draw again if a client is smaller than min_size, instead of moving samples to it"] = False
    test: Annotated[
        float | Literal["publisher"],
        "fraction of each client's samples that is held out for testing; publisher: its own test set, divided alike",
    ] = 0.25
    common_test: Annotated[
        float | Literal["publisher"] | None,
        "fraction of all samples that is held out as a test set common to all clients; publisher: its own test set",
    ] = None

    def read(self) -> SampleTable:
        """Return all samples."""
        raise NotImplementedError

    def make_federation(self) -> Federation:
        self._check_settings()  # before a download
        table, seed = self.read(), self.seed or 0
        rest, common = self._take_common_test(table, seed)
        names, owned, test = self._assign(table, rest, seed)
        return Federation.from_owners(
            table.x, table.y, owned, names=names, test=test, seed=seed, classes=table.classes,
            regression=table.classes is None, survival=table.survival, common_test=common, mean=self.mean, std=self.std,
            class_names=table.class_names, settings=self.describe(),
        )  # fmt: skip

    def download(self) -> Path | None:
        return None

    @property
    def is_available(self) -> bool | None:
        return True

    def _check_settings(self) -> None:
        if self.partition == BY_OWNER and not self.owners:
            raise DataError(f"{self.name} has no owners to split by; use Federation.from_dataset(dataset, owners).")
        if self.partition not in (*PARTITIONS, BY_OWNER, BY_INDICES):
            raise unknown_name("partition", self.partition, [*PARTITIONS, *[BY_OWNER] * bool(self.owners), BY_INDICES])
        if (self.partition == BY_INDICES) != (self.indices is not None):
            raise DataError("The partition 'indices' needs data.indices, a JSON file, and no other partition has it.")
        if self.clients is None and self.partition in PARTITIONS:
            raise DataError(f"The partition '{self.partition}' needs data.clients, the number of clients.")
        if self.test == self.common_test == PUBLISHER:
            raise DataError("The publisher's test set is either data.test or data.common_test, not both.")

    def _take_common_test(self, table: SampleTable, seed: int) -> tuple[Indices, Indices | None]:
        """Return the samples of the clients, and those of the common test set."""
        every = np.arange(table.num_samples)
        if self.common_test is None:
            return every, None
        if isinstance(self.common_test, str):
            is_test = _publisher_test(self, table)
            return every[~is_test], every[is_test]
        return hold_out_common(table.strata, every, self.common_test, seed)

    def _assign(
        self, table: SampleTable, samples: Indices, seed: int
    ) -> tuple[Sequence[str] | None, list[Indices], Any]:
        """Return the names of the clients, if they have any, the indices of their samples, and which of these are for
        testing: a fraction of them, or one boolean per sample."""
        test: Any = _publisher_test(self, table) if self.test == PUBLISHER else self.test
        if self.indices is not None:
            given = read_indices(Path(self.indices), table.num_samples)
            return given.names, given.samples, test if given.is_test is None else given.is_test
        if self.partition == BY_OWNER and table.owner is not None:
            names, owned = choose_owners(
                table.owner[samples], table.owner_names, self.clients, self.owners_per_client, self.min_size, seed
            )
            return names, [samples[own] for own in owned], test
        if self.test != PUBLISHER:
            return None, self._partition(table, samples, seed), test
        owned = self._partition(table, samples[~test[samples]], seed)
        held = divide_like(table.strata, owned, samples[test[samples]], seed)
        return None, [np.concatenate(pair) for pair in zip(owned, held, strict=True)], test

    def _partition(self, table: SampleTable, samples: Indices, seed: int) -> list[Indices]:
        settings = {f.name: getattr(self, f.name) for f in fields(SplitSettings)}
        owned = partition_samples(table.strata[samples], self.clients or 0, self.partition, seed=seed, **settings)
        return [samples[own] for own in owned]


def _publisher_test(data: Data, table: SampleTable) -> NDArray[np.bool_]:
    """Return which samples are in the publisher's test set."""
    if table.is_test is None:
        raise DataError(f"{data.name} has no test set of its publisher; set data.test to a fraction.")
    return table.is_test


@dataclass(frozen=True, kw_only=True)
class PublishedData(PartitionedData):
    """A data set that is read from the publisher's files, or from an archive that is downloaded once."""

    source: ClassVar[Source | RemoteFile | None] = None  # None: it cannot be downloaded
    caches_folder: ClassVar[bool] = False  # whether reading the publisher's files takes so long that a copy is cached

    folder: Annotated[str | None, "folder with the publisher's files; default: download them"] = None

    def read_folder(self, folder: Path) -> SampleTable:
        """Return the samples in a folder of the publisher's files."""
        raise NotImplementedError

    def read_archive(self, archive: Path) -> SampleTable:
        """Return the samples in an archive whose checksum has been compared."""
        raise NotImplementedError

    def fingerprint(self, folder: Path) -> str:
        """Return a hash that changes when the files that `read_folder` reads do; a cached copy is then outdated."""
        return folder_fingerprint(folder)

    @property
    def how_to_get(self) -> str:
        """How to get a data set that cannot be downloaded, as a part of a sentence."""
        return f"get it from {self.publisher}"

    def is_complete(self, folder: Path) -> bool:
        """Return whether an installed package has all files."""
        return folder.is_dir()

    @property
    def cache_name(self) -> str:
        """Name of the cached table; data sets with variants add the variant."""
        return self.name

    def read(self) -> SampleTable:
        if self.folder is not None:
            return self._read_given_folder(Path(self.folder).expanduser())
        if self._installed is not None:
            return self.read_folder(self._installed)
        return read_cached(self._ensure_downloaded())

    def download(self) -> Path | None:
        if self.folder is None:
            return self._installed or self._ensure_downloaded()
        folder = Path(self.folder).expanduser()
        if self.caches_folder:
            return self._ensure_converted(folder)
        self.read_folder(folder)  # the files are used in place; an error says what is missing
        return None

    @property
    def is_available(self) -> bool | None:
        return self._installed is not None or is_cached(self.cache_name)

    @property
    def _installed(self) -> Path | None:
        """The folder of the source's package, if it is installed."""
        folder = None if self.source is None else self.source.installed
        return folder if folder is not None and self.is_complete(folder) else None

    def _ensure_downloaded(self) -> Path:
        from fedtailor.data.download.fetch import fetch  # requires rich, which training does not need

        source = self.source
        if source is None:
            raise DataError(f"{self.name} cannot be downloaded; {self.how_to_get} and set data.folder.")
        return ensure_cached(
            self.cache_name, source.fingerprint, 2 * source.bytes,
            lambda work: self.read_archive(fetch(source, work, download_folder(self.name))),
        )  # fmt: skip

    def _read_given_folder(self, folder: Path) -> SampleTable:
        return read_cached(self._ensure_converted(folder)) if self.caches_folder else self.read_folder(folder)

    def _ensure_converted(self, folder: Path) -> Path:
        source = self.fingerprint(folder)
        name = f"{self.cache_name}-{source[:12]}"
        return ensure_cached(name, source, 0, lambda work: self._convert(folder))

    def _convert(self, folder: Path) -> SampleTable:
        if folder.is_dir():
            log.warning("Converting the files of %s in '%s', which is done once.", self.name, folder)
        return self.read_folder(folder)


@dataclass(frozen=True, kw_only=True)
class OwnedData(PublishedData):
    """A published data set with natural clients, such as writers or patients, which are the default clients."""

    clients: Annotated[int | None, "number of clients; with by_owner, none: all owners, else drawn at random"] = None
    partition: Annotated[str, f"{BY_OWNER}, {', '.join(PARTITIONS)}, or {BY_INDICES}: docs/splits.md"] = BY_OWNER
    min_size: Annotated[int, "minimum number of samples per client; with by_owner, smaller owners are left out"] = 2
