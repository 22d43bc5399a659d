"""The ClientApp that Flower starts on a client's machine for each message."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtailor.core.trees import Tree
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.client.worker import RoundRequest, Worker
from fedtailor.deploy.messages import from_record, to_record
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import deployment_digest
from fedtailor.version import VERSION

app = ClientApp()
log = logging.getLogger("fedtailor")
_MAX_BYTES = 2**40  # of a message: practically unlimited, because the client trusts its server


@app.query()
def query(message: Message, context: Context) -> Message:
    """Reply with the client's name, version, settings, and numbers of samples."""
    return _reply(message, lambda folder, fields, _: (folder.describe(int(fields["index"])), None))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round and reply with the upload."""
    return _reply(message, lambda folder, fields, tree: _worker(folder, fields).train(tree))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the client's personal models and reply with the scores."""
    return _reply(message, lambda folder, fields, tree: (_worker(folder, fields).evaluate(tree), None))


def _worker(folder: ClientFolder, fields: dict[str, Any]) -> Worker:
    if fields.get("name") != folder.name:
        raise DeployError("The server addresses this client by another client's name.")
    if fields.get("version") != VERSION:
        raise DeployError(f"This client has FedTailor {VERSION} and the server another version; install the same.")
    if fields.get("digest") != deployment_digest(folder.deployment):
        raise DeployError("The server's training settings differ from this client's bundle; ask for a new bundle.")
    return Worker(folder, RoundRequest.parse(fields))


def _reply(
    message: Message, handle: Callable[[ClientFolder, dict[str, Any], Tree], tuple[dict[str, Any], Tree | None]]
) -> Message:
    """Return the reply, or the message of an error.

    The text of unexpected errors is written to this machine's log only, because it may quote data.
    """
    name = "unknown"
    try:
        folder = ClientFolder.open(Path(os.environ["FEDTAILOR_CLIENT_FOLDER"]))
        name = folder.name
        content = to_record(*handle(folder, *from_record(message.content, _MAX_BYTES)))
    except FedTailorError as error:
        log.warning("%s", error)
        content = to_record({"name": name, "error": str(error)})
    except Exception as error:
        log.exception("The message could not be answered.")
        content = to_record({"name": name, "error": f"{type(error).__name__}, see its log"})
    return Message(content, reply_to=message)
