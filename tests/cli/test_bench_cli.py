"""`pipeline bench` before fake servers: faults, a dry run, the table, JSON, exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from pipeline.bench.result import BenchResult, json_schema
from pipeline.cli.bench import command
from pipeline.client.testing import Ending, FakeServer, Reply
from pipeline.errors import InvalidInput, ServerError, UserError
from tests.support import CHECKPOINTS
from tests.support.command import Command
from tests.support.waiting import wait_for

TOKENIZER = str(CHECKPOINTS / "support-target")
SHORT = ("--load", "requests=40", "--load", "warmup_s=0", "--load", "seed=3")


def bench(*arguments: str, catch: bool = False) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=catch)


def ask(server: FakeServer, *arguments: str) -> Result:
    return bench("--url", server.url, "--tokenizer", TOKENIZER, *SHORT, *arguments)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{\n")
    with pytest.raises(InvalidInput) as caught:
        bench(
            *("--url", "nowhere", "--way", "triton", "--load", "concurrency=0,2", "--load", "rate=1,x"),
            *(
                "--sweep",
                "--load",
                "cancel=2",
                "--load",
                "prompt_tokens=many",
                "--load",
                f"prompts={prompts}",
                "--load",
                "turns=2",
            ),
            *("--slo", "speed=1", "--output", "/nowhere/x.json", "--load", "speed=2"),
        )
    text = str(caught.value)
    for fault in (
        "--url = nowhere", "--way", "--load: concurrency = 0,2: must be at least 1", 
        "--load: rate = 1,x: must be a number", "cancel = 2",
        "prompt_tokens = many",
        "turns", "--slo = speed=1", "--output = /nowhere/x.json", "speed", f"{prompts}:1",
    ):  # fmt: skip
        assert fault in text, fault
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name a running deployment"),
        (("--url", "http://h:1", "--load", "prompts=calibration"), "--model"),
        (("--url", "h:1"), "--tokenizer"),
        (("x", "--load", "rate=1", "--load", "concurrency=1"), "exclude each other"),
        (("x", "--load", "trace=/nowhere.jsonl"), "no such file"),
        (("x", "--sweep", "--load", "rate=1,2,4"), "takes the first load, and the largest"),
        (("x", "--load", "raw=true", "--load", "turns=2"), "chat template"),
    ],
)
def test_faults_of_options_together(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        bench(*arguments)


def test_a_deployment_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="pipeline serve tiny-cpu"):
        bench("tiny-cpu", "--store", str(tmp_path))
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        bench("--url", "127.0.0.1:9", "--load", "prompts=calibration", "--tokenizer", TOKENIZER)
    with pytest.raises(UserError, match="chat template"):
        bench("--url", "127.0.0.1:9", "--load", "prompts=calibration")
    with pytest.raises(InvalidInput, match="needs an SLO"):
        bench("--url", "127.0.0.1:9", "--load", "prompts=calibration", "--sweep")


def test_a_dry_run_sends_nothing() -> None:
    with FakeServer() as server:
        shown = bench(
            *("--url", server.url, "--tokenizer", TOKENIZER, "--load", "rate=2,4", "--load", "requests=60"),
            *("--load", "prompt_tokens=100~20", "--slo", "ttft_p95_ms=500", "--dry-run", "--json"),
        )
        assert server.requests == []
    plan = json.loads(shown.stdout)
    assert plan["loads"] == "2 a second, then 4 a second"
    # 30 s and 15 s, and a warm-up of 3 s each.
    assert plan["takes"].startswith("51 s in all")
    assert "100~20" in plan["prompts"]
    assert plan["slo"] == "ttft_p95_ms 500"


def test_the_table_shows_loads_verdicts_and_warnings(tmp_path: Path) -> None:
    file = ("--output", str(tmp_path / "x.json"))
    with FakeServer(Reply("abcd", draft_tokens=4, accepted_tokens=3, queue_ms=2.0)) as server:
        shown = ask(
            server, "--load", "concurrency=1,3", "--slo", "ttft_p95_ms=1e6", "--slo", "itl_p99_ms=1e6", *file
        )
        assert len(server.requests) == 80
    assert shown.exit_code == 0
    for words in (
        "1 at a time", "3 at a time", "TTFT p95", "goodput", "met", "SLO itl_p99_ms 1e+06, 3 at a time",
        "75% of the draft's tokens accepted", "queue p50 2.0", "too few requests for an interval of p95",
        "a draft model predicts words at random badly",
    ):  # fmt: skip
        assert words in shown.stdout, words
    assert "written" in shown.stderr
    result = BenchResult.read(tmp_path / "x.json")
    assert [level.requests["complete"] for level in result.levels] == [40, 40]
    assert result.seed == 3


def test_json_is_the_result_and_nothing_else(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "max_tokens": 5}\n')
    with FakeServer() as server:
        shown = ask(server, "--load", f"prompts={prompts}", "--json")
        assert {request.prompt for request in server.requests} == {"Once"}
    assert shown.stderr == ""
    jsonschema.validate(json.loads(shown.stdout), json.loads(json_schema()))


@pytest.mark.parametrize(
    ("script", "arguments", "code"),
    [
        (Reply(), ("--slo", "ttft_p95_ms=0.0001"), 3),
        (Reply(), ("--slo", "ttft_p95_ms=1e6"), 0),
        (Reply((), ending=Ending.ERROR), (), 3),
        (Reply((), ending=Ending.ERROR), ("--max-failed", "1"), 0),
    ],
)
def test_exit_codes_are_for_ci(script: Reply, arguments: tuple[str, ...], code: int) -> None:
    with FakeServer(script) as server:
        assert (
            ask(server, "--load", "requests=6", "--load", "prompts=calibration", *arguments).exit_code == code
        )


def test_lengths_that_a_deployment_cannot_take_are_refused_before_a_request() -> None:
    with FakeServer() as server:
        with pytest.raises(UserError, match="output tokens"):
            ask(server, "--load", "output_tokens=100000")
        assert server.requests == []


def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    with FakeServer(Reply(delay_s=0.05)) as server:
        arguments = [
            *(
                sys.executable,
                "-m",
                "pipeline.cli.main",
                "bench",
                "--url",
                server.url,
                "--load",
                "duration_s=600",
            ),
            *(
                "--load",
                "prompts=calibration",
                "--load",
                "concurrency=2,4",
                "--output",
                str(tmp_path / "x.json"),
            ),
            *("--load", "warmup_s=0", "--tokenizer", TOKENIZER),
        ]
        with Command(arguments, tmp_path / "log", {}) as running:
            wait_for(lambda: len(server.requests) > 4 or running.process.poll() is not None, "requests")
            assert running.stop(signal.SIGINT) == 130
    assert "Ctrl-C ended the load early" in running.said
    result = BenchResult.read(tmp_path / "x.json")
    assert [str(level.load) for level in result.levels] == ["2 at a time"]
    level = result.levels[0]
    assert level.interrupted
    assert level.requests["complete"] > 0
    assert level.requests["failed"] == level.requests["abandoned"] == 0
