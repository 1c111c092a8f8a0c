"""The record of a deployment as its supervisor keeps it, also where it cannot be written for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.progress import Silent
from pipeline.serving.announcement import Announcement
from pipeline.triton.running import SUPERVISED, RunningServer


class Server:
    grpc_url = "127.0.0.1:8001"
    http_url = "http://127.0.0.1:8000"
    metrics_url = "http://127.0.0.1:8002/metrics"


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def announced(folder: Path) -> Announcement:
    record = RunningServer.of(Server(), folder, state="starting")
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
