"""Which connections stay open when there are too many.

Before a client's first signed request, nothing distinguishes it from an attacker, who may even share its address. If
new connections were rejected while all places are taken, an attacker who takes them would lock everyone out. Therefore
a new connection always gets a place, and the oldest one of the address that has most of them is closed: an honest
client needs its place for a second only, and then has places of its own.
"""

import time
from collections.abc import Callable
from ipaddress import ip_address

from fedtailor.deploy.server.proxy.limits import Limits

_ADDRESSES_PER_CLIENT = 8  # the last ones that it used
_TOO_MANY = "has too many connections without a signed request; the oldest are closed"
_CROWDED = "has most of the connections without a signed request, of which there are too many; the oldest are closed"


class Connection:
    """An open connection; `abort` closes it at once."""

    def __init__(self, address: str, abort: Callable[[], None], opened: float) -> None:
        self.address, self.abort, self.opened = address, abort, opened
        self.client: str | None = None  # that signed its last request


class Admission:
    """Keeps the numbers of connections within the limits; `report` receives an address and what happened.

    >>> admission = Admission(Limits(), report=print, places=1000)
    >>> admission.admit(Connection("192.0.2.1", abort=lambda: None, opened=0.0))
    True
    """

    def __init__(
        self,
        limits: Limits,
        report: Callable[[str, str], None],
        places: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._report, self._places, self._clock = limits, report, places, clock
        self._unsigned: dict[str, dict[Connection, None]] = {}  # by address, the oldest first
        self._signed: dict[str, dict[Connection, None]] = {}  # by client, the least recently used first
        self._used_by: dict[str, dict[str, None]] = {}  # addresses of every client, the last used last
        self._known = frozenset[str]()  # all of these
        self._arrivals: dict[str, tuple[float, float]] = {}  # by address: how many count, and since when

    def admit(self, connection: Connection) -> bool:
        """Give a new connection a place, if necessary that of another; return whether it has one."""
        address, limits = connection.address, self._limits
        if not self._count_arrival(address):
            rate = f"more than {limits.new_per_second:.0f} connections per second"
            self._report(address, f"opens {rate}; some are rejected")
            return False
        self._unsigned.setdefault(address, {})[connection] = None
        if len(self._unsigned[address]) > limits.unsigned_per_address:
            self._close_oldest(address, _TOO_MANY)
        places = min(limits.unsigned, self._places - sum(map(len, self._signed.values())))
        if sum(map(len, self._unsigned.values())) > places:
            self.make_room(_CROWDED)
        return connection in self._unsigned.get(address, ())

    def make_room(self, problem: str) -> bool:
        """Close the oldest unsigned connection of the address with most; known addresses have reserved places."""
        if self._unsigned:
            self._close_oldest(max(self._unsigned, key=self._excess), problem)
            return True
        return False

    def sign(self, connection: Connection, client: str) -> None:
        """Record that a client has signed a request on this connection, which then counts as the client's."""
        if connection.client is None:
            self._discount_arrival(connection.address)
        self.release(connection)
        connection.client = client
        own = self._signed.setdefault(client, {})
        own[connection] = None
        if len(own) > self._limits.per_client:
            self._report(connection.address, f"'{client}' has more than {self._limits.per_client} connections")
            self._close(next(iter(own)))
        addresses = self._used_by.setdefault(client, {})
        addresses.pop(connection.address, None)
        addresses[connection.address] = None
        if len(addresses) > _ADDRESSES_PER_CLIENT:
            del addresses[next(iter(addresses))]
        if connection.address not in self._known:
            self._known = frozenset(address for used in self._used_by.values() for address in used)

    def release(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        by, key = (self._unsigned, connection.address)
        if connection.client is not None:
            by, key = self._signed, connection.client
        if key in by:
            by[key].pop(connection, None)
            if not by[key]:
                del by[key]

    def forget_arrivals(self) -> None:
        """Forget addresses that have opened no connection for a while, so that they do not take memory."""
        full = self._limits.unsigned_per_address / self._limits.new_per_second
        now = self._clock()
        self._arrivals = {address: (n, at) for address, (n, at) in self._arrivals.items() if now < at + full}

    def _count_arrival(self, address: str) -> bool:
        """Count a new connection in a leaky bucket, and return whether it was not full."""
        now, (count, at) = self._clock(), self._arrivals.get(address, (0.0, 0.0))
        count = max(0.0, count - (now - at) * self._limits.new_per_second) + 1
        allowed = count <= self._limits.unsigned_per_address
        self._arrivals[address] = (count if allowed else count - 1, now)
        return allowed

    def _discount_arrival(self, address: str) -> None:
        """Take back the count of a connection that turned out to be a client's: many clients may share an address."""
        count, at = self._arrivals.get(address, (0.0, 0.0))
        self._arrivals[address] = (max(0.0, count - 1), at)

    def _excess(self, address: str) -> int:
        reserved = self._limits.reserved_per_address if address in self._known else 0
        return len(self._unsigned[address]) - reserved

    def _close_oldest(self, address: str, problem: str) -> None:
        self._report(address, problem)
        self._close(next(iter(self._unsigned[address])))

    def _close(self, connection: Connection) -> None:
        self.release(connection)
        connection.abort()


def address_of(host: str) -> str:
    """Return the address that counts for a host: of IPv6 the network of 64 bits; of a mapped IPv4 address that address.

    >>> address_of("::ffff:192.0.2.1"), address_of("2001:db8:1:2:3:4:5:6"), address_of("fe80::1%eth0")
    ('192.0.2.1', '2001:db8:1:2::/64', 'fe80::/64')
    """
    ip = ip_address(host)
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return f"{ip_address(int(ip) >> 64 << 64)}/64"
