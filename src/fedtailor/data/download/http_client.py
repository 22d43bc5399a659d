"""Requests over HTTP and HTTPS, and nothing else: urllib's own opener also reads local files and FTP servers."""

import http.client
import urllib.request
from collections.abc import Mapping
from typing import IO
from urllib.parse import urlsplit

_TIMEOUT = 30.0  # seconds without a byte


class AddressError(OSError):
    """The scheme of an address, or of one that it redirects to, is neither http nor https."""


def open_url(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Send a request through the user's proxies, and return the response; redirects are followed.

    >>> open_url("file:///etc/hostname", {})
    Traceback (most recent call last):
    fedtailor.data.download.http_client.AddressError: the address file:///etc/hostname is neither http nor https
    """
    _check_scheme(url)
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers={"User-Agent": "fedtailor", **headers})
    response: http.client.HTTPResponse = opener.open(request, timeout=_TIMEOUT)
    return response


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _check_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise AddressError(f"the address {url} is neither http nor https")
