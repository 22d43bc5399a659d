"""The metrics and the health check of a server, over HTTP on an address of their own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fedtailor.deploy.server.state.metrics import CONTENT_TYPE, metrics_of, to_text
from fedtailor.deploy.server.state.state import FederationState, read_state
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import split_monitoring_address

_MAX_CONNECTIONS = 32
_IDLE_TIMEOUT = 5  # seconds


def monitoring_app(folder: Path) -> Starlette:
    """Return the application that serves /metrics and /health of an operator's folder."""

    async def metrics(request: Request) -> Response:
        state = await run_in_threadpool(read_state, folder)
        return Response(to_text(metrics_of(state)), media_type=CONTENT_TYPE)

    async def health(request: Request) -> Response:
        try:
            return health_response(await run_in_threadpool(read_state, folder))
        except FedTailorError as error:  # a damaged file
            return PlainTextResponse(f"{error}\n", 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])


def health_response(state: FederationState) -> Response:
    """Return 200 if the federation works, and otherwise 503 with the reasons, one per line."""
    if state.problems:
        return PlainTextResponse("".join(f"{problem}\n" for problem in state.problems), 503)
    return PlainTextResponse(f"{state.run['state']}\n")


@contextmanager
def serve_monitoring(folder: Path, address: str | None) -> Iterator[None]:
    """Serve the metrics and the health check at an address such as 127.0.0.1:9100; without one, do nothing."""
    if address is None:
        yield
        return
    host, port = split_monitoring_address(address)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise DeployError(f"The address {address} for monitoring cannot be used: {error.strerror}.") from error
    config = uvicorn.Config(
        monitoring_app(folder), http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, limit_concurrency=_MAX_CONNECTIONS, timeout_keep_alive=_IDLE_TIMEOUT,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="monitoring", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
