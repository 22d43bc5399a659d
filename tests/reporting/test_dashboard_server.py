"""The dashboard's server: which requests it accepts, and how it handles invalid ones."""

import json
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.reporting.dashboard import server as server_module
from fedtailor.reporting.dashboard.routes import GET_ROUTES
from fedtailor.reporting.dashboard.server import MAX_BODY_BYTES, DashboardServer, startup_messages
from fedtailor.reporting.dashboard.views import MAX_COMPARED
from support.dashboard_client import dashboard, get, make_run, post, request


def test_request_without_token_is_rejected(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        for path in ("/", "/api/runs", "/api/form", "/nothing", "/?token=", f"/?token={server.token[:-1]}x"):
            status, _, found = request(server, "GET", path, Cookie=None)
            assert status == 403 and "token" in found["error"]
        assert request(server, "GET", "/api/runs", Cookie=f"fedtailor_{server.port}=wrong")[0] == 403
        assert request(server, "GET", f"/api/runs?token={server.token}", Cookie=None)[0] == 403  # only for the page
        assert request(server, "POST", "/api/start", "{}", Cookie=None)[0] == 403


def test_printed_url_sets_http_only_same_site_cookie(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        status, headers, text = request(server, "GET", server.url.partition(str(server.port))[2], Cookie=None)
        assert status == 200 and text.startswith(b"<!DOCTYPE html>")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert request(server, "GET", "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        assert server.token.encode() not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "10.1.2.3"])
def test_request_with_foreign_host_header_is_rejected(tmp_path: Path, host: str) -> None:
    with dashboard(tmp_path) as server:
        assert request(server, "GET", "/api/runs", Host=host)[0] == 403


def test_request_with_loopback_host_or_forwarded_port_is_accepted(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        for host in (f"localhost:{server.port}", "localhost:9999", "[::1]:80", "127.0.0.1"):
            assert request(server, "GET", "/api/runs", Host=host)[0] == 200


def test_post_from_other_origin_or_content_type_is_rejected(tmp_path: Path) -> None:
    body = json.dumps({"values": {}})
    with dashboard(tmp_path) as server:
        for origin in (None, "null", "http://evil.example", f"https://127.0.0.1:{server.port}", "http://127.0.0.1:1"):
            assert request(server, "POST", "/api/check", body, Origin=origin)[0] == 403
        for content_type in (None, "text/plain", "application/x-www-form-urlencoded"):
            assert request(server, "POST", "/api/check", body, Content_Type=content_type)[0] == 415
        assert request(server, "GET", "/api/start")[0] == 404
        assert request(server, "POST", "/api/check", body)[0] == 200
    assert not list(tmp_path.iterdir())


def test_post_with_too_large_or_invalid_body_is_rejected(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        assert request(server, "POST", "/api/check", "{}", Content_Length=str(MAX_BODY_BYTES + 1))[0] == 413
        assert request(server, "POST", "/api/check", "{}", Content_Length="-1")[0] == 411
        assert request(server, "POST", "/api/check", Content_Length=None)[0] == 411
        for body in ("[]", "{", "null", "[" * 5000):
            assert request(server, "POST", "/api/stop", body)[0] == 422
        assert get(server, "/api/runs")["runs"] == []  # the server still responds


def test_path_in_request_never_reaches_the_disk(tmp_path: Path) -> None:
    make_run(tmp_path / "outside", rounds=1)
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "runs") as server:
        for name in ("../outside", "%2e%2e/outside", str(tmp_path / "outside"), ".", ""):
            for route in ("run", "clients", "client"):
                status, _, found = request(server, "GET", f"/api/{route}?run={name}")
                assert status == 422 and "no such run" in found["error"]
            for action in ("stop", "resume", "remove"):
                assert post(server, action, run=name)[0] == 422
        for path in ("/../live.py", "/static/live.js", "/live.js", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
            assert request(server, "GET", path)[0] == 404


def test_responses_have_security_and_cache_headers(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        text = get(server, "/").decode()
        scripts = [part.partition('"')[0] for part in text.split('src="')[1:]]
        assert len(scripts) == 5 and "http://" not in text and "https://" not in text
        for path in ("/", "/api/runs", "/nothing", *scripts):
            _, headers, _ = request(server, "GET", path)
            policy = headers["Content-Security-Policy"]
            for directive in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
                assert directive in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            is_cached = "immutable" in headers["Cache-Control"]
            assert is_cached == (path in scripts) and (is_cached or headers["Cache-Control"] == "no-store")


def test_other_machines_have_access_only_with_host_option(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")
    with dashboard(tmp_path, host="0.0.0.0") as server:
        assert request(server, "GET", "/api/runs", Host="192.168.1.7:80")[0] == 200
        assert request(server, "GET", "/api/runs", Host="evil.example")[0] == 403


def test_server_with_invalid_folder_or_used_port_raises_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in error_message(lambda: DashboardServer(tmp_path / "file"))
    with dashboard(tmp_path) as server:
        assert str(server.port) in error_message(lambda: DashboardServer(tmp_path, port=server.port))


def test_cookies_of_other_servers_are_ignored(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        valid = f"fedtailor_{server.port}={server.token}"
        for others in ('{"json": [1, 2]}', "a b=c", "@=1", 'quoted="', "=", "ümlaut=1", f"fedtailor_1={server.token}x"):
            for cookie in (f"{others}; {valid}", f"{valid}; {others}", f"{others};{valid};{others}"):
                assert request(server, "GET", "/api/runs", Cookie=cookie)[0] == 200, cookie
            assert request(server, "GET", "/api/runs", Cookie=f"{others}; x{valid}")[0] == 403


def test_internal_error_is_returned_as_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: object, query: object) -> dict[str, object]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(GET_ROUTES, "/api/form", broken)
    with dashboard(tmp_path) as server:
        status, _, found = request(server, "GET", "/api/form")
        assert status == 500 and "division by zero" in found["error"] and found["error"].endswith(".")
        assert get(server, "/api/runs")["runs"] == []  # the server still responds


def test_comparison_of_too_many_runs_returns_error(tmp_path: Path) -> None:
    with dashboard(tmp_path) as server:
        many = "&".join(f"run=run-{number}" for number in range(300))
        found = get(server, f"/api/comparison?{many}")
    assert str(MAX_COMPARED) in found["error"] and "300" in found["error"]


def test_server_on_foreign_address_raises_error(tmp_path: Path) -> None:
    for port in (None, 0):
        message = error_message(lambda port=port: DashboardServer(tmp_path, host="203.0.113.7", port=port))  # type: ignore[misc]
        assert "203.0.113.7" in message


def test_startup_messages_have_external_url_and_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_external_address", lambda family: "192.168.1.7")
    for host in ("0.0.0.0", "127.0.0.1"):
        with dashboard(tmp_path, host=host) as server:
            lines = startup_messages(server)
            assert server.url in lines[0]
            external = [line for line in lines if f"http://192.168.1.7:{server.port}/?token={server.token}" in line]
            assert len(external) == (host == "0.0.0.0")
            assert any("encrypted" in line for line in lines) == (host == "0.0.0.0")
