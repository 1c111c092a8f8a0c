"""A draft that fails costs an answer its speed, never its text, and the log says why once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import SETTINGS, package_support_pair, processes
from tests.support.streams import Response, stream
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

WARNING = "the draft model failed, the target goes on alone: "


class Server:
    """A server with a draft model, and its log."""

    def __init__(self, server: TritonServer, log: Path) -> None:
        self._server, self._log = server, log

    def ask(self, question: int = 0, **more: object) -> tuple[str, int]:
        """The text, and how many draft tokens were proposed for it."""
        asked = {
            "text_input": TURN.format(QUESTIONS[question]),
            "max_tokens": 40,
            "return_perf_metrics": True,
        }
        responses: list[Response] = list(
            stream(self._server.grpc_url, "tensorrt_llm_bls", stream=True, **asked, **more)
        )
        figures = next(r.outputs for r in reversed(responses) if "total_draft_tokens" in r.outputs)
        return "".join(response.text for response in responses), figures["total_draft_tokens"].item()

    def warnings(self) -> list[str]:
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return [line.split(WARNING, 1)[1] for line in lines if WARNING in line]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = replace(SETTINGS, max_draft_tokens=4, speculation="bls")
    return package_support_pair(tmp_path_factory.mktemp("pair"), draft=True, settings=settings)


@pytest.fixture
def copy(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that may be changed; all processes of its server name this test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(shutil.copytree(package, tmp_path / "package"))


@contextmanager
def serving(package: Path) -> Iterator[Server]:
    log = package / "log"
    with TritonServer.of_package(package, log_file=log) as server:
        yield Server(server, log)


def change(package: Path, model: str, old: str, new: str) -> None:
    config = package / "model_repository" / model / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    assert old in text
    config.write_text(text.replace(old, new), encoding="utf-8")


def draft_process(package: Path) -> int:
    """The process that runs the draft model."""
    (found,) = processes("stub", str(package.parent), "tensorrt_llm_draft/1")
    return found


def test_a_draft_that_refuses_in_the_middle_of_an_answer(copy: Path) -> None:
    """Its sequences may be shorter than the target's; it is asked again for the next answer."""
    key = '"cpu_max_sequence_tokens" value { string_value: "'
    change(copy, "tensorrt_llm_draft", f'{key}956"', f'{key}40"')
    with serving(copy) as server:
        for question in range(4):
            text, proposed = server.ask(question)
            assert (text, 0) == server.ask(question, num_draft_tokens=0)
            assert proposed == pytest.approx(16, abs=15)
        assert len(server.warnings()) == 1
        assert "more than the 40 tokens a sequence may have" in server.warnings()[0]


def test_a_draft_whose_process_is_killed(copy: Path) -> None:
    """Triton 24.10 does not start it again."""
    with serving(copy) as server:
        text, _ = server.ask()
        os.kill(draft_process(copy), signal.SIGKILL)
        for _ in range(5):
            assert server.ask() == (text, 0)
        assert len(server.warnings()) == 1


@pytest.mark.slow
def test_a_draft_that_does_not_answer(copy: Path) -> None:
    timeout = 'parameters { key: "draft_timeout_ms" value { string_value: "500" } }'
    change(
        copy,
        "tensorrt_llm_bls",
        'parameters { key: "max_draft_tokens',
        f'{timeout}\nparameters {{ key: "max_draft_tokens',
    )
    with serving(copy) as server:
        text, proposed = server.ask()
        draft = draft_process(copy)
        os.kill(draft, signal.SIGSTOP)
        try:
            assert server.ask() == (text, 0)
            assert server.ask() == (text, 0)
            assert len(server.warnings()) == 1
        finally:
            os.kill(draft, signal.SIGCONT)
        wait_for(lambda: server.ask() == (text, proposed), "the draft's return")


@pytest.mark.parametrize("speculation", ["engine", "bls"])
def test_a_full_server_refuses_answers_but_ends_those_it_began(tmp_path: Path, speculation: Any) -> None:
    """One runs and one waits: with rounds of their own, each of which is a request, none is refused in its middle."""
    settings = replace(
        SETTINGS, max_draft_tokens=4, speculation=speculation, max_concurrency=1, max_queue_size=1
    )
    texts: list[str] = []
    refusals: list[str] = []
    with serving(package_support_pair(tmp_path, draft=True, settings=settings)) as server:
        text, _ = server.ask(end_id=-1)

        def ask() -> None:
            for _ in range(5):
                try:
                    texts.append(server.ask(end_id=-1)[0])
                except InferenceServerException as error:
                    refusals.append(error.message())

        threads = [Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [text] * len(texts)
        assert len(texts) >= 2
        assert refusals
        assert all("Exceeds maximum queue size" in refusal for refusal in refusals)
        assert not server.warnings()
