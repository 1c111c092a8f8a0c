"""Transfers from a hub that break, stall, trickle or are damaged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.stages import download
from tests.support.fetching import REPO, SHARDS, Recorder, get, held, refused
from tests.support.hub import LoopbackHub, sharded, whole


def test_a_broken_transfer_goes_on_where_it_broke(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_once = {"model.safetensors": 1000}
    progress = Recorder()
    get(into, progress=progress)
    assert hub.ranges("model.safetensors") == ["", "bytes=1000-"]
    assert held(into) == whole()
    (line,) = progress.lines
    assert line.startswith("hf:org/name: ")
    assert line.endswith("trying again in 0.01 s")


def test_a_broken_transfer_from_another_host_goes_on_too(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.redirect = True
    hub.faults.break_once = {"model.safetensors": 1000}
    get(into)
    assert [request.range for request in hub.requests if request.server == "cdn"] == ["", "bytes=1000-"]
    assert held(into) == whole()


def test_the_next_process_asks_only_for_the_rest(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 0}
    hub.faults.break_once = {"model.safetensors": 3000}
    assert "cannot be reached" in refused(into)
    assert (into / ".partial" / "model.safetensors").stat().st_size == 3000
    hub.faults.break_always = {}
    hub.requests.clear()
    progress = Recorder()
    get(into, progress=progress)
    assert hub.fetched() == {"model.safetensors"}, "the small files were there"
    assert hub.ranges("model.safetensors") == ["bytes=3000-"]
    assert held(into) == whole()
    assert progress.lines[-1] == "hf:org/name: 2.9 KiB of 8.1 KiB are here from an earlier try"
    task = progress.tasks[-1]
    assert task.total == task.done == len(whole()["model.safetensors"]) - 3000


def test_progress_made_earns_patience(hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More breaks than retries in a row, but each try brings enough bytes."""
    monkeypatch.setattr(download, "_PROGRESS_BYTES", 1000)
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 1000}
    get(into)
    assert len(hub.ranges("model.safetensors")) == -(-len(whole()["model.safetensors"]) // 1000)
    assert held(into) == whole()


def test_a_server_that_trickles_is_given_up(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 10}
    assert "cannot be reached (peer closed connection" in refused(into)
    assert hub.ranges("model.safetensors") == ["", "bytes=10-", "bytes=20-", "bytes=30-"]


@pytest.mark.parametrize("fault", ["ignore_range", "shift_range"])
def test_a_server_that_does_not_resume_properly(hub: LoopbackHub, into: Path, fault: str) -> None:
    hub.add(REPO, whole())
    hub.faults.break_once = {"model.safetensors": 1000}
    setattr(hub.faults, fault, 7)
    progress = Recorder()
    get(into, progress=progress)
    assert held(into) == whole()
    assert progress.tasks[-1].done == progress.tasks[-1].total


def test_a_stalled_transfer_is_given_up_and_taken_up_again(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.add(REPO, whole())
    hub.faults.stall_once = {"model.safetensors": 500}
    get(into)
    assert hub.ranges("model.safetensors") == ["", "bytes=500-"]
    assert held(into) == whole()


def test_a_damaged_part_is_thrown_away(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    (into / ".partial").mkdir()
    (into / ".partial" / "model.safetensors").write_bytes(b"x" * 700)
    (into / ".partial" / "config.json").write_bytes(b"x" * 7000)
    get(into)
    assert hub.ranges("model.safetensors") == ["bytes=700-", ""]
    assert held(into) == whole()


@pytest.mark.parametrize(
    ("subject", "statuses"),
    [("model.safetensors", [503]), ("tree", [500, 502, 504]), ("revision", [429, 408])],
)
def test_a_server_out_of_order_is_asked_again(
    hub: LoopbackHub, into: Path, subject: str, statuses: list[int]
) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses = {subject: list(statuses)}
    get(into)
    assert held(into) == whole()


@pytest.mark.parametrize("subject", ["config.json", "tree", "revision"])
def test_a_server_that_stays_out_of_order(hub: LoopbackHub, into: Path, subject: str) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses = {subject: [503] * 99}
    assert (
        refused(into)
        == f"hf:org/name: {hub.url} is out of order (503, several times in a row); try again later"
    )


def test_a_server_may_ask_for_more_time(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses, hub.faults.retry_after = {"tree": [429]}, "1"
    progress = Recorder()
    start = time.monotonic()
    get(into, progress=progress)
    assert time.monotonic() - start >= 1
    assert progress.lines == ["hf:org/name: answer 429; trying again in 1 s"]


def test_the_first_failure_stops_the_other_files(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded(rows=20_000))
    hub.faults.bytes_per_s = 500_000
    hub.faults.statuses = {SHARDS[1]: [404]}
    assert f"{SHARDS[1]} is not there (404)" in refused(into)
    assert (into / ".partial" / SHARDS[0]).exists(), "what came of the other stays for the next time"
