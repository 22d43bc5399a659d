"""Use a renewed certificate without a restart."""

import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("fedtailor.proxy")


def certificate_reloader(
    context: Callable[[], ssl.SSLContext | None], certificate: Path, key: Path
) -> Callable[[], Awaitable[None]]:
    """Return a function that loads a certificate into a TLS context again after its file has changed.

    It must be called in the thread that uses the context. New connections then use the new certificate.
    """
    loaded = _version(certificate)

    async def reload() -> None:
        nonlocal loaded
        version, tls = _version(certificate), context()
        if version == loaded or tls is None:
            return
        try:
            tls.load_cert_chain(certificate, key)
            log.info("The server uses the renewed certificate.")
        except (OSError, ssl.SSLError) as error:
            log.warning("The renewed certificate cannot be used: %s.", error)
        loaded = version

    return reload


def _version(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_mtime_ns
    return 0, 0
