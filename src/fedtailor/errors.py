"""Errors that FedTailor raises on purpose. Each message names the thing, the problem, and the fix."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from unicodedata import category

_OUT_OF_DESCRIPTORS = (
    "this process has too many files and connections open; raise its limit (ulimit -n, LimitNOFILE= of systemd)"
)
_MAX_REASON_LENGTH = 300  # characters of an error that others raise


class FedTailorError(ValueError):
    """Base class of all errors that FedTailor raises on purpose; the message is one or two sentences.

    A message may repeat a name from an untrusted file, so control characters are escaped.

    >>> str(FedTailorError(f"There is no field '{chr(27)}[2J'.")) == "There is no field '" + chr(92) + "x1b[2J'."
    True
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(c if category(c) not in ("Cc", "Cs") else repr(c)[1:-1] for c in message))


class ConfigError(FedTailorError):
    """A setting, a method, a model, or a combination of them is invalid."""


class DataError(FedTailorError):
    """A client's data, or a file that should contain data, is invalid."""


class RunError(FedTailorError):
    """A run cannot be trained, saved, read, or resumed."""


class DamagedRunError(RunError):
    """A file of a run differs from what was written."""


class DeployError(FedTailorError):
    """A federation of real clients cannot be set up or run."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that does not exist, with the closest existing one.

    >>> str(unknown_name("method", "fedavgg", ["fedavg", "ditto"]))
    "There is no method 'fedavgg'; did you mean 'fedavg'?"
    """
    names = list(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names) or 'none'}."
    return ConfigError(f"There is no {kind} '{name}'; {hint}")


def reason(error: BaseException, with_type: bool = False) -> str:
    """Return why something failed, as part of a sentence: one line, without its period, and never empty.

    Of an error that FedTailor did not raise on purpose, it is the first sentence. With `with_type`, it starts with the
    error's type.

    >>> reason(DataError("There is no file 'x.npz'. Create it."))
    "There is no file 'x.npz'. Create it"
    >>> reason(OSError(28, "No space left on device")), reason(ValueError())
    ('No space left on device', 'ValueError')
    >>> reason(ZeroDivisionError("division by zero"), with_type=True)
    'ZeroDivisionError: division by zero'
    """
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return _OUT_OF_DESCRIPTORS
    text = getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), "")
    if not isinstance(error, FedTailorError):
        text = text.partition(". ")[0][:_MAX_REASON_LENGTH]
    name, text = type(error).__name__, text.rstrip(" .:")
    return f"{name}: {text}" if text and with_type else text or name
