"""Ctrl-C, once and twice, and a reader that has enough: no traceback, and nothing that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import Command

PIPELINE = [sys.executable, "-m", "pipeline.cli"]
# The end of what a command does after the first Ctrl-C takes forever.
SLOW_END = """
import time, click
from pipeline.cli import main
def work():
    try:
        print("working", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("ending", flush=True)
        time.sleep(600)
main.cli.add_command(click.Command("work", callback=work))
main.COMMANDS["work"] = ""
main._Pipeline.get_command = click.Group.get_command
import sys
sys.argv[1:] = ["work"]
main.program()
"""
SLOW_SERVER = """
import time
from pipeline.serving.serve import stop_on_signals
stop = stop_on_signals()
print("working", flush=True)
stop.wait()
print("ending", flush=True)
time.sleep(600)
"""
SLOW_LOAD = """
import asyncio
from pipeline.bench.run import _interrupts
async def load():
    stop = asyncio.Event()
    with _interrupts(stop):
        print("working", flush=True)
        await stop.wait()
        print("ending", flush=True)
        await asyncio.sleep(600)
asyncio.run(load())
"""


@pytest.mark.parametrize("code", [SLOW_END, SLOW_SERVER, SLOW_LOAD], ids=["any command", "serve", "bench"])
def test_a_second_ctrl_c_ends_at_once(code: str, tmp_path: Path) -> None:
    with Command([sys.executable, "-c", code], tmp_path / "log", {}) as command:
        command.wait_for("working")
        command.process.send_signal(signal.SIGINT)
        command.wait_for("ending")
        assert command.stop(signal.SIGINT) == -signal.SIGINT
    assert command.said == "working\nending\n"


def test_ctrl_c_while_importing_shows_no_traceback(tmp_path: Path) -> None:
    slow = "print('importing', flush=True)\nimport time\ntime.sleep(600)\n"
    (tmp_path / "click").mkdir()
    (tmp_path / "click/__init__.py").write_text(slow)
    root = Path(__file__).resolve().parents[2]
    environment = {"PYTHONPATH": f"{tmp_path}:{root}"}
    with Command([*PIPELINE, "rules"], tmp_path / "log", environment) as command:
        command.wait_for("importing")
        assert command.stop(signal.SIGINT) == -signal.SIGINT
    assert command.said == "importing\n"


def test_the_first_ctrl_c_ends_a_command_with_130(tmp_path: Path) -> None:
    code = SLOW_END.replace("except KeyboardInterrupt", "except ValueError")
    with Command([sys.executable, "-c", code], tmp_path / "log", {}) as command:
        command.wait_for("working")
        assert command.stop(signal.SIGINT) == 130
    assert command.said.strip() == "working"


@pytest.mark.parametrize("words", [("rules", "--json"), ("--help",)])
def test_a_reader_that_leaves_ends_a_command_quietly(words: tuple[str, ...]) -> None:
    """As `pipeline … | head` does; the reader is gone before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [*PIPELINE, *words], stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
