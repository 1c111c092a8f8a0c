"""What the container runs, for real: the embedded Triton with a package for the CPU takes the place of TensorRT-LLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pipeline.client import Client
from pipeline.errors import InvalidInput
from pipeline.serving import health
from pipeline.serving.entrypoint import EntrypointSettings, following, main
from pipeline.serving.log_files import rotate
from pipeline.serving.ports import Ports
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import content_digest
from tests.support.command import Command
from tests.support.served import processes
from tests.support.waiting import wait_for

ENTRYPOINT = [sys.executable, "-m", "pipeline.serving.entrypoint"]


Refusal = Callable[..., str]


def container_environment(package: Path, folder: Path, ports: Ports, **more: str) -> dict[str, str]:
    return {
        "PIPELINE_PACKAGE": str(package),
        "PIPELINE_ADDRESS": "127.0.0.1",
        "PIPELINE_HTTP_PORT": str(ports.http or ""),
        "PIPELINE_GRPC_PORT": str(ports.grpc),
        "PIPELINE_METRICS_PORT": str(ports.metrics),
        "PIPELINE_READY_FILE": str(folder / "run" / "ready.json"),
        "PIPELINE_ALLOWED_HOSTS": "triton,other",
        "TMPDIR": str(folder),
        **more,
    }


class Container:
    """The entrypoint as a process, with the environment that a container has."""

    def __init__(self, package: Path, folder: Path, **more: str) -> None:
        self.ports = Ports.free(http=True)
        self.environment = container_environment(package, folder, self.ports, **more)
        self.ready_file = Path(self.environment["PIPELINE_READY_FILE"])
        self.command = Command(ENTRYPOINT, folder / "log", self.environment)

    @property
    def healthy(self) -> bool:
        """What HEALTHCHECK finds."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(health.FILE_VARIABLE, str(self.ready_file))
            return health.main([]) == 0

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.ready_file.exists() or self.command.process.poll() is not None, "readiness", 60)
        assert self.ready_file.exists(), self.command.said


@pytest.mark.servers
def test_ready_after_the_warm_up_and_gone_after_sigterm(cpu_package: Path, tmp_path: Path) -> None:
    container = Container(cpu_package, tmp_path)
    with container.command as command:
        assert not container.healthy
        assert not container.ready_file.exists()
        container.wait_until_ready()
        assert container.healthy
        readiness = [sys.executable, "-m", "pipeline.serving.health"]
        assert subprocess.run(readiness, env=os.environ | container.environment, check=False).returncode == 0
        assert json.loads(container.ready_file.read_text())["entry_model"] == "tensorrt_llm_bls"
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{container.ports.metrics}/metrics", timeout=5)
        with metrics:
            counted = [
                line for line in metrics.read().decode().splitlines()
                if line.startswith("nv_inference_request_success{") and 'model="tensorrt_llm_bls"' in line
            ]  # fmt: skip
        assert sum(float(line.split()[-1]) for line in counted) >= 6  # one answer, and five of the warm-up
        with Client(f"127.0.0.1:{container.ports.grpc}") as client:
            assert client.generate("Hello", max_tokens=4).text is not None
        ready = f"http://127.0.0.1:{container.ports.http}/v2/health/ready"
        with urllib.request.urlopen(ready, timeout=5) as answer:
            assert answer.status == 200
        triton = urllib.request.Request(ready, headers={"Host": "triton:8000"})
        with urllib.request.urlopen(triton, timeout=5) as answer:
            assert answer.status == 200
        command.wait_for("Started GRPCInferenceService")  # the server's own log is the container's
        assert command.stop() == 0
        assert "stopped Triton for support" in command.said
    assert not container.ready_file.exists()
    assert not container.healthy
    wait_for(lambda: not processes(str(tmp_path)), "the end of all processes")


@pytest.mark.servers
def test_a_server_that_dies_is_started_again_and_given_up_at_last(cpu_package: Path, tmp_path: Path) -> None:
    def kill_triton() -> None:
        servers = processes("bin/tritonserver", str(tmp_path)).items()
        (server,) = (number for number, line in servers if "guard.py" not in line)
        os.kill(server, signal.SIGKILL)

    container = Container(cpu_package, tmp_path, PIPELINE_MAX_RESTARTS="1")
    with container.command as command:
        container.wait_until_ready()
        kill_triton()
        command.wait_for("Triton is ready again")
        wait_for(container.ready_file.exists, "readiness")
        wait_for(lambda: command.said.count("Started GRPCInferenceService") == 2, "the second log")
        kill_triton()
        assert command.process.wait(60) == 1
        assert "gave up on Triton: it failed 2 times within 300 s" in command.said
        # Its models die with it, and may be seen first.
        assert re.search(
            "Triton for support (was killed by SIGKILL|is ill: process .* is gone)", command.said
        )
    assert not container.ready_file.exists()
    wait_for(lambda: not processes(str(tmp_path)), "the end of all processes")


