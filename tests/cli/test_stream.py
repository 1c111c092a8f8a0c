"""`pipeline stream` against the fake server: what it prints, how it finds the server, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.client.testing import Ending, FakeServer, Reply
from pipeline.triton.deployment import Deployment, DeploymentLimits
from pipeline.triton.running import RunningServer
from tests.cli.conftest import Run
from tests.support import CHECKPOINTS
from tests.support.deployments import ADDRESSES

TOKENIZER = CHECKPOINTS / "support-target"
COMMAND = [sys.executable, "-m", "pipeline.cli.main"]
SLOW = Reply(["word "] * 1000, delay_s=0.02)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def serve(server: FakeServer, store: Path, name: str = "tiny-cpu") -> None:
    """Leave for clients what `pipeline serve` leaves, of a fake server."""
    package = store / "artifacts" / "package-1"
    (package / "tokenizer").mkdir(parents=True)
    for file in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (package / "tokenizer" / file).write_text((TOKENIZER / file).read_text("utf-8"), "utf-8")
    Deployment(
        name=name,
        runtime="cpu",
        entry_model="tensorrt_llm_bls",
        models=("tensorrt_llm_bls",),
        limits=DeploymentLimits(max_input_tokens=64, max_output_tokens=48, max_concurrency=4),
        tokenizer_dir="tokenizer",
        end_id=5,
        pad_id=0,
        stop_token_ids=(5,),
        digest="0" * 64,
        versions={},
    ).save(package)
    RunningServer.of(ADDRESSES | {"grpc_url": server.url}, package).write(store / "running", name)


def test_an_answer_and_its_figures(run: Run, store: Path) -> None:
    pieces = ["Open ", "the 안녕 ", "menu 😀."]
    reply = Reply(pieces, tokens_per_chunk=2, delay_s=0.01, draft_tokens=4, accepted_tokens=3)
    with FakeServer(reply) as server:
        serve(server, store)
        done = run("stream", "tiny-cpu", "How do I log in?", "--param", "top_k=1", "--param", r'stop="\n"')
    assert (done.code, done.out) == (0, "Open the 안녕 menu 😀.\n")
    figures = r"TTFT \d+\.\d ms, ITL p50 \d+\.\d p95 \d+\.\d p99 \d+\.\d ms\n6 tokens in \d"
    assert re.search(figures, done.err)
    assert "draft accepted 75%, ended by stop" in done.err
    (request,) = server.requests
    begin = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow do I log in?"
    assert request.prompt.startswith(begin)
    assert request.prompt.endswith("assistant<|end_header_id|>\n\n")
    told = {name: request.tensors[name] for name in ("max_tokens", "top_k", "stop_words")}
    assert told == {"max_tokens": [48], "top_k": [1], "stop_words": ["\n"]}


def test_json(run: Run, store: Path) -> None:
    with FakeServer(Reply(["Hé", "llo"])) as server:
        serve(server, store)
        done = run("stream", "tiny-cpu", "Hi", "--json", "--max-tokens", "2", "--system", "Be kind.")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["text"] for line in lines[:-1]] == ["Hé", "llo", ""]
    assert lines[-2]["finish_reason"] == "length"
    assert lines[-1]["stats"]["output_tokens"] == 2
    assert lines[-1]["request_id"] == server.requests[0].request_id
    assert "system<|end_header_id|>\n\nBe kind." in server.requests[0].prompt


def test_without_a_recipe(run: Run) -> None:
    with FakeServer() as server:
        raw = run("stream", "--url", server.url, "--raw", "-q", "-", stdin="Once upon")
        templated = run("stream", "--url", server.url, "--tokenizer", str(TOKENIZER), "Hi")
        neither = run("stream", "--url", server.url, "Hi")
    assert (raw.out, raw.err) == ("Hello world\n", "")
    assert templated.code == 0
    assert server.requests[0].prompt == "Once upon"
    assert "<|eot_id|>" in server.requests[1].prompt
    assert neither.code == 2
    assert "--tokenizer FOLDER" in neither.err


@pytest.mark.parametrize(
    "words", [("stream",), ("stream", "tiny-cpu"), ("stream", "--url", "a:1", "tiny-cpu", "Hi")]
)
def test_words_that_do_not_fit(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.code == 2
    assert "QUESTION" in done.err


def test_not_running(run: Run, store: Path) -> None:
    done = run("stream", "tiny-cpu", "Hi")
    assert done.code == 1
    assert done.err == (
        "pipeline: tiny-cpu is not running. Start it in another terminal:\n"
        f"  pipeline serve tiny-cpu --store {store}\n"
    )


def test_a_server_that_is_gone(run: Run, store: Path) -> None:
    with FakeServer() as server:
        serve(server, store)
    gone = run("stream", "tiny-cpu", "Hi")
    assert gone.code == 1
    assert re.fullmatch(r"pipeline: no answer from 127\.0\.0\.1:\d+: .*\n", gone.err)
    record = store / "running" / "tiny-cpu.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "pid": 2**22 + 1}))
    dead = run("stream", "tiny-cpu", "Hi", "--store", str(store))
    assert "tiny-cpu is no longer running" in dead.err
    assert f"pipeline serve tiny-cpu --store {store}" in dead.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--temperature", "-1"), 2, "--temperature = -1.0: must be at least 0"),
        (("--model", "nope"), 2, "Request for unknown model: 'nope' is not found"),
    ],
)
def test_refusals(run: Run, words: tuple[str, ...], code: int, message: str) -> None:
    with FakeServer() as server:
        done = run("stream", "--url", server.url, "--raw", "Hi", *words)
    assert done.code == code
    assert done.err.startswith(f"pipeline: {message}")


def test_an_answer_that_breaks_off(run: Run) -> None:
    with FakeServer(Reply(ending=Ending.ERROR, error="out of memory")) as server:
        done = run("stream", "--url", server.url, "--raw", "Hi")
    said = "pipeline: out of memory (after 2 chunks of the answer, 11 characters)\n"
    assert (done.code, done.out, done.err) == (1, "Hello world\n", said)


def test_ctrl_c_stops_the_answer_on_the_server() -> None:
    with FakeServer(SLOW) as server:
        words = [*COMMAND, "stream", "--url", server.url, "--raw", "Hi"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(5) == "word "
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        assert server.requests[0].cancelled.wait(5)
    assert process.returncode == 130
    assert output.endswith("\n")
    assert errors.startswith("stopped\nTTFT ")
    assert "Traceback" not in errors


def test_a_reader_that_has_enough() -> None:
    with FakeServer(SLOW) as server:
        words = [*COMMAND, "stream", "--url", server.url, "--raw", "Hi", "-q"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.read(5)
            process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(30) == 0
        assert server.requests[0].cancelled.wait(5)


def test_wrong_parameters_are_told_before_anything_is_asked(run: Run) -> None:
    wrong = ("--param", "top_p=3", "--param", "topk=1", "--param", "seed=x", "--param", "max_tokens=2")
    done = run("stream", "--url", "127.0.0.1:1", "--raw", *wrong, "Hi")
    assert done.code == 2
    for words in ("at most 1", "did you mean top_k", "a whole number", "--max-tokens"):
        assert words in done.err
