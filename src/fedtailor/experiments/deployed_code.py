"""Own code in a deployment: which code it names, and the consent of a participant to import it.

Own code of a deployment belongs to installed packages. The operator's settings contain their versions and hashes, and
every participant imports a package only if it is exactly that one, and if a person on that machine has allowed it: the
operator by typing its name, and a client by confirming what `fedtailor deploy client` shows, or with --allow-code
PACKAGE@HASH.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.core.code_reference import find_references, is_reference
from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.errors import ConfigError
from fedtailor.experiments.installed_packages import PackageVersion, check_package, find_package, package_of
from fedtailor.experiments.own_code import CodeConsent, check_importable, import_reference
from fedtailor.experiments.own_parts import OwnPart
from fedtailor.experiments.parsing import named_settings, parse_value
from fedtailor.runs.files import write_atomic

_CONSENT_FILE = "allowed_code.json"  # in the folder of a participant
_MIN_DIGITS = 12  # of a hash in --allow-code
Packages = Mapping[str, PackageVersion]


@dataclass(frozen=True)
class NamedCode:
    """The own code that a deployment names, which is not imported."""

    references: Mapping[str, str] = field(default_factory=dict)  # by part, such as method.inner
    packages: Packages = field(default_factory=dict)  # versions and hashes

    def __post_init__(self) -> None:
        for part, reference in self.references.items():
            check_importable(part, reference)
        missing = sorted({package_of(reference) for reference in self.references.values()} - self.packages.keys())
        if missing:
            fix = "add them with: fedtailor deploy keys DIR --allow-code " + format_consent(missing[0])
            raise ConfigError(f"The deployment does not contain the version and hash of '{missing[0]}'; {fix}.")


def named_code(settings: Mapping[str, Any]) -> NamedCode:
    """Return the own code that the settings of a deployment name.

    >>> named_code({"method": "fedavg"}).references
    {}
    """
    packages = parse_value(dict[str, PackageVersion], settings.get("code", {}), "code")
    return NamedCode(find_references(settings), packages)


def freeze_packages(references: Iterable[str]) -> dict[str, PackageVersion]:
    """Return the versions and hashes of the installed packages that references belong to.

    >>> freeze_packages([])
    {}
    """
    return {name: find_package(name).version for name in sorted({package_of(reference) for reference in references})}


def without_own_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the default method and network in place of own code, and without a loader.

    >>> without_own_code({"method": "my_pkg:MyMethod", "rounds": 3})
    {'rounds': 3}
    """
    own = {part.partition(".")[0] for part in find_references(settings)}
    return {name: value for name, value in settings.items() if name not in own and name not in ("code", "data")}


# ---- consent


@dataclass(frozen=True)
class InstalledCode(CodeConsent):
    """Which references a participant allows to be imported from installed packages, never from the current folder."""

    packages: Packages | None = None  # that the deployment requires; None: they are not frozen yet

    def load(self, part: str, reference: str) -> Any:
        """Import what a reference names from an installed package, if the participant consents."""
        check_importable(part, reference)
        if reference not in self.named:
            raise ConfigError(f"The {part} '{reference}' is code that importing would execute; {self.how}.")
        package = package_of(reference)
        check_package(package, find_package(package).version if self.packages is None else self.packages[package])
        return import_reference(reference)


def format_consent(package: str, version: PackageVersion | None = None) -> str:
    """Return the value of --allow-code that allows a package: the installed one, or one with another version.

    >>> format_consent("my_pkg", PackageVersion("1.0", 64 * "a"))
    'my_pkg@aaaaaaaaaaaa'
    """
    try:
        return f"{package}@{(version or find_package(package).version).short_hash}"
    except ConfigError:  # not installed here
        return f"{package}@HASH"


def is_allowed(packages: Packages, given: Sequence[str]) -> bool:
    """Return whether the values of --allow-code allow all packages.

    >>> packages = {"my_pkg": PackageVersion("1.0", 64 * "a")}
    >>> is_allowed(packages, ["my_pkg@aaaaaaaaaaaa"]), is_allowed(packages, [])
    (True, False)
    """
    hashes = dict(_parse_consent(value) for value in given)
    for name in hashes.keys() & packages.keys():
        if not packages[name].sha256.startswith(hashes[name]):
            fix = "look at the new code before you allow it"
            raise ConfigError(f"You allow {name}@{hashes[name]}, but '{name}' is {packages[name]}; {fix}.")
    return packages.keys() <= hashes.keys()


def _parse_consent(value: str) -> tuple[str, str]:
    package, _, digits = value.partition("@")
    if not package or len(digits) < _MIN_DIGITS or not set(digits) <= set("0123456789abcdef"):
        fix = f"write the package and at least {_MIN_DIGITS} digits of its hash, such as my_pkg@3f2a9c51d07e"
        raise ConfigError(f"--allow-code cannot be '{value[:100]}': {fix}.")
    return package, digits


def save_consent(folder: Path, code: NamedCode) -> None:
    """Remember in a participant's folder that code is allowed, as long as its packages do not change."""
    hashes = {reference: code.packages[package_of(reference)].sha256 for reference in code.references.values()}
    write_atomic(folder / _CONSENT_FILE, (json.dumps(hashes, indent=1) + "\n").encode())


def read_consent(folder: Path, code: NamedCode, fix: str) -> InstalledCode:
    """Return the consent that was saved in a participant's folder; `fix` says how to give it.

    >>> read_consent(Path("nowhere"), NamedCode(), "confirm it").named
    frozenset()
    """
    path, hashes = folder / _CONSENT_FILE, dict[str, Any]()
    if path.is_file():
        try:
            hashes = dict(parse_json(read_text(path, "The list of allowed code", 2**16)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"'{path}' is not a valid list of allowed code; delete it, and {fix}.") from error
    named = {name for name in code.references.values() if hashes.get(name) == code.packages[package_of(name)].sha256}
    return InstalledCode(frozenset(named), how=fix, packages=code.packages)


# ---- loaders


@dataclass(frozen=True)
class OwnLoader:
    """A function of the user's own that reads a client's samples from a file or folder; only clients import it."""

    name: str  # its reference
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the settings from which `build_loader` builds this loader."""
        return {"name": self.name, **self.arguments}

    def read(self, path: Path, consent: CodeConsent) -> Any:
        """Return what the function returns for a path, if the client allows its import."""
        function = consent.load("data", self.name)
        if not callable(function):
            raise ConfigError(f"The data '{self.name}' has the type {type(function).__name__}; it must be a function.")
        return OwnPart(self.name, self.arguments, function).call(path)


def build_loader(given: Any) -> OwnLoader | None:
    """Return the loader with this name and these arguments; None if there is none.

    >>> build_loader({"name": "my_pkg:load", "size": 32}).arguments
    {'size': 32}
    """
    if given is None:
        return None
    settings = named_settings("data", given, None)
    name = str(settings.pop("name", ""))
    if not is_reference(name):
        fix = "clients have their own data; it can only be a function that reads them, such as my_pkg:load"
        raise ConfigError(f"The data of a deployment cannot be '{name}'; {fix}.")
    return OwnLoader(name, settings)