@pytest.mark.servers
def test_sigterm_while_it_starts_is_not_waited_with(cpu_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(cpu_package, package)
    model = package / "model_repository/postprocessing/1/model.py"
    model.write_text(
        "import time\ntime.sleep(600)\n" + model.read_text().replace("from __future__", "# from __future__")
    )
    digest = content_digest(package / "model_repository")
    Deployment.load(package).model_copy(update={"digest": digest}).save(package)
    with Container(package, tmp_path).command as command:
        command.wait_for("starting Triton for support")
        time.sleep(1)
        start = time.monotonic()
        assert command.stop() == 0
        assert time.monotonic() - start < 100
    wait_for(lambda: not processes(str(tmp_path / "pipeline-")), "the end of all processes")


@pytest.mark.slow
def test_a_model_that_dies_makes_it_unready_and_then_end(cpu_package: Path, tmp_path: Path) -> None:
    container = Container(cpu_package, tmp_path, PIPELINE_HEALTH_INTERVAL_S="0.5")
    with container.command:
        container.wait_until_ready()
        (stub,) = processes("triton_python_backend_stub", str(tmp_path), "tensorrt_llm_bls/1")
        os.kill(stub, signal.SIGKILL)
        wait_for(lambda: not container.ready_file.exists(), "unreadiness", 60)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusal]:
    """Starts what is not served, in this process. Returns what it says."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def start(package: Path, folder: Path, **more: str) -> str:
        for name, value in container_environment(package, folder, Ports.free(), **more).items():
            monkeypatch.setenv(name, value)
        assert main([]) == 2
        said = capsys.readouterr()
        assert "starting Triton" not in said.out + said.err
        return said.err

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_machine_that_does_not_fit_is_refused(gpu_package: Path, tmp_path: Path, refusal: Refusal) -> None:
    said = refusal(gpu_package, tmp_path)
    assert "support cannot be served here" in said
    assert ": there is no nvidia-smi" in said
    assert "TensorRT-LLM is not installed in this machine" in said
    assert "there is no /opt/tritonserver/bin/tritonserver" in said


def test_a_package_that_is_not_signed_is_refused(cpu_package: Path, tmp_path: Path, refusal: Refusal) -> None:
    """Where a public key is configured, before any of it runs."""
    key = Ed25519PrivateKey.generate().public_key()
    file = tmp_path / "packages.pem"
    file.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert f"$PIPELINE_VERIFY_KEY ({file}) asks for it" in refusal(
        cpu_package, tmp_path, PIPELINE_VERIFY_KEY=str(file)
    )


def test_no_package_and_a_port_that_is_taken_are_refused(
    cpu_package: Path, tmp_path: Path, refusal: Refusal
) -> None:
    assert "no deployment.json" in refusal(tmp_path / "nothing", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal(cpu_package, tmp_path, PIPELINE_GRPC_PORT=port)
    assert f"gRPC port 127.0.0.1:{port} cannot be used: Address already in use" in said


def test_another_command_is_run_instead() -> None:
    done = subprocess.run(
        [*ENTRYPOINT, "sh", "-c", "echo $0; exit 7"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "sh\n")


def test_settings() -> None:
    plain = EntrypointSettings.read({})
    assert str(plain.package) == "/deployment"
    assert plain.address == "0.0.0.0"
    options = plain.options(Path("log"), None)
    assert options.ports == Ports(None, 8001, 8002)
    assert options.triton.start_timeout_s is None
    with pytest.raises(InvalidInput) as caught:
        EntrypointSettings.read({"PIPELINE_HTTP_PORT": "x", "PIPELINE_START_TIMEOUT_S": "-1"})
    assert "PIPELINE_HTTP_PORT = x" in str(caught.value)
    assert "PIPELINE_START_TIMEOUT_S = -1" in str(caught.value)


def test_the_log_of_a_container_goes_on_after_a_restart(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Triton's log is another file then, and shorter than the one before."""
    log = tmp_path / "triton.log"
    with following(log):
        log.write_text("a long line of the first start\n")
        wait_for(lambda: b"first" in capsysbinary.readouterr().out, "the first line")
        rotate(log)
        log.write_text("second \x1b[2J\n")
    assert capsysbinary.readouterr().out == b"second \\x1b[2J\n"
