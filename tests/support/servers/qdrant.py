"""Qdrant, where its program can be found: no package index carries it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from tests.support.servers.install import Unavailable
from tests.support.servers.running import Server, free_port


class QdrantServer(Server):
    """The program that $QDRANT or PATH names; data outlives `stop` and `start`."""

    def __init__(self) -> None:
        program = os.environ.get("QDRANT") or shutil.which("qdrant")
        if program is None:
            raise Unavailable(
                "no package index carries the program: put qdrant on PATH, or name it in $QDRANT"
            )
        super().__init__()
        self._program = program
        self._second_port = free_port()

    @property
    def url(self) -> str:
        return f"qdrant://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return (self._program, "--disable-telemetry")

    def environment(self) -> Mapping[str, str]:
        return {
            **super().environment(),
            "QDRANT__SERVICE__HOST": "127.0.0.1",
            "QDRANT__SERVICE__HTTP_PORT": str(self.port),
            "QDRANT__SERVICE__GRPC_PORT": str(self._second_port),
            "QDRANT__STORAGE__STORAGE_PATH": str(self.folder / "storage"),
            "QDRANT__STORAGE__SNAPSHOTS_PATH": str(self.folder / "snapshots"),
        }
