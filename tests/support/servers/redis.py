"""Redis, with its query engine or without, and Valkey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.servers.install import installed
from tests.support.servers.running import Server


class RedisServer(Server):
    """Keeps everything in memory: what it held is gone when it is stopped.

    Args:
        kind: redis or valkey.
        search: with the query engine.
        options: more of the command line, such as --requirepass.
    """

    def __init__(self, kind: str = "redis", *, search: bool = False, options: Sequence[str] = ()) -> None:
        self._files = installed(kind)
        super().__init__()
        self._kind = kind
        self._search = search
        self.options = options

    @property
    def url(self) -> str:
        return f"{self._kind}://127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str]:
        module = ("--loadmodule", self._find("redisearch.so")) if self._search else ()
        return (
            self._find(f"{self._kind}-server"), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--dir", str(self.folder), *module, *self.options,
        )  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), "LD_LIBRARY_PATH": str(self._files)}

    def _find(self, name: str) -> str:
        found: Path = next(path for path in self._files.rglob(name) if path.is_file())
        return str(found)
