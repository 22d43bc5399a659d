"""The server's side of Flower: the SuperLink behind the reverse proxy, and requests that control it."""

import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event

from flwr.proto.control_pb2 import (
    ListRunsRequest,
    ListRunsResponse,
    StartRunRequest,
    StartRunResponse,
    StopRunRequest,
    StopRunResponse,
)
from flwr.proto.fab_pb2 import Fab

from fedtailor.deploy.app_bundle import build_app
from fedtailor.deploy.certificates import AUTHORITY_FILE, certify_server, make_authority
from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.deploy.expiry import expiry_times, has_expired
from fedtailor.deploy.server.control import FLOWER_TIMEOUT, call_flower, check_started, list_nodes, superlink_tls
from fedtailor.deploy.server.operator_folder import enrolled_clients
from fedtailor.deploy.server.proxy.limits import Limits
from fedtailor.deploy.server.proxy.listener import bind, raise_descriptor_limit, run_proxy
from fedtailor.deploy.server.proxy.proxy import Proxy
from fedtailor.deploy.server.proxy.refusals import write_refusal
from fedtailor.deploy.server.registration import register_clients
from fedtailor.deploy.server.state.disk import describe_full_disk, disk_of
from fedtailor.deploy.server.state.monitoring import serve_monitoring
from fedtailor.deploy.server.state.supervisor import Supervisor, supervised
from fedtailor.deploy.subprocesses import (
    Subprocess,
    exclusive,
    flower_command,
    flower_environment,
    free_address,
    is_healthy,
    rotating_log,
    skip_repeats,
    stop_all,
)
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, read_operator_deployment
from fedtailor.runs.files import make_private_folder, write_atomic, write_errors
from fedtailor.training.signals import deferred_signals

_HEALTH_TIMEOUT = 90.0  # seconds without a response of the SuperLink before the server ends
_SLOW_RESPONSE = 15.0  # seconds without a response of the SuperLink until this is reported
_POLL_INTERVAL = 3.0  # seconds between requests for the states of the clients
_CONTROL_TIMEOUT = 10.0  # seconds for each request of the server itself, so that it keeps watching
_OVERHEAD_BYTES = 2**26  # for everything in an upload except tensors


