"""Engines that another machine builds: the script is run for real, and what it leaves is taken as if made here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.progress import Silent
from pipeline.runtimes.tensorrt.executors.base import BuiltElsewhere
from pipeline.runtimes.tensorrt.executors.remote import (
    AdoptExecutor,
    PrintExecutor,
    RemoteEngine,
    read_sums,
    write_engine_script,
)
from tests.support.builders import (
    DIGEST,
    FakeDocker,
    ScriptedBuilder,
    handovers,
    job_in,
    run_script,
    script_in,
)
from tests.support.machines import line, put_nvidia_smi
from tests.support.waiting import wait_for

GOLDEN = Path(__file__).parent / "golden" / "build-script.sh"
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path / "smi", monkeypatch, "\n".join(line(index, "NVIDIA L4", "8.9") for index in range(2))
    )


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBuilder:
    return ScriptedBuilder(tmp_path / "program", monkeypatch)


def container_of(builder: ScriptedBuilder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """A Docker whose registry has the image, with the builder inside of it."""
    site = folder / "site" / "tensorrt_llm-1.2.1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.1\n")
    docker = FakeDocker(folder / "docker", monkeypatch, inside=builder.programs)
    docker.set(registry={IMAGE: DIGEST}, site=str(site.parent))
    return docker


def test_printed_runs_nothing(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with pytest.raises(BuiltElsewhere) as caught:
        PrintExecutor().run(job, Silent())
    assert caught.value.job == job


def test_the_script(tmp_path: Path) -> None:
    script = write_engine_script(tmp_path / "tiny-build.sh", "tiny", "tiny.yaml", handovers(tmp_path))
    text = script.path.read_text().replace(str(tmp_path), "/store")
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    subprocess.run(["bash", "-n", GOLDEN], check=True)
    assert "{{range" in text, "Docker's braces are Docker's"
    assert not [part for part in ("{%", "@(", ")@") if part in text]


@pytest.mark.usefixtures("gpu")
def test_there_and_back(tmp_path: Path, builder: ScriptedBuilder) -> None:
    builder.play(
        "[11/20/2026-10:00:00] [TRT-LLM] [W] Overriding paged_state to False", cache="measured there"
    )
    engines = handovers(tmp_path)
    said = run_script(script_in(tmp_path / "there", engines))
    folder = tmp_path / "there" / "tiny-engines" / "target"
    assert f"pipeline adopt tiny.yaml --set 'a=b c' build.target {folder}" in said
    assert sorted(read_sums(folder / "SHA256SUMS")) == [
        "build.log",
        "engine/config.json",
        "engine/rank0.engine",
        "facts.txt",
    ]
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    assert [call["cache"] for call in builder.calls] == [None, "measured there"], (
        "the draft's builder starts with it"
    )
    assert [call["gpus"] for call in builder.calls] == ["0", "0"]

    job = engines[0].job
    log = AdoptExecutor(folder).run(job, Silent())
    assert (job.output / "rank0.engine").read_bytes() == b"plan"
    assert log.executor == "adopted"
    assert log.warnings == ("Overriding paged_state to False",)
    assert log.host == os.uname().nodename
    assert (log.gpu, log.driver) == ("NVIDIA L4", "590.44.01")
    assert (log.image, log.image_digest) == (None, None)
    assert "Engine serialized" in job.log.read_text()
    os.link(job.output / "config.json", tmp_path / "one")
    assert not os.path.samefile(job.output / "config.json", folder / "engine" / "config.json"), "it is a copy"


@pytest.mark.usefixtures("gpu")
def test_what_is_finished_is_not_built_again(tmp_path: Path, builder: ScriptedBuilder) -> None:
    script = script_in(tmp_path / "there", handovers(tmp_path))
    run_script(script)
    assert "target is built already" in run_script(script)
    assert len(builder.calls) == 2
    changed = script_in(tmp_path / "there", [RemoteEngine("build.target", "build-bb", job_in(tmp_path))])
    run_script(changed)
    assert len(builder.calls) == 3, "that was another engine"


@pytest.mark.usefixtures("gpu")
def test_in_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = container_of(ScriptedBuilder(tmp_path / "program"), tmp_path, monkeypatch)
    engines = handovers(tmp_path)
    there = tmp_path / "there, with a comma"
    run_script(script_in(there, engines), GPUS="1")
    assert docker.run[docker.run.index("--gpus") + 1] == '"device=1"'
    assert docker.run[docker.run.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    digest = f"nvcr.io/nvidia/tritonserver@{DIGEST}"
    assert digest in docker.run, "what was looked at is what is run"
    log = AdoptExecutor(there / "tiny-engines" / "target").run(engines[0].job, Silent())
    assert (log.image, log.image_digest) == (IMAGE, digest)


@pytest.mark.usefixtures("gpu")
def test_in_a_rootless_container_with_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = container_of(ScriptedBuilder(tmp_path / "program"), tmp_path, monkeypatch)
    docker.set(security=["name=rootless", "name=selinux"])
    run_script(script_in(tmp_path / "there", handovers(tmp_path)))
    assert "--user" not in docker.run
    assert docker.run[docker.run.index("--security-opt") + 1] == "label=disable"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_container_ends_with_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    builder = ScriptedBuilder(tmp_path / "program")
    docker = container_of(builder, tmp_path, monkeypatch)
    builder.play("building", seconds=60)
    process = subprocess.Popen(
        [script_in(tmp_path / "there", handovers(tmp_path))],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # which nohup has ignored
    )
    wait_for((builder.folder / "begun").exists, "the build")
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    wait_for(lambda: not Path(f"/proc/{builder.calls[0]['pid']}").exists(), "the end of the container")
    assert docker.calls[-1][:2] == ["rm", "--force"]


@pytest.mark.usefixtures("gpu")
def test_a_full_disk(tmp_path: Path, builder: ScriptedBuilder) -> None:
    df = builder.programs / "df"
    df.write_text("#!/bin/sh\necho 'Filesystem 1024-blocks Used Available'\necho '/dev/sda 100 99 1'\n")
    df.chmod(0o755)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "rank1.safetensors").write_bytes(os.urandom(2**21))
    assert "has 0 MiB free; set OUT" in run_script(script_in(tmp_path / "there", handovers(tmp_path)), code=1)
    assert builder.calls == []


@pytest.mark.usefixtures("gpu")
def test_another_place(tmp_path: Path, builder: ScriptedBuilder) -> None:  # noqa: ARG001
    engines = handovers(tmp_path)
    script = script_in(tmp_path / "there", engines)
    elsewhere = tmp_path / "copied here"
    shutil.copytree(engines[0].job.checkpoint, elsewhere)
    shutil.rmtree(engines[0].job.checkpoint)
    assert "set TARGET_CHECKPOINT" in run_script(script, code=1)
    run_script(script, OUT="some where", TARGET_CHECKPOINT=str(elsewhere), DRAFT_CHECKPOINT=str(elsewhere))
    assert (script.parent / "some where" / "draft" / "SHA256SUMS").is_file()


def test_no_gpu(tmp_path: Path, builder: ScriptedBuilder) -> None:
    assert "not a machine with an NVIDIA GPU" in run_script(
        script_in(tmp_path, handovers(tmp_path)), code=1, PATH="/usr/bin:/bin"
    )
    assert builder.calls == []


def test_the_wrong_gpu(tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(
        tmp_path / "smi", monkeypatch, line(0, "NVIDIA L4", "8.9") + "\n" + line(1, capability="9.0")
    )
    script = script_in(tmp_path / "there", handovers(tmp_path))
    assert "GPU 1 is NVIDIA H100 80GB HBM3 (SM 90); this is for l4-24g (SM 89)" in run_script(script, code=1)
    assert builder.calls == []
    run_script(script, GPUS="0")
    assert len(builder.calls) == 2


@pytest.mark.usefixtures("gpu")
def test_the_wrong_version(tmp_path: Path, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site" / "tensorrt_llm-1.0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.0.0\n")
    monkeypatch.setenv("PYTHONPATH", str(site.parent))
    script = script_in(tmp_path / "there", handovers(tmp_path))
    assert "trtllm-build is of TensorRT-LLM 1.0.0, not 1.2.1" in run_script(script, code=1)
    assert builder.calls == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("what", [{"exit_code": 1}, {"ranks": 0}])
def test_a_failed_build_is_not_finished(
    tmp_path: Path, builder: ScriptedBuilder, what: dict[str, int]
) -> None:
    builder.play("no", **what)
    assert "its log: " in run_script(script_in(tmp_path / "there", handovers(tmp_path)), code=1)
    folder = tmp_path / "there" / "tiny-engines" / "target"
    assert not (folder / "SHA256SUMS").exists()
    with pytest.raises(UserError, match="the script did not come to its end"):
        AdoptExecutor(folder).run(job_in(tmp_path), Silent())
