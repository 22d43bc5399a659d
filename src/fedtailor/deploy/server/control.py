"""Requests to the control interface of Flower's SuperLink."""

import ssl
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.error import FlowerError
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from google.protobuf.message import Message  # type: ignore[import-untyped]

from fedtailor.core.untrusted_input import read_text
from fedtailor.deploy.certificates import AUTHORITY_FILE
from fedtailor.errors import DeployError, reason

FLOWER_TIMEOUT = 120.0  # seconds for Flower to start, and for each request to it
_Response = TypeVar("_Response", bound=Message)


def list_nodes(folder: Path, timeout: float = FLOWER_TIMEOUT) -> list[NodeInfo]:
    """Return the clients that are registered with Flower."""
    return list(call_flower(folder, "list-nodes", ListNodesRequest(), ListNodesResponse, timeout).nodes_info)


def call_flower(
    folder: Path, name: str, request: Message, response_type: type[_Response], timeout: float = FLOWER_TIMEOUT
) -> _Response:
    """Send a request to the control interface of the folder's server, and return the response."""
    check_started(folder)
    address = read_text(folder / "home" / "address", "The server's address", 100)
    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    try:
        response = httpx.post(
            f"https://{address}/v1/control/{name}", content=request.SerializeToString(), headers=headers,
            verify=superlink_tls(folder), timeout=timeout, trust_env=False,
        )  # fmt: skip
    except httpx.ConnectError as error:
        raise DeployError(
            f"The server for '{folder}' is not running; start it with: fedtailor deploy server {folder}."
        ) from error
    except httpx.HTTPError as error:
        raise DeployError(f"The server for '{folder}' does not respond: {reason(error)}.") from error
    if response.is_error:
        rejection = FlowerError.from_json(response.text)
        problem = response.reason_phrase if rejection is None else rejection.message.rstrip(".")
        raise DeployError(f"Flower rejected the request '{name}': {problem}.")
    parsed: _Response = response_type()
    parsed.ParseFromString(response.content)
    return parsed


def check_started(folder: Path) -> None:
    """Raise an error if the server has never been started.

    >>> check_started(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    if not (folder / "home" / "address").is_file():
        raise DeployError(f"The server for '{folder}' has not been started; run: fedtailor deploy server {folder}.")


def superlink_tls(folder: Path) -> ssl.SSLContext:
    """Return what connections to the SuperLink need, which trust the server's internal authority."""
    return ssl.create_default_context(cafile=folder / "home" / "tls" / AUTHORITY_FILE)
