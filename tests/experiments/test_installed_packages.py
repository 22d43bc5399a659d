"""Hashes of installed packages: what they cover, and what does not matter."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.experiments.installed_packages import PackageVersion, check_package, find_package
from support.own_package import NAME, installed, is_imported


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    with installed(tmp_path / "site") as folder:
        yield folder


def digest() -> str:
    return find_package(NAME).version.sha256


def test_hash_is_that_of_all_files_and_nothing_is_imported(package: Path) -> None:
    names = ["__init__.py", "data.py", "methods.py", "networks.py", "weights.bin"]
    hashes = {name: sha256((package / name).read_bytes()).hexdigest() for name in names}
    found = find_package(NAME)
    assert found.version == PackageVersion("1.2", sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest())
    assert found.files == tuple(names) and found.location == package and not is_imported()


def test_hash_ignores_line_endings_of_text_and_caches(package: Path) -> None:
    before = digest()
    for name in ("methods.py", "data.py"):
        (package / name).write_bytes((package / name).read_bytes().replace(b"\n", b"\r\n"))
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "data.cpython-311.pyc").write_bytes(b"anything")
    assert digest() == before


@pytest.mark.parametrize("change", ["text", "binary", "new", "renamed", "removed", "source of a cache alone"])
def test_hash_changes_with_every_file(change: str, package: Path) -> None:
    before, weights = digest(), package / "weights.bin"
    if change == "text":
        (package / "data.py").write_text((package / "data.py").read_text() + "# changed\n")
    elif change == "binary":  # whose line endings matter
        weights.write_bytes(b"\0\r\n")
        before = digest()
        weights.write_bytes(b"\0\n")
    elif change == "new":
        (package / "more").mkdir()
        (package / "more" / "names.txt").write_text("ann")
    elif change == "renamed":
        weights.rename(package / "other.bin")
    elif change == "removed":
        weights.unlink()
    else:  # Python imports it without a source file
        (package / "extra.pyc").write_bytes(b"code")
    assert digest() != before


def test_package_that_a_hash_cannot_cover_is_rejected(package: Path, tmp_path: Path) -> None:
    (package / "linked").symlink_to(tmp_path)
    assert "contains the link 'linked'" in error_message(lambda: find_package(NAME))
    for name in ("sys", "os", "json", "nosuch", "__main__"):  # of the interpreter, or nowhere
        assert f"'{name}'" in error_message(lambda name=name: find_package(name))  # type: ignore[misc]
    (package.parent / "loose.py").touch()
    assert "does not belong to an installed package" in error_message(lambda: find_package("loose"))


def test_mismatch_names_both_versions_and_hashes(package: Path) -> None:
    found = find_package(NAME).version
    check_package(NAME, found)
    other = PackageVersion("1.3", 64 * "a")
    assert error_message(lambda: check_package(NAME, other)) == (
        f"The package 'ward_models' on this machine is 1.2 (SHA-256 {found.sha256[:12]}), but the deployment needs "
        "1.3 (SHA-256 aaaaaaaaaaaa); install version 1.3."
    )
    same_version = PackageVersion("1.2", 64 * "a")
    assert "the versions are the same, but not the contents" in error_message(lambda: check_package(NAME, same_version))
