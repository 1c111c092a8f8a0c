"""Servers that do not start, die, or fall ill: a clear message soon, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ServerError
from pipeline.machine import process_guard
from pipeline.serving.launch_embedded import Installation
from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from tests.support.served import processes
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers


@pytest.fixture
def copy(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that may be harmed; no process of its server may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the stage, which all processes name, lies there
    path = tmp_path / "package"
    shutil.copytree(package, path)
    yield path
    wait_for(lambda: not processes(str(tmp_path)), "the end of all processes")


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_config_that_triton_cannot_read(copy: Path) -> None:
    replace_in(copy / "model_repository/preprocessing/config.pbtxt", "TYPE_STRING", "TYPE_NONSENSE")
    with pytest.raises(
        ServerError, match=r"exit code 1[\s\S]*'preprocessing': failed to read text proto[\s\S]*log: "
    ):
        TritonServer.of_package(copy, log_file=copy / "log").start()


END_ID = '"end_id" value { string_value: '


@pytest.mark.parametrize(
    ("model", "file", "old", "new", "message"),
    [
        ("tensorrt_llm_bls", "1/engine_call.py", "class EngineCall", "klass EngineCall",
         r"SyntaxError: invalid syntax \(engine_call"),
        pytest.param("preprocessing", "config.pbtxt", f'{END_ID}"5"', f'{END_ID}"x"',
                     "end_id = x: must be a whole number", marks=pytest.mark.slow),
        pytest.param("postprocessing", "config.pbtxt", '"1/tokenizer"', '"1/gone"',
                     "No such file or directory", marks=pytest.mark.slow),
        ("tensorrt_llm", "1/target/engine.json", '"vocab_size"', '"vocabulary"', "vocab_size"),
    ],
    ids=["source", "parameter", "tokenizer", "engine"],
)  # fmt: skip
def test_a_model_that_does_not_load(
    copy: Path, model: str, file: str, old: str, new: str, message: str
) -> None:
    target = copy / "model_repository" / model / file
    shutil.copyfile(target, copy / "own")  # the engine's files are hard links
    (copy / "own").replace(target)
    replace_in(target, old, new)
    start = time.monotonic()
    with pytest.raises(ServerError, match=message) as caught:
        TritonServer.of_package(copy, log_file=copy / "log").start()
    assert time.monotonic() - start < 100
    assert len(str(caught.value).splitlines()) <= 6
    assert "Timeout" not in str(caught.value)


def test_a_port_that_is_taken(copy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = Ports(None, taken.getsockname()[1], Ports.free().metrics)
        with pytest.raises(ServerError, match=r"gRPC port .* cannot be used: Address already in use"):
            TritonServer.of_package(copy, ports=ports, log_file=copy / "log").start()


def test_a_port_that_is_lost_between_choice_and_start_is_chosen_again(copy: Path) -> None:
    server = TritonServer.of_package(copy, ports=Ports.free(), log_file=copy / "log")
    first = server.ports
    assert first.grpc is not None
    with socket.create_server(("127.0.0.1", first.grpc)), server:
        assert server.ports.grpc not in (None, first.grpc)
        assert server.check_health().text is not None


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["gRPC", "HTTP", "metrics"])
def test_a_port_that_another_process_takes_while_triton_loads_is_not_waited_for(
    copy: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    server = TritonServer.of_package(copy, ports=Ports.free(http=True), log_file=copy / "log")
    first = server.ports
    monkeypatch.setattr(Ports, "faults", lambda *_: [])
    with socket.create_server(("127.0.0.1", first.open[protocol])), server:
        assert server.ports.open[protocol] != first.open[protocol]
        assert server.check_health().text is not None


@pytest.mark.slow
def test_a_start_that_aborts_is_tried_once_more(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Installation.find()
    root = tmp_path / "wheel"
    (root / "bin").mkdir(parents=True)
    for part in ("backends", "caches", "python_backend_stubs"):
        (root / part).symlink_to(real.root / part)
    count = tmp_path / "starts"
    binary = root / "bin" / "tritonserver"
    binary.write_text(
        f'#!/bin/sh\necho start >> {count}\n[ $(wc -l < {count}) -gt 1 ] || kill -ABRT $$\nexec {real.binary} "$@"\n'
    )
    binary.chmod(0o755)
    monkeypatch.setattr(Installation, "find", lambda: Installation(root, real.libraries, real.python))
    with TritonServer.of_package(copy, log_file=copy / "log") as server:
        assert server.running
    assert count.read_text().split() == ["start", "start"]
    binary.write_text("#!/bin/sh\nkill -ABRT $$\n")
    with pytest.raises(ServerError, match="exit code 134 while it started"):
        TritonServer.of_package(copy, log_file=copy / "log").start()


def test_a_start_that_takes_too_long(copy: Path) -> None:
    model = copy / "model_repository/postprocessing/1/model.py"
    replace_in(
        model, "class TritonPythonModel", "import time\n\ntime.sleep(1000)\n\n\nclass TritonPythonModel"
    )
    start = time.monotonic()
    with pytest.raises(ServerError, match="not ready within 4 s"):
        TritonServer.of_package(copy, log_file=copy / "log", start_deadline_s=4).start()
    assert time.monotonic() - start < 100


def run(of: Path, *words: str) -> int:
    """The process of a package whose command line has these words."""
    return next(iter(processes(str(of.parent), *words)))


def test_a_model_whose_process_is_killed_is_seen_by_inference_only(copy: Path) -> None:
    with TritonServer.of_package(copy, log_file=copy / "log") as server:
        os.kill(run(copy, "stub", "tensorrt_llm_bls/1"), signal.SIGKILL)
        time.sleep(0.5)
        # Once in a while Triton 24.10 ends with it: its backend throws what nobody catches.
        with pytest.raises(
            ServerError, match=r"tensorrt_llm_bls (does not answer|gave no answer)|Triton is not running"
        ):
            server.check_health(timeout_s=5)


def test_a_server_that_is_killed_is_seen(copy: Path) -> None:
    with TritonServer.of_package(copy, log_file=copy / "log") as server:
        os.kill(
            min(set(processes(str(copy.parent))) - {run(copy, "guard.py")}), signal.SIGKILL
        )  # its first child
        assert server.wait() == 128 + signal.SIGKILL
        with pytest.raises(ServerError, match="Triton is not running"):
            server.check_health()


def test_stopping_leaves_nothing(copy: Path, tmp_path: Path) -> None:
    server = TritonServer.of_package(copy, log_file=copy / "log")
    server.start()
    assert server.running
    assert list(tmp_path.glob("pipeline-*/start-*"))
    assert server._guarded is not None
    mark = server._guarded.mark  # others may run servers at the same time
    assert list(Path("/dev/shm").glob(f"{mark}*"))
    server.stop()
    assert not server.running
    assert not list(tmp_path.glob("pipeline-*/start-*"))
    assert not list(Path("/dev/shm").glob(f"{mark}*"))
    assert not process_guard.marked(mark)
    server.stop()  # once more is no fault


_START = """
import sys, time
from pathlib import Path
from pipeline.serving.server import TritonServer
server = TritonServer.of_package(Path(sys.argv[1]), log_file=Path(sys.argv[1]) / "log")
server.start()
print("ready", flush=True)
time.sleep(600)
"""


def test_the_server_goes_when_its_owner_is_killed(copy: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _START, str(copy)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(processes(str(tmp_path))) > 4
        owner.kill()
    wait_for(lambda: not processes(str(tmp_path)), "the end of all processes")
    assert not list(tmp_path.glob("pipeline-*"))


@pytest.mark.slow
def test_the_server_goes_when_its_guard_is_killed(copy: Path, tmp_path: Path) -> None:
    server = TritonServer.of_package(copy, log_file=copy / "log")
    server.start()
    os.kill(run(copy, "guard.py"), signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    server.stop()
    wait_for(lambda: not processes(str(tmp_path)), "the end of all processes")
    assert not list(tmp_path.glob("pipeline-*/start-*"))
