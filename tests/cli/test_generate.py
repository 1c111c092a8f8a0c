"""`pipeline generate` against the fake server; what all verbs that ask have of the recipe: its cache, its limits."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from pipeline.client.testing import Ending, FakeServer, Reply
from tests.cli.conftest import Run
from tests.cli.test_stream import COMMAND, serve
from tests.support.waiting import wait_for

CACHED = ("--set", "cache.enabled=true", "--temperature", "0")


def test_answers_in_the_order_of_the_questions(run: Run, tmp_path: Path) -> None:
    source, answers = tmp_path / "questions.jsonl", tmp_path / "answers"
    lines = ["plain text", json.dumps({"prompt": "two", "id": "b", "max_tokens": 3}), ""]
    lines += [json.dumps({"messages": [{"role": "user", "content": "three"}], "id": 3})]
    source.write_text("\n".join(lines), encoding="utf-8")
    with FakeServer([Reply(["one"], first_delay_s=0.2), Reply(["two"]), Reply(["three"])]) as server:
        serve(server, tmp_path / "store")
        words = ("--input", str(source), "--json", "--concurrency", "1", "--output", str(answers))
        done = run("generate", "tiny-cpu", *words)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(row["index"], row.get("id"), row["text"]) for row in rows] == [
        (0, None, "one"), (1, "b", "two"), (2, 3, "three"),
    ]  # fmt: skip
    assert stat.S_IMODE(answers.stat().st_mode) == 0o600
    assert server.requests[1].tensors["max_tokens"] == [3]
    assert done.code == 0, done.err
    assert done.err.startswith("3/3 in ")


def test_one_that_fails_does_not_stop_the_others(run: Run, tmp_path: Path) -> None:
    lines = "\n".join(['{"prompt": "a", "temprature": 0}', "b"])
    with FakeServer(Reply(["fine"])) as server:
        serve(server, tmp_path / "store")
        done = run("generate", "tiny-cpu", "--input", "-", "--json", stdin=lines)
    bad, good = (json.loads(line) for line in done.out.splitlines())
    assert bad["kind"] == "Refused"
    assert "did you mean 'temperature'" in bad["error"]
    assert good["text"] == "fine"
    assert done.code == 2
    assert "1 of 2 prompts have no answer" in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": 1}\n{"messages": []}', "-:2: messages: must be a list"),
        ("{no", "begins like JSON and is not"),
        ('{"id": 1}', 'needs "prompt" or "messages"'),
    ],
)
def test_lines_that_are_no_prompt(run: Run, text: str, message: str) -> None:
    done = run("generate", "--url", "127.0.0.1:1", "--raw", "--input", "-", stdin=text)
    assert done.code == 2
    assert message in done.err.replace("<stdin>", "-")


def test_ctrl_c_cancels_on_the_server(tmp_path: Path) -> None:
    with FakeServer(Reply(["word "] * 1000, delay_s=0.02)) as server:
        serve(server, tmp_path)
        words = [*COMMAND, "generate", "tiny-cpu", "a", "b", "c", "--concurrency", "2"]
        environment = os.environ | {"PIPELINE_STORE": str(tmp_path)}
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            wait_for(lambda: len(server.requests) == 2, "two requests")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        assert process.returncode == 130
        assert all(request.cancelled.wait(10) for request in server.requests)
        assert len(server.requests) == 2


def test_the_verbs_share_the_cache_of_the_recipe(run: Run, tmp_path: Path) -> None:
    with FakeServer(Reply(["He", "llo"])) as server:
        serve(server, tmp_path / "store")
        first = run("stream", "tiny-cpu", "Hi", *CACHED)
        again = run("stream", "tiny-cpu", "Hi", *CACHED)
        whole = run("generate", "tiny-cpu", "Hi", *CACHED, "--json")
        said = run("chat", "tiny-cpu", *CACHED, stdin="Hi\n/stats\n")
        assert len(server.requests) == 1
        other = run("stream", "tiny-cpu", "Hi", *CACHED, "--tenant", "shop")
        none = run("stream", "tiny-cpu", "Hi", *CACHED, "--set", "cache.enabled=false")
        assert len(server.requests) == 3
    assert {done.out for done in (first, again, other, none, said)} == {"Hello\n"}
    assert "from the cache (exact)" in again.err
    assert "from the cache (exact)" in said.err
    assert "cache" not in first.err + other.err + none.err
    cached = whole.json["stats"]["cached"]
    assert (cached["kind"], cached["similarity"], len(cached["key"])) == ("exact", 1.0, 32)
    assert "1 from the cache" in whole.err


def test_a_prompt_that_is_too_long_is_not_sent(run: Run, tmp_path: Path) -> None:
    with FakeServer(Reply(["never"], ending=Ending.EMPTY)) as server:
        serve(server, tmp_path / "store")
        done = run("stream", "tiny-cpu", "word " * 80)
        assert server.requests == []
    assert done.code == 2
    assert "this model takes at most 64" in done.err
