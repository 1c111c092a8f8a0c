"""When a process that does not answer counts as hung: what /proc shows of it, and what is decided from that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import process_state
from pipeline.process_state import HangJudge, ProcessActivity, ProcessPulse, ProcessStat
from tests.support.waiting import wait_for

STEP_S = 0.2


def hangs_after(
    cpu: float = 0.0, waited: float = 0.0, pressure: float = 0.0, *, works: bool = False
) -> float | None:
    """Seconds until a process of such shares is judged to hang; None if it is not within two minutes."""
    judge = HangJudge()
    for number in range(5, 600):
        late_s = number * STEP_S
        if judge.judge(late_s, ProcessActivity(cpu * late_s, waited * late_s, works, pressure)):
            return late_s
    return None


def test_one_that_sleeps_is_dead_after_three_seconds_however_busy_the_machine_is() -> None:
    assert hangs_after() == pytest.approx(3, abs=2 * STEP_S)
    assert hangs_after(pressure=1.0) == pytest.approx(3, abs=2 * STEP_S)


def test_one_that_computes_has_longer() -> None:
    assert hangs_after(cpu=0.5) == pytest.approx(15, abs=2 * STEP_S)
    assert hangs_after(works=True) == pytest.approx(15, abs=2 * STEP_S)


def test_one_that_gets_no_processor_has_a_minute_and_no_more() -> None:
    assert hangs_after(waited=1.0) == pytest.approx(60, abs=2 * STEP_S)
    assert hangs_after(pressure=1.0, works=True) == pytest.approx(60, abs=2 * STEP_S)
    # Half starved: half of the time does not count.
    assert hangs_after(waited=0.5) == pytest.approx(5, abs=3 * STEP_S)
    assert hangs_after(cpu=0.4, waited=0.5, works=True, pressure=0.5) == pytest.approx(29, abs=3 * STEP_S)


def test_one_that_sleeps_for_good_after_it_starved_is_dead_three_seconds_later() -> None:
    judge, found = HangJudge(), None
    for number in range(5, 300):
        late_s = number * STEP_S
        starving = late_s < 20
        if judge.judge(late_s, ProcessActivity(0.0, min(late_s, 20), starving, 0.9)):
            found = late_s
            break
    # The second in which it was not looked at counts as slept.
    assert found == pytest.approx(22, abs=3 * STEP_S)


activities = st.builds(ProcessActivity, st.floats(0, 1e6), st.floats(0, 1e6), st.booleans(), st.floats(0, 1))


@given(st.lists(activities, min_size=1, max_size=8))
@settings(max_examples=20)
def test_whatever_is_seen_none_is_dead_before_three_seconds_and_all_are_after_a_minute(
    seen: list[ProcessActivity],
) -> None:
    judge, times = HangJudge(), [number * STEP_S for number in range(5, 320)]
    hangs = dict(zip(times, map(judge.judge, times, cycle(seen)), strict=False))
    assert not any(hung for late_s, hung in hangs.items() if late_s <= 3)
    assert all(hung for late_s, hung in hangs.items() if late_s > 60)


class Proc:
    """A folder like /proc with the processes of a tree, of which the first is 1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ticks = folder, {1: 0}
        self.reaped_ticks, self.parents, self.zombies = {1: 0}, {1: 0}, set[int]()
        (folder / "pressure").mkdir()
        (folder / "pressure/cpu").write_text("some avg10=25.00 avg60=0.00 avg300=0.00 total=1\n")

    def act(self, choice: int, what: str, amount: int) -> None:
        """Let a process compute, start a child, or end; or reap one that has ended."""
        living = [pid for pid in self.ticks if pid not in self.zombies]
        pid = living[choice % len(living)]
        match what:
            case "compute":
                self.ticks[pid] += amount
            case "start":
                child = max(self.ticks) + 1
                self.ticks[child], self.reaped_ticks[child], self.parents[child] = 0, 0, pid
            case "end" if pid != 1 and pid not in self.parents.values():
                self.zombies.add(pid)
            case "reap" if self.zombies:
                ended = sorted(self.zombies)[choice % len(self.zombies)]
                self.zombies.remove(ended)
                self.reaped_ticks[self.parents.pop(ended)] += self.ticks.pop(ended) + self.reaped_ticks.pop(
                    ended
                )

    def activity(self) -> ProcessActivity:
        """What is read of it, with all processes asleep."""
        for pid in range(1, 200):
            folder = self.folder / str(pid)
            if pid not in self.ticks:
                (folder / "stat").unlink(missing_ok=True)
                continue
            (folder / f"task/{pid}").mkdir(parents=True, exist_ok=True)
            state = "Z" if pid in self.zombies else "S"
            counts = f"0 {self.ticks[pid]} {self.reaped_ticks[pid]} 0"
            line = f"{pid} (a) name)) {state} {'0 ' * 10}{counts} 0 0 0 0 {pid} 0\n"
            children = [child for child, parent in self.parents.items() if parent == pid]
            (folder / "stat").write_text(line)
            (folder / f"task/{pid}/stat").write_text(line)
            (folder / f"task/{pid}/schedstat").write_text(f"0 {self.ticks[pid]} 1\n")
            (folder / f"task/{pid}/children").write_text(" ".join(map(str, children)))
        return ProcessActivity.of(1, self.folder)


