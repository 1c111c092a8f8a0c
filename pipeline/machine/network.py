"""The Hugging Face Hub as this machine can reach it, and the ports that are taken.

Of the Hub, only heads of answers are asked for, and the token is never shown. The rules are huggingface_hub's
(HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_HOME), without its import, which takes longer than all else that is looked
at. Ports are those of /proc/net/tcp, as `ss -ltnp` reads it.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

from pipeline import __version__
from pipeline.machine.probe import ProbeTimeout, at_once

_DEADLINE_S = 10.0
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Hub:
    """The Hub, as this machine reaches it."""

    endpoint: str
    offline: bool  # HF_HUB_OFFLINE: no request is made
    token: str | None  # where a token lies: "HF_TOKEN", or a file; never the token
    problem: str = ""  # why it cannot be reached; empty if it can, or if no request was made
    clock_ahead_s: float | None = None  # of this machine against the hub's; None: not known
    repositories: Mapping[str, int] = field(
        default_factory=dict
    )  # repository -> status of the file asked for

    @property
    def reached(self) -> bool:
        """Whether it answers."""
        return not self.offline and not self.problem


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the file is there."""

    def redirect_request(self, *_: object) -> None:
        return None


# Repository, revision (None: the default branch), and name.
HubFile = tuple[str, str | None, str]


def read_hub(
    files: Iterable[HubFile] = (),
    deadline_s: float = _DEADLINE_S,
    environment: Mapping[str, str] = os.environ,
) -> Hub:
    """Ask the Hub, and for the HTTP status of a file of each repository for this user."""
    endpoint = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    offline = environment.get("HF_HUB_OFFLINE", environment.get("TRANSFORMERS_OFFLINE", "")).upper() in _TRUE
    where, token = _token(environment)
    if offline:
        return Hub(endpoint, True, where)
    if not endpoint.startswith(("http://", "https://")):
        return Hub(endpoint, False, where, f"HF_ENDPOINT is {endpoint!r}, which is no http or https address")
    urls = {
        repo: f"{endpoint}/{repo}/resolve/{quote(revision or 'main', safe='')}/{name}"
        for repo, revision, name in files
    }
    endpoints = set(urls.values()) or {endpoint}
    answers = at_once({url: partial(_status, url, token, deadline_s) for url in endpoints}, deadline_s)
    answered = [answer for answer in answers.values() if isinstance(answer, _HubAnswer)]
    if not answered:
        reasons = [answer.reason for answer in answers.values()]
        return Hub(endpoint, False, where, f"{endpoint} cannot be reached: {reasons[0]}")
    ahead = next((answer.ahead_s for answer in answered if answer.ahead_s is not None), None)
    statuses = {
        repo: answer.status for repo, url in urls.items() if isinstance(answer := answers[url], _HubAnswer)
    }
    return Hub(endpoint, False, where, clock_ahead_s=ahead, repositories=statuses)


@dataclass(frozen=True, slots=True)
class _HubAnswer:
    status: int
    ahead_s: float | None


def _status(url: str, token: str | None, deadline_s: float) -> _HubAnswer | ProbeTimeout:
    """Any answer counts, also an error: the server is there."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": f"pipeline/{__version__}"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=deadline_s) as answer:
            return _HubAnswer(answer.status, _ahead(answer.headers.get("Date")))
    except urllib.error.HTTPError as error:
        with error:
            return _HubAnswer(error.code, _ahead(error.headers.get("Date")))
    except urllib.error.URLError as error:
        return ProbeTimeout(str(error.reason))
    except (OSError, http.client.HTTPException) as error:
        return ProbeTimeout(str(error) or repr(error))


def _ahead(date: str | None) -> float | None:
    """Seconds that this clock is ahead of the one that wrote an answer's Date, whose resolution is one second."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(date or "")).total_seconds()
    except (ValueError, TypeError):
        return None


def _token(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Place of the token (a variable or a file), and the token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environment.get(name, "").strip():
            return name, token
    home = Path(
        environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    file = Path(environment.get("HF_TOKEN_PATH") or home / "token").expanduser()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None, None
    return (str(file), token) if token else (None, None)


_ROOT = Path("/")
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens."""

    port: int
    pid: int | None  # None: a process of another user, or of another container
    program: str | None


def listeners(ports: Sequence[int], root: Path = _ROOT) -> dict[int, Listener]:
    """Map each taken port to its listener, on any address; `root` holds proc/."""
    sockets = dict(_listening(root, set(ports)))  # inode -> port
    taken = {port: Listener(port, None, None) for port in sockets.values()}
    if sockets:
        for inode, pid in _holders(root, set(sockets)):
            taken[sockets[inode]] = Listener(sockets[inode], pid, _program(root, pid))
    return dict(sorted(taken.items()))


def _listening(root: Path, ports: set[int]) -> Iterator[tuple[str, int]]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # a kernel without IPv6
        for line in lines:
            cells = line.split()
            port = int(cells[1].rpartition(":")[2], 16)
            if cells[3] == _LISTENING and port in ports:
                yield cells[9], port


def _holders(root: Path, inodes: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the processes that have one of the sockets open, as far as this user may see."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for process in (root / "proc").iterdir():
        if process.name.isdigit():
            for link in _links(process / "fd"):
                if link in wanted:
                    yield wanted[link], int(process.name)


def _links(folder: Path) -> Iterator[str]:
    """Yield the targets of a process's descriptors; none for another user's process."""
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return
    for descriptor in descriptors:
        with suppress(OSError):  # closed by now
            yield os.readlink(folder / descriptor)


def _program(root: Path, pid: int) -> str | None:
    try:
        return (root / f"proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return None
