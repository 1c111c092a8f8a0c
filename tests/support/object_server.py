"""An object store by HTTP: files of a folder, by ranges, as S3 with addresses by path has them; faults on demand."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class ObjectServer:
    """A context manager.

    Attributes:
        folder: whose files it gives, and into which PUT writes.
        cut_after: bytes of an answer after which the connection breaks; None for none.
        cuts: answers that break, at most.
        pause_s: time between pieces of an answer.
        served: bytes that were sent, by path.
        ranges: first and last byte of each range that was asked for, by path.
        most_at_once: answers that were under way together.
    """

    folder: Path
    cut_after: int | None = None
    cuts: int = 10**9
    pause_s: float = 0.0
    served: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    most_at_once: int = 0
    open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(store: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

        def log_message(self, *_: object) -> None: ...

        @property
        def file(self) -> Path:
            return store.folder / unquote(urlsplit(self.path).path).lstrip("/")

        def do_HEAD(self) -> None:
            self._head(
                200 if self.file.is_file() else 404, self.file.stat().st_size if self.file.is_file() else 0
            )

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(body)
            self._head(200, 0)

        def do_GET(self) -> None:
            if not self.file.is_file():
                self._head(404, 0)
                return
            data, asked = self.file.read_bytes(), _RANGE.fullmatch(self.headers.get("Range", ""))
            first, last = (int(asked[1]), min(int(asked[2]), len(data) - 1)) if asked else (0, len(data) - 1)
            with store.lock:
                store.open += 1
                store.most_at_once = max(store.most_at_once, store.open)
                if asked:
                    store.ranges.setdefault(self.file.name, []).append((first, last))
            more = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if asked else {}
            self._head(206 if asked else 200, last + 1 - first, **more)
            try:
                self._send(data[first : last + 1])
            finally:
                with store.lock:
                    store.open -= 1

        def _send(self, data: bytes) -> None:
            with store.lock:
                breaks = store.cut_after is not None and len(data) > store.cut_after and store.cuts > 0
                store.cuts -= breaks
            cut = data[: store.cut_after] if breaks else data
            for start in range(0, len(cut), 1 << 16):
                piece = cut[start : start + (1 << 16)]
                try:
                    self.wfile.write(piece)
                except OSError:
                    # Whoever asked is gone.
                    self.close_connection = True
                    return
                with store.lock:
                    store.served[self.file.name] = store.served.get(self.file.name, 0) + len(piece)
                time.sleep(store.pause_s)
            if breaks:
                self.close_connection = True

        def _head(self, status: int, length: int, **more: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Mon, 23 Nov 2026 12:00:00 GMT")
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler
