"""Which ports something listens on already, and what that is: /proc/net/tcp, as `ss -ltnp` reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens."""

    port: int
    pid: int | None  # None: a process of another user, or of another container
    program: str | None


def listeners(ports: Sequence[int], root: Path = _ROOT) -> dict[int, Listener]:
    """Port -> who listens there, on whichever address, of those that are taken. `root`: where proc/ lies."""
    sockets = dict(_listening(root, set(ports)))  # inode -> port
    found = {port: Listener(port, None, None) for port in sockets.values()}
    if sockets:
        for inode, pid in _holders(root, set(sockets)):
            found[sockets[inode]] = Listener(sockets[inode], pid, _program(root, pid))
    return dict(sorted(found.items()))


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
    """The processes that have one of the sockets open, as far as this user may see."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for process in (root / "proc").iterdir():
        if process.name.isdigit():
            for link in _links(process / "fd"):
                if link in wanted:
                    yield wanted[link], int(process.name)


def _links(folder: Path) -> Iterator[str]:
    """What the descriptors of a process are; of another user's, nothing."""
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
