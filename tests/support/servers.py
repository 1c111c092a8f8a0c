"""Real servers for tests: started on 127.0.0.1, and stopped by their process ids; several times if need be, on the same
port with the same data. Where their programs come from: tests.support.downloads.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from tests.support.downloads import Unavailable, installed

_READY_S = 30.0
# Where util-linux is there: a server ends with the tests, even when those are killed.
_UNTIL_WE_END = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class Server:
    """Base of the servers; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pipeline-server-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """The command line that runs it in the foreground."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Its environment."""
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}

    def user(self) -> str | None:
        """Whom it runs as, if not as the tests do."""
        return None

    def start(self) -> None:
        """Return as soon as it listens."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (*self._as_user(), *_UNTIL_WE_END, *self.command()),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_S
        while not self.is_ready():
            late = time.monotonic() > deadline or self._process.poll() is not None
            assert not late, log.read_text(errors="replace")[-2000:]
            time.sleep(0.02)

    def _as_user(self) -> Sequence[str]:
        """Not by Popen, which would fork: in a process that has used gRPC, the copy may not live to run anything."""
        if (user := self.user()) is None:
            return ()
        return ("setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups")

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def pause(self) -> None:
        """It stays connected and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again."""
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        """To the process and its children, each of which may be in a group of its own."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(each, which)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
        return f"postgresql://tests@127.0.0.1:{self.port}/postgres"

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
        import psycopg

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
                str(self._program("initdb")), "-D", str(self._data), "-U", "tests", "--auth", "trust",
                "--encoding", "UTF8", "--locale", "C", "--no-sync",
            ],
            env=self.environment(), user=self.user(), extra_groups=[] if self.user() else None, cwd=self.folder,
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip

    def _program(self, name: str) -> Path:
        return next(path for path in self._files.rglob(f"bin/{name}") if path.is_file())


def prometheus_program(name: str) -> Path:
    """The path of `prometheus` or `promtool`."""
    return installed("prometheus") / "usr/bin" / name


def promtool(*words: str, folder: Path | None = None, page: str | None = None) -> tuple[int, str]:
    """Run promtool on files of a folder, or on a page that it reads.

    Returns:
        Its exit status, and all that it printed.
    """
    command: Sequence[str] = (str(prometheus_program("promtool")), *words)
    done = subprocess.run(
        command, cwd=folder, input=page, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


SERVERS: dict[str, Callable[[], Server]] = {
    "redis": lambda: RedisServer(),
    "redis-query-engine": lambda: RedisServer(search=True),
    "valkey": lambda: RedisServer("valkey"),
    "pgvector": PostgresServer,
}


class Servers:
    """See the module."""

    def __init__(self, exit: ExitStack) -> None:
        self._exit = exit
        self._running: dict[str, Server | Unavailable] = {}

    def running(self, kind: str) -> Server:
        """The server of a kind; the test is skipped where there is none."""
        if kind not in self._running:
            try:
                self._running[kind] = self._exit.enter_context(SERVERS[kind]())
            except Unavailable as error:
                self._running[kind] = error
        server = self._running[kind]
        if isinstance(server, Unavailable):
            pytest.skip(f"no server of {kind} here: {server}")
        return server


@contextmanager
def started_servers() -> Iterator[Servers]:
    """Servers that end with the block."""
    with ExitStack() as exit:
        yield Servers(exit)
