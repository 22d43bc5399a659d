"""Versions and hashes of installed packages, found without importing them."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from fedtailor.core.fields import Constraint, check_fields
from fedtailor.errors import ConfigError

_HEX = set("0123456789abcdef")
_SHOWN_DIGITS = 12  # of a hash, in messages and in a consent
_MAX_FILES = 100_000
_MAX_TEXT_BYTES = 2**24  # a larger file is hashed as it is
_Hash = Annotated[str, Constraint("64 hexadecimal digits", lambda text: len(text) == 64 and set(text) <= _HEX)]


@dataclass(frozen=True)
class PackageVersion:
    """The version of a package, and a hash of all its files."""

    version: str
    sha256: _Hash

    def __post_init__(self) -> None:
        check_fields(self, "code.")

    @property
    def short_hash(self) -> str:
        """The first digits of the hash."""
        return self.sha256[:_SHOWN_DIGITS]

    def __str__(self) -> str:
        return f"{self.version} (SHA-256 {self.short_hash})"


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package or module: what `import NAME` would execute."""

    name: str
    version: PackageVersion
    location: Path
    files: tuple[str, ...]


def package_of(reference: str) -> str:
    """Return the name of the package that a reference to own code belongs to.

    >>> package_of("my_pkg.methods:MyMethod")
    'my_pkg'
    """
    return reference.partition(":")[0].partition(".")[0]


def find_package(name: str) -> InstalledPackage:
    """Return an installed package without importing it.

    The hash covers the names and the contents of all files of the package, except for Python's caches. Line endings of
    text files do not matter, because some tools convert them.

    >>> find_package("numpy").location.name
    'numpy'
    """
    spec = _find_spec(name)
    try:
        files = _list_files(name, spec)
        hashes = {relative: _hash_file(path) for relative, path in files.items()}
    except OSError as error:
        raise ConfigError(f"The package '{name}' cannot be read: {error.strerror}; install it again.") from error
    digest = sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    location = Path(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin or "")
    return InstalledPackage(name, PackageVersion(_version(name), digest), location, tuple(hashes))


def check_package(name: str, required: PackageVersion) -> None:
    """Raise an error unless a package is installed with exactly this version and these files.

    >>> check_package("nowhere", PackageVersion("1.0", 64 * "0"))
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no package 'nowhere' on this machine; install it with pip.
    """
    found = find_package(name).version
    if found != required:
        fix = f"install version {required.version}"
        if found.version == required.version:
            fix = "install the same files, because the versions are the same, but not the contents"
        raise ConfigError(
            f"The package '{name}' on this machine is {found}, but the deployment needs {required}; {fix}."
        )


def _find_spec(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # a module without a specification, such as __main__
        spec = None
    if spec is None:
        raise ConfigError(f"There is no package '{name}' on this machine; install it with pip.")
    if spec.origin is None or not Path(spec.origin).is_file():  # a namespace package, or a part of the interpreter
        raise ConfigError(f"'{name}' is not an installed package with the file __init__.py, or a module with a file.")
    return spec


def _list_files(name: str, spec: ModuleSpec) -> Mapping[str, Path]:
    """Return the files of a package by their relative paths, in order."""
    if not spec.submodule_search_locations:
        origin = Path(str(spec.origin))
        return {origin.name: origin}
    if len(spec.submodule_search_locations) != 1:
        raise ConfigError(f"The package '{name}' is in several folders; install it as one package.")
    folder, found = Path(spec.submodule_search_locations[0]), dict[str, Path]()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if "__pycache__" in relative.parts:
            continue
        if path.is_symlink():
            raise ConfigError(
                f"The package '{name}' contains the link '{relative}', which a hash cannot cover; copy it."
            )
        if path.is_file():
            found[relative.as_posix()] = path
        if len(found) > _MAX_FILES:
            raise ConfigError(f"The package '{name}' has more than {_MAX_FILES:,} files; split it.")
    return found


def _hash_file(path: Path) -> str:
    stat = path.stat()
    return _hash_content(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=_MAX_FILES)
def _hash_content(path: Path, size: int, *changed: int) -> str:
    """Return the hash of a file; a process that checks a package for every message reads only what has changed."""
    with path.open("rb") as file:
        if size > _MAX_TEXT_BYTES:
            digest = sha256()
            while chunk := file.read(_MAX_TEXT_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
        content = file.read()
    is_text = b"\0" not in content
    return sha256(content.replace(b"\r\n", b"\n") if is_text else content).hexdigest()


def _version(name: str) -> str:
    """Return the version of the distribution that contains a package."""
    try:
        return version(next(iter(_distributions(tuple(sys.path)).get(name, [name]))))
    except PackageNotFoundError as error:
        fix = "make it a package with a pyproject.toml, and install it with pip on all machines"
        raise ConfigError(f"'{name}' does not belong to an installed package; {fix}.") from error


@lru_cache(maxsize=1)
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the distributions of each package; they are the same until the path changes."""
    return packages_distributions()
