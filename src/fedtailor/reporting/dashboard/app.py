"""The dashboard as an ASGI application: which requests it accepts, and what it answers.

Anyone with access can start processes, so every request needs the token that the dashboard prints. The Host header is
checked against DNS rebinding, and the Origin header and the content type against requests from other sites. A path from
a request is never used as a file path.
"""

import json
from functools import cache
from hashlib import sha256
from ipaddress import ip_address
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fedtailor.core.untrusted_input import parse_json
from fedtailor.errors import FedTailorError, RunError, reason
from fedtailor.reporting.dashboard.routes import GET_ROUTES, POST_ROUTES, Context
from fedtailor.reporting.page import TEMPLATES, plotly_script, read_static
from fedtailor.runs.records import nan_to_none
from fedtailor.version import VERSION

MAX_BODY_BYTES = 2**16  # a form has a few thousand
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript"}
_CONTENT_SECURITY_POLICY = (  # plotly inserts inline styles
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {  # the server adds them to every response
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NO_STORE = {"Cache-Control": "no-store"}
_CACHED_FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}


def make_app(context: Context, host: str, token: str, cookie: str) -> Starlette:
    """Return the application; `cookie` is the name of the cookie in which browsers keep the token."""

    def respond_page(request: Request) -> Response:
        paths = {name: path for path, (name, _) in assets().items()}
        text = TEMPLATES.get_template("live.html").render(paths=paths, version=VERSION)
        response = Response(text, media_type="text/html", headers=_NO_STORE)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response

    def respond_data(request: Request) -> Response:
        return _json_response(GET_ROUTES[request.scope["path"]](context, request.query_params))

    async def respond_action(request: Request) -> Response:
        body = await _read_body(request)
        return _json_response(await run_in_threadpool(POST_ROUTES[request.scope["path"]], context, body))

    return Starlette(
        routes=[
            Route("/", respond_page),
            *(Route(path, _respond_asset) for path in assets()),
            *(Route(path, respond_data) for path in GET_ROUTES),
            *(Route(path, respond_action, methods=["POST"]) for path in POST_ROUTES),
        ],
        middleware=[Middleware(Guard, host=host, token=token, cookie=cookie)],
        exception_handlers=dict.fromkeys((FedTailorError, HTTPException, Exception), _on_error),
    )


class Guard:
    """Middleware that checks the Host header, the token, and the origin before anything else is read."""

    def __init__(self, app: ASGIApp, host: str, token: str, cookie: str) -> None:
        self._app, self._host, self._token, self._cookie = app, host, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._rejection(Request(scope)) or self._app
        await respond(scope, receive, send)

    def _rejection(self, request: Request) -> Response | None:
        if not _is_allowed_host(request.headers.get("Host", ""), self._host):
            return _error_response(request, 403, "The dashboard is not available under this host name.")
        if not _has_token(request, self._token, self._cookie):
            message = "Open the URL that fedtailor live printed; it contains the access token."
            return _error_response(request, 403, message)
        if request.method == "POST" and request.headers.get("Origin") != f"http://{request.headers['Host']}":
            return _error_response(request, 403, "Requests from other sites are not allowed.")
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on this host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_allowed_host(header: str, host: str) -> bool:
    """Return whether a Host header names the server on `host`; the port may differ if it is forwarded."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    try:
        address = ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower())
    return address.is_loopback or not is_loopback(host)


def _has_token(request: Request, token: str, cookie: str) -> bool:
    """Return whether the cookie, or the query of the printed URL, contains the token."""
    is_page = request.scope["path"] == "/" and request.method == "GET"
    given = request.cookies.get(cookie, ""), request.query_params.get("token", "") if is_page else ""
    return any(compare_digest(text.encode(errors="replace"), token.encode()) for text in given)


async def _read_body(request: Request) -> dict[str, Any]:
    if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "The request body must be JSON.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The request body must have at most {MAX_BODY_BYTES:,} bytes.")
    try:
        body = parse_json(bytes(data))
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RunError("The request body must be a JSON object.")
    return body


def _respond_asset(request: Request) -> Response:
    name, data = assets()[request.scope["path"]]
    return Response(data, media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=_CACHED_FOREVER)


@cache
def assets() -> dict[str, tuple[str, bytes]]:
    """Return path -> name and content. A path contains a hash, so browsers can cache the content forever."""
    names = ("page.css", "live.css", "figures.js", "elements.js", "form.js", "live.js")
    texts = {name: read_static(name) for name in names} | {"plotly.js": plotly_script()}
    return {f"/{sha256(text.encode()).hexdigest()[:12]}/{name}": (name, text.encode()) for name, text in texts.items()}


def _json_response(value: object, status: int = 200) -> Response:
    data = json.dumps(nan_to_none(value), allow_nan=False, separators=(",", ":"))
    return Response(data, status, media_type="application/json", headers=_NO_STORE)


def _error_response(request: Request, status: int, message: str) -> Response:
    """Return an error as JSON, or as plain text if a page was opened in a browser."""
    if "text/html" in request.headers.get("Accept", ""):
        return PlainTextResponse(message, status, _NO_STORE)
    return _json_response({"error": message}, status)


def _on_error(request: Request, error: Exception) -> Response:
    """Return the message of an error; an unexpected error is a bug, and the dashboard shows it."""
    if isinstance(error, FedTailorError):
        return _error_response(request, 422, str(error))
    if isinstance(error, HTTPException):
        message = "The dashboard has no such page." if error.status_code in (404, 405) else error.detail
        return _error_response(request, error.status_code, message)
    return _error_response(request, 500, f"Internal error in the dashboard ({reason(error, with_type=True)}).")
