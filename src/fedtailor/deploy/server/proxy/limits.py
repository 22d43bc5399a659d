"""The bounds of the reverse proxy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits per request, per client, and per address.

    A connection is *unsigned* until it has sent the complete headers of a request that an enrolled client has signed.
    An address is an IPv4 address or the first half of an IPv6 address, of which one customer usually has all.
    """

    body_bytes: int = 2**24  # of a request; Flower sends arrays in chunks of 5 MiB
    upload_bytes: int = 2**30  # of all that a client sends in reply to one message
    idle_timeout: float = 30.0  # seconds without a byte where some are expected
    max_clock_lag: float = 300.0  # seconds that a client's clock may be behind

    header_timeout: float = 10.0  # seconds for the TLS handshake and complete headers
    unsigned: int = 512  # connections, of all addresses together
    unsigned_per_address: int = 256  # many clients may share one address
    reserved_per_address: int = 16  # of them, for every address from which a client has sent a signed request
    new_per_second: float = 128.0  # connections per address, after `unsigned_per_address` at once
    per_client: int = 32  # connections with a signed request
