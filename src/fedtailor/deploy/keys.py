"""Keys of a federation, and the bundles in which clients get theirs.

An authority of the federation's own signs the server's certificate, and clients trust no other. Clients have no
certificates: what they send is signed with a key whose public half is enrolled.
"""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.hazmat.primitives.serialization import load_ssh_private_key as load_ssh

from fedtailor.deploy.certificates import AUTHORITY, ODD, certify_server, host_name, make_authority, serves
from fedtailor.deploy.folder import Enrolled, check_name, enrol, enrolled
from fedtailor.deploy.settings import FILE, Deployment, read_deployment
from fedtailor.errors import Refused
from fedtailor.files import locked, make_private, write_private, writing
from fedtailor.untrusted import parse_json, read_text

_FORMAT = 1  # of a bundle
_KEY, _CLIENT = "key", "client.json"
_MOST = {AUTHORITY: 2**14, _KEY: 2**14, FILE: 2**20, _CLIENT: 2**14}  # bytes of a bundle's files, the last sealing it
_LARGEST = sum(_MOST.values()) + 2**15  # bytes of a bundle: tar rounds up, and ends with zeros
_ADDRESS = 300  # letters of a server's address, at most: names of DNS have 253


@dataclass(frozen=True)
class Bundle:
    """What a client got from its operator, in a folder of its own."""

    name: str  # fixed at enrolment
    address: str  # of the server, host:port
    folder: Path


def make_keys(folder: Path, clients: Sequence[str]) -> list[Path]:
    """Enrol clients and write a bundle for each. The authority and the server's certificate are made with the first;
    later only what does not fit the server's host any more. After a crash, the same call goes on.

    >>> make_keys(Path("nowhere"), ["hospital-a"])
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no deployment in 'nowhere'; make one: fedtailor deploy init nowhere.
    """
    deployment = read_deployment(folder)
    with _at_work(folder) as keys:
        _check_new(clients, enrolled(folder))
        make_authority(keys)
        if not serves(keys, deployment):
            certify_server(keys, deployment)
        bundles, new = [], {}
        for name in clients:
            bundle = _bundle(folder, name)
            # one of somebody who is not enrolled is left from a crash
            key = _kept_key(bundle, name) if bundle.is_file() else _new_node_key()
            _write_bundle(bundle, _contents(folder, name, key, deployment))
            bundles.append(bundle)
            new[name] = Enrolled(_public(_node_key(key, f"The key of {name}")))
        enrol(folder, new)  # last and all at once, so that before it the same call may be made again
    return bundles


def renew_server(folder: Path) -> list[Path]:
    """A new certificate for the server, before the old one ends or when its host has changed; its key stays. Bundles
    that are still there follow what they say of the server: those that changed are returned, to be given out again.

    >>> renew_server(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no deployment in 'nowhere'; make one: fedtailor deploy init nowhere.
    """
    deployment, changed = read_deployment(folder), []
    with _at_work(folder) as keys:
        make_authority(keys)
        certify_server(keys, deployment)
        for name, client in enrolled(folder).items():
            bundle = _bundle(folder, name)
            if client.left or not bundle.is_file():
                continue
            contents = _contents(folder, name, _kept_key(bundle, name), deployment)
            if contents != _unpack(bundle):
                _write_bundle(bundle, contents)
                changed.append(bundle)
    return changed


def open_bundle(tar: Path, into: Path, name: str | None = None) -> Bundle:
    """Lay a bundle, from whoever's hands, into a client's folder; if a name is given, only the one of that name. The
    same one may come again, and one that says where the server is now; never that of another client.

    >>> open_bundle(Path("nowhere.tar"), Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no bundle 'nowhere.tar'; it is the file your operator gave you.
    """
    what = f"The bundle '{tar}'"
    contents = _unpack(tar)
    bundle = _check(contents, into, what)
    if name not in (None, bundle.name):
        raise Refused(f"{what} is {bundle.name}'s, not {name}'s.")
    if (into / _CLIENT).is_file():
        before = _read_client(_read_part(into, _CLIENT), f"The bundle in '{into}'")["name"]
        if before != bundle.name:
            raise Refused(f"{what} is for {bundle.name}, and '{into}' is the folder of {before}; name another folder.")
        if _read_part(into, _KEY) != contents[_KEY]:
            raise Refused(f"{what} has another key for {bundle.name} than '{into}'; remove that folder to begin anew.")
    with writing(f"The folder '{into}' cannot be written"):
        make_private(into)
        for part in _MOST:
            write_private(into / part, contents[part].encode())
    return bundle


def read_bundle(folder: Path) -> Bundle:
    """A bundle that was opened before.

    >>> read_bundle(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no bundle in 'nowhere'; open the file your operator gave you.
    """
    if not (folder / _CLIENT).is_file():
        raise Refused(f"There is no bundle in '{folder}'; open the file your operator gave you.")
    return _check({name: _read_part(folder, name) for name in _MOST}, folder, f"The bundle in '{folder}'")


# ---- the operator's keys


@contextmanager
def _at_work(folder: Path) -> Iterator[Path]:
    """The folder of the keys, for one process at a time."""
    with writing(f"The folder '{folder}' cannot be written"):
        for private in (keys := folder / "keys", folder / "bundles"):
            make_private(private)
        with locked(keys):
            yield keys


