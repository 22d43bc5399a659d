"""The environment of a run: versions, machine, device, and the git commit of the working directory.

It contains no path and no name of a user or a computer, because run folders are shared.
"""

import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np
import torch

from fedtailor.core.system import available_cores
from fedtailor.version import VERSION

_GIT_TIMEOUT = 2.0  # seconds; a run does not wait longer for a slow file system
_GIT_STATUS = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]


def describe_environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return the environment as JSON values; `device` is that of the run, by default a GPU if available.

    >>> describe_environment(torch.device("cpu"))["device"]
    'cpu'
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    found = {
        "fedtailor": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        **_imported_versions("torchvision", "transformers", "datasets", "flwr"),
        "platform": " ".join(filter(None, [platform.system(), platform.machine(), *_libc()])),
        "cpu_cores": available_cores(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cuda": torch.version.cuda if is_cuda else None,
        "git": git_commit(),
    }
    return {name: value for name, value in found.items() if value is not None}


def git_commit() -> dict[str, Any] | None:
    """Return the commit of the repository in the working directory, and whether tracked files differ from it."""
    try:
        command = [*_GIT_STATUS, "--untracked-files=no", "--ignore-submodules"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or too slow
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    is_modified = any(not line.startswith("#") for line in lines)
    return {"commit": commit, "modified": is_modified} if re.fullmatch("[0-9a-f]{40,64}", commit) else None


def commit_text(info: Mapping[str, Any]) -> str:
    """Return the git commit in a run's `info` for tables and text.

    >>> commit_text({"environment": {"git": {"commit": "0123456789abcdef", "modified": True}}}), commit_text({})
    ('0123456789, modified', '–')
    """
    environment = info.get("environment")
    git = environment.get("git") if isinstance(environment, dict) else None
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return "–"
    return f"{git['commit'][:10]}{', modified' if git.get('modified') is True else ''}"


def optional_packages() -> dict[str, dict[str, str | None]]:
    """Return extra -> package -> installed version, or None if it is not installed."""
    try:
        requirements = metadata.requires("fedtailor") or []
    except metadata.PackageNotFoundError:  # FedTailor runs from its source
        return {}
    found: dict[str, dict[str, str | None]] = {}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra and extra[1] != "dev":
            found.setdefault(extra[1], {})[name[0]] = _installed_version(name[0])
    return found


def _imported_versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of those packages that this process has imported."""
    return {package: _installed_version(package) for package in packages if package in sys.modules}


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _libc() -> tuple[str, ...]:
    return platform.libc_ver() if sys.platform == "linux" else ()
