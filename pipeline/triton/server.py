"""A Triton server as a context: started, ready and healthy inside, gone after.

    with TritonServer.of_package(package) as server:
        server.grpc_url  # "127.0.0.1:43121"

It runs below a guard (`guard.py`), so that nothing of it outlives this process. One start in about 200 aborts for no
reason of ours; it is tried again once. Everything the server prints goes to `log_file`; a failure shows the end of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.errors import ServerError
from pipeline.triton import guard, log
from pipeline.triton.deployment import REPOSITORY, Deployment
from pipeline.triton.health import Answer, generate
from pipeline.triton.installation import Installation
from pipeline.triton.launch import LOOPBACK, Launch, Ports

_ATTEMPTS = 2
_POLL_S = 0.05
_ADDRESS_TAKEN = "already in use"


class TritonServer:
    """One server on this machine. Not for use from several threads."""

    def __init__(
        self,
        repository: Path,
        *,
        models: Sequence[str],
        entry_model: str,
        ports: Ports | None = None,
        address: str = LOOPBACK,
        log_file: Path | None = None,
        start_deadline_s: float = 120.0,
        stop_deadline_s: float = 10.0,
        warmup_tokens: int = 16,
    ) -> None:
        """`ports`: None takes free ones. `log_file`: None makes one in the temporary folder, kept after a failure."""
        self.repository = repository.absolute()
        self.models = tuple(models)
        self.entry_model = entry_model
        self.ports = ports or Ports.free()
        self.address = address
        self.log_file = (
            log_file or Path(tempfile.gettempdir()) / f"pipeline-triton-{secrets.token_hex(4)}.log"
        )
        self._fixed_ports, self._own_log = ports is not None, log_file is None
        self._start_deadline_s, self._stop_deadline_s = start_deadline_s, stop_deadline_s
        self._warmup_tokens = warmup_tokens
        self._guard: subprocess.Popen[bytes] | None = None
        self._started: Launch | None = None

    @classmethod
    def of_package(
        cls,
        package: Path,
        *,
        ports: Ports | None = None,
        address: str = LOOPBACK,
        log_file: Path | None = None,
        start_deadline_s: float = 120.0,
    ) -> Self:
        """The server of what `pipeline build` made: a folder with deployment.json and model_repository/."""
        deployment = Deployment.load(package)
        return cls(
            package / REPOSITORY,
            models=deployment.models,
            entry_model=deployment.entry_model,
            ports=ports,
            address=address,
            log_file=log_file,
            start_deadline_s=start_deadline_s,
            warmup_tokens=min(16, deployment.limits.max_output_tokens),
        )

    @property
    def grpc_url(self) -> str:
        """Where gRPC clients connect; no scheme, as tritonclient wants it."""
        return f"{self._reachable}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """Where HTTP clients connect."""
        return f"http://{self._reachable}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """The page that Prometheus reads."""
        return f"http://{self._reachable}:{self.ports.metrics}/metrics"

    @property
    def _reachable(self) -> str:
        """The address to connect to from this machine."""
        return LOOPBACK if self.address == "0.0.0.0" else self.address

    @property
    def running(self) -> bool:
        """Whether the server's process is there; `check_health` tells more."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start, and wait until a generation came back. After a failure nothing is left running.

        Raises:
            UserError: Triton cannot run here; the text says what to install.
            ServerError: it did not start, or does not answer; the text says why, with the end of its log.
        """
        if self.running:
            raise ServerError("the server is running already")
        installation = Installation.find()
        if self._fixed_ports:
            self.ports.check(self.address)
        deadline = time.monotonic() + self._start_deadline_s
        try:
            self._start(installation, deadline)
            self.check_health(timeout_s=max(1.0, deadline - time.monotonic()))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything it started; SIGKILL when SIGTERM does not help in time."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None, "it was started with a pipe"
        self._guard.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGTERM)
        try:
            self._guard.wait(self._stop_deadline_s + 5)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the kernel then kills the server
            self._guard.wait()
        _kill_session(self._guard.pid)
        if self._started is not None:
            guard.remove_traces(self._started.stage, self._started.shared_memory_prefix)
        self._guard = None

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code, or 128 + signal."""
        return self._guard.wait() if self._guard is not None else 0

    def check_health(self, *, timeout_s: float = 30.0) -> Answer:
        """A short generation through the model that clients use.

        Raises:
            ServerError: there is no answer; the text shows the end of the log.
        """
        if not self.running:
            raise self._failure("Triton is not running")
        try:
            return generate(self.grpc_url, self.entry_model, "Hello", max_tokens=1, timeout_s=timeout_s)
        except ServerError as error:
            raise self._failure(str(error)) from None

    def warmup(self, rounds: int = 5, *, timeout_s: float = 60.0) -> Answer:
        """Some short answers, so that the first client finds everything loaded; the last of them."""
        for _ in range(rounds):
            answer = generate(
                self.grpc_url, self.entry_model, "Hello", max_tokens=self._warmup_tokens, timeout_s=timeout_s
            )
        return answer

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines of the server's log."""
        return log.tail(self.log_file, lines)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._own_log and error is None:
            self.log_file.unlink(missing_ok=True)

    def _start(self, installation: Installation, deadline: float) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self._launch(installation)
            code = self._wait_until_ready(deadline)
            if code is None:
                return
            self.stop()
            taken = not self._fixed_ports and any(
                _ADDRESS_TAKEN in line for line in log.errors(self.log_file)
            )
            if taken:
                self.ports = Ports.free()
            aborted = code > 128  # by a signal
            if attempt == _ATTEMPTS or not (taken or aborted):
                raise self._failure(f"Triton ended with exit code {code} while it started")

    def _launch(self, installation: Installation) -> None:
        launch = self._started = Launch(
            installation,
            stage=Path(tempfile.mkdtemp(prefix="pipeline-triton-")),
            repository=self.repository,
            models=self.models,
            ports=self.ports,
            shared_memory_prefix=f"pipeline-{secrets.token_hex(6)}-",
            address=self.address,
            start_deadline_s=self._start_deadline_s,
            drain_s=max(1, round(self._stop_deadline_s / 3)),
        )
        launch.prepare()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        below = [sys.executable, "-I", guard.__file__]
        settings = [str(self._stop_deadline_s), str(launch.stage), launch.shared_memory_prefix]
        with self.log_file.open("wb") as output:
            self._guard = subprocess.Popen(
                [*below, *settings, *launch.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=installation.environment() | {"PIPELINE_TRITON_GRPC": self.grpc_url},
                start_new_session=True,
            )

    def _wait_until_ready(self, deadline: float) -> int | None:
        """None when it is ready; the exit code when it ended instead."""
        assert self._guard is not None, "_launch started it"
        while (code := self._guard.poll()) is None:
            if _answers(f"{self.http_url}/v2/health/ready"):
                return None
            if time.monotonic() > deadline:
                raise self._failure(f"Triton was not ready within {self._start_deadline_s:g} s")
            time.sleep(_POLL_S)
        return code

    def _failure(self, what: str) -> ServerError:
        """An error with what the log says about it: the server's own errors, or else its last lines."""
        said = [f"  {line}" for line in log.errors(self.log_file)]
        last = [f"  | {line[:200]}" for line in self.log_tail()]
        text = "\n".join([what, *(said or last), f"its log: {self.log_file}"])
        return ServerError(
            text.replace(str(self._started.mirror), str(self.repository)) if self._started else text
        )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _kill_session(leader: int) -> None:
    """Kill what is left of a session; there is something only if the guard, its leader, was killed."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(folder.name), signal.SIGKILL)
