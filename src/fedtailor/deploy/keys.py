"""Keys of a federation, and the bundles that contain the clients' keys.

The federation's own certificate authority signs the server's certificate, and clients trust no other authority. Clients
have no certificates: they sign their requests with a key whose public part is enrolled.
"""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.hazmat.primitives.serialization import load_ssh_private_key as load_ssh

from fedtailor.core.untrusted_input import parse_json, parse_toml, read_text
from fedtailor.deploy.certificates import (
    AUTHORITY_FILE,
    INVALID_ERRORS,
    certify_server,
    host_name,
    is_server_certified,
    make_authority,
)
from fedtailor.deploy.server.operator_folder import EnrolledClient, check_name, enroll, enrolled_clients
from fedtailor.errors import DeployError, FedTailorError, unknown_name
from fedtailor.experiments.deployment import DEPLOYMENT_FILE, Deployment, outline_deployment, read_outline
from fedtailor.runs.files import folder_lock, make_private_folder, write_errors, write_private

_FORMAT = 1  # of a bundle
_KEY_FILE, _CLIENT_FILE = "key", "client.json"
# of each file; the last one is written last, so a folder that has it has a complete bundle
_MAX_BYTES = {AUTHORITY_FILE: 2**14, _KEY_FILE: 2**14, DEPLOYMENT_FILE: 2**20, _CLIENT_FILE: 2**14}
_MAX_BUNDLE_BYTES = sum(_MAX_BYTES.values()) + 2**15  # tar pads files and ends with zeros
_MAX_ADDRESS_LENGTH = 300  # characters; DNS names have at most 253


@dataclass(frozen=True)
class Bundle:
    """What a client received from the operator, unpacked in a folder."""

    name: str  # fixed at enrollment
    address: str  # of the server, host:port
    folder: Path


