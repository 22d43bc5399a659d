"""Why a process ended: its exit code or signal, and whether the system ran out of memory."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def describe_exit(code: int, ran_out_of_memory: bool = False) -> str:
    """Return how a process ended, as the end of a sentence; `code` is that of `subprocess.Popen`.

    >>> describe_exit(-9), describe_exit(1)
    ('was killed by signal 9 (SIGKILL)', 'ended with exit code 1')
    >>> describe_exit(-9, ran_out_of_memory=True)
    'was killed by the system because memory ran out'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL and ran_out_of_memory:
        return "was killed by the system because memory ran out"
    with suppress(ValueError):
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"


def exit_code(pid: int) -> int | None:
    """Return the exit code of another process's child that has ended, as of `subprocess.Popen`.

    Linux keeps it until the parent asks for it, which Flower's SuperExec does only when it starts another process. None
    if it is not available.

    >>> exit_code(os.getpid()) is None  # it has not ended
    True
    """
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None
    return None


def memory_kills() -> int:
    """Return how many processes the system has killed since its start because memory ran out; 0 if it does not count.

    >>> memory_kills() >= 0
    True
    """
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def boot_id() -> str:
    """Return what identifies the system's current start; empty if it is not available.

    >>> boot_id() == boot_id()
    True
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
