"""From a recipe to its answers: built, served by a real Triton, streamed to a client and through the gateway.

What a default run holds of served deployments; everything else about them is of the tier of servers.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.client import ChatTemplate, Client, Stats
from pipeline.runtimes.cpu.engine import Engine, EngineRequest, EngineSettings, RequestOutput
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer
from tests.e2e.conftest import Build, answers, started_gateway
from tests.support.http_clients import openai_client
from tests.support.waiting import wait_for

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def package(build: Build) -> Path:
    """FP8, with a draft."""
    return Path(build("tiny-cpu")["artifact"])


@pytest.fixture(scope="module")
def server(package: Path) -> Iterator[TritonServer]:
    with TritonServer.of_package(package) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer, package: Path) -> Iterator[Client]:
    template = ChatTemplate.from_directory(tokenizer_of(package))
    with Client(server.grpc_url, template=template) as client:
        yield client


def tokenizer_of(package: Path) -> Path:
    return package / Deployment.load(package).tokenizer_dir


def questions(count: int) -> list[str]:
    """First user turns of held-out dialogues."""
    lines = (resources.folder("calibration") / "support" / "heldout.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines[:count]]


def ask(client: Client, question: str) -> tuple[str, Stats]:
    with client.stream([{"role": "user", "content": question}], max_tokens=MAX_TOKENS) as stream:
        assert "".join(chunk.text for chunk in stream) == stream.text
        return stream.text, stream.stats


def prompt_ids(package: Path, question: str) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    folder = tokenizer_of(package)
    prompt = ChatTemplate.from_directory(folder).render([{"role": "user", "content": question}])
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    return tuple(ids)


def decode(package: Path, tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    text: str = Tokenizer.from_file(str(tokenizer_of(package) / "tokenizer.json")).decode(tokens)
    return text


def engine_alone(package: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of the package's target, with no draft and no server."""
    end_id = Deployment.load(package).end_id
    target = package / "model_repository" / "tensorrt_llm" / "1" / "target"
    engine = Engine(target, None, EngineSettings(threads=2))
    answers: list[list[int]] = [[] for _ in prompts]
    finished = threading.Semaphore(0)

    def sink(output: RequestOutput) -> None:
        assert output.error is None
        answers[int(output.request_id)].extend(output.tokens)
        if output.finish:
            finished.release()

    try:
        for index, prompt in enumerate(prompts):
            engine.submit(EngineRequest(str(index), prompt, MAX_TOKENS, end_id), sink)
        for _ in prompts:
            assert finished.acquire(timeout=60)
    finally:
        engine.close()
    return answers


def test_served_greedy_equals_the_engine_alone(client: Client, package: Path) -> None:
    """With a draft in the server and without one in the engine: speculation does not change the answer, and is used.

    The engine drafts only while it pays, so not in every answer. That the engine's tokens are those of transformers is
    shown by the tests of the runtime.
    """
    asked = questions(48)
    tokens = engine_alone(package, [prompt_ids(package, question) for question in asked])
    answers = [ask(client, question) for question in asked]
    assert [text for text, _ in answers] == [decode(package, ids) for ids in tokens]
    proposed = sum(stats.draft_tokens or 0 for _, stats in answers)
    assert proposed > 0
    assert sum(stats.accepted_tokens or 0 for _, stats in answers) / proposed > 0.6


def test_openais_client_streams_through_the_gateway(
    server: TritonServer, client: Client, package: Path, store: Path
) -> None:
    """The same text as without it; and the gateway ends when it is told to."""
    (question,) = questions(1)
    record = RunningServer.of(server.record_fields, package)
    record.write(store / "running", "tiny-cpu")
    try:
        with started_gateway("tiny-cpu", store) as (url, process):
            wait_for(lambda: answers(f"{url}/readyz"), "readiness of the gateway", 240)
            with openai_client(url, timeout_s=60) as through:
                stream = through.chat.completions.create(
                    model="tiny-cpu",
                    messages=[{"role": "user", "content": question}],
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                    stream=True,
                )
                chunks = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert sum(map(bool, chunks)) > 1
            assert "".join(chunks) == ask(client, question)[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        record.remove(store / "running", "tiny-cpu")


@pytest.mark.servers
def test_the_server_survives_clients_that_come_and_go(client: Client) -> None:
    """Eight at a time, some leave early; a server that asks Triton for clients who left must not crash.

    Few leave, because Triton 24.10 has a defect of its own: a cancellation under full load can crash it, rarely.
    """
    asked, failures = questions(50), []

    def visit(offset: int) -> None:
        for turn in range(20):
            question = asked[(offset * 7 + turn) % len(asked)]
            try:
                with client.stream([{"role": "user", "content": question}], max_tokens=MAX_TOKENS) as stream:
                    for index, _ in enumerate(stream):
                        if turn == 10 and index == 1:
                            break
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=visit, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert ask(client, asked[0])[0]
