"""The supervisor with components that fail as they are told to: when it gives up, and when it goes on trying."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pipeline.errors import ServerError
from pipeline.keeper import HealthIssue, RestartPolicy, RestartsExhausted
from pipeline.progress import Silent
from pipeline.serving.announcement import Announcement
from pipeline.serving.supervisor import Supervisor
from pipeline.triton.running import RunningServer
from tests.support.deployments import ADDRESSES
from tests.support.waiting import wait_for

WAIT_S = 120.0
NAME = "support"


class Scripted:
    """A component that is ready at once, and fails as often as it is told to."""

    pids, addresses = (), MappingProxyType({})

    def __init__(self, faults: Sequence[str | None], *, start_error: str = "", kind: str = "triton") -> None:
        self.faults, self.starts, self.stops = list(faults), 0, list[bool]()
        self.start_error, self.kind, self.title = (
            start_error,
            kind,
            {"triton": "Triton"}.get(kind, f"the {kind}"),
        )

    def start(self, _stop: threading.Event) -> None:
        self.starts += 1
        if self.start_error:
            raise ServerError(self.start_error)

    def check(self) -> HealthIssue | None:
        fault = self.faults.pop(0) if self.faults else None
        return None if fault is None else HealthIssue("fault", fault)

    def stop(self, *, at_once: bool) -> None:
        self.stops.append(at_once)


def announced(folder: Path, *components: str) -> Announcement:
    announcement = Announcement(folder, NAME, RunningServer.of(ADDRESSES, folder), components)
    announcement.claim(Silent())
    return announcement


def supervise(component: Scripted, folder: Path, policy: RestartPolicy) -> Any:
    announcement, stop = announced(folder, "triton"), threading.Event()
    Supervisor({NAME: (component, announcement)}, None, {NAME: policy}, Silent(), stop).run(lambda: None)


def test_it_gives_up_after_so_many_failures_and_says_why(tmp_path: Path) -> None:
    """As in a container, where something above starts all anew."""
    component = Scripted(["first\nwith its log", "second", "third"])
    with pytest.raises(
        RestartsExhausted, match="gave up on Triton: it failed 3 times within 300 s; the last time: third"
    ):
        supervise(component, tmp_path, RestartPolicy(max_restarts=2, max_pause_s=0.01, gives_up=True))
    assert component.starts == 3
    assert component.stops[:3] == [True] * 3
    record = RunningServer.read(tmp_path, NAME)
    assert record is not None
    assert (record.state, record.restarts) == ("failed", {"triton": 2})
    assert "third" in record.reason
    # It may be served again.
    with pytest.raises(RestartsExhausted):
        supervise(Scripted(["again"]), tmp_path, RestartPolicy(max_restarts=0, gives_up=True))


def test_what_was_never_ready_is_not_tried_again(tmp_path: Path) -> None:
    component = Scripted([], start_error="no such GPU")
    with pytest.raises(ServerError, match="no such GPU"):
        supervise(component, tmp_path, RestartPolicy())
    assert component.starts == 1


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


QUICK_POLICY = RestartPolicy(max_restarts=2, pause_s=0.001, max_pause_s=0.01, max_failing_pause_s=0.02)


@pytest.mark.parametrize(("kind", "state"), [("gateway", "unready"), ("triton", "failing")])
def test_one_that_fails_too_often_is_tried_until_it_works_and_the_other_goes_on(
    tmp_path: Path, kind: str, state: str
) -> None:
    triton, gateway = Scripted([]), Scripted([], kind="gateway")
    announcement, said, stop, ready = (
        announced(tmp_path, "triton", "gateway"),
        Said(),
        threading.Event(),
        threading.Event(),
    )
    supervisor = Supervisor({NAME: (triton, announcement)}, gateway, {NAME: QUICK_POLICY}, said, stop)
    thread = threading.Thread(target=supervisor.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        ill, well = (gateway, triton) if kind == "gateway" else (triton, gateway)
        ill.start_error = "no room\nits log"
        ill.faults.append("it was killed")
        wait_for(lambda: ill.starts > 8, "many tries", WAIT_S)
        wait_for(lambda: announcement.record.state == state, f"the state {state}", WAIT_S)
        record = RunningServer.read(tmp_path, NAME)
        assert record is not None, "it stays"
        assert record.alive
        assert record.components == {"triton": "ready", "gateway": "ready", kind: "failing"}
        assert (
            record.reason
            == "no room; it failed 3 times within 300 s, and is tried again after pauses of up to 0.02 s"
        )
        assert (RunningServer.find(tmp_path, NAME) is not None) == (kind == "gateway")
        assert (well.starts, well.stops) == (1, [])
        assert not stop.is_set()
        ill.start_error = ""
        wait_for(lambda: announcement.record.state == "ready", "readiness", WAIT_S)
        assert announcement.record.components == {"triton": "ready", "gateway": "ready"}
        assert announcement.record.reason == ""
        assert (well.starts, well.stops) == (1, [])
        (told,) = [line for line in said.lines if "all else goes on" in line]
        assert "failed 3 times within 300 s: it is tried again from time to time" in told
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert RunningServer.read(tmp_path, NAME) is None


def test_one_that_works_and_dies_again_and_again_is_not_started_without_a_pause(tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=2, pause_s=0.001, max_pause_s=600)
    component, announcement = Scripted(["first", "second", "third"]), announced(tmp_path, "triton")
    said, stop = Said(), threading.Event()
    supervisor = Supervisor({NAME: (component, announcement)}, None, {NAME: policy}, said, stop)
    thread = threading.Thread(target=supervisor.run, args=(lambda: None,))
    thread.start()
    try:
        wait_for(lambda: "starting Triton again in 60 s" in said.lines, "the pause", WAIT_S)
        assert (component.starts, announcement.record.state) == (3, "failing")
    finally:
        stop.set()
        # The pause is not waited for.
        thread.join(WAIT_S)
    assert not thread.is_alive()
