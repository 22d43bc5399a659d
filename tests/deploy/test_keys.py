"""Keys and bundles of a federation: TLS, enrollment, renewal, crashes, and untrusted bundles."""

import gzip
import json
import os
import shutil
import socket
import ssl
import stat
import tarfile
import threading
from argparse import Namespace
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest

pytest.importorskip("flwr")  # the extra `flower`, which brings cryptography

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key, load_ssh_public_key
from hypothesis import strategies as st

from conftest import error_message
from fedtailor.deploy import certificates
from fedtailor.deploy.keys import (
    Bundle,
    make_keys,
    open_bundle,
    read_bundle,
    renew_client_key,
    renew_server_certificate,
)
from fedtailor.deploy.server.operator_folder import enroll, enrolled_clients
from fedtailor.experiments.deployment import Deployment, read_deployment, write_deployment
from fedtailor.runs import files
from support.fuzzing import Reader, fuzz
from support.memory import assert_memory_below
from support.mutations import PROGRAMS, damage, damaged

NAMES = ("authority.crt", "key", "client.json", "deployment.toml")
MIB = 2**20


def deployment(folder: Path, address: str = "fl.example.org:9092") -> Path:
    write_deployment(folder, Deployment(address=address))
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two clients that tests do not change."""
    folder = deployment(tmp_path_factory.mktemp("federation"))
    make_keys(folder, ["hospital-a", "b"])
    return folder


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A copy of the federation that a test may change."""
    return shutil.copytree(shared, tmp_path / "federation")


def unpacked(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as tar:
        return {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- TLS


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """Run a TLS server with the federation's certificate on this machine and yield its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys" / "server.crt", folder / "keys" / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:  # closed
                return
            try:
                with context.wrap_socket(connection, server_side=True) as secure:
                    secure.sendall(b"welcome")
            except (ssl.SSLError, ConnectionError):  # the client rejected the certificate
                connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def connect(port: int, host: str, authority: Path) -> bytes:
    """Connect as a client that trusts one authority, with OpenSSL's strict checks, and return what the server sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(authority)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.recv(7)


@pytest.mark.parametrize(
    ("address", "host"),
    [("fl.example.org:9092", "fl.example.org"), ("10.1.2.3:80", "10.1.2.3"), ("[fd00::7]:9092", "fd00::7")],
    ids=["name", "IPv4", "IPv6"],
)
def test_client_trusts_its_server_and_no_other_host(address: str, host: str, tmp_path: Path) -> None:
    (tar,) = make_keys(deployment(tmp_path / "dir", address), ["a"])
    authority = open_bundle(tar, tmp_path / "client").folder / "authority.crt"
    with server(tmp_path / "dir") as port:
        for known in (host, "localhost", "127.0.0.1", "::1"):
            assert connect(port, known, authority) == b"welcome"
        for other in ("example.org", "evil.fl.example.org", "10.1.2.4", "fd00::8"):
            with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
                connect(port, other, authority)


def test_client_does_not_trust_another_authority(shared: Path, tmp_path: Path) -> None:
    make_keys(deployment(tmp_path), [])
    with server(shared) as port, pytest.raises(ssl.SSLCertVerificationError):
        connect(port, "localhost", tmp_path / "keys" / "authority.crt")


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "keys" / f"{name}.crt").read_bytes())


def test_certificates_have_expected_constraints_and_validity(shared: Path) -> None:
    authority, server_certificate, now = (
        certificate(shared, "authority"),
        certificate(shared, "server"),
        datetime.now(UTC),
    )
    server_certificate.verify_directly_issued_by(authority)
    for found, days in ((authority, 3650), (server_certificate, 825)):
        assert found.not_valid_before_utc < now
        assert timedelta(days=days - 2) < found.not_valid_after_utc - now <= timedelta(days=days)
        public = found.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP384R1)
    ca = [
        found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        for found in (authority, server_certificate)
    ]
    assert ca == [True, False]


# ---- enrollment


