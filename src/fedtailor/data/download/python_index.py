"""Source archives in the Python Package Index, or in the index that pip is configured to use.

pip is not used, because it executes code of a source archive that it downloads.
"""

import http.client
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from fedtailor.data.download.cache import ALTERNATIVE
from fedtailor.data.download.http_client import open_url
from fedtailor.errors import DataError, reason

_DEFAULT_INDEX = re.compile(r"Package\s+Index\s+\(default\s+(\S+?)\)")  # as the help text of pip names it
_MAX_PAGE = 10**7  # bytes of the page of a package, which lists all its files


def find_file(package: str, name: str) -> str:
    """Return the address of a file of a package."""
    index = _index()
    if urlsplit(index).username is not None:  # error messages would contain the password
        raise DataError(f"The address of the package index has a password; set PIP_INDEX_URL to another, {ALTERNATIVE}")
    page_url = f"{index.rstrip('/')}/{re.sub('[-_.]+', '-', package).lower()}/"
    try:
        with open_url(page_url, {"Accept": "text/html"}) as response:
            page = response.read(_MAX_PAGE).decode("utf-8", "replace")
            page_url = response.url
    except (OSError, http.client.HTTPException) as error:
        check = f"check the network and the proxy, and try again, {ALTERNATIVE}"
        raise DataError(f"The package index does not list {package} ({reason(error)}); {check}") from error
    links = _Links()
    links.feed(page)
    for link in links.found:
        url = urldefrag(urljoin(page_url, link)).url
        if unquote(urlsplit(url).path).rpartition("/")[2] == name:
            return url
    raise DataError(f"The package index {page_url} has no file {name}; set PIP_INDEX_URL to another, {ALTERNATIVE}")


class _Links(HTMLParser):
    """The addresses in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if (tag, key) == ("a", "href") and value]


def _index() -> str:
    """Return the address of the index that pip uses."""
    if given := os.environ.get("PIP_INDEX_URL"):
        return given
    if configured := _ask_pip("config", "get", "global.index-url").strip():
        return configured
    if found := _DEFAULT_INDEX.search(_ask_pip("download", "--help")):
        return found[1]
    raise DataError(f"pip is missing, so its package index is unknown; set PIP_INDEX_URL, {ALTERNATIVE}")


def _ask_pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.stdout if done.returncode == 0 else ""
