"""Serves the dashboard, for one user on one machine: on the loopback interface unless another one is named."""

import socket
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from secrets import token_urlsafe

from uvicorn import Config, Server

from fedtailor.errors import RunError
from fedtailor.reporting.dashboard.app import SECURITY_HEADERS, is_loopback, make_app
from fedtailor.reporting.dashboard.form import form_schema
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.routes import Context
from fedtailor.reporting.dashboard.run_monitor import RunMonitor
from fedtailor.runs.reader import is_run_folder

DEFAULT_PORT = 8317
_ALL_INTERFACES = ("0.0.0.0", "::")
_IDLE_SECONDS = 60  # until an idle connection is closed
_SHUTDOWN_SECONDS = 2  # for requests that are not complete when the server stops
_MAX_HEADER_BYTES = 2**16  # a comparison of many runs has a long URL


class DashboardServer:
    """The server; a browser opens `url` first to get the cookie."""

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        if root.exists() and not root.is_dir():
            raise RunError(f"'{root}' is not a folder; fedtailor live takes a folder of runs.")
        initial_run = root.resolve().name if is_run_folder(root) else ""
        root = root.resolve().parent if initial_run else root
        self.host, self.token = host, token_urlsafe(32)
        self._socket = _listen(host, port)
        launcher = Launcher(root.resolve())
        self.context = Context(root, initial_run, launcher, RunMonitor(root.resolve(), launcher))
        cookie = f"fedtailor_{self.port}"  # cookies are shared by all ports, and several dashboards may run
        self._server = Server(
            Config(
                make_app(self.context, host, self.token, cookie), http="h11", loop="asyncio", ws="none", lifespan="off",
                log_config=None, log_level="critical", access_log=False, proxy_headers=False, server_header=False,
                headers=list(SECURITY_HEADERS.items()), h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                timeout_keep_alive=_IDLE_SECONDS, timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )  # fmt: skip
        self.context.monitor.start()

    @property
    def address(self) -> str:
        return str(self._socket.getsockname()[0])

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return self.url_for("localhost" if self.host in _ALL_INTERFACES else self.host)

    def url_for(self, host: str) -> str:
        """Return the URL with the token for a host name or address."""
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/?token={self.token}"

    def serve_forever(self) -> None:
        """Serve until `stop`, or Ctrl-C in the main thread; experiments that it started continue."""
        try:
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:
            pass
        finally:
            self._socket.close()
            self.context.monitor.stop()

    def stop(self) -> None:
        """Let `serve_forever` return."""
        self._server.should_exit = True


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket on a port, or by default on the usual port or any free one."""
    family = _address_family(host)
    dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            found = socket.create_server((host, candidate), family=family, dualstack_ipv6=dualstack)
            # Connections inherit this option. Without it, a response's body waits for the acknowledgment of its header.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except OSError as error:
            reason, cause = error.strerror or str(error), error
    where = host if port is None else f"{host}, port {port}"
    raise RunError(f"The dashboard cannot be served on {where}: {reason}.") from cause


def _address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def startup_messages(server: DashboardServer) -> list[str]:
    """Return the lines that `fedtailor live` prints: the URLs, and a warning if other machines have access."""
    lines = [f"Dashboard for {server.context.root}: {server.url}"]
    if server.host in _ALL_INTERFACES and (address := _external_address(_address_family(server.host))):
        lines.append(f"From other machines: {server.url_for(address)}")
    if not is_loopback(server.host):
        lines.append(
            "Anyone with this URL can start experiments, and traffic is not encrypted. Use only in a trusted network."
        )
    return lines


def _external_address(family: int) -> str:
    """Return the address at which other machines reach this one, or an empty string; no data is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            reserved = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"  # for documentation
            probe.connect((reserved, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def serve(folder: Path, host: str, port: int | None, open_browser: bool, echo: Callable[[str], None]) -> None:
    """Serve the dashboard until Ctrl-C."""
    server = DashboardServer(folder, host, port)
    for line in startup_messages(server):
        echo(line)
    if open_browser and not webbrowser.open(server.url):
        echo("No browser was found; open the URL manually.")
    echo("Press Ctrl-C to stop the dashboard. Experiments continue.")
    threading.Thread(target=form_schema, daemon=True).start()  # computed in advance, because it takes a second or two
    server.serve_forever()