acts = st.tuples(
    st.integers(0, 50), st.sampled_from(["compute", "start", "end", "reap"]), st.integers(1, 1000)
)


@given(st.lists(acts, min_size=1, max_size=12))
@settings(max_examples=15)
def test_processor_time_never_shrinks_when_children_end(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[int, str, int]]
) -> None:
    proc = Proc(tmp_path_factory.mktemp("proc"))
    used_ticks, before = 0, proc.activity()
    assert (before.pressure, before.works) == (0.25, False)
    for choice, what, amount in done:
        proc.act(choice, what, amount)
        used_ticks += amount if what == "compute" else 0
        now = proc.activity()
        assert now.cpu_s >= before.cpu_s
        assert now.cpu_s == pytest.approx(used_ticks / os.sysconf("SC_CLK_TCK"))
        before = now


BURN = """
import os, time
def burn():
    while time.process_time() < 0.3: pass
if os.fork() == 0:
    burn()
    os._exit(0)
os.wait()
print("ended", flush=True)
time.sleep(600)
"""


def test_a_child_that_ended_is_still_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = ProcessActivity.of(process.pid)
        process.kill()
    assert seen.cpu_s >= 0.29
    assert ProcessActivity.of(process.pid).cpu_s == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of pulses forward by so many seconds."""
    now = [1000.0]
    monkeypatch.setattr(process_state, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def faults(pulse: ProcessPulse, forward: Callable[[float], None], seconds: float) -> list[str]:
    found = []
    for _ in range(round(seconds / STEP_S)):
        forward(STEP_S)
        found += [why] if (why := pulse.fault()) is not None else []
    return found


def test_a_pulse(clock: Callable[[float], None]) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        wait_for(lambda: state(process.pid) == "sleep S", "its sleep", 60)
        pulse = ProcessPulse(process.pid)
        assert faults(pulse, clock, 60) == [], "no answer is awaited"
        pulse.ask()
        assert faults(pulse, clock, 2.8) == []
        pulse.hear()
        pulse.ask()
        assert faults(pulse, clock, 4)[0] in ("does not answer for 3.0 s", "does not answer for 3.2 s")
        # The watcher was held up: the answer may be there, and was not read.
        pulse.ask()
        clock(100)
        assert pulse.fault() is None
        assert faults(pulse, clock, 2.8) == []
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: state(process.pid) == "sleep T", "the stop", 60)
        pulse.hear()
        assert "is stopped" in faults(pulse, clock, 1.6)
        process.kill()


def state(pid: int) -> str:
    stat = ProcessStat.of(pid)
    return "" if stat is None else f"{stat.name} {stat.state}"
