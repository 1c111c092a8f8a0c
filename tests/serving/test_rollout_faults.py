"""Rollouts that fail, are cancelled, or meet a restart: by a real supervisor, of Tritons that only pretend to start."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import ServerError, UserError
from pipeline.keeper import HealthIssue, RestartPolicy, StartCancelled
from pipeline.progress import Progress, Silent
from pipeline.serving import rollout
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer, ask
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.rollouts import Rollouts
from pipeline.serving.supervisor import Supervisor
from pipeline.triton.running import RunningServer
from tests.support.waiting import wait_for


class StandIn:
    """A Triton that is ready when its gate is open."""

    kind, title = "triton", "Triton"
    pids = ()

    def __init__(self, package: Path, events: list[str], options: ServeOptions | None = None) -> None:
        self.package, self.events, self.name = package, events, "tiny"
        self.options = options or ServeOptions(ports=Ports(1, 2, 3), recipe=("tiny",))
        self.gate, self.fails, self.ill = threading.Event(), "", ""
        self.gate.set()
        ports = self.options.ports
        self.server = SimpleNamespace(
            ports=ports, grpc_url=f"127.0.0.1:{ports.grpc}", target=f"127.0.0.1:{ports.grpc}", grpc_socket="",
            http_url="", metrics_url="http://127.0.0.1:9/metrics",
            entry_model="bls", log_file=package / "triton.log", running=False, deployment=None,
        )  # fmt: skip

    @property
    def addresses(self) -> dict[str, str]:
        server = self.server
        return {"grpc_url": server.grpc_url, "http_url": server.http_url, "metrics_url": server.metrics_url}

    def start(self, stop: threading.Event) -> None:
        self.events.append(f"start {self.package.name}")
        while not self.gate.wait(0.01):
            if stop.is_set():
                raise StartCancelled("told to stop")
        if self.fails:
            raise ServerError(self.fails)
        self.ill, self.server.running = "", True

    def check(self) -> HealthIssue | None:
        return HealthIssue("fault", self.ill) if self.ill else None

    def stop(self, *, at_once: bool) -> None:
        if self.server.running or not at_once:
            self.events.append(f"stop {self.package.name}")
        self.server.running = False


class House:
    """A supervisor of one stand-in, and packages that it can be exchanged for."""

    def __init__(self, folder: Path, stack: ExitStack, gateway_url: str = "") -> None:
        self.folder, self.events = folder / "running", list[str]()
        self.packages = {name: self._package(folder / name) for name in ("old", "new", "newer")}
        self.made: dict[str, StandIn] = {"old": StandIn(self.packages["old"], self.events)}
        self.scripts: dict[str, str] = {}  # package -> what its start fails with, or "waits"
        self.old, self.stop = self.made["old"], threading.Event()
        record = RunningServer.of(
            self.old.addresses, self.old.package, state="starting", gateway_url=gateway_url, recipe=("tiny",)
        )
        announcement = Announcement(self.folder, "tiny", record, ("triton",))
        announcement.claim(Silent())
        policy = RestartPolicy(max_restarts=3)
        self.supervisor = Supervisor(
            {"tiny": (self.old, announcement)}, None, {"tiny": policy}, Silent(), self.stop
        )
        Rollouts(self.supervisor, self._make, Silent())
        self.control = stack.enter_context(ControlServer(self.folder / "tiny.sock", self.supervisor.handlers))
        self.threads = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(self.stop.set)
        self.running = self.threads.submit(self.supervisor.run, lambda: None)
        self.wait_for_state("ready")

    def _package(self, path: Path) -> Path:
        path.mkdir()
        return path

    def _make(self, package: Path, options: ServeOptions, _: Progress) -> Any:
        made = self.made[package.name] = StandIn(package, self.events, options)
        match self.scripts.get(package.name, ""):
            case "waits":
                made.gate.clear()
            case fails:
                made.fails = fails
        return made

    @property
    def record(self) -> RunningServer:
        record = RunningServer.read(self.folder, "tiny")
        assert record is not None
        return record

    def wait_for_state(self, state: str) -> None:
        wait_for(lambda: self.record.state == state, state)

    def ask(self, do: str, package: str = "", **more: Any) -> dict[str, Any]:
        named = {"package": str(self.packages[package])} if package else {}
        return ask(self.control.path, do, name="tiny", **named, **more)

    def begin(self, package: str, **more: Any) -> Future[dict[str, Any]]:
        """A rollout to a package whose start waits; it has begun."""
        self.scripts[package] = "waits"
        asked = self.threads.submit(self.ask, "rollout", package, **more)
        wait_for(lambda: f"start {package}" in self.events, "the start began")
        return asked


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_GRACE_S", "_IDLE_S", "_POLL_S"):
        monkeypatch.setattr(rollout, name, 0.05)
    monkeypatch.setattr(rollout, "check_package", lambda *_: None)


NONSENSE: list[Any] = [
    None, True, -1, 1e400, 10**30, "", "tiny", "/", "/\0", "\ud800", "x" * 5000, [], [1], ["a", None], {},
    {"a": {"b": []}},
]  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path, stack)


def test_there_and_back(house: House) -> None:
    house.ask("rollout", "new", recipe=["other"], settings={"name": "tiny"})
    assert house.events == ["start old", "start new", "stop old"]
    record = house.record
    assert (record.deployment.parent.name, record.state) == ("new", "ready")
    assert (record.recipe, record.settings) == (("other",), {"name": "tiny"})
    assert house.ask("rollback")["package"] == str(house.packages["old"])
    assert (house.record.recipe, house.record.previous) == (("tiny",), house.packages["new"])


def test_what_fails_before_the_switch_leaves_the_old_one_alone(house: House) -> None:
    before = house.record
    house.scripts["new"] = "Triton ended with exit code 1"
    with pytest.raises(ServerError, match="exit code 1"):
        house.ask("rollout", "new")
    with pytest.raises(UserError, match="so there is none to go back to"):
        house.ask("rollback")
    with pytest.raises(UserError, match=r"is served from .* already"):
        house.ask("rollout", "old")
    with pytest.raises(UserError, match="is not served by this supervisor, which serves tiny"):
        ask(house.control.path, "rollout", name="other", package=str(house.packages["new"]))
    assert house.record == before
    assert house.events == ["start old", "start new"]


def test_one_at_a_time_and_cancelled(house: House) -> None:
    before, first = house.record, house.begin("new")
    with pytest.raises(UserError, match=r"a rollout to .*/new is under way"):
        house.ask("rollout", "newer")
    assert house.ask("cancel_rollout") == {"name": "tiny", "package": str(house.packages["old"])}
    with pytest.raises(ServerError, match="was cancelled"):
        first.result(20)
    with pytest.raises(UserError, match="no rollout is under way"):
        house.ask("cancel_rollout")
    assert (house.record, house.old.server.running) == (before, True)
    house.ask("rollout", "newer")
    assert house.record.deployment.parent.name == "newer"


def test_whoever_asked_may_leave(house: House) -> None:
    """The rollout goes on without the command that asked for it."""
    house.scripts["new"] = "waits"
    with pytest.raises(ServerError, match="does not answer"):
        house.ask("rollout", "new", timeout_s=0.2)
    wait_for(lambda: "new" in house.made, "the start began")
    house.made["new"].gate.set()
    wait_for(lambda: house.record.deployment.parent.name == "new", "the switch")
    wait_for(lambda: house.events[-1] == "stop old", "the old one ended")


def test_a_deployment_that_is_being_restarted_is_exchanged(house: House) -> None:
    house.old.gate.clear()
    house.old.ill = "its engine died"
    house.wait_for_state("restarting")
    house.ask("rollout", "new")
    assert (house.record.state, house.record.deployment.parent.name) == ("ready", "new")
    house.made["new"].ill = "its engine died, too"
    wait_for(lambda: house.events.count("start new") == 2, "the new one is supervised")
    house.wait_for_state("ready")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_supervisor_that_is_stopped_in_the_middle(house: House, in_place: bool) -> None:
    rollout = house.begin("new", in_place=in_place)
    house.stop.set()
    with pytest.raises(ServerError):
        rollout.result(20)
    house.running.result(20)
    assert [triton.server.running for triton in house.made.values()] == [False, False]
    assert RunningServer.read(house.folder, "tiny") is None


def test_in_place_the_old_one_ends_first_and_comes_back_if_the_new_one_fails(house: House) -> None:
    asked = house.begin("new", in_place=True)
    assert house.record.state == "restarting"
    assert house.events == ["start old", "stop old", "start new"]
    house.made["new"].fails = "out of memory"
    house.made["new"].gate.set()
    with pytest.raises(ServerError, match="out of memory"):
        asked.result(20)
    assert (house.record.state, house.record.deployment.parent.name) == ("ready", "old")
    assert house.old.server.running
    house.ask("rollout", "newer", in_place=True)
    assert (house.record.state, house.record.deployment.parent.name) == ("ready", "newer")
    assert house.made["newer"].server.grpc_url == house.old.server.grpc_url


def test_a_gateway_that_cannot_go_over_undoes_the_switch(tmp_path: Path) -> None:
    status = {"ready": True, "faults": {"tiny": "its tokenizer is damaged"}}
    status["models"] = {"tiny": {"endpoints": ["127.0.0.1:2"], "replaced_requests": 0}}

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(status).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Gateway))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        house = House(tmp_path, stack, f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ServerError, match=r"the gateway cannot go over to .*: its tokenizer is damaged"):
            house.ask("rollout", "new")
        assert house.events == ["start old", "start new", "stop new"]
        assert house.old.server.running
        assert (house.record.state, house.record.deployment.parent.name) == ("ready", "old")


@pytest.mark.parametrize("do", ["rollout", "rollback", "cancel_rollout", "status"])
def test_nonsense_on_the_socket_is_refused_in_words(house: House, do: str) -> None:
    """Whatever stands in a request: a traceback of the thread that answers would fail this test."""
    fields = ("name", "package", "recipe", "settings", "golden", "in_place", "drain_s")
    requests: list[dict[str, Any]] = [{name: value} for name in fields for value in NONSENSE]
    requests += [{"name": "tiny", "package": "/none", name: value} for name in fields for value in NONSENSE]
    requests += [dict.fromkeys(fields, value) for value in NONSENSE]
    for request in requests:
        with contextlib.suppress(UserError):
            ask(house.control.path, do, **request)
    assert house.record.state == "ready"
    with pytest.raises(UserError, match=r"name: .*; golden: .*; drain_s: "):
        ask(house.control.path, "rollout", name=1, golden="x", drain_s=-1)
