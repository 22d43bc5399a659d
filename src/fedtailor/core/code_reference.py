"""References to users' own code: `module:qualname`, such as my_module:MyMethod.

A reference is the name of a method, network, or loader of data that is not built in. Names of built-in parts contain no
colon. A reference is only text; `experiments/own_code.py` imports what it names, if the user consents.
"""

import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

PARTS = ("method", "network", "data")  # the parts of an experiment that have a name


def is_reference(name: str) -> bool:
    """Return whether a name refers to a user's own code.

    >>> is_reference("my_module:MyMethod"), is_reference("fedavg")
    (True, False)
    """
    return ":" in name


def reference_to(code: Any) -> str:
    """Return the reference to a class or function.

    >>> from fedtailor.core.method import Method
    >>> reference_to(Method)
    'fedtailor.core.method:Method'
    """
    module = "__main__" if code.__module__ == "__mp_main__" else code.__module__  # the script, in a process it started
    return f"{module}:{code.__qualname__}"


def is_built_in(kind: type[Any]) -> bool:
    """Return whether a class is part of FedTailor."""
    return kind.__module__.partition(".")[0] == "fedtailor"


def short_name(name: str) -> str:
    """Return the name of a part for labels and folder names: of own code, the class or function without its module.

    >>> short_name("my_module:Outer.MyMethod"), short_name("fedavg")
    ('MyMethod', 'fedavg')
    """
    return name.rpartition(":")[2].rpartition(".")[2] if is_reference(name) else name


def find_references(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the references in the settings of an experiment, by the dotted name of the part.

    >>> find_references({"method": {"name": "lag", "inner": {"name": "my_module:MyMethod"}}, "data": "digits"})
    {'method.inner': 'my_module:MyMethod'}
    """
    found = dict[str, str]()
    for part in PARTS:
        found |= _references(part, settings.get(part))
    return found


def _references(part: str, given: Any) -> dict[str, str]:
    settings = given if isinstance(given, Mapping) else {"name": given, "networks": given}
    name = settings.get("name")
    found = {part: name} if isinstance(name, str) and is_reference(name) else {}
    if part.partition(".")[0] == "method":  # a wrapper method
        for field, value in settings.items():
            found |= _references(f"{part}.{field}", value) if isinstance(value, Mapping) else {}
    networks = settings.get("networks") if part == "network" else None  # of clients with different architectures
    for position, value in enumerate(networks if isinstance(networks, list) else []):
        found |= _references(f"network.{position}", value)
    return found


def describe_code(settings: Mapping[str, Any]) -> dict[str, dict[str, str | None]]:
    """Return module, qualified name, and SHA-256 of the source file of each part that is a user's own code.

    The hash is None if there is no source file, as in a notebook. Layers of torch are not recorded, because run.json
    contains the version of torch.

    >>> describe_code({"method": "fedavg", "network": "__main__:Net"})["network"]["qualname"]
    'Net'
    """
    found = {}
    for part, reference in find_references(settings).items():
        module, _, qualname = reference.partition(":")
        if module.partition(".")[0] != "torch":
            found[part] = {"module": module, "qualname": qualname, "sha256": _source_hash(module)}
    return found


def _source_hash(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return None if path is None else sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # the source is not a file, as of a module in a zip archive
        return None
