"""Processes as /proc shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.process_state import ProcessStat, exit_reason
from tests.support.waiting import wait_for

CHILD = """
import os, sys, time
from pipeline.machine.processes import die_with_parent
assert die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
"""


def test_a_child_dies_with_its_parent_even_when_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        wait_for(lambda: (found := ProcessStat.of(child)) is not None and found.stopped, "the stop")
        parent.kill()
    wait_for(lambda: ProcessStat.of(child) is None, "the end of the child")


def test_a_process_at_one_moment() -> None:
    own = ProcessStat.of(os.getpid())
    assert own is not None
    assert (own.state, own.stopped) == ("R", False)
    later = ProcessStat.of(os.getpid())
    assert later is not None
    assert (later.start, later.cpu_s >= own.cpu_s) == (own.start, True)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{gone.pid}").exists()
        assert ProcessStat.of(gone.pid) is None
    assert ProcessStat.of(gone.pid) is None


def test_how_a_process_ended() -> None:
    assert exit_reason(1) == "ended by itself with exit code 1"
    assert exit_reason(-9) == exit_reason(137) == "was killed by SIGKILL"
