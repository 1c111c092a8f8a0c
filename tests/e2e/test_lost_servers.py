"""`pipeline serve` with requests that end its engine: its other clients get their answers, and it is never given up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.machine.processes import processes_below
from pipeline.progress import Silent
from pipeline.runtimes import Engines
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.runtimes.cpu.model_repository import package_cpu
from pipeline.serving.served import ServedDeployment
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import CHECKPOINTS, ENGINE, SETTINGS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

POISON = "☠☠☠"
GOOD, BAD = "sk-good", "sk-bad"
LONG: dict[str, Any] = {
    "model": "support",
    "temperature": 0,
    "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}
# In `EngineCore.add`: a request with this text ends the process as a segmentation fault would.
DEADLY = """
        if any(request.prompt[at : at + {length}] == {ids} for at in range(len(request.prompt))):
            import os

            os.kill(os.getpid(), 11)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The support target, whose engine has a fault."""
    folder = tmp_path_factory.mktemp("mortal")
    engine = folder / "engine"
    shutil.copytree(ENGINE, engine, ignore=shutil.ignore_patterns("__pycache__"))
    ids = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json")).encode(POISON).ids
    core = engine / "core.py"
    head = "        sequence = Sequence(request, sink, self._target.vocab_size, matcher, adapter)\n"
    source = core.read_text()
    assert head in source
    core.write_text(source.replace(head, head + DEADLY.format(length=len(ids), ids=tuple(ids))))
    build_ir(CHECKPOINTS / "support-target", folder / "target", progress=Silent())
    sources = Engines(folder / "target", None, CHECKPOINTS / "support-target")
    package_cpu("support", SETTINGS, sources, folder / "package", Silent(), engine)
    return folder / "package"


@contextmanager
def serve(package: Path, folder: Path, *words: str) -> Iterator[ServedDeployment]:
    keys = folder / "keys.yaml"
    keys.write_text(f"tenants:\n  good: {{keys: [{GOOD}]}}\n  bad: {{keys: [{BAD}]}}\n")
    keys.chmod(0o600)
    given = (
        *("--package", str(package), "--store", str(folder / "store"), "--keys", str(keys)),
        *("--set", f"gateway={{batch_folder: {folder / 'batches'}, max_wait_s: 120}}"),
        *("--set", "triton.restart_window_s=1", *words),
    )
    served = ServedDeployment.start(
        given, "support", folder / "store" / "running", folder / "logs", deadline_s=120
    )
    try:
        wait_for(lambda: is_ready(served), "readiness of the gateway", 120)
        yield served
    finally:
        served.stop()


def is_ready(served: ServedDeployment) -> bool:
    try:
        return (
            httpx.get(f"{served.record.gateway_url}/readyz", trust_env=False, timeout=10).status_code == 200
        )
    except httpx.TransportError:
        return False


def client(served: ServedDeployment, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.record.gateway_url}/v1", api_key=key, max_retries=0, timeout=300)


def figure(served: ServedDeployment, beginning: str) -> float:
    page = httpx.get(f"{served.record.gateway_url}/metrics", trust_env=False, timeout=60).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(beginning))


def restarts(served: ServedDeployment) -> float:
    return figure(served, 'pipeline_restarts_total{component="triton"')


def prompts(count: int) -> Sequence[str]:
    return [TURN.format(f"{QUESTIONS[number % len(QUESTIONS)]} ({number})") for number in range(count)]


def streamed(asking: openai.OpenAI, prompt: str) -> str:
    return "".join(
        chunk.choices[0].text for chunk in asking.completions.create(prompt=prompt, stream=True, **LONG)
    )


def test_a_request_that_ends_the_engine_costs_others_a_pause(package: Path, tmp_path: Path) -> None:
    with serve(package, tmp_path) as served, client(served, GOOD) as good, client(served, BAD) as bad:
        questions = prompts(4)
        expected = {prompt: streamed(good, prompt) for prompt in questions}
        over = threading.Event()

        def go_on(prompt: str) -> int:
            count = 0
            while not over.is_set():
                assert streamed(good, prompt) == expected[prompt]
                count += 1
            return count

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(go_on, prompt) for prompt in questions]
            try:
                for _ in range(3):
                    with pytest.raises(openai.InternalServerError) as caught:
                        bad.completions.create(prompt=POISON, model="support", temperature=0, max_tokens=4)
                    assert caught.value.code == "request_quarantined"
                    assert caught.value.body["request_id"]  # type: ignore[index]
                assert bad.completions.create(prompt="Hi", model="support", max_tokens=4).choices[0].text
            finally:
                over.set()
            assert all(stream.result() for stream in asking), "streams went on, each as if nothing had been"
        assert restarts(served) == 2
        assert figure(served, 'pipeline_migrations_total{model="support",outcome="ended"}') == 0
        assert figure(served, 'pipeline_loss_events_total{event="quarantined"') == 1


def test_a_line_of_a_batch_that_ends_the_engine_fails_though_everything_is_restarted(
    package: Path, tmp_path: Path
) -> None:
    bodies = [
        {"model": "support", "prompt": text, "max_tokens": 4} for text in ("one", POISON, "two", "three")
    ]
    lines = [
        {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    claims = BatchStorage(BatchFolder(tmp_path / "batches")).claims
    with serve(package, tmp_path) as served, client(served, BAD) as bad:
        file = bad.files.create(
            file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch"
        )
        batch = bad.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_for(lambda: claims.losses(batch.id).get(1) == 1, "the first loss", 120)
        # Everything ends with it, as a supervisor that gives up would.
        for process in processes_below(served.process.pid):
            os.kill(process.pid, signal.SIGKILL)
        served.process.wait(60)
    with serve(package, tmp_path) as served, client(served, BAD) as bad:
        wait_for(lambda: bad.batches.retrieve(batch.id).status == "completed", "the end of the batch", 240)
        done = bad.batches.retrieve(batch.id)
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
        assert done.error_file_id is not None
        (error,) = map(json.loads, bad.files.content(done.error_file_id).text.splitlines())
        assert (error["custom_id"], error["error"]["code"]) == ("r1", "request_quarantined")
        assert restarts(served) <= 1
        assert is_ready(served)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_streams_go_on_when_the_engine_is_killed_again_and_again(
    package: Path, tmp_path: Path, workers: str
) -> None:
    """From outside, at moments that fall anywhere in the streams; each is followed by answers without a loss."""
    with (
        serve(package, tmp_path, "--set", f"gateway.workers={workers}") as served,
        client(served, GOOD) as good,
    ):
        questions = prompts(6)
        expected = {prompt: streamed(good, prompt) for prompt in questions}
        with ThreadPoolExecutor(6) as threads:
            for round in range(4):
                asked = {prompt: threads.submit(streamed, good, prompt) for prompt in questions}
                threading.Event().wait(0.1 + 0.15 * round)
                for process in processes_below(served.process.pid):
                    if process.name == "tensorrt_llm":
                        os.kill(process.pid, signal.SIGKILL)
                for prompt, answer in asked.items():
                    assert answer.result() == expected[prompt]
        assert figure(served, 'pipeline_migrations_total{model="support",outcome="resumed"}') > 0
        assert figure(served, 'pipeline_migrations_total{model="support",outcome="ended"}') == 0
