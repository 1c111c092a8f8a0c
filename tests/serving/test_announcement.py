"""The record of a deployment as its supervisor keeps it, also where it cannot be written for a while."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from types import MappingProxyType

import pytest

from pipeline.errors import UserError
from pipeline.keeper import HealthIssue, Keeper, RestartPolicy
from pipeline.progress import Silent
from pipeline.serving.announcement import Announcement
from pipeline.triton.running import SUPERVISED, RunningServer, metrics_targets
from tests.support.deployments import ADDRESSES


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def announced(folder: Path) -> Announcement:
    record = RunningServer.of(ADDRESSES, folder, state="starting")
    return Announcement(folder, "tiny", record, ("triton", "gateway"))


def test_a_folder_that_cannot_be_written_for_a_while_ends_nothing(tmp_path: Path) -> None:
    """As with a full disk: it is told once, and the record is there again when there is room."""
    folder, heard = tmp_path / "running", Heard()
    announcement = announced(folder)
    announcement.claim(heard)
    announcement.set_state("triton", "ready")
    announcement.set_state("gateway", "ready")
    assert RunningServer.find(folder, "tiny") is not None
    away = folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    announcement.set_state("triton", "restarting", "it died")
    announcement.count_restart("triton")
    announcement.confirm()
    assert len(heard.lines) == 1
    assert announcement.record.state == "restarting"
    folder.unlink()
    away.rename(folder)
    found = RunningServer.find(folder, "tiny", states=SUPERVISED)
    assert found is not None
    assert found.state == "ready"
    announcement.confirm()
    assert RunningServer.read(folder, "tiny") == announcement.record
    announcement.withdraw()
    assert RunningServer.read(folder, "tiny") is None


def test_a_record_that_could_not_be_brought_up_to_date_is_taken_away_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "running"
    announcement = announced(folder)
    announcement.claim(Silent())
    away = folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    announcement.set_state("triton", "ready")
    folder.unlink()
    away.rename(folder)
    before = RunningServer.read(folder, "tiny")
    assert before is not None
    assert before != announcement.record
    announcement.withdraw()
    assert RunningServer.read(folder, "tiny") is None


def test_an_exchange_moves_the_target_that_prometheus_reads(tmp_path: Path) -> None:
    announcement = announced(tmp_path)
    announcement.claim(Silent())
    announcement.exchange("tensorrt_llm_bls", metrics_url="http://127.0.0.1:9002/metrics")
    (target,) = json.loads(metrics_targets(tmp_path, "tiny").read_text())
    assert target["targets"] == ["127.0.0.1:9002"]
    announcement.withdraw()


def test_a_recipe_is_claimed_by_one_supervisor(tmp_path: Path) -> None:
    first, second = announced(tmp_path), announced(tmp_path)
    first.claim(Silent())
    with pytest.raises(UserError, match="tiny is served already by process"):
        second.claim(Silent())
    second.withdraw()
    assert RunningServer.read(tmp_path, "tiny") is not None
    first.withdraw()
    third = announced(tmp_path)
    third.claim(Silent())
    third.withdraw()


class Failing:
    """A component whose processes die, and that cannot be started at once again."""

    kind, title, pids, addresses = "triton", "Triton", (), MappingProxyType({})

    def __init__(self) -> None:
        self.starts = 0
        self.up_again = threading.Event()

    def start(self, stop: threading.Event) -> None:  # noqa: ARG002
        self.starts += 1
        if self.starts == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.starts == 3:
            self.up_again.set()

    def check(self) -> HealthIssue | None:
        return HealthIssue("fault", "it died") if self.starts < 3 else None

    def stop(self, *, at_once: bool) -> None:
        pass


def test_what_the_machine_refuses_for_a_while_is_tried_again(tmp_path: Path) -> None:
    announcement, component = announced(tmp_path), Failing()
    announcement.claim(Silent())
    policy = RestartPolicy(max_restarts=5, pause_s=0.01)
    keeper = Keeper(component, policy, [announcement], Silent(), lambda: None)
    keeper.start()
    assert component.up_again.wait(30)
    keeper.stop()
    keeper.join(30)
    assert keeper.failure is None
    assert announcement.record.restarts == {"triton": 2}
    announcement.withdraw()
