"""A package that is exchanged under load, with real Tritons and a gateway in front of them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from pipeline.errors import ServerError, UserError
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tenants import Tenants
from pipeline.golden import GoldenBudgets, GoldenSet, write_document
from pipeline.golden_questions import GoldenQuestion
from pipeline.progress import Silent
from pipeline.recipe import load_recipe
from pipeline.serving.control import ask
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.serve import serve
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer, metrics_targets
from tests.support.waiting import wait_for

QUESTION = "Is there any warranty on the headset?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
SHORT = 5  # tokens of an answer of the other package


def another(package: Path, into: Path, contains: str, **budgets: float) -> Path:
    """The same package with shorter answers, a golden question, and budgets of its answer."""
    shutil.copytree(package, into)
    found = Deployment.load(into)
    limits = found.limits.model_copy(update={"max_output_tokens": SHORT})
    found.model_copy(update={"limits": limits}).save(into)
    question = GoldenQuestion.model_validate(
        {"messages": ({"role": "user", "content": QUESTION},), "contains": contains}
    )
    write_document(GoldenSet((question,), GoldenBudgets(**budgets)).document, into)
    return into


@contextmanager
def running(run: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def served(package: Path, folder: Path) -> Iterator[Path]:
    """A supervised Triton; its control socket."""
    stop = threading.Event()
    options = ServeOptions(ports=Ports.free(), store=Store(folder.parent), recipe=("support",))
    with running(lambda: serve([(package, options)], Silent(), stop), stop.set):
        record = RunningServer.find(folder, "support", wait_s=120, states=("ready",))
        assert record is not None
        assert record.control is not None
        yield record.control


@contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """A gateway of its own that follows the record; its address."""
    record = RunningServer.read(folder, "support")
    assert record is not None

    def load(now: RunningServer) -> ServedModel:
        recipe = load_recipe("tiny-cpu", ["name=support"])
        return ServedModel.from_package(recipe, now.deployment.parent, (now.grpc_url,))

    follower = RecordFollower("support", folder, record, load)
    app = Gateway({"support": load(record)}, Tenants(), parts=GatewayParts(followers=[follower]))
    server = GatewayServer(app, "127.0.0.1", 0, drain_s=5)
    with running(server.run, lambda: setattr(server, "should_exit", True)):
        wait_for(lambda: server.started, "the gateway started")
        yield server.url


@pytest.mark.servers
def test_exchanged_under_load_and_back(package: Path, tmp_path: Path) -> None:
    """No request fails, none is answered by neither package or a mix of both, and after it all go to the new one."""
    better = another(package, tmp_path / "better", "The")
    worse = another(package, tmp_path / "worse", "the Tower of London")
    unlike = another(package, tmp_path / "unlike", "The", min_equal=0.0, min_similar=1.0)
    folder, over = tmp_path / "running", threading.Event()
    with ExitStack() as stack:
        control = stack.enter_context(served(package, folder))
        url = stack.enter_context(gateway(folder))

        def answer() -> str:
            asked = httpx.post(
                f"{url}/v1/chat/completions", json={"model": "support", **CHAT}, timeout=60, trust_env=False
            )
            assert asked.status_code == 200, asked.text
            return str(asked.json()["choices"][0]["message"]["content"])

        def load() -> list[str]:
            answers = []
            # A pause, so that this is about the exchange and not about the processor.
            while not over.wait(0.3):
                answers.append(answer())
            return answers

        long = answer()
        streams = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(over.set)
        answers = [streams.submit(load) for _ in range(4)]
        before = RunningServer.read(folder, "support")
        said: list[str] = []
        with pytest.raises(ServerError, match=r"does not contain 'the Tower of London'"):
            ask(control, "rollout", name="support", package=str(worse), on_progress=said.append)
        assert "golden questions: 0 of 1 right, all needed" in "\n".join(said)
        with pytest.raises(ServerError, match="OVER    min_similar: 0 of 1 answers similar, 100% needed"):
            ask(control, "rollout", name="support", package=str(unlike))
        assert RunningServer.read(folder, "support") == before
        result = ask(control, "rollout", name="support", package=str(better))
        assert (result["previous"], result["golden"]) == (str(package), {"questions": 1, "right": 1})
        short = answer()
        assert long.startswith(short)
        assert len(short) < len(long)
        record = RunningServer.read(folder, "support")
        assert record is not None
        assert (record.deployment.parent, record.previous) == (better, package)
        assert (record.state, record.grpc_url) == ("ready", result["grpc_url"])
        (target,) = json.loads(metrics_targets(folder, "support").read_text())
        assert before is not None
        assert before.metrics_url != record.metrics_url
        assert f"http://{target['targets'][0]}/metrics" == record.metrics_url
        with pytest.raises(UserError, match=r"is served from .* already"):
            ask(control, "rollout", name="support", package=str(better))
        assert ask(control, "rollback", name="support")["package"] == str(package)
        assert answer() == long
        over.set()
        assert {text for answer in answers for text in answer.result(60)} == {long, short}
    assert not (folder / "support.json").exists()
