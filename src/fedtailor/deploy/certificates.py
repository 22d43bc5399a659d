"""The certificates of a federation: its own certificate authority, and the server's certificate, which it signs."""

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

from fedtailor.core.untrusted_input import read_text
from fedtailor.errors import DeployError
from fedtailor.experiments.deployment import Deployment
from fedtailor.runs.files import write_atomic, write_private

AUTHORITY_FILE = "authority.crt"
INVALID_ERRORS = (  # what cryptography raises for an invalid key or certificate
    ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm,
    x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension,
)  # fmt: skip
_MAX_BYTES = 2**14  # of a key or a certificate
_VALIDITY = {"authority": timedelta(days=3650), "server": timedelta(days=825)}
_CLOCK_LAG = timedelta(days=1)  # how far a client's clock may be behind
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*")
_Extensions = list[tuple[x509.ExtensionType, bool]]  # and whether it is critical


def make_authority(keys: Path) -> None:
    """Create the authority if it does not exist; the key is written first, so a crash in between can be repaired."""
    if (keys / AUTHORITY_FILE).is_file():
        return
    if not (keys / "authority.key").is_file():
        write_private(keys / "authority.key", _new_key())
    key, name = _read_key(keys / "authority.key"), _name("FedTailor authority")
    extensions: _Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
    ]
    start = datetime.now(UTC) - _CLOCK_LAG
    certificate = _sign(name, key.public_key(), name, key, (start, start + _VALIDITY["authority"]), extensions)
    write_atomic(keys / AUTHORITY_FILE, certificate)


def certify_server(keys: Path, deployment: Deployment) -> None:
    """Create a certificate for the server's key, and the key if it does not exist."""
    authority = _read_certificate(keys / AUTHORITY_FILE)
    if not (keys / "authority.key").is_file():
        raise DeployError(f"'{keys}' has no authority.key, which a new certificate requires; restore it.")
    if not (keys / "server.key").is_file():
        write_private(keys / "server.key", _new_key())
    start = datetime.now(UTC) - _CLOCK_LAG
    end = min(start + _VALIDITY["server"], authority.not_valid_after_utc)
    if end < datetime.now(UTC):
        raise DeployError(
            f"The authority expired on {end:%Y-%m-%d}; delete authority.crt in '{keys}' and run `deploy renew` again."
        )
    extensions: _Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(_hosts(deployment)), False),
    ]
    signer, public = _read_key(keys / "authority.key"), _read_key(keys / "server.key").public_key()
    if signer.public_key() != authority.public_key():
        raise DeployError(f"authority.key in '{keys}' does not belong to authority.crt; restore the right key.")
    validity, name = (start, end), _name("FedTailor server")
    write_atomic(keys / "server.crt", _sign(name, public, authority.subject, signer, validity, extensions))


def is_server_certified(keys: Path, deployment: Deployment) -> bool:
    """Return whether the server has a certificate for its key and its host."""
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
    validity: tuple[datetime, datetime],
    extensions: _Extensions,
) -> bytes:
    """Return a certificate in PEM format; OpenSSL in strict mode requires the key identifiers."""
    identifiers = (
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), *validity)
    for extension, critical in (*extensions, *((identifier, False) for identifier in identifiers)):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, SHA384()).public_bytes(Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*allowed: str) -> x509.KeyUsage:
    usages = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{usage: usage in allowed for usage in usages})


def host_name(deployment: Deployment) -> x509.GeneralName:
    """Return the server's host in the form that certificates use."""
    host = deployment.host.removeprefix("[").removesuffix("]")
    with suppress(ValueError):  # not an IP address
        return x509.IPAddress(ip_address(host))
    if not _HOST.fullmatch(host):
        raise DeployError(f"address must contain a valid DNS name or IP address as host, got {host[:80]!r}.")
    return x509.DNSName(host)


def _hosts(deployment: Deployment) -> list[x509.GeneralName]:
    """Return the names of the server: its host, and the local names of its machine."""
    local = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(address)) for address in ("127.0.0.1", "::1"))]
    return list(dict.fromkeys((host_name(deployment), *local)))


def _new_key() -> bytes:
    return ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    """Read a private key, created by FedTailor or by the operator's own authority."""
    text = read_text(path, "The key", _MAX_BYTES)
    with suppress(*INVALID_ERRORS):
        key = load_pem_private_key(text.encode(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
            return key
    raise DeployError(f"'{path}' is not a private key, or the key is encrypted; restore the original file.")


def _read_certificate(path: Path) -> x509.Certificate:
    text = read_text(path, "The certificate", _MAX_BYTES)
    try:
        return x509.load_pem_x509_certificate(text.encode())
    except INVALID_ERRORS as error:
        raise DeployError(f"'{path}' is not a certificate; restore the original file.") from error
