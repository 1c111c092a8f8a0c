"""A deployment under test: `pipeline serve` as a process of its own, as a user starts it.

It runs below a guard (`machine/process_guard.py`), so that nothing of it outlives this process, however that ends.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import ServerError
from pipeline.machine import process_guard
from pipeline.machine.gpus import survey_gpus, visible
from pipeline.machine.processes import ProcessMemory, processes_below, start_guarded
from pipeline.triton.deployment import DRAFT_MODEL, TARGET_MODEL
from pipeline.triton.running import RunningServer

_POLL_S = 0.2
# Time for steps before Triton's own deadline, such as reading the machine.
_BUILT_IN_S = 120.0
_STOP_S = 120.0
_LOG_LINES = 25


@dataclass(slots=True)
class ServedDeployment:
    """One `pipeline serve` that this process started, ready to be asked."""

    record: RunningServer
    process: subprocess.Popen[bytes]
    logs: tuple[Path, ...]
    start_s: float

    @classmethod
    def start(cls, argv: Sequence[str], name: str, running: Path, logs: Path, *, deadline_s: float) -> Self:
        """Start the deployment of a recipe, and wait until it is ready.

        Args:
            argv: Arguments of `pipeline serve`: recipe, overrides, store, options.
            running: Folder of the store where servers are announced.
            deadline_s: Time to become ready for Triton; some is added for steps before it.

        Raises:
            ServerError: It ended, or was not ready in time; the text has the end of its log.
        """
        logs.mkdir(parents=True, exist_ok=True)
        triton, supervisor = logs / "triton.log", logs / "serve.log"
        command = (
            *(sys.executable, "-m", "pipeline.cli.main", "serve"),
            *argv,
            *("--port", "0", "--set", f"triton.log={json.dumps(str(triton))}"),
        )
        began = time.monotonic()
        mark = f"pipeline-serve-{secrets.token_hex(6)}"
        guarded = process_guard.GuardedProcess(_STOP_S, tempfile.mkdtemp(prefix="pipeline-serve-"), mark)
        with supervisor.open("wb") as output:
            process = start_guarded(command, guarded, output, {}, umask=-1)
        served = cls.__new__(cls)
        served.process, served.logs = process, (supervisor, triton)
        try:
            while process.poll() is None and time.monotonic() - began < deadline_s + _BUILT_IN_S:
                record = RunningServer.read(running, name)
                is_own = record is not None and any(
                    child.pid == record.pid for child in processes_below(process.pid)
                )
                if record is not None and is_own and record.state == "ready":
                    served.record, served.start_s = record, time.monotonic() - began
                    return served
                time.sleep(_POLL_S)
            why = (
                f"was not ready within {deadline_s + _BUILT_IN_S:.0f} s"
                if process.poll() is None
                else f"ended with exit code {process.returncode}"
            )
            raise ServerError("\n".join([f"pipeline serve {why}", *served.log_tail()]))
        except BaseException:
            served.stop()
            raise

    def stop(self) -> float:
        """End it as Ctrl-C does; SIGKILL when that does not help. Returns the seconds until it had ended."""
        began = time.monotonic()
        assert self.process.stdin is not None, "it was started with a pipe"
        # The guard sees it, sends SIGTERM, and kills after a deadline of its own.
        self.process.stdin.close()
        self.process.wait()
        return time.monotonic() - began

    def processes(self) -> dict[int, str]:
        """List its processes on this machine: number -> name."""
        return {process.pid: process.name for process in processes_below(self.process.pid)}

    def engine_memory_mib(self) -> dict[str, float]:
        """Return the memory of processes that hold an engine of the `cpu` runtime, in MiB, by their model's name."""
        return {
            name: ProcessMemory.of(pid).total
            for pid, name in self.processes().items()
            if name in (TARGET_MODEL, DRAFT_MODEL)
        }

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines of the output of the supervisor and of Triton."""
        tails = []
        for log in self.logs:
            if log.is_file():
                text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                tails += [f"--- {log.name}", *(line[:300] for line in text)]
        return tuple(tails)


def gpu_memory_mib(devices: tuple[int, ...], environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return the used memory of each GPU that may be used, in MiB, by "GPU 0".

    Args:
        devices: Indexes of GPUs; empty for those that CUDA_VISIBLE_DEVICES of `environment` leaves.
    """
    gpus = visible(survey_gpus().gpus, devices, environment)
    return {f"GPU {gpu.index}": float(gpu.memory_mib - gpu.free_mib) for gpu in gpus}