def test_make_keys_enrolls_clients_in_order_with_the_keys_in_their_bundles(folder: Path) -> None:
    before = enrolled_clients(folder)
    bundles = make_keys(folder, ["z", "c"])
    assert bundles == [folder / "bundles" / "z.tar", folder / "bundles" / "c.tar"]
    clients = enrolled_clients(folder)
    assert list(clients) == ["hospital-a", "b", "z", "c"] and {n: clients[n] for n in before} == before
    for name, client in clients.items():
        private = load_ssh_private_key(unpacked(folder / "bundles" / f"{name}.tar")["key"], None)
        assert private.public_key() == load_ssh_public_key(client.public_key.encode())
        assert client.public_key.startswith("ecdsa-sha2-nistp384 ") and client.node_id is None and not client.left
    assert len({client.public_key for client in clients.values()}) == 4


def test_flower_can_load_client_key(shared: Path, tmp_path: Path) -> None:
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    key = open_bundle(shared / "bundles" / "b.tar", tmp_path).folder / "key"
    loaded = _try_setup_client_authentication(
        Namespace(auth_supernode_private_key=str(key), auth_supernode_public_key=None)
    )
    assert loaded is not None and uses_nist_ec_curve(loaded[1])
    assert loaded[1] == load_ssh_public_key(enrolled_clients(shared)["b"].public_key.encode())


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        (["c", "b"], "Client b is already enrolled"),
        (["gone"], "Client gone has left"),
        (["c", "d", "c"], "Client c is listed 2 times"),
        (["c", "../d"], "A client's name must have"),
        (["c", ""], "A client's name must have"),
    ],
    ids=["enrolled", "left", "twice", "path", "empty"],
)
def test_make_keys_with_invalid_names_changes_nothing(clients: list[str], text: str, folder: Path) -> None:
    make_keys(folder, ["gone"])
    enroll(folder, {"gone": replace(enrolled_clients(folder)["gone"], left=True)})
    before = contents(folder)
    assert text in error_message(lambda: make_keys(folder, clients))
    assert contents(folder) == before


def test_bundle_has_four_files_and_no_key_of_the_operator(shared: Path) -> None:
    files = unpacked(shared / "bundles" / "b.tar")
    assert files.keys() == set(NAMES)
    assert files["authority.crt"] == (shared / "keys" / "authority.crt").read_bytes()
    assert files["deployment.toml"] == (shared / "deployment.toml").read_bytes()
    assert json.loads(files["client.json"]) == {"format": 1, "name": "b", "address": "fl.example.org:9092"}
    data = (shared / "bundles" / "b.tar").read_bytes()
    for name in ("authority.key", "server.key"):
        assert (shared / "keys" / name).read_bytes().splitlines()[1] not in data


def test_secrets_are_not_readable_by_other_users(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "dir" / "keys").mkdir(parents=True)
        (tar,) = make_keys(deployment(tmp_path / "dir"), ["a"])
        open_bundle(tar, tmp_path / "client" / "bundle")
    finally:
        os.umask(before)
    keys_folder, bundle = tmp_path / "dir" / "keys", tmp_path / "client" / "bundle"
    for folder in (keys_folder, tar.parent, bundle):
        assert mode(folder) == 0o700
    for secret in (keys_folder / "authority.key", keys_folder / "server.key", tar, bundle / "key"):
        assert mode(secret) == 0o600


class Killed(BaseException):
    """Simulates that the process is killed."""


