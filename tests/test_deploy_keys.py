"""Keys and bundles of a federation: whom TLS trusts, what a client takes from whoever's hands, what a crash leaves."""

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

from conftest import refusal
from fedtailor import files
from fedtailor.deploy import certificates
from fedtailor.deploy.folder import enrol, enrolled
from fedtailor.deploy.keys import Bundle, make_keys, open_bundle, read_bundle, renew_server
from fedtailor.deploy.settings import Deployment, read_deployment, write_deployment
from fuzzing import Reader, fuzz
from mutations import PROGRAMS, damage, damaged
from peaks import at_most

NAMES = ("authority.crt", "key", "client.json", "deployment.toml")
MIB = 2**20


def deployment(folder: Path, address: str = "fl.example.org:9092") -> Path:
    write_deployment(folder, Deployment(address=address))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two; tests do not change it."""
    folder = deployment(tmp_path_factory.mktemp("federation"))
    make_keys(folder, ["hospital-a", "b"])
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "federation")


def unpacked(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as tar:
        return {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- whom TLS trusts


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """A TLS server with the federation's certificate on this machine, and its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys" / "server.crt", folder / "keys" / "server.key")
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection = listening.accept()[0]
            except OSError:  # closed
                return
            try:
                with context.wrap_socket(connection, server_side=True) as secure:
                    secure.sendall(b"welcome")
            except (ssl.SSLError, ConnectionError):  # the client did not like us
                connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def greet(port: int, host: str, authority: Path) -> bytes:
    """What a client hears that knows the server by a host and trusts one authority, as strictly as OpenSSL can."""
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
def test_a_client_trusts_its_server_and_no_other_host(address: str, host: str, tmp_path: Path) -> None:
    (tar,) = make_keys(deployment(tmp_path / "dir", address), ["a"])
    authority = open_bundle(tar, tmp_path / "site").folder / "authority.crt"
    with server(tmp_path / "dir") as port:
        for known in (host, "localhost", "127.0.0.1", "::1"):
            assert greet(port, known, authority) == b"welcome"
        for other in ("example.org", "evil.fl.example.org", "10.1.2.4", "fd00::8"):
            with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
                greet(port, other, authority)


def test_another_authority_is_not_trusted(made: Path, tmp_path: Path) -> None:
    make_keys(deployment(tmp_path), [])
    with server(made) as port, pytest.raises(ssl.SSLCertVerificationError):
        greet(port, "localhost", tmp_path / "keys" / "authority.crt")


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "keys" / f"{name}.crt").read_bytes())


def test_what_certificates_may_do_and_how_long(made: Path) -> None:
    authority, of_server, now = certificate(made, "authority"), certificate(made, "server"), datetime.now(UTC)
    of_server.verify_directly_issued_by(authority)
    for found, days in ((authority, 3650), (of_server, 825)):
        assert found.not_valid_before_utc < now
        assert timedelta(days=days - 2) < found.not_valid_after_utc - now <= timedelta(days=days)
        public = found.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP384R1)
    ca = [found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for found in (authority, of_server)]
    assert ca == [True, False]


# ---- enrolment


def test_everyone_is_enrolled_in_order_with_the_key_in_the_bundle(own: Path) -> None:
    before = enrolled(own)
    bundles = make_keys(own, ["z", "c"])
    assert bundles == [own / "bundles" / "z.tar", own / "bundles" / "c.tar"]
    everyone = enrolled(own)
    assert list(everyone) == ["hospital-a", "b", "z", "c"] and {n: everyone[n] for n in before} == before
    for name, client in everyone.items():
        private = load_ssh_private_key(unpacked(own / "bundles" / f"{name}.tar")["key"], None)
        assert private.public_key() == load_ssh_public_key(client.public_key.encode())
        assert client.public_key.startswith("ecdsa-sha2-nistp384 ") and client.node is None and not client.left
    assert len({client.public_key for client in everyone.values()}) == 4


