"""A `docker` for builders: writes down how it is called, and runs "containers" as processes of this machine.

A container is no child of the client, as with Docker: it has a session and an environment of its own, outlives a client
that is killed, and ends with `docker rm --force`. It sees the paths that are mounted for it, by replacing them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

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