def test_make_keys_can_be_repeated_after_any_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in turn is written partially before the process ends; files written before remain valid."""
    write, modes = files.write_and_sync, set[int]()

    def write_or_crash(file: BinaryIO, data: bytes, left: list[int]) -> None:
        modes.add(mode(Path(file.name)) if file.name.endswith((".key.writing", ".tar.writing")) else 0o600)
        left[0] -= 1
        if left[0] < 0:
            file.write(data[: len(data) // 2])
            raise Killed
        write(file, data)

    crashes = 0
    while True:
        folder, left = deployment(tmp_path / str(crashes)), [crashes]
        monkeypatch.setattr(files, "write_and_sync", lambda file, data, left=left: write_or_crash(file, data, left))
        try:
            make_keys(folder, ["a", "b"])
            break
        except Killed:
            crashes += 1
        finally:
            monkeypatch.setattr(files, "write_and_sync", write)
        before = contents(folder)
        bundles = make_keys(folder, ["a", "b"])
        written = [name for name in before if name.endswith((".crt", ".key", ".tar"))]
        assert {name: before[name] for name in written} == {name: contents(folder)[name] for name in written}
        for name, bundle in zip(("a", "b"), bundles, strict=True):
            key = load_ssh_private_key(unpacked(bundle)["key"], None)
            assert key.public_key() == load_ssh_public_key(enrolled_clients(folder)[name].public_key.encode())
        with server(folder) as port:
            assert connect(port, "fl.example.org", folder / "keys" / "authority.crt") == b"welcome"
    assert crashes == 7 and modes == {0o600}  # four keys and certificates, two bundles, one list


def test_make_keys_is_locked_against_other_processes(folder: Path) -> None:
    with files.folder_lock(folder / "keys"):
        assert "Another process is using" in error_message(lambda: make_keys(folder, ["c"]))


def test_make_keys_without_valid_deployment_is_rejected(tmp_path: Path) -> None:
    assert "There is no deployment in" in error_message(lambda: make_keys(tmp_path, ["a"]))
    write_deployment(tmp_path, replace(Deployment(), address="f..org:1"))
    assert "a valid DNS name" in error_message(lambda: make_keys(tmp_path, ["a"]))
    assert not enrolled_clients(tmp_path)


# ---- renewal


def test_renewal_after_host_change_updates_certificate_and_bundles(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    client = open_bundle(folder / "bundles" / "b.tar", tmp_path / "client")
    enroll(folder, {"hospital-a": replace(enrolled_clients(folder)["hospital-a"], left=True)})
    deployment(folder, "new.example.org:443")
    assert renew_server_certificate(folder) == [folder / "bundles" / "b.tar"], "clients that left need no bundle"
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} == {
        "keys/server.crt", "deployment.toml", "clients.json", "bundles/b.tar",
    }  # fmt: skip
    again = open_bundle(folder / "bundles" / "b.tar", client.folder)
    assert again == Bundle("b", "new.example.org:443", client.folder) == read_bundle(client.folder)
    assert read_deployment(client.folder).port == 443
    with server(folder) as port:
        assert connect(port, "new.example.org", client.folder / "authority.crt") == b"welcome"
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(port, "fl.example.org", client.folder / "authority.crt")


def test_make_keys_certifies_new_host_or_server_key(folder: Path) -> None:
    """Also if the process ended between writing the key and writing the certificate."""

    def enroll_and_connect(name: str, host: str) -> None:
        make_keys(folder, [name])
        with server(folder) as port:
            assert connect(port, host, folder / "keys" / "authority.crt") == b"welcome"

    deployment(folder, "new.example.org:443")
    enroll_and_connect("c", "new.example.org")
    (folder / "keys" / "server.key").unlink()
    enroll_and_connect("d", "localhost")
    (folder / "keys" / "server.key").write_bytes(certificates._new_key())
    enroll_and_connect("e", "localhost")


def test_renewal_before_expiry_changes_no_bundles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(certificates._VALIDITY, "server", timedelta(days=3))
    renew_server_certificate(folder)
    soon = certificate(folder, "server").not_valid_after_utc
    monkeypatch.undo()
    before = contents(folder)
    assert renew_server_certificate(folder) == []
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} == {"keys/server.crt"}
    assert certificate(folder, "server").not_valid_after_utc > soon + timedelta(days=800)


def test_certificate_does_not_outlive_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(certificates._VALIDITY, "authority", timedelta(days=30))
    make_keys(deployment(tmp_path), ["a"])
    assert certificate(tmp_path, "server").not_valid_after_utc == certificate(tmp_path, "authority").not_valid_after_utc


def test_expired_authority_is_replaced_only_after_manual_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(deployment(tmp_path), ["a"])
    key = (tmp_path / "keys" / "authority.key").read_bytes()
    (tmp_path / "keys" / "authority.crt").unlink()
    expired = timedelta(hours=1)  # validity starts a day ago, for clocks that are behind
    monkeypatch.setitem(certificates._VALIDITY, "authority", expired)
    assert "The authority expired on" in error_message(lambda: renew_server_certificate(tmp_path))
    monkeypatch.undo()
    assert "delete authority.crt in" in error_message(lambda: renew_server_certificate(tmp_path))
    (tmp_path / "keys" / "authority.crt").unlink()
    assert renew_server_certificate(tmp_path) == [tmp_path / "bundles" / "a.tar"]
    assert (tmp_path / "keys" / "authority.key").read_bytes() == key
    authority = open_bundle(tmp_path / "bundles" / "a.tar", tmp_path / "client").folder / "authority.crt"
    with server(tmp_path) as port:
        assert connect(port, "localhost", authority) == b"welcome"


def test_authority_key_is_needed_only_for_renewal(folder: Path, tmp_path: Path) -> None:
    """Enrolling clients works without it."""
    (folder / "keys" / "authority.key").rename(tmp_path / "authority.key")
    make_keys(folder, ["c"])
    assert "has no authority.key" in error_message(lambda: renew_server_certificate(folder))
    (folder / "keys" / "authority.key").write_bytes(certificates._new_key())
    assert "does not belong to authority.crt" in error_message(lambda: renew_server_certificate(folder))
    (folder / "keys" / "authority.key").write_bytes(b"garbage")
    assert "is not a private key" in error_message(lambda: renew_server_certificate(folder))
    (folder / "keys" / "authority.crt").write_bytes(b"garbage")
    assert "is not a certificate" in error_message(lambda: renew_server_certificate(folder))


def test_certificates_of_another_authority_are_kept(folder: Path, tmp_path: Path) -> None:
    """Operators may use their organization's authority, without its key."""
    other = deployment(tmp_path / "other")
    make_keys(other, [])
    for name in ("authority.crt", "server.crt", "server.key"):
        shutil.copy(other / "keys" / name, folder / "keys" / name)
    (folder / "keys" / "authority.key").unlink()
    before = contents(folder / "keys")
    (tar,) = make_keys(folder, ["c"])
    assert contents(folder / "keys") == before and unpacked(tar)["authority.crt"] == before["authority.crt"]


