"""Files of packages are downloaded from an index without pip, which would execute their code."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.data.download.python_index import find_file
from support.package_index import package_index

NAME = "My_Package-1.0.tar.gz"
MORE = """<a href="../../files/My_Package-0.9.tar.gz">removed</a><a href="file:///etc/local-1.0.tar.gz">local</a>"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    files = {"My_Package-1.1.tar.gz": b"other", NAME: b"0123456789"}
    with package_index(tmp_path / "served", "My_Package", files, MORE) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield address


def test_file_of_package_is_found_in_the_configured_index(index: str) -> None:
    assert find_file("My.Package", NAME) == find_file("my_package", NAME) == f"{index}/files/{NAME}"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("my-package", "My_Package-2.0.tar.gz", "has no file My_Package-2.0.tar.gz"),
        ("other", NAME, "check the network and the proxy"),
    ],
)
def test_missing_file_raises(package: str, name: str, words: str) -> None:
    assert words in error_message(lambda: find_file(package, name))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://ann:secret@host/simple", "has a password; set PIP_INDEX_URL"),
        ("file:///etc/simple", "neither http nor https"),
    ],
)
def test_other_addresses_raise(monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", address)
    text = error_message(lambda: find_file("my-package", NAME))
    assert words in text and "secret" not in text
