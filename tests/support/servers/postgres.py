"""PostgreSQL with pgvector. It refuses to run as root: then it runs as nobody, from a copy that nobody may read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from tests.support.servers.install import installed
from tests.support.servers.running import Server

USER = "tests"


class PostgresServer(Server):
    """One cluster in a temporary folder; data outlives `stop` and `start`.

    Args:
        options: more of the command line, such as -c fsync=on.
    """

    def __init__(self, *, options: Sequence[str] = ()) -> None:
        files = installed("postgres")
        super().__init__()
        self._options = options
        self._files = self.folder / "files"
        self._data = self.folder / "data"
        self._data.mkdir()
        shutil.copytree(files, self._files, symlinks=True)
        if user := self.user():
            self.folder.chmod(0o755)
            for path in (self._data, self.folder):
                shutil.chown(path, user)
        self._make()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    def user(self) -> str | None:
        return "nobody" if os.geteuid() == 0 else None

    def command(self) -> Sequence[str]:
        return (
            str(self._program("postgres")), "-D", str(self._data), "-p", str(self.port), "-h", "127.0.0.1",
            "-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=40",
            *self._options,
        )  # fmt: skip

    def environment(self) -> Mapping[str, str]:
        libraries = next(self._files.rglob("*pgserver.libs"))
        return {**super().environment(), "LD_LIBRARY_PATH": str(libraries), "PGTZ": "UTC"}

    def is_ready(self) -> bool:
        """Before it lets anybody in, it listens and refuses."""
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def ask_for_password(self, role: str) -> None:
        """From now on, of this role."""
        rules = self._data / "pg_hba.conf"
        text = rules.read_text()
        rules.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{text}")
        self._signal(signal.SIGHUP)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        super().stop(how)

    def _make(self) -> None:
        subprocess.run(
            [
                str(self._program("initdb")), "-D", str(self._data), "-U", USER, "--auth", "trust",
                "--encoding", "UTF8", "--locale", "C", "--no-sync",
            ],
            env=self.environment(), user=self.user(), extra_groups=[] if self.user() else None, cwd=self.folder,
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip

    def _program(self, name: str) -> Path:
        return next(path for path in self._files.rglob(f"bin/{name}") if path.is_file())
