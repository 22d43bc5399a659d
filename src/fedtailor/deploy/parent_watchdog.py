"""Run one of Flower's commands so that it ends when its parent process or one of its threads ends.

This file is executed by its path (`python -P parent_watchdog.py PARENT_PID COMMAND ...`), so that Flower's processes do
not import FedTailor, which takes a while.
"""

import os
import runpy
import signal
import sys
import threading
import time
import traceback

_GRACE_PERIOD = 5.0  # seconds between SIGTERM and SIGKILL


def _watch_parent(parent: int) -> None:
    """Stop this process when its parent has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_PERIOD)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process leads a group that includes its children


def _exit_on_thread_error(args: threading.ExceptHookArgs) -> None:
    """Exit when a thread fails, for example the one that sends heartbeats: the remaining threads would be useless."""
    traceback.print_exception(args.exc_value)
    _exit(1)


def _exit(code: int) -> None:
    """Exit without joining threads: Flower's client has one that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    parent, *sys.argv = int(sys.argv[1]), *sys.argv[2:]
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    threading.excepthook = _exit_on_thread_error
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        _exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


if __name__ == "__main__":
    main()
