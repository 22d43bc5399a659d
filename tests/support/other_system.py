"""Make this process look like macOS or Windows to FedTailor: what these systems lack is removed.

`python other_system.py win32|darwin WORDS` runs `fedtailor WORDS`. Processes that it spawns look the same, because they
import this file again. This is no substitute for a test on the system itself.
"""

import os
import signal
import sys
import types
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

WINDOWS_LACKS = {
    os: (
        "fork", "register_at_fork", "sched_getaffinity", "getloadavg", "sysconf", "killpg", "getpgrp", "getsid",
        "O_DIRECTORY",
    ),
    signal: ("SIGKILL", "SIGCHLD", "SIGHUP"),  # not pthread_sigmask, with which processes are spawned on Linux
}  # fmt: skip
IMPORTED_BEFORE = (
    "multiprocessing.popen_spawn_posix", "multiprocessing.util", "subprocess",
    "rich.console", "safetensors.torch", "scipy.stats", "sklearn", "torch", "typer",
)  # fmt: skip
WINDOWS_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty")
MACOS_LACKS: dict[types.ModuleType, tuple[str, ...]] = {os: ("sched_getaffinity",)}


class MissingModules(MetaPathFinder):
    """Fails imports of the modules that Windows does not have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in WINDOWS_MODULES:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def pretend(system: str) -> None:
    """Remove what a system lacks; libraries that look at the system when they are imported are imported before."""
    for name in IMPORTED_BEFORE:
        import_module(name)
    for module, names in (WINDOWS_LACKS if system == "win32" else MACOS_LACKS).items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if system == "win32":
        sys.modules["msvcrt"] = make_msvcrt()
        for name in WINDOWS_MODULES:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, MissingModules())
    sys.platform = system


def make_msvcrt() -> Any:
    """Return the locks of Windows, made from those of this system."""
    import fcntl

    module: Any = types.ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK, module.LK_UNLCK = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

    def locking(descriptor: int, mode: int, size: int) -> None:
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError as error:
            raise PermissionError(error.errno, error.strerror) from error

    module.locking = locking
    return module


if __name__ in ("__main__", "__mp_main__"):
    pretend(os.environ["FEDTAILOR_TEST_SYSTEM"])

if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    from fedtailor.cli.main import main

    main()
