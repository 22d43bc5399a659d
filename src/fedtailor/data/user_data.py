"""Readers of users' own files as data sets, which are already split into clients."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fedtailor.data.dataset import Data
from fedtailor.data.federation import Federation
from fedtailor.data.tables.settings import TableSettings
from fedtailor.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class FolderData(Data):
    """Your own data: one .npz file or one folder of images per client."""

    name: ClassVar[str] = "folder"

    folder: Annotated[str | None, "the folder of your clients"] = None
    test: Annotated[float, "fraction of each client's samples that is held out for testing"] = 0.25
    classes: Annotated[int | None, "number of classes, if some have no samples"] = None
    regression: Annotated[bool | None, "whether targets are numbers, if they could be classes"] = None
    survival: Annotated[bool, "whether targets are pairs (event, time)"] = False

    def make_federation(self) -> Federation:
        return Federation.from_folder(
            _require(self, "folder"), test=self.test, seed=self.seed or 0, classes=self.classes,
            regression=self.regression, survival=self.survival,
        )  # fmt: skip

    def convert(self, path: str | Path) -> Federation:
        """Write the clients to a federation file one after another, so that they may be larger than memory."""
        from fedtailor.data.user_files.client_folders import list_clients  # requires pillow

        if self.repeat is not None:  # all samples of a client are split anew
            return super().convert(path)
        options: dict[str, Any] = {"test": self.test, "seed": self.seed or 0, "survival": self.survival}
        found = list_clients(Path(_require(self, "folder")), **options)
        extra: dict[str, Any] = {} if found.class_names is None else {"class_names": found.class_names}
        clients = ((name, *arrays) for name, arrays in found.read())
        return Federation.write(
            path, clients, classes=self.classes, regression=self.regression, survival=self.survival,
            settings=self.describe(), **extra,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PFLlibData(Data):
    """A data set that PFLlib generated: config.json, train/0.npz, test/0.npz, and so on."""

    name: ClassVar[str] = "pfllib"

    folder: Annotated[str | None, "the folder that PFLlib wrote"] = None

    def make_federation(self) -> Federation:
        return _with_seed(Federation.from_pfllib(_require(self, "folder")), self.seed)


@dataclass(frozen=True, kw_only=True)
class TablesData(TableSettings, Data):
    """Your own tables, .csv or .parquet: one file per client, or one file with a column of clients."""

    name: ClassVar[str] = "tables"

    folder: Annotated[str | None, "folder with one file per client; the client has the file's name"] = None
    file: Annotated[str | None, "one file with the rows of all clients, instead of a folder"] = None
    files: Annotated[dict[str, str] | None, "the file of each client as JSON, instead of a folder"] = None
    client: Annotated[str | None, "column of data.file that names the client of each row"] = None
    schema: Annotated[str | None, "file on which the sites agreed (fedtailor tables agree); default: agree now"] = None

    def __post_init__(self) -> None:
        TableSettings.__post_init__(self)
        Data.__post_init__(self)

    def make_federation(self) -> Federation:
        given = [source for source in (self.folder, self.file, self.files) if source is not None]
        if len(given) != 1:
            raise ConfigError("The data set 'tables' needs one of data.folder, data.file, and data.files.")
        settings = {f.name: getattr(self, f.name) for f in fields(TableSettings)}
        return Federation.from_tables(given[0], client=self.client, schema=self.schema, seed=self.seed or 0, **settings)


@dataclass(frozen=True, kw_only=True)
class FileData(Data):
    """A federation in one file, for data larger than memory (fedtailor data convert)."""

    name: ClassVar[str] = "file"

    file: Annotated[str | None, "the federation file"] = None

    def make_federation(self) -> Federation:
        return _with_seed(Federation.from_file(_require(self, "file")), self.seed)


def _require(data: Data, field: str) -> str:
    path: str | None = getattr(data, field)
    if path is None:
        raise DataError(f"The data set '{data.name}' needs data.{field}, the {field} of your clients.")
    return path


def _with_seed(fed: Federation, seed: int | None) -> Federation:
    return replace(fed, settings={**fed.settings, "seed": seed or 0})  # recorded for every data set
