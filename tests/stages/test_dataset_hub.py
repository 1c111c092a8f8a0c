"""Sets on the hub: files downloaded from a hub on loopback, and what is said where that does not work."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.stages.dataset.rows import read_parquet_column

REVISION = "1" * 40
FILE = b'{"text": "The parcel arrives on Monday."}\n'
CODE = """
import sys
from pipeline.errors import UserError
from pipeline.sources.dataset import DatasetRepository, download_file
for name in sys.argv[2:]:
    repo, _, file = name.rpartition("/")
    try:
        print(download_file(DatasetRepository(repo=repo, revision=sys.argv[1]), file).read_text(), end="")
    except UserError as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


class Handler(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the real hub for one file of a data set."""

    def answer(self) -> None:
        name = self.path.removeprefix("/datasets/org/")
        if name == f"news/resolve/{REVISION}/a.jsonl":
            self.send_response(200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(FILE).hexdigest()}"')
            self.send_header("Content-Length", str(len(FILE)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(FILE)
            return
        code = "GatedRepo" if name.startswith("gated/") else "RepoNotFound"
        code = "EntryNotFound" if name.startswith("news/") else code
        self.send_response(403 if code == "GatedRepo" else 404)
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def download(cache: Path, endpoint: str, *names: str, offline: bool = False) -> list[str]:
    """A line for each file, from a process of its own: huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1" if offline else "0"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, REVISION, *names],
        env={**os.environ, **settings, "HF_TOKEN": "", "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_file_comes_from_the_hub_once_and_then_from_its_cache(tmp_path: Path, endpoint: str) -> None:
    text = FILE.decode().strip()
    wrong = {
        "org/gated/a.jsonl": "is gated: accept its terms there, and set HF_TOKEN",
        "org/news/b.jsonl": "the repository has no such file",
        "org/gone/a.jsonl": "no such repository or revision",
    }
    got, *said = download(tmp_path, endpoint, "org/news/a.jsonl", *wrong)
    assert got == text
    for (name, message), line in zip(wrong.items(), said, strict=True):
        assert line.startswith("SourceError")
        assert message in line
        assert name.rpartition("/")[0] in line
    cached, missing = download(tmp_path, endpoint, "org/news/a.jsonl", "org/other/a.jsonl", offline=True)
    assert cached == text
    assert 'give a file instead: dataset: "local:my-set.jsonl"' in missing


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow; or give a file"):
        read_parquet_column(tmp_path / "a.parquet", "article")


def test_parquet_with_pyarrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"article": ["a", "b"], "id": [1, 2]}), tmp_path / "a.parquet")
    assert read_parquet_column(tmp_path / "a.parquet", "article") == ["a", "b"]
