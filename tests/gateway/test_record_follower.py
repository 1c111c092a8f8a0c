"""A model that is exchanged while the gateway runs: which package answers whom, and what becomes of the old one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import PromptLimit
from pipeline.client.testing import Received, Reply
from pipeline.errors import UserError
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.served_model import ServedModel
from pipeline.triton.running import RunningServer, State
from tests.gateway.conftest import Start
from tests.support import waiting
from tests.support.deployments import ADDRESSES
from tests.support.http_clients import http
from tests.support.scripted_model import Upstream, Words, tiny


def wait_for(condition: Callable[..., bool], what: str) -> None:
    waiting.wait_for(condition, what, timeout_s=120)


class Exchange:
    """A gateway with one slot that follows a record, an old server whose answers wait for a gate, and a new one."""

    def __init__(self, start: Start, folder: Path, stack: ExitStack) -> None:
        self.folder, self.gate, self.fails = folder, threading.Event(), ""
        self.new = stack.enter_context(Upstream(Reply(["new"])))
        self.threads = stack.enter_context(ThreadPoolExecutor(8))
        stack.callback(self.gate.set)
        self.running = start(self._old_answer, places=1, followers=self._followers)
        self.old = self.running.upstream

    def _old_answer(self, _: Received) -> Reply:
        assert self.gate.wait(120)
        return Reply(["old"])

    def _followers(self, url: str) -> Sequence[RecordFollower]:
        self.record = RunningServer.of({**ADDRESSES, "grpc_url": url}, self.folder / "old")
        self.switch()
        return [RecordFollower("tiny", self.folder, self.record, self._load)]

    def _load(self, record: RunningServer) -> ServedModel:
        if self.fails:
            raise UserError(self.fails)
        return tiny_again(record.grpc_url)

    def switch(self, **changes: Any) -> None:
        """Write the record, with changes."""
        replace(self.record, **changes).write(self.folder, "tiny")

    def ask(self, content: str = "Hi", **more: Any) -> str:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}
        answer = http.post(f"{self.running.url}/v1/chat/completions", json=asked, timeout=120)
        if answer.status_code != 200:
            return str(answer.json()["error"]["code"])
        return " ".join(choice["message"]["content"] for choice in answer.json()["choices"])

    def begin(self, *arguments: Any, **more: Any) -> Future[str]:
        """Ask from a thread, and wait until the request has a slot or waits for one."""
        queue = self.running.gateway.models["tiny"].queue
        before = queue.running + queue.waiting
        asked = self.threads.submit(self.ask, *arguments, **more)
        wait_for(lambda: queue.running + queue.waiting > before, "the request arrived")
        return asked

    def ready(self) -> dict[str, Any]:
        answer: dict[str, Any] = http.get(f"{self.running.url}/readyz", timeout=120).json()
        return answer

    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ready()["models"]["tiny"]
        return found


def tiny_again(url: str) -> ServedModel:
    """Another package: a shorter limit, another template, two slots."""
    model = tiny(url, places=2, template="{{ messages[0].content }} again")
    model.prompt_limit = PromptLimit(Words(), max_tokens=6)
    return model


@pytest.fixture
def exchange(start: Start, tmp_path: Path) -> Iterator[Exchange]:
    with ExitStack() as stack:
        yield Exchange(start, tmp_path, stack)


def test_requests_under_way_end_on_the_old_one_and_those_that_wait_go_to_the_new(exchange: Exchange) -> None:
    first = exchange.begin()
    wait_for(lambda: len(exchange.old.requests) == 1, "the old one was asked")
    started, second = exchange.begin("one"), exchange.begin("two three four five six seven")
    before = exchange.running.gateway.models["tiny"]
    exchange.switch(grpc_url=exchange.new.url)
    wait_for(lambda: exchange.model()["endpoints"] == [exchange.new.url], "the gateway went over")
    assert started.result(120) == "new", "the new package has two slots"
    assert exchange.new.requests[0].prompt == "one again", "by its template"
    assert second.result(120) == "context_length_exceeded", "by its limit"
    wait_for(lambda: exchange.model()["replaced_requests"] == 1, "those that waited have gone over")
    assert not before.client._closed
    exchange.gate.set()
    assert first.result(120) == "old"
    wait_for(lambda: before.client._closed, "the old one is closed")
    assert exchange.model()["replaced_requests"] == 0
    assert len(exchange.old.requests) == 1
    assert exchange.ask() == "new"


def test_all_choices_of_a_request_come_from_one_package(exchange: Exchange) -> None:
    several = exchange.begin(n=3)
    wait_for(lambda: len(exchange.old.requests) == 1, "the old one was asked")
    exchange.switch(grpc_url=exchange.new.url)
    wait_for(lambda: exchange.model()["endpoints"] == [exchange.new.url], "the gateway went over")
    exchange.gate.set()
    assert several.result(120) == "old old old"


@pytest.mark.parametrize(
    ("state", "told"), [("restarting", "started again"), ("failing", "failed too often")]
)
def test_while_triton_is_started_again_requests_wait(exchange: Exchange, state: State, told: str) -> None:
    exchange.switch(state=state)
    queue = exchange.running.gateway.models["tiny"].queue
    wait_for(lambda: told in exchange.ready()["faults"].get("tiny", ""), "the gateway knows it")
    assert queue.paused
    asked = exchange.begin()
    assert queue.waiting == 1
    exchange.switch(grpc_url=exchange.new.url, state="starting")
    exchange.switch(grpc_url=exchange.new.url, state="ready")
    assert asked.result(120) == "new"
    assert exchange.old.requests == []


def test_what_goes_wrong_leaves_the_model_as_it_was(exchange: Exchange) -> None:
    exchange.gate.set()
    exchange.fails = "its tokenizer is damaged"
    exchange.switch(grpc_url=exchange.new.url)
    wait_for(lambda: exchange.ready()["faults"] == {"tiny": exchange.fails}, "the fault is told")
    wait_for(lambda: exchange.ready()["ready"] is True, "it is ready all the same")
    assert exchange.ask() == "old"
    exchange.switch()
    wait_for(lambda: exchange.ready()["faults"] == {}, "the record is as before")
    (exchange.folder / "tiny.json").unlink()
    wait_for(lambda: "is gone" in exchange.ready()["faults"].get("tiny", ""), "the fault is told")
    assert exchange.ask() == "old"
    (exchange.folder / "tiny.json").write_text("{")
    wait_for(lambda: "is not a record" in exchange.ready()["faults"].get("tiny", ""), "the fault is told")
    exchange.fails = ""
    exchange.switch(grpc_url=exchange.new.url)
    wait_for(lambda: exchange.ready()["faults"] == {}, "the record is there again")
    assert exchange.ask() == "new"


def test_there_and_back_under_load(exchange: Exchange) -> None:
    """No request fails or is mixed, however often the model is replaced while it waits."""
    exchange.gate.set()
    stop, answers = threading.Event(), list[str]()

    def load() -> None:
        while not stop.is_set():
            answers.append(exchange.ask("one", n=2))

    readers = [exchange.threads.submit(load) for _ in range(4)]
    for turn in range(6):
        url, told = (exchange.new.url, "new new") if turn % 2 == 0 else (exchange.old.url, "old old")
        exchange.switch(grpc_url=url)
        wait_for(lambda url=url: exchange.model()["endpoints"] == [url], "the gateway went over")
        before = len(answers)
        wait_for(lambda told=told, before=before: told in answers[before:], "it answers")
    stop.set()
    for reader in readers:
        reader.result(120)
    assert {"old old", "new new"} >= set(answers)
