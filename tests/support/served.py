"""Packages to serve in tests: the small pair of the repository, or random weights behind any tokenizer."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import psutil

from pipeline.client import Stats
from pipeline.progress import Silent
from pipeline.runtimes import Engines, cpu
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.runtimes.cpu.model_repository import TOKENS_PER_BLOCK, CpuSettings, package_cpu
from pipeline.serving.server import TritonServer
from tests.support import CHECKPOINTS
from tests.support.adapters import make_adapter
from tests.support.models import make_checkpoint

ENGINE = Path(cpu.__file__).parent / "engine"
SETTINGS = CpuSettings(
    max_input_tokens=256, max_output_tokens=700, max_concurrency=8, threads=1, guided_decoding=True,
    stats_check_period_ms=50,
)  # fmt: skip


def package_support_pair(into: Path, *, draft: bool = False, settings: CpuSettings = SETTINGS) -> Path:
    """The support target, unquantized; a folder with deployment.json and model_repository/."""
    for role in ("target", "draft") if draft else ("target",):
        _make_ir(f"support-{role}", into / role)
    sources = Engines(into / "target", into / "draft" if draft else None, CHECKPOINTS / "support-target")
    package_cpu("support", settings, sources, into / "package", Silent())
    return into / "package"


# Checkpoint -> where this process has built it.
_BUILT: dict[str, Path] = {}


def _make_ir(checkpoint: str, into: Path) -> None:
    """Build a checkpoint once in this process; later its files are linked, so they are not to be changed."""
    if checkpoint in _BUILT:
        shutil.copytree(_BUILT[checkpoint], into, copy_function=os.link)
    else:
        build_ir(CHECKPOINTS / checkpoint, into, progress=Silent())
        _BUILT[checkpoint] = into


def package_adapted(into: Path) -> Path:
    """The support target with adapters "tone" and "sql", and its draft."""
    build_ir(CHECKPOINTS / "support-target", into / "target", adapters=True, progress=Silent())
    _make_ir("support-draft", into / "draft")
    base = CHECKPOINTS / "support-target"
    adapters = {
        "tone": make_adapter(into / "tone", base, rank=8, seed=1, strength=0.3),
        "sql": make_adapter(into / "sql", base, targets=("q_proj", "v_proj"), seed=2, strength=0.5),
    }
    settings = replace(SETTINGS, adapters=tuple(adapters), max_draft_tokens=4)
    sources = Engines(into / "target", into / "draft", base, adapters)
    package_cpu("adapted", settings, sources, into / "package", Silent())
    return into / "package"


def package_random(into: Path, tokenizer_json: str, vocab: int, *, settings: CpuSettings = SETTINGS) -> Path:
    """Random weights with a tokenizer of one's own, whose tokens 0 and 1 begin and end a text."""
    checkpoint = make_checkpoint(
        into / "checkpoint", vocab=vocab, hidden=64, heads=2, kv_heads=1, head_dim=32
    )
    (checkpoint / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (checkpoint / "tokenizer_config.json").write_text("{}")
    build_ir(checkpoint, into / "target", progress=Silent())
    sources = Engines(into / "target", None, checkpoint)
    package_cpu("random", settings, sources, into / "package", Silent())
    return into / "package"


def whole_blocks(stats: Stats) -> int:
    """Tokens in whole blocks of a prompt, all of which was computed before: its last is always computed again."""
    assert stats.input_tokens is not None
    return (stats.input_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def command_line(pid: int) -> str:
    """Command line of a process; empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def front_pid(server: TritonServer) -> int:
    """Process id of a server's front, 0 while none runs."""
    return next((pid for pid in server.pids if "pipeline.gateway.front" in command_line(pid)), 0)


def processes(*words: str) -> dict[int, str]:
    """Processes whose command line has all words: number -> command line."""
    commands = {pid: command_line(pid) for pid in psutil.pids()}
    return {pid: command for pid, command in commands.items() if all(word in command for word in words)}
