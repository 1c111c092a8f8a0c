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
from pipeline.runtimes.tensorrt.executors.remote import RemoteEngine, render


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

_PROGRAM = """#!{python}
import csv, json, os, signal, subprocess, sys, time
from pathlib import Path
folder = Path({folder!r})
state = json.loads((folder / "state.json").read_text())
arguments = sys.argv[1:]
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")

def end(name):
    running = folder / ("container-" + name)
    if running.exists():
        try:
            os.killpg(int(running.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass
        running.unlink(missing_ok=True)

def run(words):
    options = []
    while words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        if not value and name not in ("--rm", "--init"):
            value = words.pop(0)
        options.append((name, value))
    image, command = words[0], words[1:]
    assert image in state["images"] or image.partition("@")[2] in state["images"].values(), image
    of = lambda option: [value for name, value in options if name == option]
    if of("--entrypoint"):
        return subprocess.run([{python!r} if of("--entrypoint")[0] == "python3" else of("--entrypoint")[0], *command],
                              env=os.environ | {{"PYTHONPATH": state["site"]}}).returncode
    if state["no_gpus"]:
        print('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].')
        return 125
    mounts = {{}}
    for text in of("--mount"):
        fields = dict(field.partition("=")[::2] for field in next(csv.reader([text])))
        assert Path(fields["source"]).is_dir(), fields
        mounts[fields["target"]] = fields["source"]
    seen = lambda path: next((path.replace(to, at, 1) for to, at in mounts.items() if path.startswith(to)), path)
    environment = dict(entry.partition("=")[::2] for entry in of("--env")) | {{"PATH": state["path"]}}
    devices = next(csv.reader(of("--gpus")))[0]
    environment["CUDA_VISIBLE_DEVICES"] = devices.removeprefix("device=")
    container = subprocess.Popen([seen(word) for word in command], cwd=seen(of("--workdir")[0]), env=environment,
                                 start_new_session=True)
    name = (of("--name") or ["unnamed"])[0]
    (folder / ("container-" + name)).write_text(str(container.pid))
    signal.signal(signal.SIGTERM, lambda *_: container.terminate())
    try:
        code = container.wait()
        return code if code >= 0 else 128 - code
    finally:
        end(name)

match arguments:
    case ["info", "--format", _]:
        if state["down"]:
            sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
        print(json.dumps(state["security"]))
    case ["image", "inspect", "--format", _, name]:
        print(name.rpartition(":")[0] + "@" + state["images"][name])
    case ["image", "inspect", name]:
        if name not in state["images"]:
            sys.exit("Error response from daemon: No such image: " + name)
        print(json.dumps([{{"RepoDigests": [name.rpartition(":")[0] + "@" + state["images"][name]]}}]))
    case ["pull", name]:
        if name not in state["registry"]:
            sys.exit("Error response from daemon: manifest for " + name + " not found: manifest unknown")
        for layer in range(3):
            print("0123456789a%d: Pulling fs layer" % layer)
        for layer in range(3):
            print("0123456789a%d: Pull complete" % layer, flush=True)
        state["images"][name] = state["registry"][name]
        (folder / "state.json").write_text(json.dumps(state))
    case ["rm", "--force", name]:
        end(name)
    case ["run", *words]:
        sys.exit(run(words))
    case _:
        raise AssertionError(arguments)
"""


class BuilderDocker:
    """First on PATH. What it was called with is in `calls`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, inside: Path) -> None:
        """`inside`: the folder of programs that a container has on its PATH."""
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        program = programs / "docker"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        self._state: dict[str, Any] = {
            "images": {},
            "registry": {},
            "security": ["name=seccomp,profile=builtin"],
            "down": False,
            "no_gpus": False,
            "site": "",
            "path": f"{inside}{os.pathsep}/usr/bin{os.pathsep}/bin",
        }
        self.set()

    def set(self, **state: Any) -> None:
        """`images`, `registry`: name -> digest; `down`, `no_gpus`; `security`; `site`: of a container's Python."""
        self._state |= state
        (self.folder / "state.json").write_text(json.dumps(self._state))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def run(self) -> list[str]:
        """The last `docker run`."""
        return [call for call in self.calls if call[0] == "run"][-1]
