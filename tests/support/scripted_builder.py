"""A `trtllm-build` that does what a test writes down: prints, waits, leaves files, fails. It knows nothing of engines.

It stands in for the process. The stand-in that obeys upstream's contract is `trtllm_build`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

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
