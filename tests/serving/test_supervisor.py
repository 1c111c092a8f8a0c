"""A deployment with its gateway, supervised: whatever dies, stops or hangs is noticed, and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from pipeline.client import Client
from pipeline.errors import PipelineError, ServerError, UserError
from pipeline.frontend.process import CHILD
from pipeline.gateway.http_server import bound_sockets
from pipeline.gateway.settings import GatewaySettings, GatewayStart
from pipeline.keeper import RestartPolicy
from pipeline.progress import Silent
from pipeline.serving.control import ask
from pipeline.serving.gateway_process import GatewayLaunch
from pipeline.serving.health import Ready
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.serve import serve
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import content_digest
from pipeline.triton.running import RunningServer
from tests.support import CHECKPOINTS
from tests.support.served import command_line
from tests.support.waiting import wait_for

WAIT_S = 120.0
NAME = "support"


@dataclass
class Supervised:
    """`serve` in a thread of this process."""

    package: Path
    options: ServeOptions
    hanging: Path  # the model `postprocessing` hangs while this file is there
    ready_file: Path
    stop: threading.Event = field(default_factory=threading.Event)
    failure: PipelineError | None = None

    def run(self, gateway: GatewayLaunch | None) -> None:
        try:
            serve(
                [(self.package, self.options)],
                Silent(),
                self.stop,
                gateway=gateway,
                ready_file=self.ready_file,
            )
        except PipelineError as error:
            self.failure = error

    @property
    def folder(self) -> Path:
        assert self.options.store is not None
        return self.options.store.running

    @property
    def record(self) -> RunningServer:
        record = RunningServer.read(self.folder, NAME)
        assert record is not None, self.failure
        return record

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.failure is not None or self.record.state == "ready", "readiness", WAIT_S)
        assert self.failure is None
        wait_for(self.ready_file.exists, "the ready file", WAIT_S)

    def processes(self) -> dict[str, int]:
        """Its processes, by what they are."""
        assert self.record.control is not None
        (status,) = ask(self.record.control, "status", timeout_s=WAIT_S)["deployments"].values()
        found = {"gateway": status["pids"]["gateway"][0]}
        for pid in status["pids"]["triton"]:
            line = command_line(pid)
            if "process_guard" in line:
                found["guard"] = pid
            elif "triton_python_backend_stub" in line:
                found[line.partition("/1/model.py")[0].rpartition("/")[2]] = pid
            elif "bin/tritonserver" in line:
                found["tritonserver"] = pid
        return found

    def chat(self) -> str:
        """A greedy answer through the gateway."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "Where is my parcel?"}],
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.record.gateway_url}/v1/chat/completions",
            json.dumps({**body, "max_tokens": 8}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
            return text


@pytest.fixture(scope="module")
def supervised(cpu_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    folder = tmp_path_factory.mktemp("supervised")
    package, hanging = folder / "package", folder / "hang"
    shutil.copytree(cpu_package, package)
    model = package / "model_repository/postprocessing/1/model.py"
    wait = f"        import os, time\n        while os.path.exists({str(hanging)!r}):\n            time.sleep(0.05)\n"
    head, line, rest = model.read_text().partition(
        "    def execute(self, requests: list[Any]) -> list[Any]:\n"
    )
    model.write_text(head + line + wait + rest)
    digest = content_digest(package / "model_repository")
    Deployment.load(package).model_copy(update={"digest": digest}).save(package)
    recipe = folder / "support.yaml"
    source = f"local:{CHECKPOINTS / 'support-target'}"
    limits = {"max_input_tokens": 256, "max_output_tokens": 700, "max_concurrency": 8}
    said = {"name": NAME, "model": {"source": source}, "runtime": {"kind": "cpu"}, "limits": limits}
    recipe.write_text(yaml.safe_dump(said))
    options = ServeOptions(
        Ports.free(),
        store=Store(folder),
        restart=RestartPolicy(max_restarts=100, max_pause_s=0.01),
    )
    made = Supervised(package, options, hanging, folder / "ready.json")
    with bound_sockets("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        start = GatewayStart(
            recipes=(str(recipe),), store=folder, settings=GatewaySettings(port=port),
            sockets=(sockets[0].fileno(),), parent=os.getpid(),
        )  # fmt: skip
        gateway = GatewayLaunch(CHILD, start, sockets, f"http://127.0.0.1:{port}")
        thread = threading.Thread(target=made.run, args=(gateway,))
        thread.start()
        try:
            wait_for(lambda: (folder / "running" / f"{NAME}.json").exists(), "the record", WAIT_S)
            made.wait_until_ready()
            yield made
        finally:
            hanging.unlink(missing_ok=True)
            made.stop.set()
            thread.join()


STUBS = ("tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing")
KILLED = [(kind, signal.SIGKILL) for kind in ("tritonserver", "guard", *STUBS, "gateway")]
STOPPED = [(kind, signal.SIGSTOP) for kind in ("tritonserver", "guard", *STUBS, "gateway")]
QUICK = {("gateway", signal.SIGSTOP)}


@pytest.mark.parametrize(
    ("kind", "number"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in (*KILLED, *STOPPED)],
)
def test_what_dies_or_stops_is_started_again(
    supervised: Supervised, kind: str, number: signal.Signals
) -> None:
    expected, before = supervised.chat(), supervised.record
    component = "gateway" if kind == "gateway" else "triton"
    os.kill(supervised.processes()[kind], number)
    wait_for(lambda: supervised.record.state != "ready", f"notice of {kind}", WAIT_S)
    assert supervised.record.reason
    wait_for(lambda: not supervised.ready_file.exists(), "the ready file's end", WAIT_S)
    supervised.wait_until_ready()
    restarts = dict(before.restarts)
    assert supervised.record.restarts == {**restarts, component: restarts.get(component, 0) + 1}
    assert supervised.record.reason == ""
    assert Ready(**json.loads(supervised.ready_file.read_text())).grpc_url == supervised.record.grpc_url
    assert supervised.chat() == expected


@pytest.mark.servers
def test_a_model_that_hangs_is_noticed_though_others_work(supervised: Supervised) -> None:
    """Clients of the entry model see nothing of it: `postprocessing` is a part of `ensemble` only."""
    restarts = supervised.record.restarts.get("triton", 0)
    supervised.hanging.touch()
    wait_for(lambda: supervised.record.state != "ready", "notice", WAIT_S)
    assert "ensemble has not answered for" in supervised.record.reason
    supervised.hanging.unlink()
    supervised.wait_until_ready()
    assert supervised.record.restarts["triton"] == restarts + 1
    assert (supervised.folder.parent / "logs" / NAME / "triton.log.1").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [700, 30], ids=["long answers", "short answers"])
def test_busy_for_a_minute_is_not_ill(supervised: Supervised, tokens: int) -> None:
    """Three times as many streams as there are places, so that probes wait behind them."""
    before, over, failures = supervised.record, threading.Event(), []

    def stream() -> None:
        with Client(before.grpc_url) as client:
            while not over.is_set():
                try:
                    client.generate("Hello", min_tokens=tokens, max_tokens=tokens)
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=stream) for _ in range(24)]
    for thread in threads:
        thread.start()
    states = set()
    for _ in range(600):
        over.wait(0.1)
        states.add(supervised.record.state)
    over.set()
    for thread in threads:
        thread.join()
    assert (states, failures) == ({"ready"}, [])
    assert supervised.record.restarts == before.restarts


