"""A package index on this machine, in the layout of PEP 503."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def package_index(folder: Path, package: str, files: dict[str, bytes], more: str = "") -> Iterator[str]:
    """Serve the files of a package and return the address of the server; `more` is added to the package's page."""
    page = folder / "simple" / re.sub("[-_.]+", "-", package).lower() / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("".join(f'<a href="../../files/{name}#sha256=00">{name}</a><br/>' for name in files) + more)
    (folder / "files").mkdir()
    for name, content in files.items():
        (folder / "files" / name).write_bytes(content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