def make_keys(folder: Path, clients: Sequence[str]) -> list[Path]:
    """Enroll clients and write a bundle for each.

    The first call also creates the authority and the server's certificate; later calls replace the certificate only if
    the server's host has changed. After a crash, repeat the same call to complete it.

    >>> make_keys(Path("nowhere"), ["hospital-a"])
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    deployment = read_outline(folder)
    with _locked_keys(folder) as keys:
        _check_new_names(clients, enrolled_clients(folder))
        make_authority(keys)
        if not is_server_certified(keys, deployment):
            certify_server(keys, deployment)
        bundles, new = [], {}
        for name in clients:
            bundle = _bundle_path(folder, name)
            # the bundle of a client that is not enrolled is left over from a crash
            key = _read_key(bundle, name) if bundle.is_file() else _new_key()
            _write_bundle(bundle, _contents(folder, name, key, deployment))
            bundles.append(bundle)
            new[name] = EnrolledClient(_public_key(_parse_key(key, f"The key of {name}")))
        enroll(folder, new)  # last and in one write, so that the call can be repeated after a crash
    return bundles


def renew_server_certificate(folder: Path) -> list[Path]:
    """Create a new certificate for the server's existing key, before the old one expires or when the host has changed.

    Existing bundles are updated. Return those that changed and must be distributed again.

    >>> renew_server_certificate(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    deployment, changed = read_outline(folder), []
    with _locked_keys(folder) as keys:
        make_authority(keys)
        certify_server(keys, deployment)
        for name, client in enrolled_clients(folder).items():
            bundle = _bundle_path(folder, name)
            if client.left or not bundle.is_file():
                continue
            contents = _contents(folder, name, _read_key(bundle, name), deployment)
            if contents != _unpack(bundle):
                _write_bundle(bundle, contents)
                changed.append(bundle)
    return changed


def renew_client_key(folder: Path, name: str, at_once: bool = False) -> Path:
    """Create a new key for a client and return the bundle with it.

    The old key remains valid until the client uses the new one, so that it can take part until it has the bundle; with
    `at_once`, the old key ends immediately.

    >>> renew_client_key(Path("nowhere"), "hospital-a")
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    deployment = read_outline(folder)
    with _locked_keys(folder):
        clients = enrolled_clients(folder)
        if name not in clients:
            raise unknown_name("client", name, clients)
        if clients[name].left:
            raise DeployError(f"Client {name} has left; its name cannot be used again.")
        key = _new_key()
        _write_bundle(_bundle_path(folder, name), _contents(folder, name, key, deployment))
        public = _public_key(_parse_key(key, f"The key of {name}"))
        new = EnrolledClient(public) if at_once else replace(clients[name], next_key=public)
        enroll(folder, {name: new})  # last: after a crash, the call is repeated
    return _bundle_path(folder, name)


def open_bundle(tar: Path, into: Path, name: str | None = None) -> Bundle:
    """Unpack an untrusted bundle into a client's folder; raise an error if it is not for the client `name`.

    Unpacking the same bundle again, or one with a new server address, is allowed, and so is one with a new key of the
    same federation; a bundle of another client is not.

    >>> open_bundle(Path("nowhere.tar"), Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no bundle 'nowhere.tar'; it is the file that the operator sent you.
    """
    label = f"The bundle '{tar}'"
    contents = _unpack(tar)
    bundle = _check_bundle(contents, into, label)
    if name not in (None, bundle.name):
        raise DeployError(f"{label} is for client {bundle.name}, not {name}.")
    if (into / _CLIENT_FILE).is_file():
        owner = _parse_client(_read_part(into, _CLIENT_FILE), f"The bundle in '{into}'")["name"]
        if owner != bundle.name:
            raise DeployError(
                f"{label} is for client {bundle.name}, but '{into}' belongs to {owner}; choose another folder."
            )
        changed = [part for part in (_KEY_FILE, AUTHORITY_FILE) if _read_part(into, part) != contents[part]]
        if changed == [_KEY_FILE, AUTHORITY_FILE]:  # a renewal changes one of them
            raise DeployError(
                f"{label} is from another federation than '{into}'; choose another folder, or delete that one."
            )
    with write_errors(f"The folder '{into}' cannot be written"):
        make_private_folder(into)
        for part in _MAX_BYTES:
            write_private(into / part, contents[part].encode())
    return bundle


def read_bundle(folder: Path) -> Bundle:
    """Return a bundle that was unpacked before.

    >>> read_bundle(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no bundle in 'nowhere'; unpack the file that the operator sent you.
    """
    if not (folder / _CLIENT_FILE).is_file():
        raise DeployError(f"There is no bundle in '{folder}'; unpack the file that the operator sent you.")
    return _check_bundle({name: _read_part(folder, name) for name in _MAX_BYTES}, folder, f"The bundle in '{folder}'")


# ---- the operator's keys


@contextmanager
def _locked_keys(folder: Path) -> Iterator[Path]:
    """Create the folders of keys and bundles, lock the folder of keys for this process, and yield it."""
    with write_errors(f"The folder '{folder}' cannot be written"):
        keys = folder / "keys"
        make_private_folder(keys)
        make_private_folder(folder / "bundles")
        with folder_lock(keys):
            yield keys


def _check_new_names(clients: Sequence[str], enrolled: Mapping[str, EnrolledClient]) -> None:
    for name, count in Counter(clients).items():
        check_name(name)
        if count > 1:
            raise DeployError(f"Client {name} is listed {count} times; list it once.")
        if name in enrolled:
            state = "has left" if enrolled[name].left else "is already enrolled"
            raise DeployError(f"Client {name} {state}; names are never reused, choose another one.")


# ---- bundles


def _bundle_path(folder: Path, name: str) -> Path:
    return folder / "bundles" / f"{name}.tar"


def _contents(folder: Path, name: str, key: str, deployment: Deployment) -> dict[str, str]:
    """Return the files of a client's bundle."""
    client = {"format": _FORMAT, "name": name, "address": deployment.address}
    return {
        AUTHORITY_FILE: read_text(folder / "keys" / AUTHORITY_FILE, "The authority", _MAX_BYTES[AUTHORITY_FILE]),
        _KEY_FILE: key,
        DEPLOYMENT_FILE: read_text(folder / DEPLOYMENT_FILE, "The deployment", _MAX_BYTES[DEPLOYMENT_FILE]),
        _CLIENT_FILE: json.dumps(client) + "\n",
    }


def _write_bundle(path: Path, contents: Mapping[str, str]) -> None:
    _check_bundle(contents, path, f"The bundle '{path}'")  # the client makes the same check
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, text in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o600
            tar.addfile(entry, BytesIO(text.encode()))
    write_private(path, archive.getvalue())


def _unpack(path: Path) -> dict[str, str]:
    """Return the files in an untrusted bundle.

    Headers are parsed one by one, because tarfile's reader would accept extended headers, sparse files, and negative
    sizes.
    """
    data, at, found = _read_bytes(path), 0, dict[str, str]()
    while data[at:].strip(b"\0"):
        at += tarfile.BLOCKSIZE
        try:
            entry = tarfile.TarInfo.frombuf(data[at - tarfile.BLOCKSIZE : at], "ascii", "strict")
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.name in found:
                raise ValueError("a link, a folder, a device, or a duplicate file")
            if not 0 <= entry.size <= min(_MAX_BYTES[entry.name], len(data) - at):
                raise ValueError("too large or truncated")
            found[entry.name] = data[at : at + entry.size].decode()
        except (tarfile.TarError, ValueError, KeyError) as error:
            raise _invalid_bundle(path) from error
        at += -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if found.keys() != _MAX_BYTES.keys():
        raise _invalid_bundle(path)
    return found


def _invalid_bundle(path: Path) -> DeployError:
    return DeployError(f"'{path}' is not a client's bundle, which contains exactly the files {', '.join(_MAX_BYTES)}.")


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise DeployError(f"There is no bundle '{path}'; it is the file that the operator sent you.")
        with path.open("rb") as file:
            data = file.read(_MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise DeployError(f"The bundle '{path}' cannot be read: {error.strerror}.") from error
    if len(data) > _MAX_BUNDLE_BYTES:
        raise DeployError(f"The bundle '{path}' has more than {_MAX_BUNDLE_BYTES:,} bytes; is it the right file?")
    return data


def _read_part(folder: Path, name: str) -> str:
    return read_text(folder / name, "The bundle's file", _MAX_BYTES[name])


def _check_bundle(contents: Mapping[str, str], folder: Path, label: str) -> Bundle:
    """Return the bundle with these files; raise an error if one of them is invalid."""
    client = _parse_client(contents[_CLIENT_FILE], label)
    _parse_key(contents[_KEY_FILE], label)
    _check_authority(contents[AUTHORITY_FILE], label)
    try:
        deployment = outline_deployment(parse_toml(contents[DEPLOYMENT_FILE], f"The deployment '{DEPLOYMENT_FILE}'"))
        host_name(replace(deployment, address=client["address"]))
    except FedTailorError as error:
        raise DeployError(f"{label} cannot be used: {error}") from error
    return Bundle(client["name"], client["address"], folder)


def _parse_client(text: str, label: str) -> dict[str, str]:
    found = None
    with suppress(ValueError):
        found = parse_json(text)
    match found:
        case {"format": int(written)} if written != _FORMAT:
            raise DeployError(
                f"{label} has format {str(written)[:20]}, but this version of FedTailor reads format {_FORMAT}; "
                "install the version that created the bundle."
            )
        case {"format": int(), "name": str(name), "address": str(address), **rest} if not rest:
            if len(address) <= _MAX_ADDRESS_LENGTH and address.isascii():
                return {"name": check_name(name), "address": address}
    raise DeployError(f"{label} has no valid {_CLIENT_FILE} with the client's name and the server's address.")


def _check_authority(text: str, label: str) -> None:
    """Raise an error unless the file is exactly one authority's certificate: OpenSSL would trust additional ones."""
    try:
        authority = x509.load_pem_x509_certificate(text.encode())
        is_authority = authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        is_single = authority.public_bytes(Encoding.PEM).split() == text.encode().split()
    except INVALID_ERRORS as error:
        raise DeployError(f"{label} has an {AUTHORITY_FILE} that is not a certificate.") from error
    if not (is_authority and is_single):
        raise DeployError(f"{label} has an {AUTHORITY_FILE} that is not the certificate of exactly one authority.")


def _new_key() -> str:
    """Return a new client key in OpenSSH format, the only one that Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()


def _parse_key(text: str, label: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh(text.encode(), None)
    except INVALID_ERRORS as error:
        raise DeployError(f"{label} has no OpenSSH private key, or the key is encrypted.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError(f"{label} has a key that is not ECDSA, the only type that Flower supports.")
    return key


def _read_key(bundle: Path, name: str) -> str:
    """Return the key in an existing bundle."""
    contents = _unpack(bundle)
    if _parse_client(contents[_CLIENT_FILE], f"The bundle '{bundle}'")["name"] != name:
        raise DeployError(f"The bundle '{bundle}' is not for client {name}; delete it or choose another name.")
    return contents[_KEY_FILE]


def _public_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
