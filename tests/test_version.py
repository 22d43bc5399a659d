"""Tests of the version: of an installed package, and of a source tree."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from fedtailor.version import SOURCE_VERSION, VERSION, find_version

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("folder", "version"),
    [
        ("fedtailor-1.2.3.dist-info", "1.2.3"),
        ("fedtailor-1.3.0.dev7.dist-info", "1.3.0.dev7"),
        ("fedtailor.egg-info", SOURCE_VERSION),  # of a source tree, written at some earlier commit
        ("fedtailor_extras-9.0.dist-info", SOURCE_VERSION),
    ],
)
def test_find_version_uses_the_package_beside_the_code(tmp_path: Path, folder: str, version: str) -> None:
    (tmp_path / folder).mkdir()
    assert find_version(tmp_path) == version


def test_version_of_source_tree_needs_no_library_no_git_and_no_installation(tmp_path: Path) -> None:
    """A deployed server accepts only clients with its version, so a copy of its tree must have the same."""
    copy = tmp_path / "copy" / "version.py"
    copy.parent.mkdir()
    copy.write_text((ROOT / "src/fedtailor/version.py").read_text())
    words = [sys.executable, "-I", "-S", "-c", f"import runpy; print(runpy.run_path({str(copy)!r})['VERSION'])"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={}, cwd=tmp_path)
    assert done.stdout.strip() == SOURCE_VERSION == VERSION


def test_source_version_is_the_fallback_of_builds_without_git() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]
    assert settings["fallback_version"] == SOURCE_VERSION and Version(SOURCE_VERSION).is_devrelease


def test_source_version_is_newer_than_the_last_release() -> None:
    words = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    tag = done.stdout.strip()
    is_release = subprocess.run(["git", "describe", "--tags", "--exact-match"], capture_output=True, cwd=ROOT)
    if done.returncode or is_release.returncode == 0:
        pytest.skip("no release before this commit, or no git")
    assert Version(SOURCE_VERSION) > Version(tag)
