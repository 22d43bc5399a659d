"""The space on the disk of an operator's folder, and what happens when it is full."""

import errno
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIN_CHECKPOINTS = 10  # for which there should be space
_MIN_BYTES = 2**20  # for the status, records, logs, and Flower's database
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Disk:
    """The space on a disk, in bytes."""

    free: int
    total: int
    checkpoint: int  # size of the last checkpoint; 0 before the first one

    @property
    def is_full(self) -> bool:
        """Whether the next checkpoint does not fit."""
        return self.free < self.checkpoint + _MIN_BYTES

    @property
    def is_low(self) -> bool:
        """Whether the next checkpoints do not fit."""
        return self.free < MIN_CHECKPOINTS * self.checkpoint + _MIN_BYTES


def disk_of(folder: Path) -> Disk:
    """Return the space on the disk of an operator's folder.

    >>> disk_of(Path(".")).checkpoint
    0
    """
    usage = shutil.disk_usage(folder)
    return Disk(usage.free, usage.total, _newest_checkpoint_bytes(folder / "run" / "checkpoints"))


def _newest_checkpoint_bytes(checkpoints: Path) -> int:
    with suppress(OSError):  # it may just be removed
        newest = max((path for path in checkpoints.iterdir() if path.name.isdecimal()), default=None, key=_number)
        return sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
    return 0


def _number(path: Path) -> int:
    return int(path.name)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that a disk is full.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
    True
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_full_disk(folder: Path) -> str:
    """Return a sentence that says that the disk is full, without its period.

    >>> describe_full_disk(Path("."))[:23]
    "The disk of '.' is full"
    """
    disk = disk_of(folder)
    checkpoint = f", a checkpoint takes {format_bytes(disk.checkpoint)}" if disk.checkpoint else ""
    return f"The disk of '{folder}' is full: {format_bytes(disk.free)} free{checkpoint}"


def format_bytes(count: float) -> str:
    """Return a number of bytes for people.

    >>> format_bytes(60_000), format_bytes(3_200_000_000)
    ('60 kB', '3.2 GB')
    """
    unit, *larger = ("bytes", "kB", "MB", "GB", "TB")
    while count >= 1000 and larger:
        count, unit, *larger = count / 1000, *larger
    return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
