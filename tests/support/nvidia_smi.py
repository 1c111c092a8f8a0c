"""A stand-in `nvidia-smi` on PATH, which answers our query with GPUs of a test's choice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_PROGRAM = """#!{python}
import sys
assert sys.argv[1] == "--query-gpu=index,uuid,name,compute_cap,memory.total,memory.free,driver_version", sys.argv
assert sys.argv[2] == "--format=csv,noheader,nounits", sys.argv
print({text!r})
sys.exit({code})
"""


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    """First on PATH from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, text=text, code=code))
    program.chmod(0o755)
    if str(folder) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def line(
    index: int = 0,
    name: str = "NVIDIA H100 80GB HBM3",
    capability: str = "9.0",
    total: int = 81559,
    free: int = 81000,
    driver: str = "590.44.01",
) -> str:
    """What nvidia-smi prints of one GPU."""
    return f"{index}, GPU-{index}abc, {name}, {capability}, {total}, {free}, {driver}"
