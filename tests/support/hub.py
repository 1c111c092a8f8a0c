"""A Hugging Face Hub on loopback, for tests: what huggingface_hub 1.33 and our fetch ask of the real one.

    with LoopbackHub() as hub:
        hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        ...HF_ENDPOINT=hub.url...
        assert [request.path for request in hub.requests] == [...]

Spoken: `/api/models/…` with revisions, `/api/models/…/tree/…` in pages, `/…/resolve/…` with ranges, the
error codes and headers of the real Hub, and redirects of large files to a second server ("the CDN", another
origin, signed addresses). Misbehaviour is switched on by `Faults`. Writing to the Hub, discussions, data
sets and Xet are not spoken.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from pipeline.sources import hub as client

LARGE = (".safetensors", ".bin", ".gguf", ".model", ".onnx")  # kept in LFS, as the Hub does


@dataclass
class Repo:
    """One repository: each commit holds all its files."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]  # and tags
    gated: bool = False
    private: bool = False


@dataclass
class Faults:
    """What the hub does wrong. Names are file names; each `once` is used up by the first request that it
    befalls.
    """

    redirect: bool = False  # large files lie on the CDN
    page_size: int = 1000
    break_once: dict[str, int] = field(default_factory=dict)  # close the connection after so many bytes
    break_always: dict[str, int] = field(default_factory=dict)
    stall_once: dict[str, int] = field(default_factory=dict)  # send nothing more after so many bytes
    statuses: dict[str, list[int]] = field(
        default_factory=dict
    )  # file, "tree" or "revision" -> answers before the true one
    retry_after: str = ""
    content: dict[str, bytes] = field(default_factory=dict)  # sent in place of what is listed
    ignore_range: bool = False
    shift_range: int = 0  # send a part that begins so much later than asked
    bytes_per_s: float = 0.0
    html: bool = False  # not a hub at all


@dataclass(frozen=True)
class Request:
    """One request as it came in."""

    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: str
    authorization: str


