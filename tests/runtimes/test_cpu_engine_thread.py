"""The engine's thread: joining, leaving, closing, and failing without anyone left waiting."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.runtimes.cpu.engine import (
    Engine,
    EngineSettings,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    RequestOutput,
)
from tests.runtimes.conftest import Pair
from tests.support.engine import Answer, Broken, SharedModel, prompts, request
from tests.support.waiting import wait_for

PROMPTS = prompts(16)


class Waiter(Answer):
    """An answer that another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        super().__call__(output)
        if output.finish:
            self.done.set()

    def wait(self) -> Waiter:
        assert self.done.wait(30), "no last output"
        return self


def ask(engine: Engine, name: object, tokens: int = 16) -> Waiter:
    sink = Waiter()
    engine.submit(request(name, PROMPTS[int(str(name)) % 16], tokens), sink)
    return sink


@pytest.fixture(scope="module")
def engine(cpu_pair: Pair) -> Iterator[Engine]:
    """For tests that leave it as it was."""
    with Engine(cpu_pair.target, cpu_pair.draft, EngineSettings(max_concurrency=16)) as made:
        yield made


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of single tests share their compiled model; that of all tests has one of its own."""
    monkeypatch.setattr("pipeline.runtimes.cpu.engine.engine.PagedModel", SharedModel)


@pytest.fixture
def broken(cpu_pair: Pair) -> Iterator[Engine]:
    """For tests that break it."""
    with Engine(cpu_pair.target, None, EngineSettings(max_concurrency=16)) as made:
        yield made


def test_many_threads_submit_while_others_run(engine: Engine) -> None:
    alone = [ask(engine, name).wait().tokens for name in range(16)]
    answers: dict[int, Waiter] = {}

    def submit(name: int) -> None:
        time.sleep(0.003 * (name % 5))
        answers[name] = ask(engine, name)

    threads = [threading.Thread(target=submit, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[name].wait().tokens for name in range(16)] == alone
    assert engine.stats().running == 0


def test_a_round_hands_on_all_that_its_sinks_got(cpu_pair: Pair) -> None:
    """Outputs of steps, of cancellations between them and of the end arrive together, on the engine's thread."""
    rounds: list[list[RequestOutput]] = []
    made: list[RequestOutput] = []
    threads: set[threading.Thread] = set()

    def after_round() -> None:
        threads.add(threading.current_thread())
        if made:
            rounds.append(made.copy())
            made.clear()

    def ends() -> list[FinishReason]:
        return [output.finish for one in rounds for output in one if output.finish]

    with Engine(cpu_pair.target, None, EngineSettings(max_concurrency=16)) as engine:
        engine.after_round = after_round
        for name in range(4):
            engine.submit(request(name, PROMPTS[name], 900), made.append)
        wait_for(lambda: any(len(one) == 4 for one in rounds), "a step with a token of each")
        engine.cancel("0")
        wait_for(lambda: bool(ends()), "the end of the first")
        assert ends() == [FinishReason.CANCELLED]
    assert ends() == [FinishReason.CANCELLED] * 4
    assert not made
    assert all(len({output.request_id for output in one}) == len(one) for one in rounds[:-1])
    assert len(threads) == 1
    assert threads != {threading.main_thread()}


def test_cancel_frees_the_blocks_at_once(engine: Engine) -> None:
    seen: list[int] = []
    sink = Waiter()

    def watch(output: RequestOutput) -> None:
        if output.finish:
            seen.append(engine.stats().kv_blocks_used)
        sink(output)

    engine.submit(request(1, PROMPTS[0], 900), watch)
    wait_for(lambda: bool(sink.tokens), "a first token")
    engine.cancel("1")
    engine.cancel("unknown")
    assert sink.wait().finish is FinishReason.CANCELLED
    assert seen == [0]
    assert len(sink.tokens) < 900
    assert ask(engine, 1).wait().finish is FinishReason.LENGTH


def test_one_that_waits_can_be_cancelled(cpu_pair: Pair) -> None:
    with Engine(cpu_pair.target, None, EngineSettings(max_concurrency=1)) as engine:
        first, second, third = ask(engine, 1, 300), ask(engine, 2), ask(engine, 3)
        engine.cancel("2")
        assert second.wait().finish is FinishReason.CANCELLED
        assert second.metrics.first_scheduled_ns == 0
        assert len(first.wait().tokens) == 300
        assert len(third.wait().tokens) == 16


