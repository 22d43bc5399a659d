"""Import users' own code by reference, such as my_module:MyMethod, if the user consents.

A file can name code, but only the user can allow its import: by naming the same code on the command line, or with
--allow-code. Whatever views a run folder has no consent and imports nothing.
"""

import importlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.core.code_reference import is_reference, short_name
from fedtailor.core.method import Method
from fedtailor.errors import ConfigError, FedTailorError, reason, unknown_name
from fedtailor.training.simulate import check_method_class

PYTHON_ARGUMENTS = {"method": "method", "network": "model", "data": "fed"}  # of ft.resume, by part
_ALLOW = "--allow-code"
_IN_TEXT = re.compile(r"[\w.]+:[\w.]+")
_MAX_LENGTH = 300  # characters of a reference


@dataclass(frozen=True)
class CodeConsent:
    """Which code the user allows to be imported: the references that the user named, or all code."""

    named: frozenset[str] = frozenset()
    everything: bool = False
    how: str = "only a command in which you name it imports it"  # how to give consent, as the end of an error message

    def load(self, part: str, reference: str) -> Any:
        """Import what a reference names, if the user consents; `part` is the setting that names it."""
        check_importable(part, reference)
        if not self.everything and reference not in self.named:
            raise ConfigError(f"The {part} '{reference}' is code that importing would execute; {self.how}.")
        return import_reference(reference, from_current_folder=True)

    def load_method(self, part: str, reference: str) -> type[Method]:
        """Import the class of a method, if the user consents."""
        kind = self.load(part, reference)
        if not isinstance(kind, type) or not issubclass(kind, Method):
            raise ConfigError(f"The {part} '{reference}' must be a class that inherits from ft.Method.")
        check_method_class(kind)
        return kind


NO_CONSENT = CodeConsent()


def parse_consent(command: str, words: Sequence[str]) -> tuple[list[str], CodeConsent]:
    """Return the arguments of a command without --allow-code, and the consent that they give.

    >>> words, consent = parse_consent("run", ["--method", "my_module:MyMethod"])
    >>> consent.named
    frozenset({'my_module:MyMethod'})
    """
    rest = [word for word in words if word != _ALLOW]
    named = frozenset(found for word in rest for found in _IN_TEXT.findall(word))
    how = f"if you trust it, name it in the command, or run: {shlex.join(['fedtailor', command, *rest, _ALLOW])}"
    return rest, CodeConsent(named, _ALLOW in words, how)


def rename_part(part: str, settings: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Return a part's settings with a reference that the user named as the name of its own code, which may have been
    moved to another module. Of a built-in wrapper method, this is the innermost method.

    >>> rename_part("method", {"name": "lag", "inner": {"name": "__main__:Mine", "lr": 0.1}}, "my_module:Mine")
    {'name': 'lag', 'inner': {'name': 'my_module:Mine', 'lr': 0.1}}
    """
    name, inner = str(settings.get("name")), settings.get("inner")
    if part == "method" and not is_reference(name) and isinstance(inner, Mapping):
        return {**settings, "inner": rename_part(part, inner, reference)}
    if not is_reference(name) and name not in ("own data", reference):
        raise ConfigError(f"The {part} of the run is '{name}', not '{reference}'; do not name another one.")
    return {**settings, "name": reference}


def check_distinct_names(names: Sequence[str]) -> None:
    """Raise an error if own classes have the same name as other methods, because runs are named after the class.

    >>> check_distinct_names(["fedavg", "my_module:FedAvg"])
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: fedavg and my_module:FedAvg have the same name; rename your class.
    """
    known = dict[str, str]()
    for name in names:
        other = known.setdefault(short_name(name).lower(), name)
        if other != name and (is_reference(name) or is_reference(other)):
            raise ConfigError(f"{other} and {name} have the same name; rename your class.")


def call_own_code(reference: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's function; an exception becomes an error that names the function and the line."""
    try:
        return function(*args, **kwargs)
    except FedTailorError:
        raise
    except Exception as error:
        raise ConfigError(f"'{reference}' failed: {_explain(error, reference.partition(':')[0])}.") from error


def check_importable(part: str, reference: str) -> None:
    """Raise an error if a reference cannot be imported, whatever the user's modules contain."""
    module, _, qualname = reference.partition(":")
    argument = PYTHON_ARGUMENTS[part.partition(".")[0]]
    fix = f"put it into a module and name that one (my_module:...), or pass the object in Python ({argument}=...)"
    if module == "__main__":
        raise ConfigError(f"The {part} '{reference}' was defined in a script or a notebook; {fix}.")
    if "<" in qualname:
        raise ConfigError(f"The {part} '{reference}' was defined inside a function; {fix}.")
    if module.partition(".")[0] == "torch":
        raise ConfigError(f"The {part} '{reference}' does not describe its layers; {fix}.")
    valid = all(name.isidentifier() for name in (*module.split("."), *qualname.split(".")))
    if not valid or len(reference) > _MAX_LENGTH:
        shown = reference[:_MAX_LENGTH]
        raise ConfigError(f"The {part} '{shown}' must be written as module:name, such as my_module:MyMethod.")


def import_reference(reference: str, *, from_current_folder: bool = False) -> Any:
    """Import what a reference names from the installed packages, or from the current folder first. It needs consent."""
    module_name, _, qualname = reference.partition(":")
    try:
        with _current_folder_first() if from_current_folder else nullcontext():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_error(module_name, error) from error
        folder = f"in the current folder '{Path.cwd()}' or " if from_current_folder else ""
        where = f"{folder}among the installed packages"
        raise ConfigError(f"There is no module '{error.name}' {where}, so '{reference}' cannot be imported.") from error
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise _import_error(module_name, error) from error
    found: Any = module
    for name in qualname.split("."):
        if not hasattr(found, name):
            known = [n for n, value in vars(found).items() if getattr(value, "__module__", None) == module_name]
            raise unknown_name(f"class or function in '{module_name}' named", name, known)
        found = getattr(found, name)
    return found


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Import from the current folder first, as `python -m` does. Afterward, the folder is the last one on the path, so
    that functions can import its modules, but none of these replaces an installed package."""
    folder = str(Path.cwd())
    importlib.invalidate_caches()  # files may be newer than the caches
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)  # the first one
        if folder not in sys.path and "" not in sys.path:
            sys.path.append(folder)


def _import_error(module: str, error: BaseException) -> ConfigError:
    return ConfigError(f"The module '{module}' cannot be imported: {_explain(error, module)}.")


def _explain(error: BaseException, module: str) -> str:
    """Return an exception and the line of the module that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    path = getattr(sys.modules.get(module), "__file__", None) or f"{module.replace('.', '/')}.py"
    own = [frame for frame in frames if frame.filename.endswith(path)]
    if not own and path.endswith("__init__.py"):  # a package, whose parts are in other files
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(path).parent)]
    line = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{reason(error, with_type=True)}{line}"
