"""A local HTTP server with one file, which can drop connections, ignore ranges, and redirect."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """A web server with one file at every path, which records the requests."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.etag: str | None = '"1"'
        self.modified: str | None = None  # Last-Modified
        self.ranges = True  # whether it honors Range
        self.has_length = True  # whether it sends Content-Length
        self.statuses: list[int] = []  # errors to answer first
        self.cuts: list[int] = []  # bytes to send before the connection is closed, one per response
        self.redirect: str | None = None  # target of /moved
        self.requests: list[tuple[str, str | None, str | None]] = []  # path, Range, If-Range
        self.sent = 0  # bytes of the file
        state = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                state.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted, version = request.headers.get("Range"), request.headers.get("If-Range")
        self.requests.append((request.path, wanted, version))
        if self.statuses or request.path == "/missing.bin":
            request.send_error(self.statuses.pop(0) if self.statuses else 404)
        elif request.path == "/moved" and self.redirect:
            request.send_response(302)
            request.send_header("Location", self.redirect)
            request.end_headers()
        else:
            start = int(wanted[6:-1]) if wanted and self.ranges and version in (None, self.etag, self.modified) else 0
            self.send(request, start)

    def send(self, request: BaseHTTPRequestHandler, start: int) -> None:
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.has_length:
            request.send_header("Content-Length", str(len(body)))
        if self.etag:
            request.send_header("ETag", self.etag)
        if self.modified:
            request.send_header("Last-Modified", self.modified)
        request.end_headers()
        body = body[: self.cuts.pop(0)] if self.cuts else body
        self.sent += len(body)
        request.close_connection = True
        with suppress(ConnectionError):  # the client stops reading at the expected size
            request.wfile.write(body)

    @property
    def ranges_asked(self) -> list[str | None]:
        return [wanted for _, wanted, _ in self.requests]
