"""The worker: a process beside the SuperNode that answers the server's messages, one at a time.

It keeps FedTailor, the client's data, and the model in memory; the executor, a small process, talks to Flower.
"""

import json
import logging
import secrets
import sys
from functools import lru_cache
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, cast

import torch

from fedtailor.core.trees import Tree
from fedtailor.deploy.app_bundle import check_app
from fedtailor.deploy.client.client_folder import ClientFolder, worker_file
from fedtailor.deploy.client.worker import RoundRequest, Worker
from fedtailor.deploy.keys import read_bundle
from fedtailor.deploy.messages import parse_message
from fedtailor.errors import DeployError, FedTailorError, reason
from fedtailor.experiments.deployment import deployment_digest
from fedtailor.runs.files import make_private_folder, write_private
from fedtailor.runs.serialization import pack
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")
_MAX_BYTES = 2**40  # of a message: practically unlimited, because the client trusts its server


def main() -> None:
    """Answer messages until this process is stopped; the file `worker_file` tells the executor where to connect."""
    logging.basicConfig(level=logging.INFO)
    folder, key = Path(sys.argv[1]), secrets.token_bytes(32)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        host, port = cast(tuple[str, int], listener.address)
        make_private_folder(worker_file(folder).parent)
        write_private(worker_file(folder), f"{host}:{port}:{key.hex()}".encode())
        while True:
            try:
                with listener.accept() as connection:
                    _answer_connection(folder, connection)
            except Exception as error:  # an executor that was killed, or another program that does not know the key
                log.warning("A message was lost: %s.", reason(error))
            torch.cuda.empty_cache()  # other programs may need the memory between two messages


def _answer_connection(folder: Path, connection: Connection) -> None:
    app, kind, text = (connection.recv_bytes().decode() for _ in range(3))
    reply_text, reply_data = answer(folder, app, kind, text, connection.recv_bytes())
    connection.send_bytes(reply_text.encode())
    connection.send_bytes(reply_data)


def answer(path: Path, app: str, kind: str, text: str, data: bytes) -> tuple[str, bytes]:
    """Return the fields and the tree of the reply to a message, or the reason of an error; `app` is the SHA-256 of the
    app that the server sent with the run.

    The text of unexpected errors is written to this machine's log only, because it may quote data.
    """
    name = "unknown"
    try:
        name = read_bundle(path / "bundle").name
        check_app(app)
        folder = _open(path)
        fields, upload = _handle(folder, kind, *parse_message(text, data, _MAX_BYTES))
        return json.dumps(fields), b"" if upload is None else pack(upload)
    except FedTailorError as error:
        log.warning("%s", error)
        problem = str(error)
    except Exception as error:
        log.exception("The message could not be answered.")
        problem = f"{type(error).__name__}, see its log"
    return json.dumps({"name": name, "error": problem}), b""


def _handle(folder: ClientFolder, kind: str, fields: dict[str, Any], tree: Tree) -> tuple[dict[str, Any], Tree | None]:
    if kind == "query":
        return folder.describe(int(fields["index"])), None
    if fields.get("name") != folder.name:
        raise DeployError("The server addresses this client by another client's name.")
    if fields.get("version") != VERSION:
        raise DeployError(f"This client has FedTailor {VERSION} and the server another version; install the same.")
    if fields.get("digest") != deployment_digest(folder.deployment):
        raise DeployError("The server's training settings differ from this client's bundle; ask for a new bundle.")
    worker = Worker(folder, RoundRequest.parse(fields))
    return worker.train(tree) if kind == "train" else (worker.evaluate(tree), None)


def _open(path: Path) -> ClientFolder:
    """Return a client's folder; its data and model remain in memory until the data or the settings change."""
    opened = ClientFolder.open(path)
    settings = str(opened.data), opened.deployment.device, deployment_digest(opened.deployment)
    return _keep(path, settings, opened.data_version)


@lru_cache(maxsize=1)
def _keep(path: Path, settings: tuple[str, ...], data_version: tuple[int, ...]) -> ClientFolder:
    return ClientFolder.open(path)


if __name__ == "__main__":
    main()
