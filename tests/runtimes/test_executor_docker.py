"""trtllm-build in the container that will serve: what Docker is asked, and what becomes of its containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ServerError, StageError, UserError
from pipeline.progress import Lines, Silent
from pipeline.runtimes.tensorrt.executors.docker import DockerExecutor, container_name
from tests.support.builders import DIGEST, FakeDocker, ScriptedBuilder, job_in
from tests.support.machines import line, put_nvidia_smi
from tests.support.waiting import wait_for

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


@pytest.fixture
def builder(tmp_path: Path) -> ScriptedBuilder:
    return ScriptedBuilder(tmp_path / "program")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: ScriptedBuilder) -> FakeDocker:
    stand_in = FakeDocker(tmp_path / "docker", monkeypatch, inside=builder.programs)
    stand_in.set(images={IMAGE: DIGEST})
    return stand_in


def test_the_command(tmp_path: Path) -> None:
    """Golden: what a person would have to type."""
    job = job_in(tmp_path, workers=2, gpus=2)
    command = DockerExecutor(devices=(0, 3)).command(
        job,
        tmp_path / "here",
        name="n",
        image=f"nvcr.io/nvidia/tritonserver@{DIGEST}",
        security="name=selinux",
    )
    assert " ".join(command).replace(str(tmp_path), "/store") == (
        'docker run --rm --init --name n --gpus "device=0,3" --shm-size=2560m --ulimit memlock=-1 --ulimit '
        f"stack=67108864 --user {os.getuid()}:{os.getgid()} --security-opt label=disable "
        "--mount type=bind,source=/store/checkpoint,target=/build/checkpoint,readonly "
        "--mount type=bind,source=/store/work/build-0123456789abcdef0123/engine,target=/build/engine "
        "--mount type=bind,source=/store/here,target=/build/work --workdir /build/work "
        "--env HOME=/build/work --env USER=builder --env LOGNAME=builder --env PYTHONUNBUFFERED=1 "
        f"nvcr.io/nvidia/tritonserver@{DIGEST} "
        "trtllm-build --checkpoint_dir /build/checkpoint --output_dir /build/engine "
        "--input_timing_cache timing.cache --output_timing_cache new-timing.cache --workers 2 --max_batch_size 8"
    )


def test_a_build(tmp_path: Path, docker: FakeDocker, builder: ScriptedBuilder) -> None:
    job = job_in(tmp_path)
    log = DockerExecutor().run(job, Silent())
    assert (job.output / "rank0.engine").is_file()
    assert job.timing_cache.read_text() == "measured"
    assert (log.executor, log.image, log.image_digest) == (
        "docker",
        IMAGE,
        f"nvcr.io/nvidia/tritonserver@{DIGEST}",
    )
    assert f"nvcr.io/nvidia/tritonserver@{DIGEST}" in docker.run, "what is recorded is what runs"
    assert docker.run[docker.run.index("--gpus") + 1] == "1"
    assert builder.calls[0]["argv"][:2] == ["--checkpoint_dir", str(job.checkpoint)]
    assert not any(call[0] == "pull" for call in docker.calls)
    assert docker.calls[-1] == ["rm", "--force", container_name(job)]


def test_paths_with_commas(tmp_path: Path, docker: FakeDocker) -> None:  # noqa: ARG001
    folder = tmp_path / 'a, "b"'
    job = job_in(folder)
    DockerExecutor().run(job, Silent())
    assert (job.output / "rank0.engine").is_file()


def test_a_pull(tmp_path: Path, docker: FakeDocker, capsys: pytest.CaptureFixture[str]) -> None:
    docker.set(images={}, registry={IMAGE: DIGEST})
    DockerExecutor().run(job_in(tmp_path), Lines(interval_s=0))
    said = capsys.readouterr().err
    assert f"pulling {IMAGE}" in said
    assert "3 layers in" in said


def test_no_such_image(tmp_path: Path, docker: FakeDocker) -> None:
    docker.set(images={})
    with pytest.raises(ServerError, match=r"cannot be pulled: .*manifest unknown"):
        DockerExecutor().run(job_in(tmp_path), Silent())


def test_no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no 'docker' on PATH; .*--executor print"):
        DockerExecutor().check("1.2.1")


def test_no_daemon(docker: FakeDocker) -> None:
    docker.set(down=True)
    with pytest.raises(UserError, match=r"Cannot connect to the Docker daemon.*--executor print"):
        DockerExecutor().check("1.2.1")


def test_no_gpus_for_containers(tmp_path: Path, docker: FakeDocker) -> None:
    docker.set(no_gpus=True)
    with pytest.raises(StageError, match=r"exit code 125[\s\S]*install the NVIDIA Container Toolkit"):
        DockerExecutor().run(job_in(tmp_path), Silent())


def test_rootless_docker_maps_users_itself(tmp_path: Path, docker: FakeDocker) -> None:
    docker.set(security=["name=seccomp,profile=builtin", "name=rootless"])
    DockerExecutor().run(job_in(tmp_path), Silent())
    assert "--user" not in docker.run


def test_devices(
    tmp_path: Path, docker: FakeDocker, builder: ScriptedBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path / "smi", monkeypatch, "\n".join(line(i, capability="8.9") for i in range(4)))
    DockerExecutor(devices=(2, 3)).run(job_in(tmp_path, workers=2, gpus=2), Silent())
    assert docker.run[docker.run.index("--gpus") + 1] == '"device=2,3"'
    assert builder.calls[0]["gpus"] == "device=2,3".removeprefix("device=")


def test_another_gpu(tmp_path: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path / "smi", monkeypatch, line(capability="10.0"))
    with pytest.raises(UserError, match=r"SM 89\), GPU 0 here is .* \(SM 100\)"):
        DockerExecutor().run(job_in(tmp_path), Silent())
    assert not any(call[0] == "run" for call in docker.calls)


_BUILD = """
import sys
from pathlib import Path
from pipeline.progress import Lines
from pipeline.runtimes.tensorrt.executors.docker import DockerExecutor
from tests.support.builders import job_in
DockerExecutor().run(job_in(Path(sys.argv[1])), Lines())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_container_outlives_us(
    tmp_path: Path, docker: FakeDocker, builder: ScriptedBuilder, number: signal.Signals
) -> None:
    builder.play("building", seconds=60)
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_for((builder.folder / "begun").exists, "the build")
    finally:
        process.send_signal(number)
        process.wait(30)
    pid = builder.calls[0]["pid"]
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the container")
    builder.play("again")
    assert DockerExecutor().run(job_in(tmp_path), Silent()).lines[0] == "again"
    assert list(docker.folder.glob("container-*")) == []


def test_a_container_that_was_left_is_removed(
    tmp_path: Path, docker: FakeDocker, builder: ScriptedBuilder
) -> None:
    """As by a guard that was killed, too."""
    job = job_in(tmp_path)
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (docker.folder / f"container-{container_name(job)}").write_text(str(left.pid))
    builder.play()
    DockerExecutor().run(job, Silent())
    assert left.wait(10) == -signal.SIGKILL
