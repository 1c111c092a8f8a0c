"""The Hugging Face Hub: which commit a revision is, which files it has, and the bytes of one file.

Sessions, tokens, addresses and errors are huggingface_hub's. Its downloads are not used: version 1.33 throws away a
broken transfer (each try writes a file of another name and removes it), and these are gigabytes; see
`pipeline.stages.download`. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are read when a `HubClient` is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import huggingface_hub
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.utils import get_session, hf_raise_for_status

from pipeline import __version__
from pipeline.errors import SourceError
from pipeline.sources.hub_errors import HubRetries, HubSubject, UnexpectedHubAnswer

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit, and the hash that its bytes must have."""

    name: str
    bytes: int
    # Hexadecimal: SHA-256 of large files, else SHA-1 as git takes it, over "blob <size>\0" and the bytes.
    hash: str
    is_sha256: bool


@dataclass(frozen=True)
class HubClient:
    """Client of a Hugging Face Hub. Its `repr` does not show the token."""

    endpoint: str
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls) -> HubClient:
        """The hub of `HF_ENDPOINT`, with the token of `HF_TOKEN` or of huggingface_hub's login.

        Raises:
            SourceError: The token holds characters that no token has.
        """
        token = get_token()
        if token is not None and not (token.isascii() and token.isprintable()):
            raise SourceError("HF_TOKEN is not a token: it holds characters that no token has")
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        return cls(endpoint.rstrip("/"), token)

    def subject(self, repo: str, revision: str | None) -> HubSubject:
        """Name of a request in messages."""
        return HubSubject(repo, revision, self.endpoint, self.token is not None)

    def commit_of(self, repo: str, revision: str | None, say: Callable[[str], None]) -> str:
        """The commit (40 hexadecimal digits) that a branch, a tag or the default branch is now."""

        def ask() -> str:
            at = f"/revision/{quote(revision, safe='')}" if revision else ""
            with _understanding():
                return str(self._get(f"{self.endpoint}/api/models/{repo}{at}").json()["sha"])

        return self._with_retries(ask, repo, revision, say)

    def files(
        self, repo: str, commit: str, say: Callable[[str], None], *, recursive: bool = False
    ) -> dict[str, RemoteFile]:
        """Name -> file, of the top folder of a commit, or of all its folders (a name is then a path)."""

        def ask() -> dict[str, RemoteFile]:
            folders = "?recursive=true" if recursive else ""
            page: str | None = f"{self.endpoint}/api/models/{repo}/tree/{commit}{folders}"
            remote_files: dict[str, RemoteFile] = {}
            while page is not None:
                response = self._get(page)
                with _understanding():
                    files = [_remote_file(entry) for entry in response.json() if entry["type"] == "file"]
                remote_files |= {file.name: file for file in files}
                page = response.links.get("next", {}).get("url")
            return remote_files

        return self._with_retries(ask, repo, commit, say)

    def open(self, repo: str, commit: str, name: str, offset: int) -> AbstractContextManager[httpx.Response]:
        """The bytes of a file from `offset` on, as far as the server follows (status 206, else the whole file).

        Raises what huggingface_hub and httpx raise; the token goes to the Hub and not where it redirects to.
        """
        part = f"{offset}-" if offset else ""
        return self._stream(repo, commit, name, part, constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def start_of(self, repo: str, commit: str, name: str, size: int, say: Callable[[str], None]) -> bytes:
        """The first `size` bytes of a file, asked for as a range; the file as it is where that is shorter."""
        return self.part_of(repo, commit, name, (0, size), say)

    def part_of(
        self, repo: str, commit: str, name: str, place: tuple[int, int], say: Callable[[str], None]
    ) -> bytes:
        """The bytes of a file from the first place up to the second; fewer where it ends, none where a server
        ignores ranges and would send all that lies before.
        """
        begin, end = place

        def ask() -> bytes:
            part, content = f"{begin}-{end - 1}", b""
            with self._stream(repo, commit, name, part, constants.HF_HUB_ETAG_TIMEOUT) as response:
                if begin and response.status_code != httpx.codes.PARTIAL_CONTENT:
                    return b""
                for chunk in response.iter_bytes():  # a server that ignores ranges sends all of it
                    content += chunk
                    if len(content) >= end - begin:
                        break
            return content[: end - begin]

        return self._with_retries(ask, repo, commit, say)

    @contextmanager
    def _stream(
        self, repo: str, commit: str, name: str, part: str, timeout_s: float
    ) -> Iterator[httpx.Response]:
        """Ask for a file, or for a part of it as "FIRST-LAST"."""
        url = hf_hub_url(repo, name, revision=commit, endpoint=self.endpoint)
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if part:
            headers["Range"] = f"bytes={part}"
        with get_session().stream(
            "GET", url, headers=headers, timeout=timeout_s, follow_redirects=True
        ) as response:
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            yield response

    def _get(self, url: str) -> httpx.Response:
        headers = self._headers() if url.startswith(self.endpoint + "/") else {}
        response = get_session().get(url, headers=headers, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        hf_raise_for_status(response)
        return response

    def _headers(self) -> dict[str, str]:
        """Ours, and not huggingface_hub's: to make its own it asks the public Hub which agents there are."""
        agent = f"pipeline/{__version__}; hf_hub/{huggingface_hub.__version__}"
        return {"user-agent": agent} | ({"authorization": f"Bearer {self.token}"} if self.token else {})

    def _with_retries(
        self, ask: Callable[[], Result], repo: str, revision: str | None, say: Callable[[str], None]
    ) -> Result:
        retries = HubRetries(self.subject(repo, revision), say)
        while True:
            try:
                return ask()
            except (httpx.HTTPError, httpx.InvalidURL, UnexpectedHubAnswer) as error:
                retries.wait(error)


@contextmanager
def _understanding() -> Iterator[None]:
    """Around the reading of an answer, which may be that of a captive portal or of another kind of server."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnexpectedHubAnswer(f"{type(error).__name__}: {error}") from error


def _remote_file(entry: Mapping[str, Any]) -> RemoteFile:
    large = entry.get("lfs")
    if large:
        return RemoteFile(entry["path"], int(large["size"]), large["oid"], is_sha256=True)
    return RemoteFile(entry["path"], int(entry["size"]), entry["oid"], is_sha256=False)