def test_flower_loads_the_key(made: Path, tmp_path: Path) -> None:
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    key = open_bundle(made / "bundles" / "b.tar", tmp_path).folder / "key"
    loaded = _try_setup_client_authentication(
        Namespace(auth_supernode_private_key=str(key), auth_supernode_public_key=None)
    )
    assert loaded is not None and uses_nist_ec_curve(loaded[1])
    assert loaded[1] == load_ssh_public_key(enrolled(made)["b"].public_key.encode())


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (["c", "b"], "The client b is enrolled already"),
        (["gone"], "The client gone was enrolled and has left"),
        (["c", "d", "c"], "The client c is named 2 times"),
        (["c", "../d"], "A client's name has letters"),
        (["c", ""], "A client's name has letters"),
    ],
    ids=["enrolled", "left", "twice", "path", "empty"],
)
def test_names_that_cannot_be_given(clients: list[str], words: str, own: Path) -> None:
    make_keys(own, ["gone"])
    enrol(own, {"gone": replace(enrolled(own)["gone"], left=True)})
    before = contents(own)
    assert words in refusal(lambda: make_keys(own, clients))
    assert contents(own) == before


def test_a_bundle_has_four_files_and_no_key_of_the_operator(made: Path) -> None:
    files = unpacked(made / "bundles" / "b.tar")
    assert files.keys() == set(NAMES)
    assert files["authority.crt"] == (made / "keys" / "authority.crt").read_bytes()
    assert files["deployment.toml"] == (made / "deployment.toml").read_bytes()
    assert json.loads(files["client.json"]) == {"format": 1, "name": "b", "address": "fl.example.org:9092"}
    whole = (made / "bundles" / "b.tar").read_bytes()
    for name in ("authority.key", "server.key"):
        assert (made / "keys" / name).read_bytes().splitlines()[1] not in whole


def test_nobody_else_can_read_a_secret(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "dir" / "keys").mkdir(parents=True)
        (tar,) = make_keys(deployment(tmp_path / "dir"), ["a"])
        open_bundle(tar, tmp_path / "site" / "bundle")
    finally:
        os.umask(before)
    keys_folder, opened = tmp_path / "dir" / "keys", tmp_path / "site" / "bundle"
    for folder in (keys_folder, tar.parent, opened):
        assert mode(folder) == 0o700
    for secret in (keys_folder / "authority.key", keys_folder / "server.key", tar, opened / "key"):
        assert mode(secret) == 0o600


class Killed(BaseException):
    """The process ends here."""


