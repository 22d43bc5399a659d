"""Runs one of Flower's commands such that it ends with whoever started it, and never half-way.

Started by its path (`python -P leash.py PARENT COMMAND ...`), for Flower's processes have no need of this library,
which takes a while to import.
"""

import os
import runpy
import signal
import sys
import threading
import time
import traceback

_GRACE = 5.0  # seconds for leaving in good order


def _follow(parent: int) -> None:
    """Leave when the process that started this one is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # it leads a group of its own, in which are those that it started


def _fall(death: threading.ExceptHookArgs) -> None:
    """A thread died: of heartbeats, say. Without it the rest would go on and be of no use."""
    traceback.print_exception(death.exc_value)
    _leave(1)


def _leave(code: int) -> None:
    """Leave without waiting for threads: Flower's client keeps one for ever that serves nobody any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    parent, *sys.argv = int(sys.argv[1]), *sys.argv[2:]
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    threading.excepthook = _fall
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


if __name__ == "__main__":
    main()
