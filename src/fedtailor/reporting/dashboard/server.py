"""The dashboard's HTTP server, for one user on one machine.

Anyone with access can start processes, so the server listens on the loopback interface by default and requires the
token that it prints. It checks the Host header (against DNS rebinding) and the Origin header and content type (against
requests from other sites), and it never uses a path from a request as a file path.
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from secrets import compare_digest, token_urlsafe
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedtailor.core.untrusted_input import parse_json
from fedtailor.errors import FedTailorError, RunError
from fedtailor.reporting.dashboard.form import form_schema
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.routes import GET_ROUTES, POST_ROUTES, Context, Query
from fedtailor.reporting.dashboard.run_monitor import RunMonitor
from fedtailor.reporting.page import plotly_script, read_static
from fedtailor.runs.reader import is_run_folder
from fedtailor.runs.records import nan_to_none
from fedtailor.version import VERSION

DEFAULT_PORT = 8317
MAX_BODY_BYTES = 2**16  # a form has a few thousand
_ALL_INTERFACES = ("0.0.0.0", "::")
_IDLE_SECONDS = 60  # until a silent connection is closed
_CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_CONTENT_SECURITY_POLICY = (  # plotly inserts inline styles
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class DashboardServer(ThreadingHTTPServer):
    """The server; a browser opens `url` first to get the cookie."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        if root.exists() and not root.is_dir():
            raise RunError(f"'{root}' is not a folder; fedtailor live takes a folder of runs.")
        initial_run = root.resolve().name if is_run_folder(root) else ""
        root = root.resolve().parent if initial_run else root
        plotly_script()  # raises an error now if plotly is missing
        self.host, self.token = host, token_urlsafe(32)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for candidate in (DEFAULT_PORT, 0) if port is None else (port,):  # 0: any free port
            try:
                super().__init__((host, candidate), RequestHandler)
                break
            except OSError as error:
                reason, cause = error.strerror or str(error), error
        else:
            where = host if port is None else f"{host}, port {port}"
            raise RunError(f"The dashboard cannot be served on {where}: {reason}.") from cause
        launcher = Launcher(root.resolve())
        self.context = Context(root, initial_run, launcher, RunMonitor(root.resolve(), launcher))
        self.context.monitor.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return self.url_for("localhost" if self.host in _ALL_INTERFACES else self.host)

    def url_for(self, host: str) -> str:
        """Return the URL with the token for a host name or address."""
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/?token={self.token}"

    def server_close(self) -> None:
        """Close the server; experiments that it started continue."""
        super().server_close()
        if hasattr(self, "context"):  # it is missing if the port could not be opened
            self.context.monitor.stop()

    def is_allowed_host(self, host: str) -> bool:
        """Return whether a request's Host header names this server; the port may differ if it is forwarded."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            address = ip_address(name)
        except ValueError:
            return name in ("localhost", self.host.lower())
        return address.is_loopback or not _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RequestHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: DashboardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "FedTailor", ""
    timeout = _IDLE_SECONDS
    wbufsize = -1  # buffer a response: a second packet would wait for the acknowledgment of the first
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_POST(self) -> None:
        self._handle(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows only the messages of `serve`."""

    def _handle(self, respond: Callable[[str, Query], None]) -> None:
        """Check the Host header and the token, then respond."""
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)  # the request line has at most 64 KiB
        except ValueError:
            self._send_error(HTTPStatus.BAD_REQUEST, "The URL is invalid.")
            return
        if not self.server.is_allowed_host(self.headers.get("Host", "")):
            self._send_error(HTTPStatus.FORBIDDEN, "The dashboard is not available under this host name.")
        elif not self._is_authorized(parts.path, query):
            self._send_error(
                HTTPStatus.FORBIDDEN, "Open the URL that fedtailor live printed; it contains the access token."
            )
        else:
            try:
                respond(parts.path, query)
            except FedTailorError as error:
                self._send_json({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            except Exception as error:  # a bug: show it in the dashboard
                message = f"Internal error in the dashboard ({type(error).__name__}: {str(error)[:200].rstrip('.')})."
                self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, message)

    def _is_authorized(self, path: str, query: Query) -> bool:
        """Return whether the cookie, or the query of the printed URL, contains the token."""
        from_query = query.get("token", [""])[0] if path == "/" and self.command == "GET" else ""
        parts = self.headers.get("Cookie", "").split(";")  # not http.cookies, which fails on other servers' odd cookies
        pairs = (part.strip().partition("=") for part in parts)
        from_cookies = [value for name, _, value in pairs if name == self._cookie]
        token = self.server.token.encode()
        return any(compare_digest(one.encode(errors="replace"), token) for one in (from_query, *from_cookies))

    @property
    def _cookie(self) -> str:
        return f"fedtailor_{self.server.port}"  # cookies are shared by all ports, and several dashboards may run

    def _get(self, path: str, query: Query) -> None:
        if path == "/":
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(page().encode(), "text/html", {"Cache-Control": "no-store", "Set-Cookie": cookie})
        elif path in assets():
            data, content_type = assets()[path]
            self._send(data, content_type, {"Cache-Control": "private, max-age=31536000, immutable"})
        elif path in GET_ROUTES:
            self._send_json(GET_ROUTES[path](self.server.context, query))
        else:
            self._send_error(HTTPStatus.NOT_FOUND, "The dashboard has no such page.")

    def _post(self, path: str, query: Query) -> None:
        if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            self._send_error(HTTPStatus.FORBIDDEN, "Requests from other sites are not allowed.")
        elif self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._send_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The request body must be JSON.")
        elif not (length := self.headers.get("Content-Length", "")).isdecimal() or len(length) > 9:
            self._send_error(HTTPStatus.LENGTH_REQUIRED, "The request needs a valid Content-Length header.")
        elif int(length) > MAX_BODY_BYTES:
            self._send_error(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request body must have at most {MAX_BODY_BYTES:,} bytes."
            )
        elif path not in POST_ROUTES:
            self._send_error(HTTPStatus.NOT_FOUND, "The dashboard has no such page.")
        else:
            try:
                body = parse_json(self.rfile.read(int(length)))
            except ValueError:
                body = None
            if not isinstance(body, dict):
                raise RunError("The request body must be a JSON object.")
            self._send_json(POST_ROUTES[path](self.server.context, body))

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send data, or only the status 304 if the client already has the same data."""
        data = json.dumps(nan_to_none(value), allow_nan=False, separators=(",", ":")).encode()
        tag = f'"{sha256(data).hexdigest()[:20]}"'
        if status is HTTPStatus.OK and self.command == "GET" and self.headers.get("If-None-Match") == tag:
            data, status = b"", HTTPStatus.NOT_MODIFIED
        self._send(data, "application/json", {"ETag": tag, "Cache-Control": "no-store"}, status)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        """Send an error as JSON, or as plain text if a page was opened in a browser."""
        self.close_connection = True  # an unread body would be parsed as the next request
        is_page = "text/html" in self.headers.get("Accept", "")
        data, content_type = (
            (message, "text/plain") if is_page else (json.dumps({"error": message}), "application/json")
        )
        self._send(data.encode(), content_type, {"Cache-Control": "no-store", "Connection": "close"}, status)

    def _send(
        self, data: bytes, content_type: str, headers: Mapping[str, str], status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | dict(headers)).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """Return path -> content and content type. A path contains a hash, so browsers can cache the content forever."""
    names = ("page.css", "live.css", "figures.js", "elements.js", "form.js", "live.js")
    texts = {name: read_static(name) for name in names} | {"plotly.js": plotly_script()}
    found = {}
    for name, text in texts.items():
        data = text.encode()
        stem, _, extension = name.partition(".")
        found[f"/{stem}-{sha256(data).hexdigest()[:12]}.{extension}"] = (data, _CONTENT_TYPES[extension])
    return found


@cache
def page() -> str:
    """Return the HTML page with the paths of its assets."""
    text = read_static("live.html")
    for path in assets():
        stem, extension = path[1:].rpartition("-")[0], path.rpartition(".")[2]
        text = text.replace(f'"{stem}.{extension}"', f'"{path}"')
    return text.replace("VERSION", VERSION)


def startup_messages(server: DashboardServer) -> list[str]:
    """Return the lines that `fedtailor live` prints: the URLs, and a warning if other machines have access."""
    lines = [f"Dashboard for {server.context.root}: {server.url}"]
    if server.host in _ALL_INTERFACES and (address := _external_address(server.address_family)):
        lines.append(f"From other machines: {server.url_for(address)}")
    if not _is_loopback(server.host):
        lines.append(
            "Anyone with this URL can start experiments, and traffic is not encrypted. Use only in a trusted network."
        )
    return lines


def _external_address(family: int) -> str:
    """Return the address at which other machines reach this one, or an empty string; no data is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(
                ("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9)
            )  # reserved for documentation
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def serve(folder: Path, host: str, port: int | None, open_browser: bool, echo: Callable[[str], None]) -> None:
    """Serve the dashboard until Ctrl-C."""
    server = DashboardServer(folder, host, port)
    for line in startup_messages(server):
        echo(line)
    if open_browser and not _open(server.url):
        echo("No browser was found; open the URL manually.")
    echo("Press Ctrl-C to stop the dashboard. Experiments continue.")
    threading.Thread(target=form_schema, daemon=True).start()  # computed in advance, because it takes a second or two
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _open(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
