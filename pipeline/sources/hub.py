"""The Hugging Face Hub: which commit a revision is, which files it has, and the bytes of one file.

Sessions, tokens, addresses and errors are huggingface_hub's. Its downloads are not used: version 1.33 throws away a
broken transfer (each try writes a file of another name and removes it), and these are gigabytes; see
`pipeline.stages.download`. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are read when a `HubClient` is made.
Errors: which of them are worth another try, after how long, and what a user is told about the others. Nothing here
prints a request's headers or the query of an address, where tokens and signatures are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import httpx
import huggingface_hub
from huggingface_hub import constants, errors, get_token, hf_hub_url
from huggingface_hub.utils import get_session, hf_raise_for_status

from pipeline import __version__
from pipeline.errors import SourceError

DELAYS_S = (1.0, 2.0, 4.0, 8.0)
# That a server may ask for.
_LONGEST_DELAY_S = 60.0
# Where not even a connection can be opened.
_UNREACHABLE_TRIES = 2
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class BrokenTransfer(Exception):
    """The server ended a file early, or sent another part of it."""


class UnexpectedHubAnswer(Exception):
    """An answer that no hub gives."""


class TransferStopped(Exception):
    """Another file failed, or the user interrupted."""


@dataclass(frozen=True, slots=True)
class HubSubject:
    """A repository at a revision, as messages name it."""

    repo: str
    revision: str | None
    endpoint: str
    has_token: bool

    @property
    def label(self) -> str:
        return f"hf:{self.repo}"

    @property
    def site(self) -> str:
        """The endpoint without the name and password that an address may carry."""
        parts = urlsplit(self.endpoint)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class HubRetries:
    """Counts the failures in a row of one request, and sleeps before each new try.

    Args:
        subject: File or repository that is asked for.
        say: Receives one line for each new try.
        stopped: Ends a sleep early; after it, `wait` raises `TransferStopped`.
    """

    def __init__(
        self, subject: HubSubject, say: Callable[[str], None], stopped: threading.Event | None = None
    ) -> None:
        self._subject, self._say = subject, say
        self._stopped = stopped or threading.Event()
        self._failures = 0

    def wait(self, error: Exception, *, progressed: bool = False) -> None:
        """Sleep before the next try.

        Args:
            error: Why the last try failed.
            progressed: The try brought bytes; failures are counted anew.

        Raises:
            SourceError: The error does not pass by itself, or tries are used up; the text says what to do.
            TransferStopped: `stopped` is set.
        """
        if self._stopped.is_set():
            raise TransferStopped from error
        self._failures = 1 if progressed else self._failures + 1
        delay_s = retry_delay_s(error, self._failures) if is_retryable(error) else None
        if delay_s is None:
            raise explain(error, self._subject) from error
        self._say(f"{self._subject.label}: {_brief(error)}; trying again in {delay_s:g} s")
        self._stopped.wait(delay_s)


def is_retryable(error: Exception) -> bool:
    """Whether trying again may help."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in _PASSING
    if isinstance(error, httpx.UnsupportedProtocol) or "CERTIFICATE" in str(error):
        return False
    return isinstance(error, httpx.TransportError | BrokenTransfer)


def retry_delay_s(error: Exception, failures: int) -> float | None:
    """Seconds before the next try, at least what the server asks for (Retry-After, up to a minute).

    Args:
        failures: Tries in a row that failed, this one among them (1 or more).

    Returns:
        None: there were enough tries.
    """
    delays_s = DELAYS_S[:_UNREACHABLE_TRIES] if isinstance(error, httpx.ConnectError) else DELAYS_S
    if failures > len(delays_s):
        return None
    return max(delays_s[failures - 1], _retry_after_s(error))


def explain(error: Exception, subject: HubSubject) -> SourceError:
    """The failure as a message that says what to do."""
    if isinstance(error, errors.HfHubHTTPError):
        return SourceError(_explain_status(error, subject))
    if isinstance(error, httpx.TransportError | BrokenTransfer):
        return SourceError(
            f"{subject.label}: {subject.site} cannot be reached ({_brief(error)}); check the network, HF_ENDPOINT and "
            "proxies; what the store has already can be built with HF_HUB_OFFLINE=1"
        )
    return SourceError(
        f"{subject.label}: {subject.site} does not answer like a Hugging Face Hub ({error}); "
        "check HF_ENDPOINT"
    )


def _explain_status(error: errors.HfHubHTTPError, subject: HubSubject) -> str:
    status = error.response.status_code
    page = f"{subject.site}/{subject.repo}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{subject.label} has no revision {subject.revision!r}; {page}/commits lists what it has"
    if isinstance(error, errors.GatedRepoError):
        known = "the account of HF_TOKEN has no access" if subject.has_token else "HF_TOKEN is not set"
        return (
            f"{subject.label} is gated, and {known}: accept its licence at {page}, "
            "then set HF_TOKEN to a token of the account that did"
        )
    refused = error.response.headers.get("X-Error-Message", "").startswith("Invalid credentials")
    if refused and subject.has_token:
        return f"{subject.label}: {subject.site} refuses HF_TOKEN: it has expired or is mistyped"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        private = (
            "the account of HF_TOKEN cannot see it" if subject.has_token else "it is private: set HF_TOKEN"
        )
        return f"{subject.label} does not exist on {subject.site}, or {private}"
    if status == 404:
        return f"{subject.label}: {_file_of(error)} is not there (404)"
    if status in _PASSING:
        return f"{subject.label}: {subject.site} is out of order ({status}, several times in a row); try again later"
    return f"{subject.label}: {subject.site} answers {status} for {_file_of(error)}"


def _file_of(error: errors.HfHubHTTPError) -> str:
    return urlsplit(str(error.response.request.url)).path


def _brief(error: Exception) -> str:
    if isinstance(error, errors.HfHubHTTPError):
        return f"answer {error.response.status_code}"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__


def _retry_after_s(error: Exception) -> float:
    retry_after = (
        error.response.headers.get("Retry-After", "") if isinstance(error, errors.HfHubHTTPError) else ""
    )
    return min(float(retry_after), _LONGEST_DELAY_S) if retry_after.isdigit() else 0.0


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
