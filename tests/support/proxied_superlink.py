"""A reverse proxy before a fake SuperLink, and clients that sign their requests."""

import http.client
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from starlette.types import Receive, Scope, Send

from fedtailor.deploy.keys import make_keys, open_bundle
from fedtailor.deploy.server.operator_folder import enrolled_clients
from fedtailor.deploy.server.proxy.limits import Limits
from fedtailor.deploy.server.proxy.listener import bind, run_proxy
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.deploy.server.proxy.refusals import write_refusal
from fedtailor.experiments.deployment import Deployment, write_deployment
from support.federation_processes import TIMEOUT, free_port

LIMITS = Limits(body_bytes=3_000_000, upload_bytes=5_000_000)
FLEET = "/v1/fleet/"


def prepare(folder: Path, clients: list[str]) -> Path:
    """Create an operator's folder with a free port, and the clients' folders next to it."""
    write_deployment(folder, Deployment(address=f"localhost:{free_port()}"))
    for tar in make_keys(folder, clients):
        open_bundle(tar, folder.parent / tar.stem / "bundle")
    return folder


class FakeSuperLink:
    """Records forwarded requests and responds with `response`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.response = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.requests.append((scope["path"], body))
        headers = [(b"content-type", b"application/x-protobuf"), (b"content-length", str(len(self.response)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.response})


class SigningClient:
    """An HTTP client that signs its requests with a key."""

    def __init__(self, folder: Path, port: int, key: Path) -> None:
        self.tls = ssl.create_default_context(cafile=folder / "keys" / "authority.crt")
        self.port = port
        private = load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, EllipticCurvePrivateKey)
        self._private = private

    def connect(self, source: str = "127.0.0.1") -> http.client.HTTPSConnection:
        """Return a connection that will be opened from one of this machine's addresses."""
        here = (source, 0)
        return http.client.HTTPSConnection(
            "localhost", self.port, context=self.tls, timeout=TIMEOUT, source_address=here
        )

    def sign(self, offset: timedelta = timedelta(0)) -> dict[str, str]:
        encoded = self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        now = (datetime.now(UTC) + offset).isoformat()
        signature = self._private.sign(now.encode(), ECDSA(SHA256()))
        headers = {"flwr-public-key": b64encode(encoded).decode(), "flwr-timestamp": now}
        return {**headers, "flwr-signature": b64encode(signature).decode(), "content-type": "application/x-protobuf"}

    def post(
        self,
        path: str,
        body: bytes = b"",
        method: str = "POST",
        overrides: Mapping[str, str] | None = None,
        source: str = "127.0.0.1",
    ) -> tuple[int, bytes]:
        connection = self.connect(source)
        connection.request(method, path, body, {**self.sign(), **(overrides or {})})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content


@contextmanager
def serve_fake(fake: FakeSuperLink, folder: Path) -> Iterator[int]:
    """Serve a fake SuperLink on this machine and yield its port."""
    keys, listener = folder / "keys", socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        fake,
        ws="none",
        lifespan="off",
        log_config=None,
        ssl_certfile=keys / "server.crt",
        ssl_keyfile=keys / "server.key",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield int(listener.getsockname()[1])
    server.should_exit = True
    thread.join()


@contextmanager
def proxy_before(superlink: int, folder: Path, limits: Limits = LIMITS) -> Iterator[SigningClient]:
    """Run a proxy to a port that allows the client a, but not b, and yield a."""
    keys = folder / "keys"
    tls = ssl.create_default_context(cafile=keys / "authority.crt")
    proxy = Proxy(f"127.0.0.1:{superlink}", tls, limits, partial(write_refusal, folder))
    proxy.allow_only({"a": enrolled_clients(folder)["a"].public_key})
    with bind("localhost", 0) as listener, run_proxy(proxy, listener, keys / "server.crt", keys / "server.key"):
        yield SigningClient(folder, int(listener.getsockname()[1]), folder.parent / "a" / "bundle" / "key")
