"""What a server holds while it runs is for its own user: shared memory, sockets, its stage, its log."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.client import Client
from pipeline.machine import process_guard
from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from tests.support.other_user import readable_by_nobody, require_root

pytestmark = pytest.mark.servers


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that every user can enter, with the umask that hides nothing."""
    made = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    made.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    before = os.umask(0)
    yield made
    os.umask(before)
    shutil.rmtree(made)


def held(server: TritonServer, folder: Path) -> list[Path]:
    assert server._guarded is not None
    return [folder, *Path("/dev/shm").glob(f"{server._guarded.mark}*")]


def test_what_a_server_makes_is_for_its_owner(package: Path, folder: Path) -> None:
    with TritonServer.of_package(package, ports=Ports.free(http=True)) as server:
        with Client(server.target) as client:
            client.generate("Hello", max_tokens=3)
        _, *regions = held(server, folder)
        assert len(regions) >= 4
        made = [*regions, server.log_file, *(path for path in folder.iterdir())]
        assert not [str(path) for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not list(folder.iterdir())


def test_another_user_reads_nothing_of_it(package: Path, folder: Path) -> None:
    require_root()
    (folder / "open").write_text("what a user of the machine can read")
    with TritonServer.of_package(package, ports=Ports.free(http=True)) as server:
        with Client(server.target) as client:
            client.generate("Hello", max_tokens=3)
        assert readable_by_nobody(held(server, folder)) == [str(folder / "open")]
    (folder / "open").unlink()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_against_opening_files(machine: str) -> None:
    """Eight instructions; what it does to a real server is above."""
    assert len(process_guard._fchmod_filter(machine)) == 8 * 8
    assert process_guard._fchmod_filter("other") == b""
