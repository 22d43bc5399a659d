"""The files of a data set as its publisher provides them: unpacked in a folder, or in the publisher's archive.

Folders are untrusted: nothing outside of them is read. An archive is opened only if its checksum is the published one.
"""

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fedtailor.data.download.source import RemoteFile
from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.errors import DataError, reason

MAX_FILE_BYTES = 1 << 30  # of one file; twice the largest published file
_AR_MAGIC = b"!<arch>\n"  # start of a Debian package, which is an ar archive


class PublisherFiles(ABC):
    """Files by the publisher's names; a file is read when it is needed."""

    def __init__(self, where: str, hint: str) -> None:
        self.where, self.hint = where, hint

    def __contains__(self, name: str) -> bool:
        return any(self._has(variant) for variant in _variants(name))

    def __getitem__(self, name: str) -> bytes:
        """Return the content of a file; IDX files may be gzipped, or renamed as some unpacking programs do."""
        for variant in _variants(name):
            if self._has(variant):
                return self._read(variant)
        raise DataError(f"{self.where} has no {name}; {self.hint}.")

    def describe(self, name: str) -> str:
        """Return the start of an error message about a file."""
        return f"{self.where} has a file {name} that"

    def lines(self, name: str, max_bytes: int = 1 << 24) -> list[str]:
        """Return the lines of a text file, without empty ones."""
        content = self[name]
        if len(content) > max_bytes:
            raise DataError(f"{self.describe(name)} is too large; {self.hint}.")
        return [line for line in content.decode("utf-8", "replace").splitlines() if line.strip()]

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files in a folder."""

    @abstractmethod
    def _has(self, name: str) -> bool:
        """Return whether there is a file with exactly this name."""

    @abstractmethod
    def _read(self, name: str) -> bytes:
        """Return the content of a file that exists."""


def _variants(name: str) -> list[str]:
    if not name.endswith("-ubyte"):
        return [name]
    renamed = name.replace("-idx", ".idx")
    return [name, renamed, f"{name}.gz", f"{renamed}.gz"]


class FolderFiles(PublisherFiles):
    """Files in a folder inside the folder `root` that the user named."""

    def __init__(self, folder: Path, root: Path, hint: str) -> None:
        super().__init__(f"The folder {folder}", hint)
        self._folder, self._root = folder, root
        self._checked: set[Path] = set()  # folders inside of the root

    def names(self, folder: str) -> list[str]:
        path = self._folder / folder
        if not path.is_dir():
            raise DataError(f"{self.where} has no folder {folder}; {self.hint}.")
        self._check_folder(path)
        return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))

    def _has(self, name: str) -> bool:
        return (self._folder / name).is_file()  # reading a pipe or a device may never end

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        self._check_folder(path.parent)
        check_entry(path, self._root)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{self.describe(name)} is too large; is it the right file?")
        return path.read_bytes()

    def _check_folder(self, folder: Path) -> None:
        if folder not in self._checked:
            if not folder.resolve().is_relative_to(self._root.resolve()):
                raise DataError(
                    f"{folder.name!r} is a link that leads out of '{self._root}'; replace it with the data."
                )
            self._checked.add(folder)


class ZipFiles(PublisherFiles):
    """Files in a folder of a .zip archive."""

    def __init__(self, archive: zipfile.ZipFile, top: str, where: str, hint: str) -> None:
        super().__init__(where, hint)
        self._archive = archive
        self._members = {info.filename.removeprefix(f"{top}/"): info for info in archive.infolist()}
        self._folders = defaultdict[str, list[str]](list)
        for name in self._members:
            folder, _, file = name.rpartition("/")
            self._folders[folder].append(file)

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self._folders[folder] if name)

    def _has(self, name: str) -> bool:
        return name in self._members

    def _read(self, name: str) -> bytes:
        return self._archive.read(self._members[name])


class UnpackedFiles(PublisherFiles):
    """Files in memory."""

    def __init__(self, contents: Mapping[str, bytes], where: str, hint: str) -> None:
        super().__init__(where, hint)
        self._contents = contents

    def names(self, folder: str) -> list[str]:
        paths = map(PurePosixPath, self._contents)
        return sorted(path.name for path in paths if path.parent == PurePosixPath(folder))

    def _has(self, name: str) -> bool:
        return name in self._contents

    def _read(self, name: str) -> bytes:
        return self._contents[name]


@contextmanager
def open_folder(folder: Path, hint: str) -> Iterator[PublisherFiles]:
    """Open the unpacked files in a folder; `hint` says what it must contain, as the end of an error message.

    >>> with open_folder(Path("nowhere"), "it must contain a.txt") as files:
    ...     files["a.txt"]
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no folder nowhere; it must contain a.txt.
    """
    with _readable(folder, hint) as root:
        yield FolderFiles(root, root, hint)


@contextmanager
def open_published(folder: Path, archive: RemoteFile, marker: str) -> Iterator[PublisherFiles]:
    """Open the unpacked files if a folder contains the file `marker`, directly or in `top`; else open the archive.

    >>> archive = RemoteFile(("https://host/x.zip",), sha256="", bytes=1, top="x")
    >>> with open_published(Path("."), archive, "a.txt") as files:
    ...     files["a.txt"]
    Traceback (most recent call last):
    fedtailor.errors.DataError: The folder . has no a.txt; it must contain https://host/x.zip or the files in it.
    """
    hint = f"it must contain {archive} or the files in it"
    with _readable(folder, hint) as root:
        for place in (root, root / archive.top):
            unpacked = FolderFiles(place, root, hint)
            if marker in unpacked:
                yield unpacked
                return
        path = root / archive.name
        if not path.is_file():
            raise DataError(f"The folder {folder} has no {marker}; {hint}.")
        if mismatch := archive.mismatch(path):
            raise DataError(f"{path} has {mismatch}; download it again, or unpack it if you trust it.")
        with _opened_archive(path, archive.top, hint) as files:
            yield files


@contextmanager
def _readable(folder: Path, hint: str) -> Iterator[Path]:
    try:
        root = folder.expanduser()
        if not root.is_dir():
            raise DataError(f"There is no folder {folder}; {hint}.")
        yield root
    except (OSError, RuntimeError) as error:  # RuntimeError: expanduser finds no home folder
        raise DataError(f"The folder {folder} cannot be read ({reason(error)}); {hint}.") from error


@contextmanager
def _opened_archive(path: Path, top: str, hint: str) -> Iterator[PublisherFiles]:
    try:
        if path.suffix != ".zip":
            yield UnpackedFiles(_read_tar(path, top), f"The archive {path}", hint)
            return
        with zipfile.ZipFile(path) as archive:
            yield ZipFiles(archive, top, f"The archive {path}", hint)
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked ({reason(error)}); download it again.") from error


def _read_tar(path: Path, top: str) -> dict[str, bytes]:
    contents = dict[str, bytes]()
    with tarfile.open(path) as archive:
        for member in archive:  # in the order of the archive, because seeking would decompress it again
            if member.isreg() and (stream := archive.extractfile(member)):
                contents[member.name.removeprefix(f"{top}/")] = stream.read()
    return contents


def unpack_package(data: bytes, where: str, hint: str) -> PublisherFiles:
    """Return the files of a registry's package, a .tgz or .deb, by their names without folders; nothing is written.

    The caller must have compared the archive's checksum: Python 3.11 loops forever on some invalid archives.

    >>> unpack_package(b"nonsense", "The file", "try again")
    Traceback (most recent call last):
    fedtailor.errors.DataError: The file cannot be unpacked (file could not be opened successfully); download it again.
    """
    contents = dict[str, bytes]()
    try:
        with tarfile.open(fileobj=io.BytesIO(_deb_data(data) if data.startswith(_AR_MAGIC) else data)) as archive:
            for member in archive:
                if member.isreg() and (stream := archive.extractfile(member)):
                    name = PurePosixPath(member.name).name
                    if member.size > MAX_FILE_BYTES:
                        raise tarfile.ReadError(f"{name} is larger than a data set")
                    contents[name] = stream.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise DataError(f"{where} cannot be unpacked ({reason(error)}); download it again.") from error
    return UnpackedFiles(contents, where, hint)


def _deb_data(data: bytes) -> bytes:
    """Return the data.tar.* of a Debian package: an `ar` archive, in which each member follows a header of 60 bytes."""
    offset = len(_AR_MAGIC)
    while len(header := data[offset : offset + 60]) == 60:
        digits, offset = header[48:58].strip(), offset + 60
        if not digits.isdigit():
            raise tarfile.ReadError("a member without a size")
        if header.startswith(b"data.tar"):
            return data[offset : offset + int(digits)]
        offset += int(digits) + int(digits) % 2  # members start at even offsets
    raise tarfile.ReadError("it contains no data.tar")
