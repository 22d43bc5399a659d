"""The live page: a small server for one person on one machine.

Whoever can talk to it can start processes, so it listens on loopback unless told otherwise, and answers only those who
have the token that it printed; it heeds no page but its own (Host against names that were bent to this machine, Origin
and JSON against forms of others), and no path in a request ever becomes one on the disk.
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

from fedtailor.errors import Refused
from fedtailor.lines import without_nan
from fedtailor.record import holds_run
from fedtailor.see.answering import ASKED, TOLD, Known, Query
from fedtailor.see.form import form
from fedtailor.see.page import plotly_script, static
from fedtailor.see.starting import Starter
from fedtailor.see.watching import Watcher
from fedtailor.untrusted import parse_json
from fedtailor.version import VERSION

PORT = 8317
_ANYWHERE = ("0.0.0.0", "::")  # all addresses of this machine
_LARGEST = 2**16  # bytes of a request's body: a form has a few thousand
_PATIENCE = 60  # seconds that a silent connection stays open
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = (  # plotly writes its styles into the page, hence inline ones
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Live(ThreadingHTTPServer):
    """The server; `url` is what a browser is to open, once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        if root.exists() and not root.is_dir():
            raise Refused(f"'{root}' is no folder; fedtailor live takes the folder that runs lie in.")
        first = root.resolve().name if holds_run(root) else ""  # a run: it is shown among those beside it
        root = root.resolve().parent if first else root
        plotly_script()  # refused now where there is none
        self.host, self.token = host, token_urlsafe(32)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for wanted in (PORT, 0) if port is None else (port,):  # where somebody has ours, any other will do
            try:
                super().__init__((host, wanted), Handler)
                break
            except OSError as error:
                why, cause = error.strerror or str(error), error
        else:
            where = host if port is None else f"{host}, port {port}"
            raise Refused(f"The page cannot be served on {where}: {why}.") from cause
        starter = Starter(root.resolve())
        self.known = Known(root, first, starter, Watcher(root.resolve(), starter))
        self.known.watcher.begin()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return self.url_at("localhost" if self.host in _ANYWHERE else self.host)

    def url_at(self, name: str) -> str:
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{self.port}/?token={self.token}"

    def server_close(self) -> None:
        """The page ends; experiments that it started go on."""
        super().server_close()
        if hasattr(self, "known"):  # else the port was taken
            self.known.watcher.end()

    def is_own_name(self, host: str) -> bool:
        """Whether a request's Host may be meant for us. A name that somebody bent to this address is not; the port may
        be another, for it may be forwarded."""
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


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Live
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "FedTailor", ""
    timeout = _PATIENCE
    wbufsize = -1  # an answer leaves in one piece: in two, the second would wait for a word about the first
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for experiments."""

    def _guarded(self, answer: Callable[[str, Query], None]) -> None:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)  # of a line of at most 64 KiB
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "This address cannot be read.")
            return
        if not self.server.is_own_name(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "This page answers under its own address only.")
        elif not self._is_known(parts.path, query):
            words = "Open the address that fedtailor live printed: it carries the token that this page asks for."
            self._refuse(HTTPStatus.FORBIDDEN, words)
        else:
            try:
                answer(parts.path, query)
            except Refused as refusal:
                self._json({"refused": str(refusal)}, HTTPStatus.UNPROCESSABLE_ENTITY)
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            except Exception as error:  # of our own: said where it is seen, for the terminal is for experiments
                words = f"This page made a mistake ({type(error).__name__}: {str(error)[:200].rstrip('.')})."
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, words)

    def _is_known(self, path: str, query: Query) -> bool:
        """Whether the token came with the cookie, or with the address that was printed."""
        given = query.get("token", [""])[0] if path == "/" and self.command == "GET" else ""
        parts = self.headers.get("Cookie", "").split(";")  # by hand: pages on other ports may have set odd ones
        kept = [value for name, _, value in (part.strip().partition("=") for part in parts) if name == self._cookie]
        token = self.server.token.encode()
        return any(compare_digest(one.encode(errors="replace"), token) for one in (given, *kept))

    @property
    def _cookie(self) -> str:
        return f"fedtailor_{self.server.port}"  # cookies know no ports, and there may be several pages

    def _get(self, path: str, query: Query) -> None:
        if path == "/":
            keep = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(page().encode(), "text/html", {"Cache-Control": "no-store", "Set-Cookie": keep})
        elif path in assets():
            data, kind = assets()[path]
            self._send(data, kind, {"Cache-Control": "private, max-age=31536000, immutable"})
        elif path in ASKED:
            self._json(ASKED[path](self.server.known, query))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _post(self, path: str, query: Query) -> None:
        if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            self._refuse(HTTPStatus.FORBIDDEN, "Only this page itself may ask for that.")
        elif self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "What is sent here must be JSON.")
        elif not (length := self.headers.get("Content-Length", "")).isdecimal() or len(length) > 9:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "What is sent here must say how long it is.")
        elif int(length) > _LARGEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {_LARGEST:,} bytes can be sent here.")
        elif path not in TOLD:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")
        else:
            body = self.rfile.read(int(length))
            try:
                told = parse_json(body)
            except ValueError:
                told = None
            if not isinstance(told, dict):
                raise Refused("What was sent is no JSON object.")
            self._json(TOLD[path](self.server.known, told))

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Data, which nobody keeps; who has the same already is told so."""
        data = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":")).encode()
        tag = f'"{sha256(data).hexdigest()[:20]}"'
        if status is HTTPStatus.OK and self.command == "GET" and self.headers.get("If-None-Match") == tag:
            self._send(b"", "application/json", {"ETag": tag, "Cache-Control": "no-store"}, HTTPStatus.NOT_MODIFIED)
        else:
            self._send(data, "application/json", {"ETag": tag, "Cache-Control": "no-store"}, status)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        """A body that was not read must not be taken for the next request, so the connection ends."""
        self.close_connection = True
        by_hand = "text/html" in self.headers.get("Accept", "")  # somebody opened it, who reads words rather than JSON
        data, kind = (words, "text/plain") if by_hand else (json.dumps({"refused": words}), "application/json")
        self._send(data.encode(), kind, {"Cache-Control": "no-store", "Connection": "close"}, status)

    def _send(self, data: bytes, kind: str, headers: Mapping[str, str], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | dict(headers)).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """Address -> bytes and kind. The address changes with what it holds, so that browsers may keep it for good."""
    texts = {name: static(name) for name in ("page.css", "live.css", "figures.js", "elements.js", "form.js", "live.js")}
    texts["plotly.js"] = plotly_script()
    found = {}
    for name, text in texts.items():
        data = text.encode()
        stem, _, kind = name.partition(".")
        found[f"/{stem}-{sha256(data).hexdigest()[:12]}.{kind}"] = (data, _KINDS[kind])
    return found


