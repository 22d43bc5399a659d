"""Files of packages are downloaded from an index without pip, which would execute their code."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.data.python_index import download_file, find_file

NAME = "My_Package-1.0.tar.gz"
PAGE = """<!DOCTYPE html><html><body>
<a href="../../files/My_Package-0.9.tar.gz#sha256=00">My_Package-0.9.tar.gz</a><br/>
<a href="../../files/My_Package-1.0.tar.gz#sha256=11" data-requires-python="&gt;=3.6">My_Package-1.0.tar.gz</a><br/>
<a href="file:///etc/hostname/local-1.0.tar.gz">local-1.0.tar.gz</a>
</body></html>"""


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package index on this machine with one package, in the layout of PEP 503."""
    page = tmp_path / "served" / "simple" / "my-package" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    (tmp_path / "served" / "files").mkdir()
    (tmp_path / "served" / "files" / NAME).write_bytes(b"0123456789")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "served")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield address
    server.shutdown()
    server.server_close()


def test_download_file_takes_the_named_file_from_the_configured_index(index: str, tmp_path: Path) -> None:
    assert find_file("My.Package", NAME) == f"{index}/files/{NAME}"
    seen: list[int] = []
    assert download_file("My_Package", NAME, tmp_path, 100, seen.append).read_bytes() == b"0123456789"
    assert seen == [10]


@pytest.mark.usefixtures("index")
def test_download_file_saves_no_more_than_its_size(tmp_path: Path) -> None:
    assert download_file("my-package", NAME, tmp_path, 4, lambda done: None).read_bytes() == b"0123"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("my-package", "My_Package-2.0.tar.gz", "has no file My_Package-2.0.tar.gz"),
        ("my-package", "My_Package-0.9.tar.gz", "could not be downloaded from the Python Package Index"),
        ("other", NAME, "check the network and the proxy"),
        ("my-package", "local-1.0.tar.gz", "must start with https://"),
    ],
)
def test_download_of_missing_file_raises(package: str, name: str, words: str, tmp_path: Path) -> None:
    assert words in error_message(lambda: download_file(package, name, tmp_path, 100, lambda done: None))
