"""The guard between this program and a server: it ends what it started when it is told to, and when nobody is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.machine import process_guard

# Says that it is there, and then what it is told.
SERVER = "import signal, sys; print('up', flush=True); print(signal.sigwait([signal.SIGTERM]).name)"
BLOCKED = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); {SERVER}"


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "the end of its standard input"])
def test_it_ends_its_server_politely(tmp_path: Path, how: str) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    guarded = process_guard.GuardedProcess(
        stop_deadline_s=60, stage=str(stage), mark=f"guard-{tmp_path.name}"
    )
    command = [sys.executable, "-I", process_guard.__file__, json.dumps(asdict(guarded))]
    with subprocess.Popen(
        [*command, sys.executable, "-c", BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stdout.readline() == "up\n"
        if how.startswith("SIG"):
            guard.send_signal(signal.Signals[how])
        else:
            guard.stdin.close()
        assert guard.wait(60) == 0
        assert guard.stdout.read() == "SIGTERM\n"
    assert not stage.exists()