def test_after_a_crash_anywhere_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file in turn is written by half, and then nothing more; whatever had been handed out stays good."""
    whole, modes = files.put, set[int]()

    def put(file: BinaryIO, data: bytes, left: list[int]) -> None:
        modes.add(mode(Path(file.name)) if file.name.endswith((".key.writing", ".tar.writing")) else 0o600)
        left[0] -= 1
        if left[0] < 0:
            file.write(data[: len(data) // 2])
            raise Killed
        whole(file, data)

    crashes = 0
    while True:
        folder, left = deployment(tmp_path / str(crashes)), [crashes]
        monkeypatch.setattr(files, "put", lambda file, data, left=left: put(file, data, left))
        try:
            make_keys(folder, ["a", "b"])
            break
        except Killed:
            crashes += 1
        finally:
            monkeypatch.setattr(files, "put", whole)
        before = contents(folder)
        bundles = make_keys(folder, ["a", "b"])
        kept = [name for name in before if name.endswith((".crt", ".key", ".tar"))]
        assert {name: before[name] for name in kept} == {name: contents(folder)[name] for name in kept}
        for name, bundle in zip(("a", "b"), bundles, strict=True):
            key = load_ssh_private_key(unpacked(bundle)["key"], None)
            assert key.public_key() == load_ssh_public_key(enrolled(folder)[name].public_key.encode())
        with server(folder) as port:
            assert greet(port, "fl.example.org", folder / "keys" / "authority.crt") == b"welcome"
    assert crashes == 7 and modes == {0o600}  # four keys and certificates, two bundles, one list


def test_two_cannot_make_keys_at_once(own: Path) -> None:
    with files.locked(own / "keys"):
        assert "Somebody is at work" in refusal(lambda: make_keys(own, ["c"]))


def test_keys_are_made_for_a_deployment(tmp_path: Path) -> None:
    assert "There is no deployment in" in refusal(lambda: make_keys(tmp_path, ["a"]))
    write_deployment(tmp_path, replace(Deployment(), address="f..org:1"))
    assert "a host as DNS writes it" in refusal(lambda: make_keys(tmp_path, ["a"]))
    assert not enrolled(tmp_path)


# ---- renewal


def test_the_host_may_change(own: Path, tmp_path: Path) -> None:
    before = contents(own)
    site = open_bundle(own / "bundles" / "b.tar", tmp_path / "site")
    enrol(own, {"hospital-a": replace(enrolled(own)["hospital-a"], left=True)})
    deployment(own, "new.example.org:443")
    assert renew_server(own) == [own / "bundles" / "b.tar"], "who has left needs none"
    after = contents(own)
    assert {name for name in before if before[name] != after[name]} == {
        "keys/server.crt", "deployment.toml", "clients.json", "bundles/b.tar",
    }  # fmt: skip
    again = open_bundle(own / "bundles" / "b.tar", site.folder)
    assert again == Bundle("b", "new.example.org:443", site.folder) == read_bundle(site.folder)
    assert read_deployment(site.folder).port == 443
    with server(own) as port:
        assert greet(port, "new.example.org", site.folder / "authority.crt") == b"welcome"
        with pytest.raises(ssl.SSLCertVerificationError):
            greet(port, "fl.example.org", site.folder / "authority.crt")


def test_enrolment_after_the_host_changed_brings_the_certificate_along(own: Path) -> None:
    deployment(own, "new.example.org:443")
    make_keys(own, ["c"])
    with server(own) as port:
        assert greet(port, "new.example.org", own / "keys" / "authority.crt") == b"welcome"


def test_a_new_key_of_the_server_gets_a_certificate(own: Path) -> None:
    """Also if the process ended between the two: a pair that does not fit is no pair."""
    (own / "keys" / "server.key").unlink()
    for name in ("c", "d"):
        make_keys(own, [name])
        with server(own) as port:
            assert greet(port, "localhost", own / "keys" / "authority.crt") == b"welcome"
        (own / "keys" / "server.key").write_bytes(certificates._new_key())


def test_renewal_before_the_end_changes_nothing_for_clients(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(certificates._LASTS, "server", timedelta(days=3))
    renew_server(own)
    soon = certificate(own, "server").not_valid_after_utc
    monkeypatch.undo()
    before = contents(own)
    assert renew_server(own) == []
    after = contents(own)
    assert {name for name in before if before[name] != after[name]} == {"keys/server.crt"}
    assert certificate(own, "server").not_valid_after_utc > soon + timedelta(days=800)


def test_no_certificate_outlives_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(certificates._LASTS, "authority", timedelta(days=30))
    make_keys(deployment(tmp_path), ["a"])
    assert certificate(tmp_path, "server").not_valid_after_utc == certificate(tmp_path, "authority").not_valid_after_utc


def test_an_authority_that_ended_is_replaced_by_hand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(deployment(tmp_path), ["a"])
    key = (tmp_path / "keys" / "authority.key").read_bytes()
    (tmp_path / "keys" / "authority.crt").unlink()
    yesterday = timedelta(hours=1)  # it begins a day ago, for clocks that are behind
    monkeypatch.setitem(certificates._LASTS, "authority", yesterday)
    assert "The authority ended on" in refusal(lambda: renew_server(tmp_path))
    monkeypatch.undo()
    assert "remove authority.crt from" in refusal(lambda: renew_server(tmp_path))
    (tmp_path / "keys" / "authority.crt").unlink()
    assert renew_server(tmp_path) == [tmp_path / "bundles" / "a.tar"]
    assert (tmp_path / "keys" / "authority.key").read_bytes() == key
    authority = open_bundle(tmp_path / "bundles" / "a.tar", tmp_path / "site").folder / "authority.crt"
    with server(tmp_path) as port:
        assert greet(port, "localhost", authority) == b"welcome"


def test_the_authority_s_key_may_be_kept_elsewhere(own: Path, tmp_path: Path) -> None:
    """It is needed for the server's certificate, not to enrol clients."""
    (own / "keys" / "authority.key").rename(tmp_path / "authority.key")
    make_keys(own, ["c"])
    assert "has no authority.key" in refusal(lambda: renew_server(own))
    (own / "keys" / "authority.key").write_bytes(certificates._new_key())
    assert "is not the key of authority.crt" in refusal(lambda: renew_server(own))
    (own / "keys" / "authority.key").write_bytes(b"garbage")
    assert "is no private key" in refusal(lambda: renew_server(own))
    (own / "keys" / "authority.crt").write_bytes(b"garbage")
    assert "is no certificate" in refusal(lambda: renew_server(own))


