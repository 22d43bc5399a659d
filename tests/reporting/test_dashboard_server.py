"""The dashboard's server: which requests it accepts, and how it handles invalid ones."""

import logging
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.reporting.dashboard import server as server_module
from fedtailor.reporting.dashboard.app import MAX_BODY_BYTES
from fedtailor.reporting.dashboard.routes import GET_ROUTES
from fedtailor.reporting.dashboard.server import DashboardServer, startup_messages
from fedtailor.reporting.dashboard.views import MAX_COMPARED
from support.dashboard_client import dashboard, get, make_run, post, request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    """The dashboard of an empty folder; there is a run next to the folder."""
    folder = tmp_path_factory.mktemp("folder")
    make_run(folder / "outside", rounds=1)
    (folder / "runs").mkdir()
    with dashboard(folder / "runs") as found:
        yield found
    assert not list((folder / "runs").iterdir())  # rejected requests start nothing


@pytest.mark.parametrize(
    ("method", "path", "cookie"),
    [
        *(("GET", path, None) for path in ("/", "/api/runs", "/api/form", "/nothing", "/?token=", "/?token=TOKENx")),
        ("GET", "/api/runs", "fedtailor_PORT=wrong"),
        ("GET", "/api/runs?token=TOKEN", None),  # the token in a URL is only for the page
        ("HEAD", "/?token=TOKEN", None),
        ("POST", "/?token=TOKEN", None),
        ("POST", "/api/start", None),
    ],
)
def test_request_without_token_is_rejected(server: DashboardServer, method: str, path: str, cookie: str | None) -> None:
    sent = None if cookie is None else cookie.replace("PORT", str(server.port))
    body = "{}" if method == "POST" else None
    status, _, found = request(server, method, path.replace("TOKEN", server.token), body, Cookie=sent)
    assert status == 403 and (method == "HEAD" or "token" in found["error"])


def test_printed_url_sets_http_only_same_site_cookie(server: DashboardServer) -> None:
    status, headers, text = request(server, "GET", server.url.partition(str(server.port))[2], Cookie=None)
    assert status == 200 and text.startswith(b"<!DOCTYPE html>")
    cookie = headers["set-cookie"]
    assert "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
    assert request(server, "GET", "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    assert server.token.encode() not in text


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        *(({"Host": host}, 403) for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[")),
        ({"Host": "10.1.2.3"}, 403),
        ({"Host": None}, 400),
        *(({"Host": host}, 200) for host in ("localhost:9999", "[::1]:80", "127.0.0.1")),  # a port may be forwarded
    ],
)
def test_get_from_host_returns_status(server: DashboardServer, headers: dict[str, str | None], expected: int) -> None:
    assert request(server, "GET", "/api/runs", **headers)[0] == expected


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ("{}", {}, 200),
        *(("{}", {"Origin": origin}, 403) for origin in (None, "null", "http://evil.example", "http://127.0.0.1:1")),
        ("{}", {"Origin": "https://127.0.0.1:1", "Host": "127.0.0.1:1"}, 403),
        *(("{}", {"Content_Type": kind}, 415) for kind in (None, "text/plain", "application/x-www-form-urlencoded")),
        (" " * MAX_BODY_BYTES + "{}", {}, 413),
        (f"{MAX_BODY_BYTES:x}\r\n{' ' * MAX_BODY_BYTES}\r\n2\r\n{{}}\r\n0\r\n\r\n",
         {"Content_Length": None, "Transfer_Encoding": "chunked"}, 413),
        ("{}", {"Content_Length": "-1"}, 400),
        *((body, {}, 422) for body in ("", "[]", "{", "null", "[" * 5000)),
        (None, {"Content_Length": None}, 422),
    ],
)  # fmt: skip
def test_post_returns_status(
    server: DashboardServer, body: str | None, headers: dict[str, str | None], expected: int
) -> None:
    assert request(server, "POST", "/api/check", body, **headers)[0] == expected
    assert get(server, "/api/runs")["runs"] == []  # the server still responds


