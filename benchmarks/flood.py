"""Attack the server's port without a key, and measure whether honest clients get through.

    python benchmarks/flood.py                # FedTailor's own listener
    python benchmarks/flood.py --port 9443    # another reverse proxy, started by hand, before the port that it prints

The attack comes from one address of this machine, 127.0.0.1, and keeps a number of connections in one state: `idle`
(TCP only), `slow` (one header line per second after the TLS handshake), or `shake` (TLS handshakes, one after the
other). Two honest clients send a signed request per half second, each on a new connection, from the attacker's address
and from another one.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from starlette.types import Receive, Scope, Send

from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.server.operator_folder import enrolled_clients
from fedtailor.deploy.server.proxy.listener import bind, run_proxy
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.experiments.deployment import Deployment, write_deployment

ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
ATTACKS = ("none", "idle", "slow", "shake")
_TIMEOUT = 10.0  # seconds for an honest request
_REQUEST = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: localhost\r\n"


@dataclass(frozen=True)
class Result:
    """How honest clients fared during an attack."""

    attack: str
    connections: int
    attempts: int  # connections that the attacker opened
    same_address: str  # requests that succeeded, of how many
    same_address_seconds: float | None  # median of those that succeeded
    other_address: str
    other_address_seconds: float | None
    server_cpu: float  # fraction of a core
    server_peak_mb: float


async def superlink(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request as Flower's SuperLink answers a client for which it has no message."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def serve(folder: Path) -> None:
    """Serve the reverse proxy and behind it a fake SuperLink, until the input ends."""
    keys, listener = folder / "keys", socket.create_server(("127.0.0.1", 0))
    files: dict[str, Any] = {"ssl_certfile": keys / "server.crt", "ssl_keyfile": keys / "server.key"}
    server = uvicorn.Server(uvicorn.Config(superlink, ws="none", lifespan="off", log_level="error", **files))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    proxy = Proxy(f"127.0.0.1:{listener.getsockname()[1]}", ssl.create_default_context(cafile=keys / "authority.crt"))
    proxy.allow_only({name: client.public_key for name, client in enrolled_clients(folder).items()})
    with bind("localhost", 0) as public, run_proxy(proxy, public, keys / "server.crt", keys / "server.key"):
        print(public.getsockname()[1], flush=True)
        sys.stdin.read()


class Signer:
    """Signs requests with a client's key."""

    def __init__(self, key: Path) -> None:
        private = load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, EllipticCurvePrivateKey)
        public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self._private, self._public = private, b64encode(public).decode()

    def request(self) -> bytes:
        """Return a complete request."""
        now = datetime.now(UTC).isoformat()
        signature = b64encode(self._private.sign(now.encode(), ECDSA(SHA256()))).decode()
        headers = {"flwr-public-key": self._public, "flwr-timestamp": now, "flwr-signature": signature}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": "0"}.items())
        return _REQUEST + lines.encode() + b"\r\n"


async def _open(
    port: int, tls: ssl.SSLContext | None, source: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = "localhost" if tls else None
    return await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name, local_addr=(source, 0))


async def honest_client(port: int, tls: ssl.SSLContext, signer: Signer, source: str, seconds: float) -> list[float]:
    """Return the seconds of each request, inf for a failure."""
    taken, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        status = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT):
                reader, writer = await _open(port, tls, source)
                writer.write(signer.request())
                status = await reader.readline()
                writer.transport.abort()
        elapsed = time.monotonic() - started
        taken.append(elapsed if b" 200 " in status else float("inf"))
        await asyncio.sleep(max(0.0, 0.5 - elapsed))
    return taken


async def attack(kind: str, port: int, tls: ssl.SSLContext, connections: int, seconds: float) -> int:
    """Keep connections open, and return how many were opened."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = 0

    async def keep_one() -> None:
        nonlocal opened
        while True:
            with suppress(OSError):
                opened += 1
                reader, writer = await _open(port, None if kind == "idle" else tls, ATTACKER)
                writer.write(_REQUEST if kind == "slow" else b"")
                while kind != "shake" and not reader.at_eof():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await reader.read(1000)
                    writer.write(b"x: y\r\n" if kind == "slow" else b"")
                writer.transport.abort()
            await asyncio.sleep(0.1)  # at most ten new connections per second for each one that is kept

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(keep_one() for _ in range(connections)))
    return opened


def _in_other_process(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--folder", str(folder), *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _median(taken: list[float]) -> tuple[str, float | None]:
    succeeded = [seconds for seconds in taken if seconds < _TIMEOUT]
    return f"{len(succeeded)} of {len(taken)}", round(median(succeeded), 3) if succeeded else None


async def measure(folder: Path, port: int, kind: str, connections: int, seconds: float, server: int) -> Result:
    """Measure one attack; it starts three seconds before the honest clients do."""
    tls = ssl.create_default_context(cafile=folder / "keys" / "authority.crt")
    process = psutil.Process(server)
    attacker = None
    if kind != "none":
        plan = ("--attack", kind, "--target", str(port), "--connections", str(connections))
        attacker = _in_other_process(folder, *plan, "--seconds", str(seconds + 3))
        await asyncio.sleep(3)
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    signer = Signer(folder.parent / "client" / "key")
    same, other = await asyncio.gather(
        *(honest_client(port, tls, signer, source, seconds) for source in (ATTACKER, OTHER))
    )
    cpu = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
    status = Path(f"/proc/{server}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1000
    attempts = int(attacker.communicate()[0]) if attacker else 0
    return Result(kind, connections, attempts, *_median(same), *_median(other), round(cpu, 2), round(peak))


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, int]]:
    """Start the server in a process of its own, and yield its port and its process."""
    process = _in_other_process(folder, "--serve")
    assert process.stdout is not None and process.stdin is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--connections", type=int, default=1100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--port", type=int, help="of another reverse proxy that is attacked instead")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--folder", type=Path, help="keep the keys here")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    for hidden in ("--attack", "--target"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.folder)
        return
    if args.attack:
        tls = ssl.create_default_context(cafile=args.folder / "keys" / "authority.crt")
        print(asyncio.run(attack(args.attack, int(args.target), tls, args.connections, args.seconds)))
        return
    with ExitStack() as stack:
        root = args.folder.parent if args.folder else Path(stack.enter_context(TemporaryDirectory()))
        folder = root / "operator"
        if not folder.exists():
            write_deployment(folder, Deployment(address="localhost:9443"))
            open_bundle(make_keys(folder, ["client"])[0], root / "client")
        own_port, server = stack.enter_context(_server(folder))
        print(f"Port {own_port}, process {server}, {os.cpu_count()} cores", flush=True)
        results = []
        for kind in args.attacks.split(","):
            target = (args.port or own_port, kind, args.connections, args.seconds, args.pid or server)
            results.append(asdict(asyncio.run(measure(folder, *target))))
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
