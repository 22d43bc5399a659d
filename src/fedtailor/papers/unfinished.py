"""Checkpoints of a paper's unfinished runs, from which a later command with the same code continues."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from fedtailor.core.method import Method
from fedtailor.core.model import Model
from fedtailor.data.federation import Federation
from fedtailor.errors import RunError
from fedtailor.progress import OnRoundEnd
from fedtailor.runs.run import Run
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import train
from fedtailor.version import source_hash

if TYPE_CHECKING:
    from fedtailor.runs.checkpoint import Checkpoint

log = logging.getLogger("fedtailor")


@contextmanager
def checkpoint_folder(results: Path) -> Iterator[Path | None]:
    """Yield the folder for checkpoints beside a folder of results; it is removed if no unfinished run is left.

    Without safetensors, there are no checkpoints, and runs that were stopped start again from round 1.

    >>> from tempfile import mkdtemp
    >>> with checkpoint_folder(Path(mkdtemp())) as folder: folder.parent.name
    '.unfinished'
    """
    if find_spec("safetensors") is None:
        yield None
        return
    own = results.absolute() / ".unfinished" / source_hash()
    _remove_those_of_other_code(own)
    try:
        yield own
    finally:
        for folder in (own, own.parent):
            with suppress(OSError):  # it does not exist, or is not empty
                folder.rmdir()


def _remove_those_of_other_code(own: Path) -> None:
    """Remove checkpoints from which other code continued, unless a command uses them now."""
    for folder in own.parent.glob("*/"):
        runs = list(folder.iterdir())
        if folder != own and not any(map(is_in_use, runs)):
            log.warning("FedTailor has changed since %d unfinished runs were stopped; they start again.", len(runs))
            rmtree(folder, ignore_errors=True)


def is_in_use(folder: Path) -> bool:
    """Return whether a process trains the run in a folder.

    >>> is_in_use(Path("nowhere"))
    False
    """
    from fedtailor.runs.files import is_locked

    return is_locked(folder / "lock")


def train_or_continue(
    folder: Path, config: TrainingConfig, method: Method, model: Model, fed: Federation, on_round_end: OnRoundEnd | None
) -> Run:
    """Train with checkpoints in `folder`, or continue from the last one of a run whose process died or was stopped."""
    from fedtailor.runs.files import folder_lock  # needs safetensors, like all run folders
    from fedtailor.training.resume import continue_run

    found = _last_checkpoint(folder)
    if found is None:
        rmtree(folder, ignore_errors=True)
        return train(config, method, model, fed, on_round_end, folder, save_models=False)
    with folder_lock(folder):
        return continue_run(folder, config, method, model, fed, found, on_round_end, save_models=False)


def _last_checkpoint(folder: Path) -> "Checkpoint | None":
    from fedtailor.training.resume import newest_checkpoint

    try:
        return newest_checkpoint(folder)
    except RunError:
        log.warning("The checkpoints in '%s' are damaged, so this run starts again.", folder)
        return None
