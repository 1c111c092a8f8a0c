"""The timing cache that builders share: lent, taken back, and never the reason why a build fails."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.progress import Lines, Silent
from pipeline.runtimes.tensorrt.executors.builder import NativeExecutor
from tests.support.builders import ScriptedBuilder, job_in


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBuilder:
    return ScriptedBuilder(tmp_path / "program", monkeypatch)


def test_a_cache_is_lent_and_taken_back(tmp_path: Path, builder: ScriptedBuilder) -> None:
    job = job_in(tmp_path)
    builder.play(cache="first")
    NativeExecutor().run(job, Silent())
    assert job.timing_cache.read_text() == "first"
    builder.play(cache="second")
    NativeExecutor().run(job, Silent())
    assert [call["cache"] for call in builder.calls] == [None, "first"]
    assert job.timing_cache.read_text() == "second"
    assert [path.name for path in job.timing_cache.parent.iterdir()] == [job.timing_cache.name]


@pytest.mark.usefixtures("builder")
def test_several_workers_write_another_cache(tmp_path: Path) -> None:
    job = job_in(tmp_path, workers=2, gpus=2)
    assert job.command("c", "e")[5:9] == (
        *("--input_timing_cache", "timing.cache"),
        *("--output_timing_cache", "new-timing.cache"),
    )
    NativeExecutor().run(job, Silent())
    assert job.timing_cache.read_text() == "measured"


def test_a_failed_build_keeps_the_cache(tmp_path: Path, builder: ScriptedBuilder) -> None:
    job = job_in(tmp_path)
    job.timing_cache.parent.mkdir(parents=True)
    job.timing_cache.write_text("kept")
    builder.play("no", exit_code=1)
    with pytest.raises(StageError):
        NativeExecutor().run(job, Silent())
    assert job.timing_cache.read_text() == "kept"


def test_a_cache_that_breaks_the_build_is_dropped(
    tmp_path: Path, builder: ScriptedBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tmp_path)
    job.timing_cache.parent.mkdir(parents=True)
    job.timing_cache.write_text("of another TensorRT")
    builder.play(dies_of_cache=True)
    NativeExecutor().run(job, Lines())
    assert [call["cache"] for call in builder.calls] == ["of another TensorRT", None]
    assert job.timing_cache.read_text() == "measured"
    assert "building again without it" in capsys.readouterr().err


def test_a_crash_may_be_the_cache(tmp_path: Path, builder: ScriptedBuilder) -> None:
    """Once; without a kept cache, a crash is a crash."""
    job = job_in(tmp_path)
    job.timing_cache.parent.mkdir(parents=True)
    job.timing_cache.write_text("cut off")
    builder.play(signal=signal.SIGSEGV)
    with pytest.raises(StageError, match=r"exit code 139[\s\S]*the builder crashed"):
        NativeExecutor().run(job, Silent())
    assert [call["cache"] for call in builder.calls] == ["cut off", None]
    assert not job.timing_cache.exists()


def test_no_build_fails_because_of_a_cache(
    tmp_path: Path, builder: ScriptedBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tmp_path)
    job.timing_cache.mkdir(parents=True)  # neither to be read nor to be replaced
    NativeExecutor().run(job, Lines())
    assert [call["cache"] for call in builder.calls] == [None]
    said = capsys.readouterr().err
    assert f"the timing cache {job.timing_cache} cannot be read: " in said
    assert f"the timing cache {job.timing_cache} cannot be kept: " in said
    assert [path.name for path in job.timing_cache.parent.iterdir()] == [job.timing_cache.name]


def test_two_builders_share_a_cache(tmp_path: Path, builder: ScriptedBuilder) -> None:
    builder.play(seconds=0.3)
    jobs = [job_in(tmp_path / name, timing_cache=tmp_path / "shared.cache") for name in ("a", "b")]
    threads = [threading.Thread(target=NativeExecutor().run, args=(job, Silent())) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (tmp_path / "shared.cache").read_text() == "measured"
    assert all((job.output / "rank0.engine").is_file() for job in jobs)
