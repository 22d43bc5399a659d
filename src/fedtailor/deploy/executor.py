"""The executor: takes the server's messages from the SuperNode and passes them on to the client's worker.

The worker is a process that keeps the data and the model in memory.

The executor replaces the processes in which Flower would unpack and run the app that the server sends with every run,
so that no code from the server is ever executed. Its file is executed by its path: it imports neither FedTailor nor
torch.
"""

import sys
import time
from contextlib import closing
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

HANDLING, DONE = "Handling a message.", "The message is done."  # what it prints
_FIELDS, _TREE, _ARRAY_TYPE = "fields", "tree", "fedtailor.safetensors"
WORKER_END_FILE = "end"  # next to the worker's address: why the last worker ended
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_POLL_INTERVAL = 0.25  # seconds between requests for the next message; 0.1 would use a tenth of a core
_END_TIMEOUT = 3.0  # seconds until the reason is known
_START_TIMEOUT = 120.0  # seconds until the worker accepts messages; it may have to import FedTailor first


def main() -> None:
    """Handle messages until this process is stopped."""
    address, secret, worker = sys.argv[1], Path(sys.argv[2]).read_bytes(), Path(sys.argv[3])
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE])
    with closing(_connect_to_supernode(address, signed)) as supernode:
        while True:
            claimed = supernode.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if claimed.token:
                print(HANDLING, flush=True)
                _handle(address, claimed.token, worker)
                print(DONE, flush=True)
            time.sleep(_POLL_INTERVAL)


def _connect_to_supernode(address: str, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    client: RuntimeHttpClient = RuntimeHttpClient.from_server_address(
        address, insecure=True, root_certificates=None, interceptors=[version, interceptor],
        retry_invoker=make_simple_http_retry_invoker(),
    )  # fmt: skip
    return client


def _handle(address: str, token: str, worker: Path) -> None:
    """Fetch the message of a task from the SuperNode, and hand over the reply."""
    with closing(_connect_to_supernode(address, RuntimeTokenHttpInterceptor(token))) as supernode:
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(supernode))
        heartbeat.start()
        try:
            message, context, _, app = pull_task_input(supernode)
            try:
                reply, problem = answer(message, app.content, worker), ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                print(problem, flush=True)
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, problem), reply_to=message)
            push_message(supernode, reply, context)
            push_task_output(supernode, None, SubStatus.FAILED if problem else SubStatus.COMPLETED, problem)
        finally:
            heartbeat.stop()


def answer(message: Message, app: bytes, worker: Path) -> Message:
    """Return the worker's reply to a message. Of the app that came with the run, the worker gets only the hash."""
    text, data = unwrap(message.content)
    started = time.time()
    try:
        with _connect_to_worker(worker) as connection:
            for part in (sha256(app).hexdigest(), message.metadata.message_type, text):
                connection.send_bytes(part.encode())
            connection.send_bytes(data)
            text, data = connection.recv_bytes().decode(), connection.recv_bytes()
    except (EOFError, OSError, AuthenticationError) as error:
        raise RuntimeError(f"{_worker_end(worker, started)}; see log/worker.log in the client's folder") from error
    return Message(wrap(text, data), reply_to=message)


def _worker_end(worker: Path, since: float) -> str:
    """Return why the worker ended, which `fedtailor deploy client`, its parent, writes into a file."""
    path, deadline = worker.with_name(WORKER_END_FILE), time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        try:
            if path.stat().st_mtime >= since:
                return path.read_text()
        except OSError:  # not yet
            pass
        time.sleep(0.1)
    return "the worker ended"


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


def _connect_to_worker(file: Path) -> Connection:
    """Return a connection to the worker, which may just be starting; a file contains its HOST:PORT:KEY."""
    deadline = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            host, port, key = file.read_text().split(":")
            return Client((host, int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, AuthenticationError):  # no file yet, or that of a worker that has ended
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    main()
