"""Errors of the Hub: which of them are worth another try, after how long, and the messages for the others.

Nothing here prints a request's headers or the query of an address, where tokens and signatures are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import httpx
from huggingface_hub import errors

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
