"""Standard output and standard error that cannot be written neither end nor hold up a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.dropping_output import DroppingFile

# Writes 2 MB to both streams by print, click and logging, and ends as if nothing were wrong.
CHATTY = """
import logging, sys
import click
from pipeline.dropping_output import drop_unwritable_output
drop_unwritable_output()
logging.basicConfig(handlers=[logging.StreamHandler(sys.stderr)])
for _ in range(200):
    print("x" * 2000)
    click.echo("y" * 2000)
    print("z" * 2000, file=sys.stderr, flush=True)
    logging.getLogger().error("w" * 2000)
sys.stdout.buffer.write(b"end")
sys.stdout.flush()
sys.exit(7)
"""


def chatty(to: Any) -> int:
    return subprocess.run([sys.executable, "-c", CHATTY], stdout=to, stderr=to, check=False).returncode


def test_a_full_disk_ends_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        assert chatty(full) == 7


def test_a_closed_pipe_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        assert chatty(pipe) == 7


def test_a_reader_that_reads_nothing_holds_nothing_up() -> None:
    """Without, it would wait for ever."""
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb") as pipe:
        assert chatty(pipe) == 7


def test_closed_streams_end_nothing() -> None:
    code = "from pipeline.dropping_output import *\ndrop_unwritable_output()\nraise SystemExit(7)"
    words = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(words, check=False).returncode == 7


def test_what_can_be_written_is_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with file.open("wb") as out:
        assert chatty(out) == 7
    text = file.read_bytes()
    assert {letter: text.count(letter.encode()) for letter in "xyzw"} == dict.fromkeys("xyzw", 400_000)
    assert text.endswith(b"end")


def test_it_goes_on_when_the_reader_does() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    with os.fdopen(read, "rb", buffering=0) as reader, os.fdopen(write, "wb", buffering=0) as writer:
        out = DroppingFile(writer.fileno())
        for _ in range(64):
            assert out.write(b"." * 4096) == 4096
        assert out.write(b"lost") == 4
        while reader.read(65536):
            pass
        assert out.write(b"kept") == 4
        assert reader.read(65536) == b"kept"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_streams_of_tests_stay(name: str) -> None:
    from pipeline.dropping_output import drop_unwritable_output

    before = getattr(sys, name)
    drop_unwritable_output()
    assert getattr(sys, name) is before
