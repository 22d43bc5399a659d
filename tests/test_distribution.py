"""Tests of the wheel and the source distribution that `make dist` builds."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.installed_wheel import clean_environ, install_wheel

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
# what a source distribution contains besides src/: what builds and describes the package
PROJECT_FILES = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}
WRITTEN = {"PKG-INFO", "setup.cfg"}


def build(source: Path, out: Path, *options: str) -> Path:
    """Build one distribution as `make dist` does."""
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked where there is no git repository."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(unpacked, tmp_path_factory.mktemp("wheel"), "--wheel")


def test_sdist_contains_the_package_and_what_builds_it(unpacked: Path) -> None:
    assert {path.name for path in unpacked.iterdir()} == PROJECT_FILES | WRITTEN | {"src"}
    assert {path.name for path in (unpacked / "src").iterdir()} == {"fedtailor", "fedtailor.egg-info"}


def test_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "fedtailor"
    expected = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert files == expected and "fedtailor/py.typed" in files


def test_wheel_from_sdist_equals_wheel_from_checkout(wheel: Path, tmp_path: Path) -> None:
    direct = build(ROOT, tmp_path, "--wheel")
    assert direct.name == wheel.name  # also the version, which the sdist has without git
    assert contents(direct) == contents(wheel)


def test_installed_wheel_runs_the_quick_start(wheel: Path, tmp_path: Path) -> None:
    """Only with the declared dependencies, and outside of the checkout: package data must be in the wheel."""
    programs = install_wheel(wheel, tmp_path / "venv")
    work = tmp_path / "work"
    work.mkdir()
    environ = clean_environ() | {"FEDTAILOR_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"}

    def run(command: str) -> str:
        program, *words = command.split()
        words = [str(programs / program), *words]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=work, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    version = wheel.name.split("-")[1]
    assert run("fedtailor --version") == f"fedtailor {version}\n"
    table = run(
        "fedtailor compare local fedavg fedrep --data heart --network logistic --network.intercept_head true "
        "--metrics auc,accuracy --rounds 2 --batch-size 16 --folds 5 --out hospitals"
    )
    assert "Long Beach VA" in table and "Long Beach VA" in run("fedtailor show hospitals")
    run("fedtailor report hospitals --out report.html")
    assert "Long Beach VA" in (work / "report.html").read_text("utf-8")
    (info, *_) = work.glob("hospitals/*/run.json")
    assert json.loads(info.read_text())["fedtailor"] == version
    assert "Ditto" in run("fedtailor list methods")
    assert run("python -m fedtailor.papers list") and run("fedtailor env")