def test_an_id_is_free_again_when_its_last_output_is_out(engine: Engine) -> None:
    first, again = Waiter(), Waiter()

    def sink(output: RequestOutput) -> None:
        if output.finish:
            engine.submit(request(1, PROMPTS[1], 4), again)
        first(output)

    engine.submit(request(1, PROMPTS[0], 4), sink)
    assert len(again.wait().tokens) == 4
    slow = ask(engine, 1, 500)
    with pytest.raises(InvalidRequest, match="'1' is in flight"):
        ask(engine, 1)
    engine.cancel("1")
    slow.wait()


def test_close_is_prompt_and_leaves_nobody_waiting(cpu_pair: Pair) -> None:
    engine = Engine(cpu_pair.target, None, EngineSettings(max_concurrency=2))
    answers = [ask(engine, name, 900) for name in range(6)]
    wait_for(lambda: bool(answers[0].tokens), "a first token")
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 30
    assert {answer.finish for answer in answers} == {FinishReason.CANCELLED}
    with pytest.raises(EngineStopped, match="closed"):
        ask(engine, 7)
    engine.close()
    assert not engine._thread.is_alive()


def test_a_sink_may_close_the_engine(cpu_pair: Pair) -> None:
    engine = Engine(cpu_pair.target, None, EngineSettings())
    engine.submit(request(1, PROMPTS[0], 900), lambda _: engine.close())
    engine._thread.join(10)
    assert not engine._thread.is_alive()


def test_a_sink_that_fails_loses_its_request_only(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def sink(output: RequestOutput) -> None:
        raise OSError(f"nobody reads {output.request_id}")

    engine.submit(request("bad", PROMPTS[0], 900), sink)
    assert len(ask(engine, 1).wait().tokens) == 16
    wait_for(lambda: engine.stats().running == 0, "the end of the request")
    assert "nobody reads bad" in caplog.text
    assert engine.stats().kv_blocks_used == 0


def test_a_failed_step_ends_its_requests_and_no_others(
    broken: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = broken
    good = ask(engine, 1).wait().tokens
    failing = Broken(engine._core._target, failures=0)
    engine._core._target = failing  # type: ignore[assignment]
    first = ask(engine, 1, 500)
    wait_for(lambda: bool(first.tokens), "a first token")
    failing.failures = 1
    assert first.wait().finish is FinishReason.ERROR
    assert first.outputs[-1].error == "made to fail"
    assert ask(engine, 1).wait().tokens == good
    assert engine.stopped is None
    assert engine.stats().kv_blocks_used == 0
    assert "made to fail" in caplog.text


def test_when_steps_keep_failing_the_engine_dies_and_says_so(
    broken: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = broken
    engine._core._target = Broken(engine._core._target, failures=99)  # type: ignore[assignment]
    for name in range(3):
        assert ask(engine, name).wait().finish is FinishReason.ERROR
    wait_for(lambda: engine.stopped is not None, "the end of the engine")
    with pytest.raises(EngineStopped, match="the engine died: StepFailed: made to fail"):
        ask(engine, 9)
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)


def test_when_the_thread_dies_everybody_hears_of_it(cpu_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(cpu_pair.target, None, EngineSettings(max_concurrency=2)) as engine:
        answers = [ask(engine, name, 900) for name in range(5)]
        wait_for(lambda: bool(answers[0].tokens), "a first token")

        def fail() -> None:
            raise KeyError("a bug")

        engine._core.step = fail  # type: ignore[method-assign]
        for answer in answers:
            assert answer.wait().finish is FinishReason.ERROR
            assert answer.outputs[-1].error == "the engine died: KeyError: 'a bug'"
        with pytest.raises(EngineStopped, match="a bug"):
            ask(engine, 9)
    assert "the engine thread died" in caplog.text


def test_the_folder_imports_nothing_of_the_package() -> None:
    """It is copied into a Triton model, where the package is not installed."""
    import ast
    from pathlib import Path

    import pipeline.runtimes.cpu.engine as package

    allowed = {"numpy", "openvino", "llguidance", *sys.stdlib_module_names}
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").split(".")[0] in allowed, path


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from pipeline.runtimes.cpu.engine import EngineSettings
from pipeline.runtimes.cpu.engine.paged_model import PagedModel

models = [PagedModel(Path(folder), EngineSettings()) for folder in sys.argv[1:]]
while models:
    del models[0]  # the first that came is the first to go
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_after_the_models_are_gone_is_handled(cpu_pair: Pair) -> None:
    """OpenVINO's plugin leaves the thread an alternate signal stack that it has freed."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, cpu_pair.target, cpu_pair.draft],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