def serve(
    folder: Path,
    say: Callable[[str], None] = print,
    monitoring: str | None = None,
    supervise_run: Callable[[], None] = lambda: None,
) -> None:
    """Serve a federation until SIGTERM or Ctrl-C; raise an error if a part of it ends earlier, so systemd restarts it.

    `monitoring` is the address of metrics and the health check, by default that in deployment.toml. `supervise_run` is
    called about once per second (`RunSupervisor.check`).

    >>> serve(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    say = skip_repeats(say)
    deployment, home, keys = read_operator_deployment(folder), folder / "home", folder / "keys"
    raise_descriptor_limit()  # also Flower's
    home.mkdir(parents=True, exist_ok=True)
    if not (keys / "server.crt").is_file():
        raise DeployError(f"'{folder}' has no keys; create them with: fedtailor deploy keys {folder} --clients a,b,c.")
    in_use = f"A server for '{folder}' is already running; stop it first."
    with (
        exclusive(home, in_use),
        supervised(folder, say) as supervisor,
        deferred_signals(only_first=False) as stop,
        bind(deployment.host, deployment.port) as listener,
        serve_monitoring(folder, monitoring or deployment.monitoring),
    ):
        stop_all(home)  # left over from a server that was killed
        supervisor.settle()
        _check_before_start(folder)
        _certify_superlink(home, deployment)
        address, tls = free_address(), superlink_tls(folder)
        write_atomic(home / "address", address.encode())
        proxy = Proxy(address, tls, _limits(folder, deployment), partial(write_refusal, folder))
        _set_up_proxy_log(folder)
        env = flower_environment(home, FEDTAILOR_DEPLOYMENT=str(folder.absolute()))
        superlink = Subprocess(home, _superlink_command(folder, address), env, folder / "log" / "superlink.log")
        supervisor.started(superlink.pid)
        try:
            _wait_until_healthy(folder, address, tls, superlink, supervisor, stop)
            stop_orphaned_runs(folder)
            registered = register_clients(folder, proxy, {}, say)
            with run_proxy(proxy, listener, keys / "server.crt", keys / "server.key") as is_proxy_running:
                say(f"Serving at {deployment.address}.")
                healthy_at, asked_at, connections = time.monotonic(), 0.0, dict[str, str]()
                while not stop.wait(1.0):
                    if time.monotonic() > asked_at + _POLL_INTERVAL:
                        asked_at = time.monotonic()
                        with suppress(FedTailorError):  # it does not respond
                            connections = client_states(folder, _CONTROL_TIMEOUT)
                            healthy_at = time.monotonic()
                    problem = _check(folder, superlink, supervisor, is_proxy_running(), time.monotonic() - healthy_at)
                    supervisor.check(connections, problem, lambda: stop_orphaned_runs(folder))
                    supervise_run()
                    registered = register_clients(folder, proxy, registered, say)
        except FedTailorError as error:
            supervisor.close(str(error))  # now, because it takes seconds to stop all processes
            raise
        finally:
            superlink.stop()


def submit(folder: Path) -> int:
    """Start a run and return Flower's ID of the run.

    >>> submit(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    check_started(folder)
    app = build_app()
    request = StartRunRequest(fab=Fab(hash_str=sha256(app).hexdigest(), content=app))
    return int(call_flower(folder, "start-run", request, StartRunResponse).run_id)


def run_state(folder: Path, run: int) -> str:
    """Return Flower's state of a run: pending, starting, running, finished, or unknown if its database was replaced.

    >>> run_state(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    return _run_states(folder).get(run, "unknown")


def stop_run(folder: Path, run: int) -> None:
    """Stop a run.

    >>> stop_run(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    call_flower(folder, "stop-run", StopRunRequest(run_id=run), StopRunResponse)


def client_states(folder: Path, timeout: float = FLOWER_TIMEOUT) -> dict[str, str]:
    """Return the state of every client: online, offline, registered (it has never connected), or left.

    A client that disappears without notice remains online for another minute, which is Flower's timeout.

    >>> client_states(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    states = {node.node_id: node.status for node in list_nodes(folder, timeout)}
    return {
        name: "left" if client.left else states.get(client.node_id or 0, "not registered")
        for name, client in enrolled_clients(folder).items()
    }


# ---- Flower's server


def _limits(folder: Path, deployment: Deployment) -> Limits:
    """Return limits of twice the expected upload, because chunks may be sent again, plus overhead."""
    upload = preview_payload(deployment, max(len(enrolled_clients(folder)), 2), num_samples=100)["up"]
    return Limits(upload_bytes=2 * sum(tensor.bytes for tensor in upload) + _OVERHEAD_BYTES)


def _check_before_start(folder: Path) -> None:
    """Raise an error if the server could not work, although its parts might start."""
    for name in (AUTHORITY_FILE, "server.crt"):
        for expires in expiry_times({name: folder / "keys" / name}).values():
            if has_expired(expires):
                date = time.strftime("%Y-%m-%d", time.gmtime(expires))
                raise DeployError(f"keys/{name} expired on {date}; run: fedtailor deploy renew {folder}.")
    if disk_of(folder).is_full:
        raise DeployError(f"{describe_full_disk(folder)}; free some space.")


def _certify_superlink(home: Path, deployment: Deployment) -> None:
    """Create an authority and a certificate for connections to the SuperLink, which stay on this machine.

    Flower reads its certificate only once. With one of its own, which is new at every start, a renewal of the server's
    certificate concerns only the reverse proxy.
    """
    keys = home / "tls"
    with write_errors(f"The folder '{keys}' cannot be written"):
        make_private_folder(keys)
        for path in keys.iterdir():
            path.unlink()
        make_authority(keys)
        certify_server(keys, replace(deployment, address="localhost:1"))


def _check(
    folder: Path, superlink: Subprocess, supervisor: Supervisor, is_proxy_running: bool, unresponsive: float
) -> str:
    """Raise an error if a part of the server has ended or does not respond; return what is wrong otherwise."""
    if (code := superlink.returncode) is not None:
        end = supervisor.describe_end(code)
        raise DeployError(f"Flower's SuperLink {end}; see '{folder / 'log' / 'superlink.log'}'.")
    if not is_proxy_running:
        raise DeployError(f"The reverse proxy ended unexpectedly; see '{folder / 'log' / 'proxy.log'}'.")
    if unresponsive > _HEALTH_TIMEOUT:
        raise DeployError(f"Flower's SuperLink has not responded for {unresponsive:.0f} s; restart the server.")
    slow = unresponsive > _SLOW_RESPONSE
    return f"Flower's SuperLink has not responded for {unresponsive:.0f} s." if slow else ""


def _superlink_command(folder: Path, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    keys = folder.absolute() / "home" / "tls"
    return [
        flower_command("flower-superlink"), "--host", host, "--port", port,
        "--ssl-ca-certfile", str(keys / AUTHORITY_FILE), "--ssl-certfile", str(keys / "server.crt"),
        "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
        "--database", str(folder.absolute() / "superlink.db"), "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _set_up_proxy_log(folder: Path) -> None:
    handler = rotating_log(folder / "log" / "proxy.log")
    for name in ("fedtailor.proxy", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # invalid requests are logged with their address
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO


def _wait_until_healthy(
    folder: Path, address: str, tls: ssl.SSLContext, superlink: Subprocess, supervisor: Supervisor, stop: Event
) -> None:
    deadline = time.monotonic() + FLOWER_TIMEOUT
    while not is_healthy(address, tls) and not stop.wait(0.1):
        if superlink.returncode is not None or time.monotonic() > deadline:
            why = f"it {supervisor.describe_end(superlink.returncode)}"
            if disk_of(folder).is_full:
                why = describe_full_disk(folder)
            raise DeployError(f"Flower's SuperLink did not start: {why}; see log/superlink.log.")


def stop_orphaned_runs(folder: Path) -> None:
    """Stop runs whose process was killed, so that one can be resumed before Flower's timeout of a minute.

    >>> stop_orphaned_runs(Path("nowhere"))  # without a server, there is none
    """
    with suppress(FedTailorError):
        for run, state in _run_states(folder).items():
            if state != "finished":
                stop_run(folder, run)


def _run_states(folder: Path) -> dict[int, str]:
    runs = call_flower(folder, "list-runs", ListRunsRequest(), ListRunsResponse).run_dict
    return {run: description.status.status for run, description in runs.items()}
