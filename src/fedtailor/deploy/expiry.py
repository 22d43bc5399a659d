"""When certificates expire, and warnings before."""

import time
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509

WARNING_DAYS = 30.0
_DAY = 86_400.0  # seconds
_MAX_BYTES = 2**16


def expiry_times(certificates: Mapping[str, Path]) -> dict[str, float]:
    """Return when certificates expire, in seconds since the epoch; those that cannot be read are missing.

    >>> expiry_times({"server": Path("nowhere.crt")})
    {}
    """
    times = {}
    for name, path in certificates.items():
        try:
            with path.open("rb") as file:
                certificate = x509.load_pem_x509_certificate(file.read(_MAX_BYTES))
            times[name] = certificate.not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            continue
    return times


def days_left(expires: float, now: float | None = None) -> float:
    """Return the days until a time, negative after it.

    >>> days_left(86_400.0, now=0.0)
    1.0
    """
    return (expires - (time.time() if now is None else now)) / _DAY


def has_expired(expires: float) -> bool:
    """Return whether a time has passed.

    >>> has_expired(0.0)
    True
    """
    return days_left(expires) <= 0


def expiry_sentence(what: str, expires: float, fix: str, now: float | None = None) -> str | None:
    """Return a sentence if a certificate expires within 30 days or has expired, otherwise None.

    >>> expiry_sentence("The server's certificate", 10 * 86_400.0, "renew it", now=0.0)
    "The server's certificate expires in 10 days, on 1970-01-11; renew it."
    >>> expiry_sentence("The server's certificate", 0.0, "renew it", now=1.0)
    "The server's certificate expired on 1970-01-01; renew it."
    """
    left, date = days_left(expires, now), time.strftime("%Y-%m-%d", time.gmtime(expires))
    if left > WARNING_DAYS:
        return None
    if left <= 0:
        return f"{what} expired on {date}; {fix}."
    days = f"in {left:.0f} days" if left >= 1.5 else f"in {24 * left:.0f} hours" if left >= 0.1 else "very soon"
    return f"{what} expires {days}, on {date}; {fix}."