def _check_new(clients: Sequence[str], known: Mapping[str, Enrolled]) -> None:
    for name, times in Counter(clients).items():
        check_name(name)
        if times > 1:
            raise Refused(f"The client {name} is named {times} times.")
        if name in known:
            ever = "was enrolled and has left" if known[name].left else "is enrolled already"
            raise Refused(f"The client {name} {ever}; a name is given once, take another.")


# ---- bundles


def _bundle(folder: Path, name: str) -> Path:
    return folder / "bundles" / f"{name}.tar"


def _contents(folder: Path, name: str, key: str, deployment: Deployment) -> dict[str, str]:
    """The files of a client's bundle."""
    client = {"format": _FORMAT, "name": name, "address": deployment.address}
    return {
        AUTHORITY: read_text(folder / "keys" / AUTHORITY, "The authority", _MOST[AUTHORITY]),
        _KEY: key,
        FILE: read_text(folder / FILE, "The deployment", _MOST[FILE]),
        _CLIENT: json.dumps(client) + "\n",
    }


def _write_bundle(path: Path, contents: Mapping[str, str]) -> None:
    _check(contents, path, f"The bundle '{path}'")  # what its client would refuse is not worth handing out
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, text in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o600
            tar.addfile(entry, BytesIO(text.encode()))
    write_private(path, archive.getvalue())


def _unpack(path: Path) -> dict[str, str]:
    """The texts in a bundle. Headers are taken one by one: tarfile's own reading would follow extended headers, sparse
    files and sizes below 0."""
    data, at, found = _read_bytes(path), 0, dict[str, str]()
    while data[at:].strip(b"\0"):
        at += tarfile.BLOCKSIZE
        try:
            entry = tarfile.TarInfo.frombuf(data[at - tarfile.BLOCKSIZE : at], "ascii", "strict")
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.name in found:
                raise ValueError("a link, a folder, a device, or a file twice")
            if not 0 <= entry.size <= min(_MOST[entry.name], len(data) - at):
                raise ValueError("too large, or cut off")
            found[entry.name] = data[at : at + entry.size].decode()
        except (tarfile.TarError, ValueError, KeyError) as error:
            raise _no_bundle(path) from error
        at += -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if found.keys() != _MOST.keys():
        raise _no_bundle(path)
    return found


def _no_bundle(path: Path) -> Refused:
    return Refused(f"'{path}' is no bundle of a client, which has the files {', '.join(_MOST)}, and nothing else.")


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise Refused(f"There is no bundle '{path}'; it is the file your operator gave you.")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise Refused(f"The bundle '{path}' cannot be read: {error.strerror}.") from error
    if len(data) > _LARGEST:
        raise Refused(f"The bundle '{path}' has more than {_LARGEST:,} bytes; is it the right file?")
    return data


def _read_part(folder: Path, name: str) -> str:
    return read_text(folder / name, "The bundle's file", _MOST[name])


def _check(contents: Mapping[str, str], folder: Path, what: str) -> Bundle:
    """The bundle that these texts are, if every one of them is what it should be."""
    client = _read_client(contents[_CLIENT], what)
    _node_key(contents[_KEY], what)
    _check_authority(contents[AUTHORITY], what)
    with TemporaryDirectory() as beside:
        (Path(beside) / FILE).write_bytes(contents[FILE].encode())
        try:
            deployment = read_deployment(Path(beside))
            host_name(replace(deployment, address=client["address"]))
        except Refused as error:
            why = str(error).replace(str(Path(beside) / FILE), FILE)
            raise Refused(f"{what} cannot be used: {why}") from error
    return Bundle(client["name"], client["address"], folder)


def _read_client(text: str, what: str) -> dict[str, str]:
    found = None
    with suppress(ValueError):
        found = parse_json(text)
    match found:
        case {"format": int(written)} if written != _FORMAT:
            here = f"this version of FedTailor reads format {_FORMAT}"
            raise Refused(f"{what} has format {str(written)[:20]}, and {here}; install the one it was made with.")
        case {"format": int(), "name": str(name), "address": str(address), **rest} if not rest:
            if len(address) <= _ADDRESS and address.isascii():
                return {"name": check_name(name), "address": address}
    raise Refused(f"{what} does not say in {_CLIENT} whose it is and where the server is.")


def _check_authority(text: str, what: str) -> None:
    """One certificate and no word beside it: what is checked here is what OpenSSL will find there."""
    try:
        authority = x509.load_pem_x509_certificate(text.encode())
        is_one = authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        is_alone = authority.public_bytes(Encoding.PEM).split() == text.encode().split()
    except ODD as error:
        raise Refused(f"{what} has an {AUTHORITY} that is no certificate.") from error
    if not (is_one and is_alone):
        raise Refused(f"{what} has an {AUTHORITY} that is not the certificate of one authority.")


def _new_node_key() -> str:
    """A client's key in the only form that Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()


def _node_key(text: str, what: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh(text.encode(), None)
    except ODD as error:
        raise Refused(f"{what} has no private key of OpenSSH without a password.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Refused(f"{what} has a key that is not of an elliptic curve, which alone Flower takes.")
    return key


def _kept_key(bundle: Path, name: str) -> str:
    """The key in a bundle that was written before."""
    contents = _unpack(bundle)
    if _read_client(contents[_CLIENT], f"The bundle '{bundle}'")["name"] != name:
        raise Refused(f"The bundle '{bundle}' is not for {name}; remove it, or take another name.")
    return contents[_KEY]


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
