"""Builders that tests play: jobs and printed scripts for them, a `trtllm-build` that does what a test writes down, and
a `docker` that runs it in "containers". The stand-in that obeys upstream's contract is `trtllm_build`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtimes.tensorrt.executors import BuildJob, timing_cache_file
from pipeline.runtimes.tensorrt.executors.remote import RemoteEngine, write_engine_script


def job_in(folder: Path, **changes: Any) -> BuildJob:
    """As the runtime would compose it in a store at `folder`."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "rank0.safetensors").write_bytes(b"weights")
    output = folder / "work" / "build-0123456789abcdef0123" / "engine"
    output.parent.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "name": "tiny-target",
        "flags": ("--max_batch_size", "8"),
        "checkpoint": checkpoint,
        "output": output,
        "timing_cache": timing_cache_file(folder / "caches", "1.2.1", "l4-24g"),
        "log": folder / "reports" / "tiny-target.log",
        "workers": 1,
        "gpus": 1,
        "version": "1.2.1",
        "image": "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
        "gpu": "l4-24g",
        "sm": 89,
    }
    return BuildJob(**values | changes)


ARTIFACT = "build-0123456789abcdef0123"


def handovers(folder: Path) -> list[RemoteEngine]:
    target = job_in(folder)
    draft = job_in(
        folder, name="tiny-draft", flags=("--max_batch_size", "8", "--use_paged_context_fmha", "enable")
    )
    return [RemoteEngine("build.target", ARTIFACT, target), RemoteEngine("build.draft", "build-aa", draft)]


def script_in(folder: Path, engines: Sequence[RemoteEngine]) -> Path:
    return write_engine_script(folder / "tiny-build.sh", "tiny", "tiny.yaml --set 'a=b c'", engines).path


def run_script(script: Path, *, code: int = 0, **environment: str) -> str:
    """Its output."""
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


_PROGRAM = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder = Path({folder!r})
play = json.loads((folder / "play.json").read_text())
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
cache = Path(words["--input_timing_cache"])
with (folder / "calls.jsonl").open("a") as calls:
    call = {{"argv": sys.argv[1:], "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}
    calls.write(json.dumps(call | {{"cache": cache.read_text() if cache.exists() else None}}) + "\\n")
if play.get("child_s"):
    sleep = "import time; time.sleep(%s)" % play["child_s"]
    child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    (folder / "child.pid").write_text(str(child.pid))
for line in play["lines"]:
    print(line, flush=True)
(folder / "begun").touch()
if play.get("dies_of_cache") and cache.exists():
    print("[TRT] [E] 2: [caskBuilderUtils.cpp::getCaskHandle::408] Error Code 2: Internal Error (Assertion failed)")
    sys.exit(1)
deadline = time.monotonic() + play.get("seconds", 0)
while time.monotonic() < deadline and not (folder / "go").exists():
    time.sleep(0.02)
if play.get("signal"):
    os.kill(os.getpid(), play["signal"])
if play.get("exit_code"):
    sys.exit(play["exit_code"])
output = Path(words["--output_dir"])
output.mkdir(exist_ok=True)
for rank in range(play["ranks"]):
    (output / ("rank%d.engine" % rank)).write_bytes(b"plan")
    print("[11/20/2026-10:00:00] [TRT-LLM] [I] Serializing engine to /o/rank%d.engine..." % rank)
    print("[11/20/2026-10:00:00] [TRT-LLM] [I] Engine serialized. Total time: 00:00:00", flush=True)
(output / "config.json").write_text("{{}}")
Path(words["--output_timing_cache"]).write_text(play.get("cache", "measured"))
"""


class ScriptedBuilder:
    """First on PATH, if there is a `monkeypatch`. What it was called with is in `calls`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        program = self.programs / "trtllm-build"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        if monkeypatch is not None:
            monkeypatch.setenv("PATH", f"{self.programs}{os.pathsep}{os.environ['PATH']}")
        self.play()

    def play(self, *lines: str, ranks: int = 1, **what: Any) -> None:
        """From the next call on."""
        (self.folder / "play.json").write_text(json.dumps({"lines": lines, "ranks": ranks, **what}))

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


DIGEST = "sha256:" + "cd" * 32


class FakeDocker:
    """A stand-in `docker`, first on PATH. What it was called with is in `calls`."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, inside: Path = Path("/usr/bin")
    ) -> None:
        """`inside`: the folder of programs that a container has on its PATH."""
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir(parents=True)
        text = Path(__file__).with_name("docker").read_text()
        program = self.programs / "docker"
        program.write_text(f"#!{sys.executable}\n{text.partition(chr(10))[2]}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.programs}{os.pathsep}{os.environ['PATH']}")
        self._state: dict[str, Any] = {
            "images": {},
            "registry": {},
            "info": {"ServerVersion": "28.3.2", "Runtimes": {"runc": {}, "nvidia": {}}},
            "security": ["name=seccomp,profile=builtin"],
            "down": False,
            "no_gpus": False,
            "site": "",
            "path": f"{inside}{os.pathsep}/usr/bin{os.pathsep}/bin",
        }
        self.set()

    def set(self, **state: Any) -> None:
        """`images`, `registry`: name -> digest or None; `down`, `no_gpus`; `info`, `security`: what `docker info` says;
        `site`: of a container's Python; `server`: paths of the Triton that containers run.
        """
        self._state |= state
        (self.folder / "state.json").write_text(json.dumps(self._state))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def called(self, *words: str) -> list[list[str]]:
        """Calls that begin with these words."""
        return [call for call in self.calls if call[: len(words)] == list(words)]

    @property
    def run(self) -> list[str]:
        """The last `docker run`."""
        return self.called("run")[-1]
