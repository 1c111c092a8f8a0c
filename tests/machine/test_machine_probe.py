"""Programs and probes that hang, fail or die: the time is kept, and the reason is told."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.machine.probe import ProbeTimeout, at_once, run_command
from tests.support.machines import HANGS, put_tool
from tests.support.waiting import wait_for


def test_what_a_program_says(tmp_path: Path) -> None:
    said = run_command([str(put_tool(tmp_path, "tool", "one\ntwo\n"))], 20)
    assert (said.lines, said.problem) == (["one", "two"], "")


def test_a_program_that_is_not_there() -> None:
    assert (
        run_command(["no-such-program-anywhere"], 5).problem == "there is no no-such-program-anywhere on PATH"
    )


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    assert run_command(
        [str(put_tool(tmp_path, "tool", complains="no\n\npermission\n", code=3))], 20
    ).problem == ("tool failed: no permission")
    assert run_command([str(put_tool(tmp_path, "tool", code=3))], 20).problem == "tool failed: exit code 3"


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_bytes(b"\x7fELF, not really")
    file.chmod(0o755)
    assert "tool cannot be run" in run_command([str(file)], 5).problem


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    starting = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(child.pid))
{HANGS}"""
    said = run_command([str(put_tool(tmp_path, "tool", does=starting))], 1)
    assert said.problem == "tool does not answer within 1 s"
    if child.exists():
        wait_for(lambda: not _runs(int(child.read_text())), "the end of its child")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_pipe_that_a_stranger_holds_open_does_not_count(tmp_path: Path) -> None:
    """A daemon of its own session keeps the output open after the program has been killed."""
    leaving = f"subprocess.Popen(['sleep', '80'], start_new_session=True)\n{HANGS}"
    start = time.monotonic()
    assert "does not answer" in run_command([str(put_tool(tmp_path, "tool", does=leaving))], 0.5).problem
    assert time.monotonic() - start < 60


def test_probes_run_at_the_same_time() -> None:
    together = threading.Barrier(3)
    answers = at_once({str(number): lambda: together.wait(20) >= 0 for number in range(3)}, 20)
    assert answers == {"0": True, "1": True, "2": True}


def test_a_late_probe_leaves_the_others_alone() -> None:
    never = threading.Event()
    answers = at_once({"late": never.wait, "here": lambda: None}, 0.3)
    assert answers == {"late": ProbeTimeout("no answer within 0.3 s"), "here": None}
    never.set()


def test_what_a_probe_does_not_foresee_is_raised() -> None:
    def broken() -> None:
        raise KeyError("MemTotal")

    with pytest.raises(KeyError, match="MemTotal"):
        at_once({"broken": broken}, 20)