def test_an_own_certificate_stays(own: Path, tmp_path: Path) -> None:
    """An operator whose house has an authority lays its certificates there, and no key of it."""
    house = deployment(tmp_path / "house")
    make_keys(house, [])
    for name in ("authority.crt", "server.crt", "server.key"):
        shutil.copy(house / "keys" / name, own / "keys" / name)
    (own / "keys" / "authority.key").unlink()
    before = contents(own / "keys")
    (tar,) = make_keys(own, ["c"])
    assert contents(own / "keys") == before and unpacked(tar)["authority.crt"] == before["authority.crt"]


def test_a_bundle_of_another_name_is_not_taken_for_a_crash(own: Path) -> None:
    shutil.copy(own / "bundles" / "b.tar", own / "bundles" / "c.tar")
    assert "is not for c" in refusal(lambda: make_keys(own, ["c"]))
    (own / "bundles" / "c.tar").write_bytes(b"garbage")
    assert "is no bundle of a client" in refusal(lambda: make_keys(own, ["c"]))


# ---- bundles from whoever's hands


def packed(files: Mapping[str, bytes]) -> bytes:
    return tar_of(*(entry(name, data) for name, data in files.items()))


def entry(name: str, data: bytes = b"", **about: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in about.items():
        setattr(info, field, value)
    return info, data


def tar_of(*entries: tuple[tarfile.TarInfo, bytes], form: Literal[0, 1, 2] = tarfile.USTAR_FORMAT) -> bytes:
    """A tar whose headers say what they are told to, true or not."""
    blocks = [info.tobuf(form) + data + b"\0" * (-len(data) % 512) for info, data in entries]
    return b"".join(blocks) + b"\0" * 1024


def with_entry(files: Mapping[str, bytes], replaced: str, *entries: tuple[tarfile.TarInfo, bytes], **how: Any) -> bytes:
    honest = [entry(name, data) for name, data in files.items() if name != replaced]
    return tar_of(*honest, *entries, **how)


def bytes_of_size(files: Mapping[str, bytes], size: bytes) -> bytes:
    """A bundle in which the key's header says another size, with a right checksum."""
    header = bytearray(tarfile.TarInfo("key").tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + with_entry(files, "key")


HOSTILE: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "empty": lambda files: b"",
    "zeros": lambda files: b"\0" * 10240,
    "text": lambda files: b"hello\n" * 100,
    "compressed": lambda files: gzip.compress(packed(files)),
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
    "twice over": lambda files: packed(files) + packed(files),
    "garbage after": lambda files: packed(files) + b"garbage",
    "cut off": lambda files: packed(files)[: len(packed(files)) // 2],
    "cut off at the end": lambda files: packed(files)[: -1024 - 500],
    "cut in a header": lambda files: packed(files)[:700],
    "huge": lambda files: with_entry(files, "key", entry("key", files["key"], size=8**11 - 1)),
    "too large": lambda files: packed(files | {"key": b"k" * 2**15}),
    "too large settings": lambda files: packed(files | {"deployment.toml": b"#" * (MIB + 1)}),
    "below zero": lambda files: bytes_of_size(files, b"\xff" * 12),
    "no number": lambda files: bytes_of_size(files, b"zzzzzzzzzzz\0"),
    "no text": lambda files: packed(files | {"client.json": b"\xff\xfe"}),
    **{f"no {name}": lambda files, name=name: with_entry(files, name) for name in NAMES},  # type: ignore[misc]
}


@pytest.fixture
def honest(made: Path) -> dict[str, bytes]:
    return unpacked(made / "bundles" / "hospital-a.tar")


def opened(data: bytes, folder: Path) -> Bundle:
    (folder / "a.tar").write_bytes(data)
    return open_bundle(folder / "a.tar", folder / "site" / "bundle")


def test_an_honest_bundle_is_opened_and_read_again(honest: dict[str, bytes], tmp_path: Path) -> None:
    """Made by hand, so that the refusals below are not refusals of everything."""
    bundle = opened(packed(honest), tmp_path)
    assert bundle == Bundle("hospital-a", "fl.example.org:9092", tmp_path / "site" / "bundle")
    assert contents(bundle.folder) == honest
    assert read_bundle(bundle.folder) == bundle
    assert opened(packed(honest), tmp_path) == bundle and contents(bundle.folder) == honest


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tar_is_refused(kind: str, honest: dict[str, bytes], tmp_path: Path) -> None:
    data = HOSTILE[kind](honest)
    with at_most(10 * MIB):
        assert "is no bundle of a client" in refusal(lambda: opened(data, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"], "nothing was laid out"


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**33)  # takes no room on the disk
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", Path("/dev/zero")):
        assert "There is no bundle" in refusal(lambda path=path: open_bundle(path, tmp_path / "site"))  # type: ignore[misc]
    with at_most(10 * MIB):
        assert "is it the right file?" in refusal(lambda: open_bundle(tmp_path / "large", tmp_path / "site"))
    assert not (tmp_path / "site").exists()


def client(**fields: Any) -> bytes:
    return json.dumps({"format": 1, "name": "a", "address": "h:1"} | fields).encode()


def locked_key(public: ec.EllipticCurvePublicKey) -> bytes:
    """As ssh-keygen writes one with a password; what is enciphered does not matter here."""

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    half = b64decode(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    salted = text(text(b"s" * 16) + (16).to_bytes(4, "big"))
    whole = text(b"aes256-ctr") + text(b"bcrypt") + salted + (1).to_bytes(4, "big") + text(half) + text(b"?" * 160)
    lines = b64encode(b"openssh-key-v1\0" + whole)
    return b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + lines + b"\n-----END OPENSSH PRIVATE KEY-----\n"


def half_point() -> bytes:
    """A key whose public half is written in the short form, for which the library has no words of its own."""
    key = ec.generate_private_key(ec.SECP384R1())
    long, short = (
        key.public_key().public_bytes(Encoding.X962, form)
        for form in (PublicFormat.UncompressedPoint, PublicFormat.CompressedPoint)
    )
    begin, *lines, end = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).splitlines()
    whole = b64decode(b"".join(lines)).replace(long, short.ljust(len(long), b"\0"))
    return b"\n".join([begin, b64encode(whole), end])


PEM = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
EDWARDS = ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
WRONG: dict[str, tuple[str, bytes, str]] = {
    "garbage for a key": ("key", b"garbage", "no private key of OpenSSH"),
    "no key": ("key", b"", "no private key of OpenSSH"),
    "PEM": ("key", PEM, "no private key of OpenSSH"),
    "locked key": ("key", locked_key(ec.generate_private_key(ec.SECP384R1()).public_key()), "without a password"),
    "key of half a point": ("key", half_point(), "no private key of OpenSSH"),
    "Edwards curve": ("key", EDWARDS, "not of an elliptic curve, which alone Flower takes"),
    "garbage for an authority": ("authority.crt", b"garbage", "no certificate"),
    "key for an authority": ("authority.crt", PEM, "no certificate"),
    "client is no JSON": ("client.json", b"garbage", "does not say in client.json"),
    "client is a list": ("client.json", b"[]", "does not say in client.json"),
    "client is deep": ("client.json", b"[" * 8000, "does not say in client.json"),
    "client is nobody": ("client.json", b'{"format": 1, "address": "h:1"}', "does not say in client.json"),
    "client has more": ("client.json", client(run="rm"), "does not say in client.json"),
    "other format": ("client.json", client(format=2), "has format 2, and this version of FedTailor reads format 1"),
    "number for a name": ("client.json", client(name=7), "does not say in client.json"),
    "path for a name": ("client.json", client(name="../a"), "A client's name has letters"),
    "odd name": ("client.json", client(name="a\x1b[2J"), "A client's name has letters"),
    "no port": ("client.json", client(address="example.org"), "address must be host:port"),
    "odd port": ("client.json", client(address="example.org:99999"), "address must be host:port"),
    "odd address": ("client.json", client(address="a\x1b[2J:1"), "address must be host:port"),
    "address with a path": ("client.json", client(address="a/b:1"), "address must be host:port"),
    "flag for an address": ("client.json", client(address="--insecure:1"), "address must be host:port"),
    "long address": ("client.json", client(address="a" * 5000 + ":1"), "does not say in client.json"),
    "digits of elsewhere": ("client.json", client(address="a:\u0663"), "does not say in client.json"),
    "deployment is no TOML": ("deployment.toml", b"garbage", "'deployment.toml' is not TOML"),
    "no such method": ("deployment.toml", b'method = "nonsense"', "There is no method 'nonsense'"),
    "dots": ("deployment.toml", b"a." * 100_000 + b"a = 1", "more than 32 dots"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_part_is_refused_and_named(kind: str, honest: dict[str, bytes], tmp_path: Path) -> None:
    name, data, words = WRONG[kind]
    assert words in refusal(lambda: opened(packed(honest | {name: data}), tmp_path))
    assert not (tmp_path / "site").exists()


def test_the_authority_is_one_and_alone(made: Path, honest: dict[str, bytes], tmp_path: Path) -> None:
    """Else a client would trust more than it checked."""
    authority, of_server = honest["authority.crt"], (made / "keys" / "server.crt").read_bytes()
    for text in (of_server, authority + authority, authority + of_server, authority + b"more"):
        words = refusal(lambda text=text: opened(packed(honest | {"authority.crt": text}), tmp_path))  # type: ignore[misc]
        assert "not the certificate of one authority" in words


def test_a_folder_is_one_client_s_for_good(made: Path, honest: dict[str, bytes], tmp_path: Path) -> None:
    site = opened(packed(honest), tmp_path).folder
    other = unpacked(made / "bundles" / "b.tar")
    for parts, words in (
        (other, "is for b, and"),
        (honest | {"client.json": other["client.json"]}, "is for b, and"),  # another's name, with one's own key
        (honest | {"key": other["key"]}, "has another key for hospital-a"),
    ):
        assert words in refusal(lambda parts=parts: opened(packed(parts), tmp_path))  # type: ignore[misc]
        assert contents(site) == honest


def test_an_opening_that_was_cut_short_is_none(honest: dict[str, bytes], tmp_path: Path) -> None:
    site = opened(packed(honest), tmp_path).folder
    (site / "client.json").unlink()  # which is written last
    assert "There is no bundle in" in refusal(lambda: read_bundle(site))
    assert read_bundle(opened(packed(honest), tmp_path).folder).name == "hospital-a"


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_that_was_damaged_on_disk_is_refused(name: str, honest: dict[str, bytes], tmp_path: Path) -> None:
    site = opened(packed(honest), tmp_path).folder
    (site / name).write_bytes(honest[name][:-40])
    assert "The bundle in" in refusal(lambda: read_bundle(site))
    (site / name).unlink()
    assert "bundle" in refusal(lambda: read_bundle(site))


@pytest.mark.slow
def test_hostile_bundles_are_opened_or_refused(made: Path, tmp_path: Path) -> None:
    """Damage to the archive, and to a file in an archive that is whole."""
    tar = made / "bundles" / "hospital-a.tar"
    files = unpacked(tar)
    parts = st.builds(
        lambda name, program: packed(files | {name: damage(files[name], program)}), st.sampled_from(NAMES), PROGRAMS
    )

    def read(data: bytes, folder: Path) -> None:
        shutil.rmtree(folder / "site", ignore_errors=True)
        bundle = opened(data, folder)
        assert read_bundle(bundle.folder) == bundle and {p.name for p in bundle.folder.iterdir()} == set(NAMES)

    fuzz(Reader(read, tar.read_bytes(), damaged([tar.read_bytes()]) | parts), 1, tmp_path)