class LoopbackHub:
    """The hub and its CDN, each on a free port of 127.0.0.1."""

    def __init__(self, token: str = "hf_secret", members: tuple[str, ...] = ("hf_secret",)) -> None:
        self.token = token  # the one that is valid
        self.members = members  # tokens that were granted access to gated and private repositories
        self.repos: dict[str, Repo] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._servers = {name: _Server(self, name) for name in ("hub", "cdn")}
        self.url = self._servers["hub"].url
        self.cdn_url = self._servers["cdn"].url

    def __enter__(self) -> LoopbackHub:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes], *, branch: str = "main", **properties: bool) -> str:
        """Commit `files` to a branch; the commit."""
        text = "".join(f"{name}:{hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files))
        commit = hashlib.sha1(f"{repo}:{text}".encode()).hexdigest()
        held = self.repos.setdefault(repo, Repo({}, {}))
        held.commits[commit] = dict(files)
        held.branches[branch] = commit
        for name, value in properties.items():
            setattr(held, name, value)
        return commit

    def ranges(self, name: str) -> list[str]:
        """The Range headers of the requests for the bytes of a file, in order."""
        return [request.range for request in self.requests if request.path.endswith(f"/{name}")]

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        return {request.path.rpartition("/")[2] for request in self.requests if "/resolve/" in request.path}

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def use_up(self, faults: dict[str, int], name: str) -> int | None:
        with self._lock:
            return faults.pop(name, None)

    def next_status(self, subject: str) -> int | None:
        with self._lock:
            waiting = self.faults.statuses.get(subject)
            return waiting.pop(0) if waiting else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.name = hub, name
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Quiet; `LoopbackHub.requests` is the log."""

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        header = self.headers.get
        hub.note(
            Request(self.server.name, self.command, path, header("Range", ""), header("Authorization", ""))
        )
        if hub.faults.html:
            self._send(200, b"<html>Welcome to the hotel network</html>", {"Content-Type": "text/html"})
        elif self.server.name == "cdn":
            _, _, owner, repo, commit, name = path.split("/", 5)
            self._bytes(hub.repos[f"{owner}/{repo}"].commits[commit][name], name)
        elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(api[1], api[2] or "revision", api[3])
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(file[1], file[2], file[3])
        else:
            self._refuse(404, "NotFound", "no such page")

    # pages

    def _api(self, repo_id: str, kind: str, revision: str | None) -> None:
        found = self._open(repo_id, kind, revision or "main", needs_grant=False)
        if found is None:
            return
        commit, files = found
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings})
            return
        asked = parse_qs(urlsplit(self.path).query)
        entries: list[dict[str, Any]] = []
        for name in sorted(files):
            if "/" not in name or "recursive" in asked:
                entries.append(_entry(name, files[name]))
            elif not any(entry["path"] == name.partition("/")[0] for entry in entries):
                entries.append(
                    {"type": "directory", "oid": "0" * 40, "size": 0, "path": name.partition("/")[0]}
                )
        size = self.server.hub.faults.page_size
        start = int(asked.get("cursor", ["0"])[0])
        more = {}
        if start + size < len(entries):
            folders = "&recursive=true" if "recursive" in asked else ""
            next_page = f"{self.server.url}{urlsplit(self.path).path}?cursor={start + size}{folders}"
            more["Link"] = f'<{next_page}>; rel="next"'
        self._json(entries[start : start + size], more)

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        found = self._open(repo_id, name, revision, needs_grant=True)
        if found is None:
            return
        commit, files = found
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit}
        if name.endswith(LARGE) and self.server.hub.faults.redirect:
            headers |= {
                "Location": f"{self.server.hub.cdn_url}/cdn/{repo_id}/{commit}/{name}?X-Signature=signed",
                "X-Linked-Size": str(len(files[name])),
                "X-Linked-ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"',
            }
            self._send(302, b"", headers)
        else:
            self._bytes(files[name], name, headers)

    def _open(
        self, repo_id: str, subject: str, revision: str, *, needs_grant: bool
    ) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files, or None after a refusal was sent."""
        hub = self.server.hub
        if (status := hub.next_status(subject)) is not None:
            self._refuse(status, "", "out of order")
            return None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in (hub.token, *hub.members):
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repo = hub.repos.get(repo_id)
        if repo is None or (repo.private and token not in hub.members):
            # The real Hub does not tell strangers whether a repository exists.
            self._refuse(
                404 if token else 401,
                "RepoNotFound",
                "Repository not found" if token else "Invalid username or password.",
            )
            return None
        if needs_grant and repo.gated and token not in hub.members:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {repo_id} is restricted.")
            return None
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repo.commits[commit]

    # answers

    def _bytes(self, listed: bytes, name: str, headers: Mapping[str, str] | None = None) -> None:
        hub, faults = self.server.hub, self.server.hub.faults
        content = faults.content.get(name, listed)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        is_part = asked is not None and not faults.ignore_range
        start = int(asked[1]) + faults.shift_range if asked is not None and is_part else 0
        end = min(
            len(content), int(asked[2]) + 1 if asked is not None and is_part and asked[2] else len(content)
        )
        if start and start >= len(content):
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        is_part = bool(start) or end < len(content)
        self.send_response(206 if is_part else 200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha256(listed).hexdigest()}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = content[start:end]
        stall_after = hub.use_up(faults.stall_once, name)
        break_after = hub.use_up(faults.break_once, name)
        if break_after is None:
            break_after = faults.break_always.get(name)
        self._write(
            rest if break_after is None and stall_after is None else rest[: break_after or stall_after or 0]
        )
        if stall_after is not None:
            hub.closing.wait(60)
        if break_after is not None or stall_after is not None:
            self.close_connection = True

    def _write(self, content: bytes) -> None:
        pace = self.server.hub.faults.bytes_per_s
        step = max(1, int(pace / 50)) if pace else len(content) or 1
        for start in range(0, len(content), step):
            self.wfile.write(content[start : start + step])
            self.wfile.flush()
            if pace:
                time.sleep(1 / 50)

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"Content-Type": "application/json", "X-Error-Message": message}
        headers |= {"X-Error-Code": code} if code else {}
        retry_after = self.server.hub.faults.retry_after
        headers |= {"Retry-After": retry_after} if retry_after else {}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """A file as the tree lists it: large ones by the SHA-256 of their bytes, and by git's of the pointer to
    them.
    """
    blob = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(content), "path": name}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 16}).encode()
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}).encode()


def weights(*names: str, rows: int = 64, seed: int = 0) -> bytes:
    """Safetensors of one [rows, 16] float32 tensor a name."""
    random = np.random.default_rng(seed)
    return bytes(save({name: random.standard_normal((rows, 16), dtype=np.float32) for name in names}))


def whole(rows: int = 64) -> dict[str, bytes]:
    """A checkpoint with one file of weights."""
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights("a", "b", rows=rows),
    }


def sharded(rows: int = 64) -> dict[str, bytes]:
    """A checkpoint with two files of weights and their index."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "model.safetensors.index.json": index({"a": first, "b": second}),
        first: weights("a", rows=rows),
        second: weights("b", rows=rows, seed=1),
    }


def index(placed: Mapping[str, object]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": placed}).encode()


@contextmanager
def asked_hub(patch: pytest.MonkeyPatch, folder: Path, *, retries: int = 2) -> Iterator[LoopbackHub]:
    """A hub that this process asks, without a token, and again after 10 ms; `folder` is without one, too."""
    with LoopbackHub() as hub:
        patch.setenv("HF_ENDPOINT", hub.url + "/")
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        patch.setattr(client, "DELAYS_S", (0.01,) * retries)
        yield hub
