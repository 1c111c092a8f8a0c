"""`pipeline generate` against the fake server; what all verbs that ask have of the recipe: its cache, its limits."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from pipeline.client.testing import Ending, FakeServer, Reply
from tests.cli.test_stream import command, environment, run, serve
from tests.support.waiting import wait_for

CACHED = ("--set", "cache.enabled=true", "--temperature", "0")


def test_answers_in_the_order_of_the_questions(tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    lines = ["plain text", json.dumps({"prompt": "two", "id": "b", "max_tokens": 3}), ""]
    lines += [json.dumps({"messages": [{"role": "user", "content": "three"}], "id": 3})]
    source.write_text("\n".join(lines), encoding="utf-8")
    with FakeServer([Reply(["one"], first_delay_s=0.2), Reply(["two"]), Reply(["three"])]) as server:
        serve(server, tmp_path)
        asked = [
            "--input",
            str(source),
            "--json",
            "--concurrency",
            "1",
            "--output",
            str(tmp_path / "answers"),
        ]
        done = run("generate", "tiny-cpu", *asked, store=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert [(row["index"], row.get("id"), row["text"]) for row in rows] == [
        (0, None, "one"), (1, "b", "two"), (2, 3, "three"),
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o600
    assert server.requests[1].tensors["max_tokens"] == [3]
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("3/3 in ")


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    lines = "\n".join(['{"prompt": "a", "temprature": 0}', "b"])
    with FakeServer(Reply(["fine"])) as server:
        serve(server, tmp_path)
        done = run("generate", "tiny-cpu", "--input", "-", "--json", store=tmp_path, stdin=lines)
    bad, good = (json.loads(line) for line in done.stdout.splitlines())
    assert bad["kind"] == "Refused"
    assert "did you mean 'temperature'" in bad["error"]
    assert good["text"] == "fine"
    assert done.returncode == 2
    assert "1 of 2 prompts have no answer" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": 1}\n{"messages": []}', "-:2: messages: must be a list"),
        ("{no", "begins like JSON and is not"),
        ('{"id": 1}', 'needs "prompt" or "messages"'),
    ],
)
def test_lines_that_are_no_prompt(text: str, message: str, tmp_path: Path) -> None:
    done = run("generate", "--url", "127.0.0.1:1", "--raw", "--input", "-", store=tmp_path, stdin=text)
    assert done.returncode == 2
    assert message in done.stderr.replace("<stdin>", "-")


def test_ctrl_c_cancels_on_the_server(tmp_path: Path) -> None:
    with FakeServer(Reply(["word "] * 1000, delay_s=0.02)) as server:
        serve(server, tmp_path)
        with subprocess.Popen(
            command("generate", "tiny-cpu", "a", "b", "c", "--concurrency", "2"),
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            wait_for(lambda: len(server.requests) == 2, "two requests")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        assert process.returncode == 130
        assert all(request.cancelled.wait(10) for request in server.requests)
        assert len(server.requests) == 2


def test_the_verbs_share_the_cache_of_the_recipe(tmp_path: Path) -> None:
    with FakeServer(Reply(["He", "llo"])) as server:
        serve(server, tmp_path)
        first = run("stream", "tiny-cpu", "Hi", *CACHED, store=tmp_path)
        again = run("stream", "tiny-cpu", "Hi", *CACHED, store=tmp_path)
        whole = run("generate", "tiny-cpu", "Hi", *CACHED, "--json", store=tmp_path)
        said = run("chat", "tiny-cpu", *CACHED, store=tmp_path, stdin="Hi\n/stats\n")
        assert len(server.requests) == 1
        other = run("stream", "tiny-cpu", "Hi", *CACHED, "--tenant", "shop", store=tmp_path)
        none = run("stream", "tiny-cpu", "Hi", *CACHED, "--set", "cache.enabled=false", store=tmp_path)
        assert len(server.requests) == 3
    assert first.stdout == again.stdout == other.stdout == none.stdout == said.stdout == "Hello\n"
    assert "from the cache (exact)" in again.stderr
    assert "from the cache (exact)" in said.stderr
    assert "cache" not in first.stderr + other.stderr + none.stderr
    cached = json.loads(whole.stdout)["stats"]["cached"]
    assert (cached["kind"], cached["similarity"], len(cached["key"])) == ("exact", 1.0, 32)
    assert "1 from the cache" in whole.stderr


def test_a_prompt_that_is_too_long_is_not_sent(tmp_path: Path) -> None:
    with FakeServer(Reply(["never"], ending=Ending.EMPTY)) as server:
        serve(server, tmp_path)
        done = run("stream", "tiny-cpu", "word " * 80, store=tmp_path)
        assert server.requests == []
    assert done.returncode == 2
    assert "this model takes at most 64" in done.stderr
