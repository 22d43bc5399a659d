"""The ClientApp that Flower starts on a client's machine for each message. It passes the message on to the client's
worker, a process that keeps the data and the model in memory.

Flower executes this file by its path, so that its process imports neither FedTailor nor torch, which takes seconds.
"""

import os
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
_FIELDS, _TREE, _ARRAY_TYPE = "fields", "tree", "fedtailor.safetensors"
WORKER_END_FILE = "end"  # next to the worker's address: why the last worker ended
_END_TIMEOUT = 3.0  # seconds until the reason is known
_START_TIMEOUT = 120.0  # seconds until the worker accepts messages; it may have to import FedTailor first


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Return the worker's reply to a message."""
    text, data = unwrap(message.content)
    started = time.time()
    try:
        with _connect() as worker:
            for part in (message.metadata.message_type.encode(), text.encode(), data):
                worker.send_bytes(part)
            text, data = worker.recv_bytes().decode(), worker.recv_bytes()
    except (EOFError, OSError, AuthenticationError) as error:
        raise RuntimeError(f"{_worker_end(started)}; see log/worker.log in the client's folder") from error
    return Message(wrap(text, data), reply_to=message)


def wrap(text: str, data: bytes) -> RecordDict:
    """Return the content of a message: its fields as JSON, and the bytes of a tree, which may be empty.

    >>> unwrap(wrap("{}", b"tree"))
    ('{}', b'tree')
    """
    record = RecordDict({_FIELDS: ConfigRecord({_FIELDS: text})})
    if data:
        record[_TREE] = ArrayRecord({_TREE: Array("uint8", (len(data),), _ARRAY_TYPE, data)})
    return record


def unwrap(content: RecordDict) -> tuple[str, bytes]:
    """Return the fields and the bytes of the tree in an untrusted message; what it does not contain is empty."""
    text = content.config_records.get(_FIELDS, ConfigRecord()).get(_FIELDS)
    array = content.array_records.get(_TREE, ArrayRecord()).get(_TREE)
    return text if isinstance(text, str) else "", b"" if array is None else array.data


def _worker_end(since: float) -> str:
    """Return why the worker ended, which `fedtailor deploy client`, its parent, writes into a file."""
    path, deadline = Path(os.environ["FEDTAILOR_WORKER"]).with_name(WORKER_END_FILE), time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        try:
            if path.stat().st_mtime >= since:
                return path.read_text()
        except OSError:  # not yet
            pass
        time.sleep(0.1)
    return "the worker ended"


def _connect() -> Connection:
    """Return a connection to the worker, which may just be starting; a file contains its HOST:PORT:KEY."""
    deadline = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            host, port, key = Path(os.environ["FEDTAILOR_WORKER"]).read_text().split(":")
            return Client((host, int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, AuthenticationError):  # no file yet, or that of a worker that has ended
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
