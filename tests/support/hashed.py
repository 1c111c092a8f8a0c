"""Which files are read to hash them."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import pytest

from pipeline.store import files


class HashedFiles:
    """Names of the files that `files.sha256` read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        real = files.sha256

        def sha256(stream: BufferedReader, advance: Callable[[float], None] | None = None) -> str:
            self.names.append(Path(os.readlink(f"/proc/self/fd/{stream.fileno()}")).name)
            return real(stream, advance)

        monkeypatch.setattr(files, "sha256", sha256)
