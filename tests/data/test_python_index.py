"""Files of packages are downloaded from an index without pip, which would execute their code."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import error_message
from fedtailor.data.python_index import download_file, find_file
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
