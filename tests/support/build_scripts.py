"""Printed scripts over the jobs of `build_jobs`: written, and run as a person would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.runtimes.tensorrt.executors.remote import RemoteEngine, render
from tests.support.build_jobs import job_in

ARTIFACT = "build-0123456789abcdef0123"


def handovers(folder: Path) -> list[RemoteEngine]:
    target = job_in(folder)
    draft = job_in(
        folder, name="tiny-draft", flags=("--max_batch_size", "8", "--use_paged_context_fmha", "enable")
    )
    return [RemoteEngine("build.target", ARTIFACT, target), RemoteEngine("build.draft", "build-aa", draft)]


def script_in(folder: Path, engines: Sequence[RemoteEngine]) -> Path:
    path = folder / "tiny-build.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("tiny", "tiny.yaml --set 'a=b c'", engines))
    path.chmod(0o755)
    return path


def run_script(script: Path, *, code: int = 0, **environment: str) -> str:
    """What it said."""
    done = subprocess.run(
        [script],
        cwd=script.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
