"""Warn a client before the certificates on which its connection depends expire."""

import socket
import ssl
from contextlib import suppress

from fedtailor.deploy.certificates import AUTHORITY_FILE
from fedtailor.deploy.expiry import expiry_sentence, expiry_times
from fedtailor.deploy.keys import Bundle

_TIMEOUT = 10.0  # seconds


def certificate_warnings(bundle: Bundle, now: float | None = None) -> list[str]:
    """Return a sentence for each certificate that expires within 30 days: the server's, and the authority's."""
    expires = expiry_times({"authority": bundle.folder / AUTHORITY_FILE})
    with suppress(OSError, ValueError):  # behind a proxy, only Flower can connect
        expires["server"] = _server_expiry(bundle)
    fix = {"server": "the operator must renew it", "authority": "ask the operator for a new bundle"}
    found = (expiry_sentence(f"The {name}'s certificate", when, fix[name], now) for name, when in expires.items())
    return [sentence for sentence in found if sentence]


def _server_expiry(bundle: Bundle) -> float:
    """Return when the certificate expires that the server shows."""
    host, _, port = bundle.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    context = ssl.create_default_context(cafile=bundle.folder / AUTHORITY_FILE)
    with (
        socket.create_connection((host, int(port)), timeout=_TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return float(ssl.cert_time_to_seconds(str((secure.getpeercert() or {}).get("notAfter"))))
