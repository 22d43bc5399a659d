"""The live page's server: who may talk to it, and what it does with what is odd."""

import json
from pathlib import Path

import pytest

from conftest import refusal
from fedtailor.see import live as server
from fedtailor.see.answering import ASKED
from fedtailor.see.live import _LARGEST, Live
from fedtailor.see.looking import MOST
from live_page import ask, get, made, page, tell


def test_without_the_token_every_request_is_refused(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        for path in ("/", "/api/runs", "/api/form", "/nothing", "/?token=", f"/?token={live.token[:-1]}x"):
            status, _, found = ask(live, "GET", path, Cookie=None)
            assert status == 403 and "token" in found["refused"]
        assert ask(live, "GET", "/api/runs", Cookie=f"fedtailor_{live.port}=wrong")[0] == 403
        assert ask(live, "GET", f"/api/runs?token={live.token}", Cookie=None)[0] == 403  # only the page itself
        assert ask(live, "POST", "/api/start", "{}", Cookie=None)[0] == 403


def test_the_printed_address_gives_a_cookie_that_scripts_and_other_sites_cannot_use(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        status, headers, text = ask(live, "GET", live.url.partition(str(live.port))[2], Cookie=None)
        assert status == 200 and text.startswith(b"<!DOCTYPE html>")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert ask(live, "GET", "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        assert live.token.encode() not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "10.1.2.3"])
def test_a_name_that_was_bent_to_this_machine_is_refused(tmp_path: Path, host: str) -> None:
    with page(tmp_path) as live:
        assert ask(live, "GET", "/api/runs", Host=host)[0] == 403


def test_other_names_of_loopback_and_forwarded_ports_are_heeded(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        for host in (f"localhost:{live.port}", "localhost:9999", "[::1]:80", "127.0.0.1"):
            assert ask(live, "GET", "/api/runs", Host=host)[0] == 200


def test_what_changes_something_must_come_from_the_page_itself(tmp_path: Path) -> None:
    body = json.dumps({"values": {}})
    with page(tmp_path) as live:
        for origin in (None, "null", "http://evil.example", f"https://127.0.0.1:{live.port}", "http://127.0.0.1:1"):
            assert ask(live, "POST", "/api/check", body, Origin=origin)[0] == 403
        for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
            assert ask(live, "POST", "/api/check", body, Content_Type=kind)[0] == 415
        assert ask(live, "GET", "/api/start")[0] == 404
        assert ask(live, "POST", "/api/check", body)[0] == 200
    assert not list(tmp_path.iterdir())


def test_bodies_are_bounded_and_must_be_objects(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        assert ask(live, "POST", "/api/check", "{}", Content_Length=str(_LARGEST + 1))[0] == 413
        assert ask(live, "POST", "/api/check", "{}", Content_Length="-1")[0] == 411
        assert ask(live, "POST", "/api/check", Content_Length=None)[0] == 411
        for body in ("[]", "{", "null", "[" * 5000):
            assert ask(live, "POST", "/api/stop", body)[0] == 422
        assert get(live, "/api/runs")["runs"] == []  # and it goes on


def test_no_path_in_a_request_reaches_the_disk(tmp_path: Path) -> None:
    made(tmp_path / "outside", rounds=1)
    (tmp_path / "runs").mkdir()
    with page(tmp_path / "runs") as live:
        for name in ("../outside", "%2e%2e/outside", str(tmp_path / "outside"), ".", ""):
            for what in ("run", "clients", "client"):
                status, _, found = ask(live, "GET", f"/api/{what}?run={name}")
                assert status == 422 and "no such run" in found["refused"]
            for what in ("stop", "resume", "forget"):
                assert tell(live, what, run=name)[0] == 422
        for path in ("/../live.py", "/static/live.js", "/live.js", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
            assert ask(live, "GET", path)[0] == 404


def test_every_answer_forbids_what_the_page_does_not_need(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        text = get(live, "/").decode()
        scripts = [part.partition('"')[0] for part in text.split('src="')[1:]]
        assert len(scripts) == 5 and "http://" not in text and "https://" not in text
        for path in ("/", "/api/runs", "/nothing", *scripts):
            _, headers, _ = ask(live, "GET", path)
            policy = headers["Content-Security-Policy"]
            assert (
                "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
            )
            assert headers["X-Content-Type-Options"] == "nosniff"
            kept = "immutable" in headers["Cache-Control"]
            assert kept == (path in scripts) and (kept or headers["Cache-Control"] == "no-store")


def test_others_are_let_in_only_when_told_so(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        assert live.server_address[0] == "127.0.0.1" and live.url.startswith("http://127.0.0.1:")
    with page(tmp_path, host="0.0.0.0") as live:
        assert ask(live, "GET", "/api/runs", Host="192.168.1.7:80")[0] == 200
        assert ask(live, "GET", "/api/runs", Host="evil.example")[0] == 403


def test_a_folder_that_is_none_and_a_port_that_is_taken_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "no folder" in refusal(lambda: Live(tmp_path / "file"))
    with page(tmp_path) as live:
        assert str(live.port) in refusal(lambda: Live(tmp_path, port=live.port))


def test_cookies_of_other_pages_on_this_machine_do_not_lock_anyone_out(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        own = f"fedtailor_{live.port}={live.token}"
        for others in ('{"json": [1, 2]}', "a b=c", "@=1", 'quoted="', "=", "ümlaut=1", f"fedtailor_1={live.token}x"):
            for cookie in (f"{others}; {own}", f"{own}; {others}", f"{others};{own};{others}"):
                assert ask(live, "GET", "/api/runs", Cookie=cookie)[0] == 200, cookie
            assert ask(live, "GET", "/api/runs", Cookie=f"{others}; x{own}")[0] == 403


def test_an_error_of_our_own_is_answered_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(known: object, query: object) -> dict[str, object]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(ASKED, "/api/form", broken)
    with page(tmp_path) as live:
        status, _, found = ask(live, "GET", "/api/form")
        assert status == 500 and "division by zero" in found["refused"] and found["refused"].endswith(".")
        assert get(live, "/api/runs")["runs"] == []  # and it goes on


def test_any_number_of_runs_may_be_ticked_and_is_answered_in_words(tmp_path: Path) -> None:
    with page(tmp_path) as live:
        many = "&".join(f"run=run-{number}" for number in range(300))
        found = get(live, f"/api/compared?{many}")
    assert str(MOST) in found["refused"] and "300" in found["refused"]


def test_an_address_that_is_not_this_machines_is_refused_in_words(tmp_path: Path) -> None:
    for port in (None, 0):
        assert "203.0.113.7" in refusal(lambda port=port: Live(tmp_path, host="203.0.113.7", port=port))  # type: ignore[misc]


def test_who_lets_others_in_is_told_the_address_that_others_can_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_outward", lambda family: "192.168.1.7")
    for host in ("0.0.0.0", "127.0.0.1"):
        with page(tmp_path, host=host) as live:
            said = server.greeting(live)
            assert live.url in said[0]
            shown = [words for words in said if f"http://192.168.1.7:{live.port}/?token={live.token}" in words]
            assert len(shown) == (host == "0.0.0.0")
            assert any("encrypted" in words for words in said) == (host == "0.0.0.0")
