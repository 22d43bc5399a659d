"""An environment with the wheel and the packages that it declares, and none of the others that are installed here."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Create an environment, and return its folder of programs.

    The declared dependencies are links to those of this environment, because downloading PyTorch takes minutes.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True, env=clean_environ())
    (packages,) = folder.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("fedtailor-*.dist-info")
    for found in _dependencies(Distribution.at(metadata), set()):
        for entry in _entries(found):
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    subprocess.run([*pip, "check"], check=True, env=clean_environ())
    return programs


def clean_environ() -> dict[str, str]:
    """Return the variables of this process without those that make other packages visible."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _dependencies(package: Distribution, seen: set[str]) -> Iterator[Distribution]:
    """Yield the packages that a package requires, and those that they require."""
    for line in package.requires or []:
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = distribution(name)
        yield found
        yield from _dependencies(found, seen)


def _entries(package: Distribution) -> Iterator[Path]:
    """Yield the files and folders of a package in site-packages."""
    site = Path(str(package.locate_file("")))
    names = {path.parts[0] for path in package.files or []} - {"..", "__pycache__"}
    yield from (site / name for name in sorted(names) if not name.startswith("__editable__"))
