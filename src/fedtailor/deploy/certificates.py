"""The certificates of a federation: its own authority, and the server's, which it signs."""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtailor.deploy.settings import Deployment
from fedtailor.errors import Refused
from fedtailor.files import write, write_private
from fedtailor.untrusted import read_text

AUTHORITY = "authority.crt"
ODD = (  # what cryptography says of what is no key or certificate
    ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm,
    x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension,
)  # fmt: skip
_MOST = 2**14  # bytes of a key or a certificate
_LASTS = {"authority": timedelta(days=3650), "server": timedelta(days=825)}
_SKEW = timedelta(days=1)  # that a client's clock may be behind
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*")
_Extensions = list[tuple[x509.ExtensionType, bool]]  # and whether one who does not know it must refuse


def make_authority(keys: Path) -> None:
    """The authority if there is none. Its key comes first: a crash between them is mended by a certificate for it."""
    if (keys / AUTHORITY).is_file():
        return
    if not (keys / "authority.key").is_file():
        write_private(keys / "authority.key", _new_key())
    key, name = _read_key(keys / "authority.key"), _name("FedTailor authority")
    extensions: _Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
    ]
    begins = datetime.now(UTC) - _SKEW
    certificate = _sign(name, key.public_key(), name, key, (begins, begins + _LASTS["authority"]), extensions)
    write(keys / AUTHORITY, certificate)


def certify_server(keys: Path, deployment: Deployment) -> None:
    """A certificate for the server's key, which is made if there is none."""
    authority = _read_certificate(keys / AUTHORITY)
    if not (keys / "authority.key").is_file():
        raise Refused(f"'{keys}' has no authority.key, without which there is no new certificate; bring it back.")
    if not (keys / "server.key").is_file():
        write_private(keys / "server.key", _new_key())
    begins = datetime.now(UTC) - _SKEW
    ends = min(begins + _LASTS["server"], authority.not_valid_after_utc)
    if ends < datetime.now(UTC):
        raise Refused(f"The authority ended on {ends:%Y-%m-%d}; remove authority.crt from '{keys}' and renew.")
    extensions: _Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(_hosts(deployment)), False),
    ]
    signer, public = _read_key(keys / "authority.key"), _read_key(keys / "server.key").public_key()
    if signer.public_key() != authority.public_key():
        raise Refused(f"authority.key in '{keys}' is not the key of authority.crt; bring back the one that is.")
    span, name = (begins, ends), _name("FedTailor server")
    write(keys / "server.crt", _sign(name, public, authority.subject, signer, span, extensions))


def serves(keys: Path, deployment: Deployment) -> bool:
    """Whether the server has a certificate for its key and its host."""
    if not (keys / "server.crt").is_file() or not (keys / "server.key").is_file():
        return False
    certificate, key = _read_certificate(keys / "server.crt"), _read_key(keys / "server.key")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return certificate.public_key() == key.public_key() and host_name(deployment) in names


def _sign(
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    span: tuple[datetime, datetime],
    extensions: _Extensions,
) -> bytes:
    """A certificate in PEM. Key identifiers are what OpenSSL wants when it is strict."""
    identifiers = (
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    made = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), *span)
    for extension, critical in (*extensions, *((identifier, False) for identifier in identifiers)):
        made = made.add_extension(extension, critical)
    return made.sign(signer, SHA384()).public_bytes(Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*allowed: str) -> x509.KeyUsage:
    ways = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{way: way in allowed for way in ways})


def host_name(deployment: Deployment) -> x509.GeneralName:
    """The server's host as certificates name it."""
    host = deployment.host.removeprefix("[").removesuffix("]")
    with suppress(ValueError):  # a name
        return x509.IPAddress(ip_address(host))
    if not _HOST.fullmatch(host):
        raise Refused(f"address must have a host as DNS writes it, or its number, not {host[:80]!r}.")
    return x509.DNSName(host)


def _hosts(deployment: Deployment) -> list[x509.GeneralName]:
    """By which names the server is known: its own, and those of its own machine."""
    local = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(number)) for number in ("127.0.0.1", "::1"))]
    return list(dict.fromkeys((host_name(deployment), *local)))


def _new_key() -> bytes:
    return ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    """A key of ours, or one that the operator's own authority gave them."""
    text = read_text(path, "The key", _MOST)
    with suppress(*ODD):
        key = load_pem_private_key(text.encode(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
            return key
    raise Refused(f"'{path}' is no private key without a password; bring back the one that was there.")


def _read_certificate(path: Path) -> x509.Certificate:
    text = read_text(path, "The certificate", _MOST)
    try:
        return x509.load_pem_x509_certificate(text.encode())
    except ODD as error:
        raise Refused(f"'{path}' is no certificate; bring back the one that was there.") from error