def test_path_in_request_never_reaches_the_disk(server: DashboardServer) -> None:
    for name in ("../outside", "%2e%2e/outside", str(server.context.root.parent / "outside"), ".", ""):
        for route in ("run", "clients", "client"):
            status, _, found = request(server, "GET", f"/api/{route}?run={name}")
            assert status == 422 and "no such run" in found["error"]
        for action in ("stop", "resume", "remove"):
            assert post(server, action, run=name)[0] == 422
    for path in ("/../live.py", "/static/live.js", "/live.js", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
        assert request(server, "GET", path)[0] == 404
    assert request(server, "GET", "/api/start")[0] == 405


def test_responses_have_security_and_cache_headers(server: DashboardServer) -> None:
    text = get(server, "/").decode()
    scripts = [part.partition('"')[0] for part in text.split('src="')[1:]]
    assert len(scripts) == 5 and "http://" not in text and "https://" not in text
    for path in ("/", "/api/runs", "/nothing", *scripts):
        _, headers, _ = request(server, "GET", path)
        policy = headers["content-security-policy"]
        for directive in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
            assert directive in policy
        assert headers["x-content-type-options"] == "nosniff"
        is_cached = "immutable" in headers["cache-control"]
        assert is_cached == (path in scripts) and (is_cached or headers["cache-control"] == "no-store")


def test_other_machines_have_access_only_with_host_option(server: DashboardServer, tmp_path: Path) -> None:
    assert server.address == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")
    with dashboard(tmp_path, host="0.0.0.0") as public:
        assert public.address == "0.0.0.0"
        assert request(public, "GET", "/api/runs", Host="192.168.1.7:80")[0] == 200
        assert request(public, "GET", "/api/runs", Host="evil.example")[0] == 403


def test_server_with_invalid_folder_port_or_address_raises_error(server: DashboardServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in error_message(lambda: DashboardServer(tmp_path / "file"))
    assert str(server.port) in error_message(lambda: DashboardServer(tmp_path, port=server.port))
    for port in (None, 0):
        open_server = partial(DashboardServer, tmp_path, host="203.0.113.7", port=port)
        assert "203.0.113.7" in error_message(open_server)


@pytest.mark.parametrize(
    "others", ['{"json": [1, 2]}', "a b=c", "@=1", 'quoted="', "=", "ümlaut=1", "fedtailor_1=wrong"]
)
def test_cookies_of_other_servers_are_ignored(server: DashboardServer, others: str) -> None:
    valid = f"fedtailor_{server.port}={server.token}"
    for cookie in (f"{others}; {valid}", f"{valid}; {others}", f"{others};{valid};{others}"):
        assert request(server, "GET", "/api/runs", Cookie=cookie)[0] == 200
    assert request(server, "GET", "/api/runs", Cookie=f"{others}; x{valid}")[0] == 403


@pytest.mark.parametrize("accept", ["application/json", "text/html"])
def test_internal_error_is_returned_as_message(
    server: DashboardServer, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: object, query: object) -> dict[str, object]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(GET_ROUTES, "/api/form", broken)
    status, headers, found = request(server, "GET", "/api/form", Accept=accept)
    message = found["error"] if accept == "application/json" else found.decode()
    assert status == 500 and "division by zero" in message and message.endswith(".")
    assert "content-security-policy" in headers and get(server, "/api/runs")["runs"] == []  # it still responds


def test_comparison_of_too_many_runs_returns_error(server: DashboardServer) -> None:
    many = "&".join(f"run={'long-name-' * 15}{number}" for number in range(300))  # a URL of 47 kB
    found = get(server, f"/api/comparison?{many}")
    assert str(MAX_COMPARED) in found["error"] and "300" in found["error"]


def test_startup_messages_have_external_url_and_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_external_address", lambda family: "192.168.1.7")
    for host in ("0.0.0.0", "127.0.0.1"):
        with dashboard(tmp_path, host=host) as server:
            lines = startup_messages(server)
            assert server.url in lines[0]
            external = [line for line in lines if f"http://192.168.1.7:{server.port}/?token={server.token}" in line]
            assert len(external) == (host == "0.0.0.0")
            assert any("encrypted" in line for line in lines) == (host == "0.0.0.0")


def test_server_with_open_connections_stops_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """One connection is idle, one has sent half a header, and one has sent half a body."""
    with caplog.at_level(logging.DEBUG), dashboard(tmp_path) as server:
        clients = [socket.create_connection((server.address, server.port), timeout=60) for _ in range(3)]
        clients[1].sendall(b"GET / HT")
        headers = {"Host": "localhost", "Origin": "http://localhost", "Content-Type": "application/json",
                   "Cookie": f"fedtailor_{server.port}={server.token}", "Content-Length": "9"}  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        clients[2].sendall(f"POST /api/check HTTP/1.1\r\n{lines}\r\n{{".encode())
        assert request(server, "GET", "/", Host=None)[0] == 400  # uvicorn logs a warning by default
    for client in clients:
        client.close()
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    assert capfd.readouterr() == ("", "")
