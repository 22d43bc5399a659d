"""What runs in the process of a task. Only the process that started it sends it anything."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fedtailor.core.system import limit_cores
from fedtailor.tasks.schedule import progress_of
from fedtailor.tasks.task import Outcome, failure_text
from fedtailor.training.signals import was_signal_deferred


def run_child(
    task: bytes,
    messages: "Connection[Any, Any]",
    control: "Connection[Any, Any]",
    environ: Mapping[str, str],
    cores: int,
) -> None:
    """Run a pickled function of `on_round_end`, and send the progress of every round and then the outcome."""
    # Ctrl-C reaches all processes of a terminal. This one stops when the process that started it closes `control`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_stop_when_closed, args=(control,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environ)  # before CUDA starts; it reads which GPUs it may use
    limit_cores(cores)

    def on_round_end(record: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody reads any more
            messages.send(progress_of(record))

    try:
        outcome = Outcome(pickle.loads(task)(on_round_end))  # noqa: S301 (from the process that started this one)
    except Exception as error:
        outcome = Outcome(failure=failure_text(error))
    except KeyboardInterrupt:  # stopped, after a checkpoint was written
        return
    with suppress(OSError):
        messages.send(outcome)


def _stop(number: int, frame: Any) -> None:
    """Stop now, once, unless the run is finishing its round or has stopped after it: a batch system and
    `_stop_when_closed` may both send a signal, and an exception while the process ends would be printed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not was_signal_deferred():
        raise KeyboardInterrupt


def _stop_when_closed(control: "Connection[Any, Any]") -> None:
    """Stop this process, after its round, when the other end is closed: on request, or because that process died."""
    with suppress(EOFError, OSError):
        control.recv_bytes()
    if sys.platform == "win32":  # there, os.kill would end this process immediately
        signal.raise_signal(signal.SIGTERM)
    else:  # it also wakes up the main thread
        os.kill(os.getpid(), signal.SIGTERM)
