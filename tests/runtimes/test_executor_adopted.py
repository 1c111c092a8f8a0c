"""What a printed script left is taken only if it is whole, and is the engine that was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.progress import Silent
from pipeline.runtimes.tensorrt.executors import BuildJob
from pipeline.runtimes.tensorrt.executors.remote import AdoptExecutor, read_facts
from tests.support.builders import ScriptedBuilder, handovers, job_in, run_script, script_in
from tests.support.machines import line, put_nvidia_smi


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the script leaves it."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        put_nvidia_smi(folder / "smi", patch, line(0, "NVIDIA L4", "8.9"))
        ScriptedBuilder(folder / "program", patch)
        run_script(script_in(folder / "there", handovers(folder)))
    return folder / "there" / "tiny-engines" / "target"


@pytest.fixture
def filled(left: Path, tmp_path: Path) -> Path:
    shutil.copytree(left, tmp_path / "filled")
    return tmp_path / "filled"


def refusal(folder: Path, job: BuildJob) -> str:
    with pytest.raises(UserError) as caught:
        AdoptExecutor(folder).run(job, Silent())
    assert not job.output.exists() or not any(job.output.iterdir())
    return str(caught.value)


def test_changed_files(tmp_path: Path, filled: Path) -> None:
    (filled / "engine" / "rank0.engine").write_bytes(b"cut")
    assert "changed: engine/rank0.engine" in refusal(filled, job_in(tmp_path))


def test_missing_and_unknown_files(tmp_path: Path, filled: Path) -> None:
    (filled / "engine" / "rank0.engine").rename(filled / "engine" / "rank1.engine")
    text = refusal(filled, job_in(tmp_path))
    assert "missing: engine/rank0.engine" in text
    assert "not in SHA256SUMS: engine/rank1.engine" in text


def test_links(tmp_path: Path, filled: Path) -> None:
    (filled / "engine" / "rank0.engine").unlink()
    (filled / "engine" / "rank0.engine").symlink_to("/etc/passwd")
    assert "not a plain file: engine/rank0.engine" in refusal(filled, job_in(tmp_path))


def test_another_engine(tmp_path: Path, filled: Path) -> None:
    job = job_in(tmp_path, output=tmp_path / "work" / "build-ffffffffffffffffffff" / "engine")
    job.output.parent.mkdir()
    assert "what is missing is build-ffffffffffffffffffff" in refusal(filled, job)


def test_another_command(tmp_path: Path, filled: Path) -> None:
    text = refusal(filled, job_in(tmp_path, flags=("--max_batch_size", "9")))
    assert "another command" in text
    assert "--max_batch_size 9" in text


def test_another_version(tmp_path: Path, filled: Path) -> None:
    assert "runtime.version is 1.2.0" in refusal(filled, job_in(tmp_path, version="1.2.0"))


def test_any_folder(tmp_path: Path) -> None:
    assert "no engine, build.log, facts.txt, SHA256SUMS" in refusal(tmp_path, job_in(tmp_path))


def test_facts_may_hold_anything(filled: Path) -> None:
    assert read_facts(filled)["command"].startswith("trtllm-build --checkpoint_dir CHECKPOINT")
