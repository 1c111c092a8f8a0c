"""A server of several ranks: the same guarantees as for one process, whichever of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ServerError
from pipeline.machine import process_guard
from pipeline.serving.server import TritonServer
from tests.support.launchers import leader_of, two_ranks
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files; whatever a test does, nothing of its servers may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    marks: list[str] = []
    monkeypatch.setattr(process_guard, "GuardedProcess", _remembering(marks))
    yield tmp_path / "ranks"
    assert not list(tmp_path.glob("pipeline-*/start-*"))
    for mark in marks:
        assert not list(Path("/dev/shm").glob(f"{mark}*"))
        assert not process_guard.marked(mark)
    for path in (tmp_path / "ranks").glob("rank*.json"):
        assert not Path(f"/proc/{json.loads(path.read_text())['pid']}").exists(), path.name


def _remembering(marks: list[str]) -> Callable[..., process_guard.GuardedProcess]:
    real = process_guard.GuardedProcess

    def make(*arguments: Any) -> process_guard.GuardedProcess:
        guarded = real(*arguments)
        marks.append(guarded.mark)
        return guarded

    return make


def rank(folder: Path, number: int) -> dict[str, Any]:
    """What a rank was started with."""
    found: dict[str, Any] = json.loads((folder / f"rank{number}.json").read_text())
    return found


def server_of(package: Path, launcher: Any, **options: Any) -> TritonServer:
    return TritonServer(leader_of(package), launcher, **options)


def test_rank_0_serves_and_rank_1_holds_the_engine_only(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(package, two_ranks(package, folder, monkeypatch)) as server:
        assert server.check_health().text is not None
        assert (server.warmup(1).stats.total_ms or 0) > 0
        first, second = rank(folder, 0)["arguments"], rank(folder, 1)["arguments"]
        assert f"--grpc-address={server.target.rpartition(':')[0]}" in first
        assert "--model-control-mode=none" in first
        assert [part for part in second if part.startswith("--load-model=")] == ["--load-model=tensorrt_llm"]
        assert "--model-control-mode=explicit" in second
        assert not [part for part in second if "port" in part]
        prefixes = {part.rpartition("=")[2] for part in (*first, *second) if "shm-region-prefix-name" in part}
        assert len(prefixes) == 2
        assert len({prefix.rpartition("r")[0] for prefix in prefixes}) == 1


def test_a_rank_that_dies_ends_the_server(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(package, two_ranks(package, folder, monkeypatch)) as server:
        os.kill(rank(folder, 1)["pid"], signal.SIGKILL)
        wait_for(lambda: not server.running, "the end of the server")
        assert server.wait() == 128 + signal.SIGKILL
        with pytest.raises(ServerError, match="Triton is not running"):
            server.check_health()


def test_a_rank_that_does_not_start_is_named_with_the_likely_cause(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "[TensorRT-LLM][ERROR] 6: The engine plan file is generated on an incompatible device"
    launcher = two_ranks(package, folder, monkeypatch, other=f"print({message!r}, flush=True); sys.exit(3)")
    start = time.monotonic()
    with pytest.raises(ServerError) as caught:
        server_of(package, launcher).start()
    text = str(caught.value)
    assert "exit code 3 while it started" in text
    assert "incompatible device" in text
    assert "likely cause: the engine was built for another GPU: build again for this one" in text
    assert "its log: " in text
    assert time.monotonic() - start < 100


def test_a_launcher_that_goes_on_waiting_is_not_waited_for(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trtllm-llmapi-launch does, whose helper stays when the server has failed."""
    failing = (
        "print('error: creating server: Internal - failed to load all models', flush=True); time.sleep(600)"
    )
    launcher = two_ranks(package, folder, monkeypatch, first=failing)
    start = time.monotonic()
    with pytest.raises(ServerError, match="gave up while it started"):
        server_of(package, launcher, start_deadline_s=300).start()
    assert time.monotonic() - start < 100


@pytest.mark.slow
def test_ranks_that_never_get_ready_are_ended_at_the_deadline(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    launcher = two_ranks(package, folder, monkeypatch, first=f"{stubborn}; time.sleep(600)", other=stubborn)
    start = time.monotonic()
    with pytest.raises(ServerError, match="not ready within 3 s"):
        server_of(package, launcher, start_deadline_s=3, stop_deadline_s=2).start()
    assert time.monotonic() - start < 100


def test_workers_in_sessions_of_their_own_go_when_mpirun_is_killed(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    launcher = two_ranks(package, folder, monkeypatch, other=worker)
    with server_of(package, launcher) as server:
        assert server._guarded is not None
        assert server._guard is not None
        mark, guarding = server._guarded.mark, server._guard.pid
        children = Path(f"/proc/{guarding}/task/{guarding}/children").read_text()
        os.kill(int(children), signal.SIGKILL)
        assert server.wait() == 128 + signal.SIGKILL
        wait_for(lambda: not process_guard.marked(mark), "the end of all ranks")


def test_no_mpirun_no_server(package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = two_ranks(package, folder, monkeypatch)
    shutil.rmtree(folder / "bin")
    with pytest.raises(
        ServerError, match=r"exit code 127 while it started[\s\S]*mpirun cannot be run: No such file"
    ):
        server_of(package, launcher).start()
