"""trtllm-build of this machine: found, watched, and ended with everything that it started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.errors import StageError, StoreError, UserError
from pipeline.machine.programs import tensorrt_llm_of
from pipeline.progress import Lines, Silent
from pipeline.runtimes.tensorrt.executors.builder import NativeExecutor
from tests.support.builders import ScriptedBuilder, job_in
from tests.support.machines import line, put_nvidia_smi
from tests.support.waiting import wait_for


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBuilder:
    return ScriptedBuilder(tmp_path / "program", monkeypatch)


L = "[11/20/2026-10:00:00] [TRT-LLM] "


def test_a_build(tmp_path: Path, builder: ScriptedBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    builder.play(
        L + "[I] Total time of constructing network from module object 2.5 seconds",
        L + "[W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.",
        L + "[W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.",
        L + "[I] Build phase peak memory: 1000.50 MB, children: 24.50 MB",
        ranks=2,
    )
    job = job_in(tmp_path, gpus=2)
    log = NativeExecutor().run(job, Lines(interval_s=0))
    assert sorted(path.name for path in job.output.iterdir()) == [
        "config.json",
        "rank0.engine",
        "rank1.engine",
    ]
    assert log.warnings == (
        "Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.",
    )
    assert log.peak_memory_mib == 1025.0
    assert log.executor == "native"
    assert log.lines[-1].endswith("Engine serialized. Total time: 00:00:00")
    assert job.log.read_text().count("[W]") == 2, "the whole output is kept"
    said = capsys.readouterr().err
    assert "weights loaded and network made in 2.5 s" in said
    assert "writing rank 1" in said
    assert "2/2 engines" in said
    assert [path.name for path in job.output.parent.iterdir()] == ["engine"], "nothing is left beside it"
    call = builder.calls[0]["argv"]
    assert tuple(call) == job.command(job.checkpoint, job.output)[1:]


@pytest.mark.usefixtures("builder")
def test_the_command_says_nothing_of_this_machine(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    facts = NativeExecutor().run(job, Silent()).facts()
    assert str(tmp_path) not in str(facts["command"])


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no trtllm-build on PATH.*--executor docker"):
        NativeExecutor().check("1.2.1")


@pytest.mark.parametrize(
    "shebang", ["#!{python}", "#!/usr/bin/env {python}", '#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"']
)
def test_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shebang: str) -> None:
    site = tmp_path / "site" / "tensorrt_llm-1.1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.1.0\n")
    program = tmp_path / "trtllm-build"
    program.write_text(shebang.format(python=sys.executable) + "\n")
    program.chmod(0o755)
    assert tensorrt_llm_of(program) is None, "its Python has no TensorRT-LLM"
    monkeypatch.setenv("PYTHONPATH", str(site.parent))
    assert tensorrt_llm_of(program) == "1.1.0"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"of TensorRT-LLM 1\.1\.0, the recipe's runtime\.version is 1\.2\.1"):
        NativeExecutor().check("1.2.1")
    NativeExecutor().check("1.1.0")


def test_a_program_without_a_python(tmp_path: Path) -> None:
    program = tmp_path / "trtllm-build"
    program.write_bytes(b"\x7fELF\x00\xff")
    assert tensorrt_llm_of(program) is None


def test_another_gpu(tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path / "smi", monkeypatch, line(capability="9.0"))
    with pytest.raises(UserError, match=r"l4-24g \(SM 89\), GPU 0 here is NVIDIA H100 80GB HBM3 \(SM 90\)"):
        NativeExecutor().run(job_in(tmp_path), Silent())
    assert builder.calls == []


@pytest.mark.usefixtures("builder")
def test_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path / "smi", monkeypatch, "\n".join(line(index, capability="8.9") for index in range(4))
    )
    with pytest.raises(UserError, match=r"2 ranks are built at a time.*shows 1 of its 4 GPUs"):
        NativeExecutor(devices=(3,)).run(job_in(tmp_path, workers=2, gpus=2), Silent())


def test_devices(tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path / "smi", monkeypatch, "\n".join(line(index, capability="8.9") for index in range(4))
    )
    log = NativeExecutor(devices=(2, 3)).run(job_in(tmp_path, workers=2, gpus=2), Silent())
    assert builder.calls[0]["gpus"] == "2,3"
    assert (log.gpu, log.driver) == ("NVIDIA H100 80GB HBM3", "590.44.01")


def test_a_failure_shows_its_end_and_the_cause(tmp_path: Path, builder: ScriptedBuilder) -> None:
    lines = [f"line {number}" for number in range(50)]
    lines += ["[11/20/2026-10:00:00] [TRT] [E] Error Code 2: OutOfMemory (no further information)"]
    builder.play(*lines, exit_code=1)
    job = job_in(tmp_path)
    with pytest.raises(StageError) as caught:
        NativeExecutor().run(job, Silent())
    text = str(caught.value)
    assert "trtllm-build for tiny-target failed (exit code 1)" in text
    assert "| line 49" in text
    assert "| line 10" not in text
    assert "likely cause: the GPU ran out of memory: stop what else uses the GPU" in text
    assert f"its log: {job.log}" in text
    assert "line 0\n" in job.log.read_text()


def test_killed_by_the_kernel(tmp_path: Path, builder: ScriptedBuilder) -> None:
    builder.play("building", signal=signal.SIGKILL)
    with pytest.raises(StageError, match=r"exit code 137[\s\S]*out-of-memory killer"):
        NativeExecutor().run(job_in(tmp_path), Silent())


def test_a_deadline(tmp_path: Path, builder: ScriptedBuilder) -> None:
    builder.play("building", seconds=60)
    with pytest.raises(StageError, match=r"longer than 0\.5 s"):
        NativeExecutor(deadline_s=0.5).run(job_in(tmp_path), Silent())
    # On a busy machine it may not even have begun.
    assert not any(alive(call["pid"]) for call in builder.calls)


def test_a_full_disk(tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 95, 5))
    with pytest.raises(StoreError, match=r"needs about 9 B, .* has 5 B free"):
        NativeExecutor().run(job_in(tmp_path), Silent())
    assert builder.calls == []


def test_progress_bars_are_lines(tmp_path: Path, builder: ScriptedBuilder) -> None:
    builder.play("Loading: 10%\rLoading: 100%\r", "\u00e9")
    assert NativeExecutor().run(job_in(tmp_path), Silent()).lines[:3] == (
        "Loading: 10%",
        "Loading: 100%",
        "\u00e9",
    )


# The end of this process

_BUILD = """
import sys
from pathlib import Path
from pipeline.progress import Lines
from pipeline.runtimes.tensorrt.executors.builder import NativeExecutor
from tests.support.builders import job_in
NativeExecutor().run(job_in(Path(sys.argv[1])), Lines())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_us(tmp_path: Path, builder: ScriptedBuilder, number: signal.Signals) -> None:
    """Not the builder, nor what it started in a session of its own; and the next build goes on."""
    builder.play("building", seconds=60, child_s=60)
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_for((builder.folder / "begun").exists, "the build")
    finally:
        process.send_signal(number)
        process.wait(30)
    child = int((builder.folder / "child.pid").read_text())
    builder.play("again")
    job = job_in(tmp_path)
    log = NativeExecutor().run(job, Silent())  # waits for the last of the other one
    assert not alive(builder.calls[0]["pid"])
    assert not alive(child)
    assert log.lines[0] == "again"
    assert "building" not in job.log.read_text()


def test_a_predecessor_that_does_not_end(
    tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runtimes.tensorrt.executors.process._PREDECESSOR_S", 0.3)
    job = job_in(tmp_path)
    builder.play(seconds=30)
    thread = threading.Thread(target=NativeExecutor().run, args=(job, Silent()))
    thread.start()
    wait_for((builder.folder / "begun").exists, "the build")
    with pytest.raises(StageError, match="earlier builder does not end"):
        NativeExecutor().run(job, Silent())
    (builder.folder / "go").touch()
    thread.join(30)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_interrupted_while_running(tmp_path: Path, builder: ScriptedBuilder) -> None:
    """Ctrl-C here ends the builder before the exception goes on."""
    builder.play("building", seconds=600)

    def interrupt() -> None:
        wait_for((builder.folder / "begun").exists, "the build")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Thread(target=interrupt).start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            NativeExecutor().run(job_in(tmp_path), Silent())
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 100
    assert not alive(builder.calls[0]["pid"])
