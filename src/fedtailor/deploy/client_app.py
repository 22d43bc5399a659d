"""What Flower starts on a client's machine for a message."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtailor.deploy.messages import from_record, to_record
from fedtailor.deploy.settings import digest
from fedtailor.deploy.site import Site
from fedtailor.deploy.worker import Asked, Worker
from fedtailor.errors import Refused
from fedtailor.trees import Tree
from fedtailor.version import VERSION

app = ClientApp()
log = logging.getLogger("fedtailor")
_MOST = 2**40  # bytes of a message: the server is who one joined, and Flower has read it by now


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who this client is, and how many samples it has."""
    return _answer(message, lambda site, words, _: (site.introduce(int(words["index"])), None))


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round of training."""
    return _answer(message, lambda site, words, tree: _worker(site, words).train(tree))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """This client's own numbers."""
    return _answer(message, lambda site, words, tree: (_worker(site, words).evaluate(tree), None))


def _worker(site: Site, words: dict[str, Any]) -> Worker:
    if words.get("name") != site.name:
        raise Refused("The server calls this client by another's name.")
    if words.get("version") != VERSION:
        raise Refused(f"This client has FedTailor {VERSION}, and the server another version; install the same.")
    if words.get("digest") != digest(site.deployment):
        raise Refused("The server trains something else than this client's bundle says; ask for a new one.")
    return Worker(site, Asked.read(words))


def _answer(
    message: Message, do: Callable[[Site, dict[str, Any], Tree], tuple[dict[str, Any], Tree | None]]
) -> Message:
    """The answer; a refusal is an answer too, in its own words. What else goes wrong is for this machine's log alone:
    an error may quote data."""
    name = "unknown"
    try:
        site = Site.open(Path(os.environ["FEDTAILOR_SITE"]))
        name = site.name
        answer = to_record(*do(site, *from_record(message.content, _MOST)))
    except Refused as refusal:
        log.warning("%s", refusal)
        answer = to_record({"name": name, "refused": str(refusal)})
    except Exception as error:
        log.exception("This message could not be answered.")
        answer = to_record({"name": name, "refused": f"{type(error).__name__}, see its log"})
    return Message(answer, reply_to=message)
