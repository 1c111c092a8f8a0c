"""Which executor a build takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contracts.releases import container
from pipeline.errors import UserError
from pipeline.progress import Silent
from pipeline.runtimes import AUTO, ExecutorChoice
from pipeline.runtimes.tensorrt.executors import executor_of
from tests.support.builders import DIGEST, FakeDocker, ScriptedBuilder, job_in

IMAGE = container("1.2.1").image


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBuilder:
    return ScriptedBuilder(tmp_path / "program", monkeypatch)


def test_auto_prefers_the_builder_of_this_machine(tmp_path: Path, builder: ScriptedBuilder) -> None:
    assert executor_of(AUTO).run(job_in(tmp_path), Silent()).executor == "native"
    assert len(builder.calls) == 1


def test_auto_takes_docker_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ScriptedBuilder(tmp_path / "program")
    FakeDocker(tmp_path / "docker", monkeypatch, inside=inside.programs).set(images={IMAGE: DIGEST})
    assert executor_of(AUTO).run(job_in(tmp_path), Silent()).executor == "docker"


def test_auto_says_why_nothing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as caught:
        executor_of(ExecutorChoice()).check("1.2.1")
    text = str(caught.value)
    assert "nothing here can run trtllm-build 1.2.1; --executor print" in text
    assert "native: there is no trtllm-build on PATH" in text
    assert "docker: there is no 'docker' on PATH" in text
