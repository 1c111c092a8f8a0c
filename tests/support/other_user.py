"""Another user of the machine: what `nobody` can read, and which sockets it can connect to."""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest


def require_root() -> None:
    """Skip a test that cannot become another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")


def readable_by_nobody(roots: Iterable[Path]) -> list[str]:
    """Files below some paths that `nobody` can open for reading or writing, and sockets that it can connect to.

    Links are not followed: what they lead to is looked at where it lies, if it is to be.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receiving)
            account = pwd.getpwnam("nobody")
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            with os.fdopen(sending, "w") as into:
                json.dump(sorted(found for root in roots for found in _open_to_me(root)), into)
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(text)
    return found


def _open_to_me(root: Path) -> Iterable[str]:
    yield from ([str(root)] if _can_use(root) else [])
    for folder, _, names in os.walk(root):
        yield from (str(path) for path in (Path(folder, name) for name in names) if _can_use(path))


def _can_use(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
            return True
        if stat.S_ISREG(mode):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try:
                    os.close(os.open(path, flags))
                except OSError:
                    continue
                return True
    except OSError:
        pass
    return False
