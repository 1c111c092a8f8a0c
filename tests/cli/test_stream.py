"""`pipeline stream` against the fake server: what it prints, how it finds the server, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.client.testing import Ending, FakeServer, Reply
from pipeline.triton.deployment import Deployment, DeploymentLimits
from pipeline.triton.running import RunningServer
from tests.support.deployments import ADDRESSES

TOKENIZER = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "support-target"
SLOW = Reply(["word "] * 1000, delay_s=0.02)


def run(*words: str, store: Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        capture_output=True,
        text=True,
        input=stdin,
        env=environment(store),
        timeout=60,
        check=False,
    )


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli.main", *words]


def environment(store: Path | None) -> dict[str, str]:
    return {**os.environ, **({"PIPELINE_STORE": str(store)} if store else {})}


def serve(server: FakeServer, store: Path, name: str = "tiny-cpu") -> None:
    """What `pipeline serve` leaves for clients, for a fake server."""
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

    addresses = {**ADDRESSES, "grpc_url": server.url}
    RunningServer.of(addresses, package).write(store / "running", name)


def test_an_answer_and_its_figures(tmp_path: Path) -> None:
    reply = Reply(
        ["Open ", "the 안녕 ", "menu 😀."],
        tokens_per_chunk=2,
        delay_s=0.01,
        draft_tokens=4,
        accepted_tokens=3,
    )
    with FakeServer(reply) as server:
        serve(server, tmp_path)
        done = run(
            "stream",
            "tiny-cpu",
            "How do I log in?",
            "--param",
            "top_k=1",
            "--param",
            'stop="\\n"',
            store=tmp_path,
        )
    assert done.stdout == "Open the 안녕 menu 😀.\n"
    assert re.search(
        r"TTFT \d+\.\d ms, ITL p50 \d+\.\d p95 \d+\.\d p99 \d+\.\d ms\n6 tokens in \d", done.stderr
    )
    assert "draft accepted 75%, ended by stop" in done.stderr
    assert done.returncode == 0
    (request,) = server.requests
    assert request.prompt.startswith(
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow do I log in?"
    )
    assert request.prompt.endswith("assistant<|end_header_id|>\n\n")
    assert request.tensors["max_tokens"] == [48]
    assert request.tensors["top_k"] == [1]
    assert request.tensors["stop_words"] == ["\n"]


def test_json(tmp_path: Path) -> None:
    with FakeServer(Reply(["Hé", "llo"])) as server:
        serve(server, tmp_path)
        done = run(
            "stream", "tiny-cpu", "Hi", "--json", "--max-tokens", "2", "--system", "Be kind.", store=tmp_path
        )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["text"] for line in lines[:-1]] == ["Hé", "llo", ""]
    assert lines[-2]["finish_reason"] == "length"
    assert lines[-1]["stats"]["output_tokens"] == 2
    assert lines[-1]["request_id"] == server.requests[0].request_id
    assert "system<|end_header_id|>\n\nBe kind." in server.requests[0].prompt


def test_without_a_recipe() -> None:
    with FakeServer() as server:
        raw = run("stream", "--url", server.url, "--raw", "-q", "-", stdin="Once upon")
        templated = run("stream", "--url", server.url, "--tokenizer", str(TOKENIZER), "Hi")
        neither = run("stream", "--url", server.url, "Hi")
    assert (raw.stdout, raw.stderr) == ("Hello world\n", "")
    assert templated.returncode == 0
    assert server.requests[0].prompt == "Once upon"
    assert "<|eot_id|>" in server.requests[1].prompt
    assert neither.returncode == 2
    assert "--tokenizer FOLDER" in neither.stderr


@pytest.mark.parametrize(
    "words", [("stream",), ("stream", "tiny-cpu"), ("stream", "--url", "a:1", "tiny-cpu", "Hi")]
)
def test_words_that_do_not_fit(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "QUESTION" in done.stderr


def test_not_running(tmp_path: Path) -> None:
    done = run("stream", "tiny-cpu", "Hi", store=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "pipeline: tiny-cpu is not running. Start it in another terminal:\n"
        f"  pipeline serve tiny-cpu --store {tmp_path}\n"
    )


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    with FakeServer() as server:
        serve(server, tmp_path)
    gone = run("stream", "tiny-cpu", "Hi", store=tmp_path)
    assert gone.returncode == 1
    assert re.fullmatch(r"pipeline: no answer from 127\.0\.0\.1:\d+: .*\n", gone.stderr)
    record = tmp_path / "running" / "tiny-cpu.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "pid": 2**22 + 1}))
    dead = run("stream", "tiny-cpu", "Hi", "--store", str(tmp_path))
    assert "tiny-cpu is no longer running" in dead.stderr
    assert f"pipeline serve tiny-cpu --store {tmp_path}" in dead.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--max-tokens", "0"), 2, "--max-tokens = 0: must be at least 1"),
        (("--temperature", "-1"), 2, "--temperature = -1.0: must be at least 0"),
        (("--model", "nope"), 1, "Request for unknown model: 'nope' is not found"),
    ],
)
def test_refusals(words: tuple[str, ...], code: int, message: str) -> None:
    with FakeServer() as server:
        done = run("stream", "--url", server.url, "--raw", "Hi", *words)
    assert done.returncode == code
    assert done.stderr.startswith(f"pipeline: {message}")
    assert "Traceback" not in done.stderr


def test_an_answer_that_breaks_off() -> None:
    with FakeServer(Reply(ending=Ending.ERROR, error="out of memory")) as server:
        done = run("stream", "--url", server.url, "--raw", "Hi")
    said = "pipeline: out of memory (after 2 chunks of the answer, 11 characters)\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "Hello world\n", said)


def test_ctrl_c_stops_the_answer_on_the_server() -> None:
    with FakeServer(SLOW) as server:
        words = command("stream", "--url", server.url, "--raw", "Hi")
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
        words = command("stream", "--url", server.url, "--raw", "Hi", "-q")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.read(5)
            process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(30) == 0
        assert server.requests[0].cancelled.wait(5)


def test_wrong_parameters_are_told_before_anything_is_asked() -> None:
    wrong = ("--param", "top_p=3", "--param", "topk=1", "--param", "seed=x", "--param", "max_tokens=2")
    done = run("stream", "--url", "127.0.0.1:1", "--raw", *wrong, "Hi")
    assert done.returncode == 2
    for words in ("at most 1", "did you mean top_k", "a whole number", "--max-tokens"):
        assert words in done.stderr
