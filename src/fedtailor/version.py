"""Which FedTailor this is: the version of an installed package, or that of a source tree.

A package is built with the version of its git tag. A source tree has one version, whatever its commit and wherever it
is installed: a deployed server accepts only clients with its own version, and equal trees must agree.
"""

from hashlib import sha256
from pathlib import Path

SOURCE_VERSION = "0.1.0.dev0"  # before the next release; also `fallback_version` in pyproject.toml


def find_version(folder: Path) -> str:
    """Return the version of the package that was installed in a folder, or `SOURCE_VERSION`.

    >>> find_version(Path("nowhere")) == SOURCE_VERSION
    True
    """
    prefix, suffix = "fedtailor-", ".dist-info"  # a source tree may contain the .egg-info of another commit
    found = [path.name for path in folder.glob(f"{prefix}*{suffix}")]
    return found[0].removeprefix(prefix).removesuffix(suffix) if found else SOURCE_VERSION


VERSION = find_version(Path(__file__).parent.parent)


def source_hash() -> str:
    """Return a hash of the package's Python files. Unlike the version, it differs between commits of a source tree.

    >>> len(source_hash())
    16
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]