def test_make_keys_with_existing_bundle_of_another_client_is_rejected(folder: Path) -> None:
    shutil.copy(folder / "bundles" / "b.tar", folder / "bundles" / "c.tar")
    assert "is not for client c" in error_message(lambda: make_keys(folder, ["c"]))
    (folder / "bundles" / "c.tar").write_bytes(b"garbage")
    assert "is not a client's bundle" in error_message(lambda: make_keys(folder, ["c"]))


# ---- untrusted bundles


def pack_tar(files: Mapping[str, bytes]) -> bytes:
    return tar_of(*(entry(name, data) for name, data in files.items()))


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of(*entries: tuple[tarfile.TarInfo, bytes], form: Literal[0, 1, 2] = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar file with these headers, whether they match the data or not."""
    blocks = [info.tobuf(form) + data + b"\0" * (-len(data) % 512) for info, data in entries]
    return b"".join(blocks) + b"\0" * 1024


def with_entry(
    files: Mapping[str, bytes], replaced: str, *entries: tuple[tarfile.TarInfo, bytes], **options: Any
) -> bytes:
    unchanged = [entry(name, data) for name, data in files.items() if name != replaced]
    return tar_of(*unchanged, *entries, **options)


def with_key_size(files: Mapping[str, bytes], size: bytes) -> bytes:
    """Return a bundle in which the key's header has another size and a valid checksum."""
    header = bytearray(tarfile.TarInfo("key").tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + with_entry(files, "key")


MALICIOUS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "empty": lambda files: b"",
    "zeros": lambda files: b"\0" * 10240,
    "text": lambda files: b"hello\n" * 100,
    "compressed": lambda files: gzip.compress(pack_tar(files)),
    "symlink": lambda files: with_entry(files, "key", entry("key", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "hard link": lambda files: with_entry(files, "key", entry("key", type=tarfile.LNKTYPE, linkname="client.json")),
    "folder": lambda files: with_entry(files, "key", entry("key", type=tarfile.DIRTYPE)),
    "pipe": lambda files: with_entry(files, "key", entry("key", type=tarfile.FIFOTYPE)),
    "device": lambda files: with_entry(files, "key", entry("key", type=tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "sparse": lambda files: with_entry(files, "key", entry("key", files["key"], type=tarfile.GNUTYPE_SPARSE)),
    "absolute": lambda files: with_entry(files, "key", entry("/key", files["key"])),
    "parent": lambda files: with_entry(files, "key", entry("../key", files["key"])),
    "dot": lambda files: with_entry(files, "key", entry("./key", files["key"])),
    "prefix": lambda files: with_entry(files, "key", entry("a" * 99 + "/key", files["key"])),
    "duplicate": lambda files: with_entry(files, "", entry("key", files["key"])),
    "extra": lambda files: with_entry(files, "", entry("run.sh", b"rm -rf")),
    "extended": lambda files: with_entry(files, "", entry("x" * 300, b"y"), form=tarfile.PAX_FORMAT),
    "long name": lambda files: with_entry(files, "", entry("x" * 300, b"y"), form=tarfile.GNU_FORMAT),
    "concatenated": lambda files: pack_tar(files) + pack_tar(files),
    "trailing garbage": lambda files: pack_tar(files) + b"garbage",
    "truncated": lambda files: pack_tar(files)[: len(pack_tar(files)) // 2],
    "truncated at the end": lambda files: pack_tar(files)[: -1024 - 500],
    "truncated header": lambda files: pack_tar(files)[:700],
    "huge": lambda files: with_entry(files, "key", entry("key", files["key"], size=8**11 - 1)),
    "too large": lambda files: pack_tar(files | {"key": b"k" * 2**15}),
    "too large settings": lambda files: pack_tar(files | {"deployment.toml": b"#" * (MIB + 1)}),
    "negative size": lambda files: with_key_size(files, b"\xff" * 12),
    "invalid size": lambda files: with_key_size(files, b"zzzzzzzzzzz\0"),
    "not UTF-8": lambda files: pack_tar(files | {"client.json": b"\xff\xfe"}),
    **{f"no {name}": lambda files, name=name: with_entry(files, name) for name in NAMES},  # type: ignore[misc]
}


@pytest.fixture
def valid_files(shared: Path) -> dict[str, bytes]:
    return unpacked(shared / "bundles" / "hospital-a.tar")


def open_bytes(data: bytes, folder: Path) -> Bundle:
    (folder / "a.tar").write_bytes(data)
    return open_bundle(folder / "a.tar", folder / "client" / "bundle")


def test_valid_bundle_is_unpacked_and_read(valid_files: dict[str, bytes], tmp_path: Path) -> None:
    """The bundle is packed by this test, which shows that the tests below do not reject every bundle."""
    bundle = open_bytes(pack_tar(valid_files), tmp_path)
    assert bundle == Bundle("hospital-a", "fl.example.org:9092", tmp_path / "client" / "bundle")
    assert contents(bundle.folder) == valid_files
    assert read_bundle(bundle.folder) == bundle
    assert open_bytes(pack_tar(valid_files), tmp_path) == bundle and contents(bundle.folder) == valid_files


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_tar_is_rejected(kind: str, valid_files: dict[str, bytes], tmp_path: Path) -> None:
    data = MALICIOUS[kind](valid_files)
    with assert_memory_below(10 * MIB):
        assert "is not a client's bundle" in error_message(lambda: open_bytes(data, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"], "nothing was unpacked"


def test_bundle_that_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**33)  # a sparse file
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", Path("/dev/zero")):
        assert "There is no bundle" in error_message(lambda path=path: open_bundle(path, tmp_path / "client"))  # type: ignore[misc]
    with assert_memory_below(10 * MIB):
        assert "is it the right file?" in error_message(lambda: open_bundle(tmp_path / "large", tmp_path / "client"))
    assert not (tmp_path / "client").exists()


def client_json(**fields: Any) -> bytes:
    return json.dumps({"format": 1, "name": "a", "address": "h:1"} | fields).encode()


def encrypted_key(public: ec.EllipticCurvePublicKey) -> bytes:
    """Return a key as ssh-keygen writes it with a password; the encrypted content does not matter."""

    def string(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    public_part = b64decode(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    salt = string(string(b"s" * 16) + (16).to_bytes(4, "big"))
    header = string(b"aes256-ctr") + string(b"bcrypt") + salt + (1).to_bytes(4, "big")
    lines = b64encode(b"openssh-key-v1\0" + header + string(public_part) + string(b"?" * 160))
    return b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + lines + b"\n-----END OPENSSH PRIVATE KEY-----\n"


def compressed_point_key() -> bytes:
    """Return a key whose public part is a compressed point, for which the library raises an undocumented error."""
    key = ec.generate_private_key(ec.SECP384R1())
    long, short = (
        key.public_key().public_bytes(Encoding.X962, form)
        for form in (PublicFormat.UncompressedPoint, PublicFormat.CompressedPoint)
    )
    header, *lines, footer = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).splitlines()
    decoded = b64decode(b"".join(lines)).replace(long, short.ljust(len(long), b"\0"))
    return b"\n".join([header, b64encode(decoded), footer])


PEM = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
EDWARDS = ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
INVALID: dict[str, tuple[str, bytes, str]] = {
    "invalid key": ("key", b"garbage", "no OpenSSH private key"),
    "no key": ("key", b"", "no OpenSSH private key"),
    "PEM": ("key", PEM, "no OpenSSH private key"),
    "encrypted key": ("key", encrypted_key(ec.generate_private_key(ec.SECP384R1()).public_key()), "key is encrypted"),
    "compressed point": ("key", compressed_point_key(), "no OpenSSH private key"),
    "Edwards curve": ("key", EDWARDS, "not ECDSA"),
    "invalid authority": ("authority.crt", b"garbage", "not a certificate"),
    "key for an authority": ("authority.crt", PEM, "not a certificate"),
    "client is not JSON": ("client.json", b"garbage", "no valid client.json"),
    "client is a list": ("client.json", b"[]", "no valid client.json"),
    "client is nested too deeply": ("client.json", b"[" * 8000, "no valid client.json"),
    "client has no name": ("client.json", b'{"format": 1, "address": "h:1"}', "no valid client.json"),
    "client has extra fields": ("client.json", client_json(run="rm"), "no valid client.json"),
    "other format": (
        "client.json",
        client_json(format=2),
        "has format 2, but this version of FedTailor reads format 1",
    ),
    "number for a name": ("client.json", client_json(name=7), "no valid client.json"),
    "path for a name": ("client.json", client_json(name="../a"), "A client's name must have"),
    "odd name": ("client.json", client_json(name="a\x1b[2J"), "A client's name must have"),
    "no port": ("client.json", client_json(address="example.org"), "address must be host:port"),
    "odd port": ("client.json", client_json(address="example.org:99999"), "address must be host:port"),
    "odd address": ("client.json", client_json(address="a\x1b[2J:1"), "address must be host:port"),
    "address with a path": ("client.json", client_json(address="a/b:1"), "address must be host:port"),
    "flag for an address": ("client.json", client_json(address="--insecure:1"), "address must be host:port"),
    "long address": ("client.json", client_json(address="a" * 5000 + ":1"), "no valid client.json"),
    "non-ASCII digits": ("client.json", client_json(address="a:\u0663"), "no valid client.json"),
    "deployment is not TOML": ("deployment.toml", b"garbage", "'deployment.toml' is not valid TOML"),
    "no such method": ("deployment.toml", b'method = "nonsense"', "There is no method 'nonsense'"),
    "dots": ("deployment.toml", b"a." * 100_000 + b"a = 1", "more than 32 dots"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_bundle_with_invalid_file_is_rejected(kind: str, valid_files: dict[str, bytes], tmp_path: Path) -> None:
    name, data, text = INVALID[kind]
    assert text in error_message(lambda: open_bytes(pack_tar(valid_files | {name: data}), tmp_path))
    assert not (tmp_path / "client").exists()


def test_bundle_with_several_authorities_is_rejected(
    shared: Path, valid_files: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise a client would trust certificates that it has not checked."""
    authority, server_certificate = valid_files["authority.crt"], (shared / "keys" / "server.crt").read_bytes()
    for text in (server_certificate, authority + authority, authority + server_certificate, authority + b"more"):
        message = error_message(lambda text=text: open_bytes(pack_tar(valid_files | {"authority.crt": text}), tmp_path))  # type: ignore[misc]
        assert "not the certificate of exactly one authority" in message


def test_folder_belongs_to_one_client_permanently(shared: Path, valid_files: dict[str, bytes], tmp_path: Path) -> None:
    unpacked_folder = open_bytes(pack_tar(valid_files), tmp_path).folder
    other = unpacked(shared / "bundles" / "b.tar")
    for parts, text in (
        (other, "is for client b, but"),
        (
            valid_files | {"client.json": other["client.json"]},
            "is for client b, but",
        ),  # another client's name with this client's key
    ):
        assert text in error_message(lambda parts=parts: open_bytes(pack_tar(parts), tmp_path))  # type: ignore[misc]
        assert contents(unpacked_folder) == valid_files


@pytest.mark.parametrize("name", NAMES)
def test_bundle_damaged_on_disk_is_rejected(name: str, valid_files: dict[str, bytes], tmp_path: Path) -> None:
    """client.json is written last, so without it the bundle was not unpacked completely."""
    unpacked_folder = open_bytes(pack_tar(valid_files), tmp_path).folder
    (unpacked_folder / name).write_bytes(valid_files[name][:-40])
    assert "The bundle in" in error_message(lambda: read_bundle(unpacked_folder))
    (unpacked_folder / name).unlink()
    text = "There is no bundle in" if name == "client.json" else "bundle"
    assert text in error_message(lambda: read_bundle(unpacked_folder))
    if name == "client.json":
        assert read_bundle(open_bytes(pack_tar(valid_files), tmp_path).folder).name == "hospital-a"


@pytest.mark.slow
def test_fuzzed_bundles_are_unpacked_or_rejected(shared: Path, tmp_path: Path) -> None:
    """Damage the archive, or a file in an intact archive."""
    tar = shared / "bundles" / "hospital-a.tar"
    files = unpacked(tar)
    parts = st.builds(
        lambda name, program: pack_tar(files | {name: damage(files[name], program)}), st.sampled_from(NAMES), PROGRAMS
    )

    def read(data: bytes, folder: Path) -> None:
        shutil.rmtree(folder / "client", ignore_errors=True)
        bundle = open_bytes(data, folder)
        assert read_bundle(bundle.folder) == bundle and {p.name for p in bundle.folder.iterdir()} == set(NAMES)

    fuzz(Reader(read, tar.read_bytes(), damaged([tar.read_bytes()]) | parts), 1, tmp_path)


# ---- new keys of clients


def test_client_opens_bundle_with_its_new_key_in_its_old_folder(folder: Path, tmp_path: Path) -> None:
    client = open_bundle(folder / "bundles" / "b.tar", tmp_path / "client").folder
    before, old_key = enrolled_clients(folder)["b"], (client / "key").read_text()
    tar = renew_client_key(folder, "b")
    after = enrolled_clients(folder)["b"]
    assert after == replace(before, next_key=after.next_key) and after.next_key not in (None, before.public_key)
    assert open_bundle(tar, client, "b").name == "b" and (client / "key").read_text() != old_key
    private = load_ssh_private_key((client / "key").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key(str(after.next_key).encode())
    newest = open_bundle(renew_client_key(folder, "b"), client)  # the bundle was lost on the way
    assert enrolled_clients(folder)["b"].next_key != after.next_key and newest.name == "b"
    renew_client_key(folder, "b", at_once=True)
    ended = enrolled_clients(folder)["b"]
    assert ended.next_key is None and ended.node_id is None and ended.public_key != before.public_key
    assert renew_server_certificate(folder) == []  # bundles keep the new key


def test_new_key_is_rejected_for_unknown_client_and_from_another_federation(folder: Path, tmp_path: Path) -> None:
    assert "'nobody'" in error_message(lambda: renew_client_key(folder, "nobody"))
    enroll(folder, {"hospital-a": replace(enrolled_clients(folder)["hospital-a"], left=True)})
    assert "has left" in error_message(lambda: renew_client_key(folder, "hospital-a"))
    client = open_bundle(folder / "bundles" / "b.tar", tmp_path / "client").folder
    (other,) = make_keys(deployment(tmp_path / "other"), ["b"])
    assert "from another federation" in error_message(lambda: open_bundle(other, client))