@cache
def page() -> str:
    """The page itself, with the addresses of its parts."""
    text = static("live.html")
    for address in assets():
        stem, kind = address[1:].rpartition("-")[0], address.rpartition(".")[2]
        text = text.replace(f'"{stem}.{kind}"', f'"{address}"')
    return text.replace("VERSION", VERSION)


def greeting(live: Live) -> list[str]:
    """Where the page is, and what to know of that."""
    said = [f"The page of {live.known.root} is at {live.url}"]
    if live.host in _ANYWHERE and (outward := _outward(live.address_family)):
        said.append(f"From other machines it is at {live.url_at(outward)}")
    if not _is_loopback(live.host):
        said.append("Who has this address can start experiments here, and what crosses is not encrypted: use a trusted "
                    "network.")  # fmt: skip
    return said


def _outward(family: int) -> str:
    """The address by which other machines know this one, if there are any; nothing is sent to find it out."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))  # addresses of no machine
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def serve(folder: Path, host: str, port: int | None, show: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C."""
    live = Live(folder, host, port)
    for words in greeting(live):
        say(words)
    if show and not _open(live.url):
        say("There is no browser here; open the address yourself.")
    say("Ctrl-C ends the page; experiments go on.")
    threading.Thread(target=form, daemon=True).start()  # so that it is there when somebody wants it
    try:
        live.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        live.server_close()


def _open(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