@pytest.mark.slow
def test_a_model_that_hangs_while_others_are_busy_is_noticed(supervised: Supervised) -> None:
    """The engine goes on making steps for clients of the entry model."""
    restarts, over = supervised.record.restarts.get("triton", 0), threading.Event()

    def stream() -> None:
        with Client(supervised.record.grpc_url) as client:
            while not over.is_set():
                try:
                    client.generate("Hello", min_tokens=700, max_tokens=700)
                except Exception:
                    over.wait(0.1)

    threads = [threading.Thread(target=stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        supervised.hanging.touch()
        wait_for(lambda: supervised.record.restarts.get("triton", 0) > restarts, "a restart", WAIT_S)
    finally:
        over.set()
        supervised.hanging.unlink()
        for thread in threads:
            thread.join()
    supervised.wait_until_ready()


def test_a_second_one_of_the_same_name_is_refused(supervised: Supervised) -> None:
    options = replace(supervised.options, ports=Ports.free())
    with pytest.raises(UserError, match=f"support is served already by process {os.getpid()} at "):
        serve([(supervised.package, options)], Silent(), threading.Event())
    assert supervised.record.state == "ready"


def test_a_stop_by_its_socket_ends_everything(supervised: Supervised) -> None:
    """Last: the others share what it ends."""
    processes, control = supervised.processes(), supervised.record.control
    assert control is not None
    assert ask(control, "stop", timeout_s=WAIT_S) == {"stopped": [NAME]}
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes.values())
    left = [path.suffix for path in supervised.folder.iterdir() if path.is_file()]
    assert left == [".lock"]
    assert not supervised.ready_file.exists()
    with pytest.raises(ServerError):
        ask(control, "status")
