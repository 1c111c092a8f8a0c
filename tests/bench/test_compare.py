"""`pipeline compare` against servers that answer from a script: what they are asked, and what is made of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner, Result

from pipeline.bench.compare.judge import decide
from pipeline.bench.compare.run import CompareResult
from pipeline.cli.main import cli
from pipeline.client.testing import FakeServer, Reply
from pipeline.client.testing.reply import Received
from pipeline.errors import InvalidInput, ServerError
from pipeline.golden import GoldenBudgets, GoldenSet, write_document
from pipeline.golden_questions import GoldenQuestion
from pipeline.store import Store
from pipeline.triton.deployment import Deployment, DeploymentLimits
from pipeline.triton.running import RunningServer
from tests.support import CHECKPOINTS
from tests.support.deployments import ADDRESSES
from tests.support.served import package_support_pair

QUESTIONS = ("Is there a warranty?", "What is <b>E62</b>?", "Where is my parcel?")
LIGHT = "<script>alert(1)</script> means that there is no light & no {} at all, at the moment"
ANSWERS = {
    "a": ("Yes, for two years.", LIGHT.format("signal"), "On its way to you."),
    "b": ("Yes, for two years.", LIGHT.format("sound"), "Nobody knows."),
}


@dataclass
class Pair:
    """Two deployments, announced in a store, and what both were asked, in its order."""

    store: Store
    asked: list[tuple[str, str]]
    ctrl_c_at: int | None = None  # with which request the user loses patience

    def run(self, *words: str) -> Result:
        arguments = ["compare", "a", "b", "--store", str(self.store.root), *words]
        return CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)

    def result(self, *words: str, code: int = 0) -> CompareResult:
        done = self.run("--json", *words)
        assert done.return_value in (code, None), done.output
        return CompareResult.model_validate_json(done.stdout)


def criteria(*keys: str) -> list[str]:
    return [f"--criteria={key}" for key in keys]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(Store(tmp_path / "store"), [])
    with ExitStack() as stack:
        for name in ("a", "b"):

            def answer(received: Received, name: str = name) -> Reply:
                pair.asked.append((name, received.prompt))
                if len(pair.asked) == pair.ctrl_c_at:
                    os.kill(os.getpid(), signal.SIGINT)
                found = [
                    text
                    for question, text in zip(QUESTIONS, ANSWERS[name], strict=True)
                    if question in received.prompt
                ]
                return Reply(found or ["some", " words"], first_delay_s=0.001)

            server = stack.enter_context(FakeServer(answer))
            package = tmp_path / name
            (package / "tokenizer").mkdir(parents=True)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                (package / "tokenizer" / file).write_bytes(
                    (CHECKPOINTS / "support-target" / file).read_bytes()
                )
            Deployment(
                name=name, runtime="pytorch", entry_model="tensorrt_llm_bls", models=("tensorrt_llm_bls",),
                limits=DeploymentLimits(max_input_tokens=256, max_output_tokens=16, max_concurrency=4),
                tokenizer_dir="tokenizer", end_id=1, pad_id=1, stop_token_ids=(), digest=name * 64, versions={},
            ).save(package)  # fmt: skip
            RunningServer.of({**ADDRESSES, "grpc_url": server.url}, package).write(pair.store.running, name)
        yield pair


LOAD = (
    "--load",
    "concurrency=1",
    "--load",
    "requests=2",
    "--load",
    "warmup_s=0",
    "--load",
    "prompt_tokens=8",
    "--load",
    "output_tokens=2",
)


def test_both_get_the_same_load_in_turns(pair: Pair) -> None:
    result = pair.result(*LOAD, *criteria("rounds=4", "skip_golden=true"))
    order = [side for side, _ in pair.asked]
    assert order == [side for side in "abbaabba" for _ in range(2)]
    of = {side: [prompt for one, prompt in pair.asked if one == side] for side in "ab"}
    assert of["a"] == of["b"]
    assert len(set(of["a"])) == 8, "rounds do not repeat each other: a prefix cache would answer"
    (load,) = result.loads
    assert (load.requests, load.failed, result.rounds) == ((8, 8), (0, 0), 4)
    assert {metric.metric for metric in load.metrics} >= {"ttft_p50", "ttft_p95", "output_tokens_per_s"}
    for metric in load.metrics:
        assert len(metric.rounds) == 4
        assert metric.p is not None
    assert result.answers is None


def test_ctrl_c_ends_with_what_whole_rounds_have_shown(pair: Pair) -> None:
    words = (*LOAD, *criteria("rounds=40", "skip_golden=true", "max_regression=0.9"))
    pair.ctrl_c_at = 13  # of two requests a load: A B B A A B, and one of the seventh load
    result = pair.result(*words, code=130)
    assert (result.interrupted, result.rounds, result.budgets) == (True, 3, ())
    assert {len(metric.rounds) for metric in result.loads[0].metrics} == {3}
    pair.asked.clear()
    pair.ctrl_c_at = 5
    with pytest.raises((KeyboardInterrupt, click.Abort)):
        pair.run(*words)


def test_rounds_go_on_while_a_budget_is_open(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal servers are never shown to be no slower at all, and all rounds are used; a generous budget needs few."""
    words = (*LOAD, *criteria("rounds=5", "most_rounds=8", "skip_golden=true"))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.bench.compare.budgets.ALPHA", 1e-12)  # nor, by chance, to be slower
        open_ = pair.result(*words, *criteria("max_regression=0"), code=4)
    assert (open_.rounds, open_.state) == (8, "not shown")
    order = [side for side, _ in pair.asked]
    assert order == [side for side in "abbaabbaabbaabba" for _ in range(2)]
    pair.asked.clear()
    decided = pair.result(*words, *criteria("max_length_change=0.5"))
    assert (decided.rounds, decided.state) == (5, "kept")


def test_any_two_servers_of_openais_api_are_compared(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time", "max_tokens": 2}\n')
    load = [f"--load={key}" for key in (f"prompts={prompts}", "concurrency=1", "requests=2", "warmup_s=0")]
    with openai_server() as a, openai_server("llama", "qwen") as b:
        words = ["compare", a, f"{b}#qwen", "--json", *load, *criteria("rounds=3")]
        done = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
        result = CompareResult.model_validate_json(done.stdout)
        with pytest.raises(ServerError, match="lists llama, qwen as its models: name one behind the address"):
            CliRunner().invoke(cli, ["compare", a, b, *load], catch_exceptions=False, standalone_mode=False)
    assert [compared.target["model"] for compared in (result.a, result.b)] == ["llama", "qwen"]
    assert (result.rounds, result.loads[0].requests, result.answers) == (3, (6, 6), None)
    with pytest.raises(InvalidInput) as caught:
        CliRunner().invoke(
            cli, ["compare", a, "b", *criteria("rounds=0")], catch_exceptions=False, standalone_mode=False
        )
    assert {fault.key for fault in caught.value.faults} == {"questions", "--tokenizer"}


@contextlib.contextmanager
def openai_server(*models: str) -> Iterator[str]:
    """A server of OpenAI's API with these models, that answers two words."""

    class Handler(JudgeHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": model} for model in models or ("llama",)]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            for text in (" two", " words"):
                self.wfile.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    with answering(Handler) as url:
        yield url


@contextlib.contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server with this handler; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def questions(folder: Path) -> Path:
    lines = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    lines[2] |= {"contains": "way"}  # type: ignore[dict-item]
    (folder / "golden.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "golden.jsonl"


def test_answers_are_compared_and_held_to_budgets(pair: Pair, tmp_path: Path) -> None:
    words = criteria("rounds=0", f"questions={questions(tmp_path)}", "min_passed=0.5")
    page, output = tmp_path / "page.html", tmp_path / "result.json"
    done = pair.run(*words, *criteria("min_similar=0.6"), "--output", str(page), "--output", str(output))
    result = CompareResult.read(output)
    answers = result.answers
    assert answers is not None
    assert (answers.equal, answers.similar, answers.right) == (1, 2, (3, 2))
    assert [question.equal for question in answers.questions] == [True, False, False]
    assert answers.questions[0].first_difference is None
    assert answers.questions[2].first_difference == 0
    assert answers.questions[2].fault_b == "does not contain 'way': 'Nobody knows.'"
    assert "pytorch" in answers.no_perplexity, "that runtime tells no log probabilities"
    assert [(budget.budget, budget.state) for budget in result.budgets] == [
        ("min_passed", "kept"),
        ("min_similar", "kept"),
    ]
    assert "answers to 3 golden questions: 1 equal, 2 similar; right by their checks: A 3, B 2" in done.stdout
    html = page.read_text()
    assert "<script>" not in html
    assert "What is &lt;b&gt;E62&lt;/b&gt;?" in html
    shown = re.sub(r"</?(del|ins)>", "", html)
    for text in (*ANSWERS["a"], *ANSWERS["b"]):
        assert text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in shown
    assert pair.run(*words, *criteria("min_equal=0.5")).return_value == 3
    assert pair.run(*words, *criteria("max_perplexity_increase=0.1")).return_value == 4, (
        "what is not known does not pass"
    )


def test_questions_and_budgets_of_the_package_are_used(pair: Pair, tmp_path: Path) -> None:
    golden = GoldenSet((GoldenQuestion(prompt=QUESTIONS[0]),), GoldenBudgets(min_equal=1.0))
    write_document(golden.document, tmp_path / "b")
    result = pair.result(*criteria("rounds=0"))
    assert result.state == "kept"
    assert [budget.budget for budget in result.budgets] == ["min_passed", "min_equal"]
    assert {prompt for _, prompt in pair.asked} == {QUESTIONS[0]}, "a text goes without the chat template"


class JudgeHandler(BaseHTTPRequestHandler):
    """Prefers the answer that promises a way, wherever it stands; about lights it always likes the first."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"]
        self.asked.append((self.headers["authorization"], body["model"]))
        first, second = text.index("<first>"), text.index("<second>")
        word = "FIRST" if "light" in text or "way" in text[first:second] else "SECOND"
        if body["model"] == "chatty":
            word = "I like both of them!"
        event = {"choices": [{"index": 0, "delta": {"content": f"They differ.\n{word}"}}]}
        self.send_response(200 if body["model"] != "broken" else 503)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    JudgeHandler.asked.clear()
    with answering(JudgeHandler) as url:
        yield url


def test_a_judge_is_asked_in_both_orders(
    pair: Pair, judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    asks = criteria("rounds=0", f"questions={questions(tmp_path)}", "min_passed=0.1", f"judge={judge}")
    wise = criteria("judge_model=wise", "judge_key_env=MY_KEY", "max_lost=0.2")
    result = pair.result(*asks, *wise, code=3)
    assert result.answers is not None
    assert [question.preferred for question in result.answers.questions] == ["tie", "tie", "a"]
    assert JudgeHandler.asked == [("Bearer secret", "wise")] * 4, "equal answers need no judge"
    assert [budget.budget for budget in result.budgets if budget.state == "over"] == ["max_lost"]
    assert "secret" not in result.model_dump_json()
    chatty = pair.result(*asks, *criteria("judge_model=chatty")).answers
    assert chatty is not None
    assert chatty.judged == {"a": 0, "b": 0, "tie": 1, "none": 2}
    assert "I like both of them!" in chatty.questions[1].no_verdict
    with pytest.raises(ServerError, match="answered none of 4 requests: HTTP 503"):
        pair.run(*asks, *criteria("judge_model=broken"))


@pytest.mark.parametrize(
    ("forward", "exchanged", "preferred"),
    [
        ("FIRST", "SECOND", "a"), ("SECOND", "FIRST", "b"), ("TIE", "TIE", "tie"), ("FIRST", "FIRST", "tie"),
        ("Well.\n\n**FIRST**", "second thoughts\nSECOND.", "a"), ("FIRST or SECOND", "FIRST", None), ("", "TIE", None),
    ],
)  # fmt: skip
def test_what_a_judge_writes_is_read_strictly(forward: str, exchanged: str, preferred: str | None) -> None:
    assert decide(forward, exchanged).preferred == preferred


def test_everything_wrong_with_a_command_line_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("{}")

    def faults(*words: str) -> set[str]:
        with pytest.raises(InvalidInput) as caught:
            CliRunner().invoke(cli, ["compare", *words], catch_exceptions=False, standalone_mode=False)
        return {fault.key or fault.problem for fault in caught.value.faults}

    wrong = criteria("rounds=9", "judge=x", "min_equal=2")
    assert faults(str(file), str(tmp_path / "b.json"), *wrong) == {
        "B", "rounds", "judge", "min_equal", "judge and judge_model go together",
    }  # fmt: skip
    wrong = criteria("rounds=2", "skip_golden=true", "min_similar=1")
    assert faults("a", str(tmp_path), *wrong, "--slo", "x") == {
        "B", "rounds", "min_similar", "--slo",
    }  # fmt: skip
    assert faults(str(file), "a") == {"a stored run cannot be compared with what runs"}


@pytest.mark.servers
def test_two_packages_are_served_and_compared(tmp_path: Path) -> None:
    """One target without a draft and with one, beside each other and by turns: greedily they are the same model."""
    a, b = (package_support_pair(tmp_path / str(draft), draft=draft) for draft in (False, True))
    asked = ("Is there any warranty on the headset?", "The router says error E62.")
    golden = [
        GoldenQuestion.model_validate({"messages": ({"role": "user", "content": text},), "max_tokens": 12})
        for text in asked
    ]
    write_document(GoldenSet(tuple(golden), GoldenBudgets(min_equal=1.0)).document, b)

    def compared(*words: str) -> CompareResult:
        arguments = ["compare", str(a), str(b), "--json", *words]
        done = CliRunner().invoke(cli, arguments, standalone_mode=False)
        assert done.exception is None, done.output
        return CompareResult.model_validate_json(done.stdout)

    keys = ("concurrency=2", "requests=4", "warmup_s=0", "prompt_tokens=16", "output_tokens=8")
    load = [f"--load={key}" for key in keys]
    result = compared(*criteria("rounds=3"), *load, *criteria("max_perplexity_increase=0.01"))
    assert not result.by_turns
    assert (result.loads[0].requests, result.loads[0].failed) == ((12, 12), (0, 0))
    assert all(len(metric.rounds) == 3 for metric in result.loads[0].metrics)
    assert [budget.budget for budget in result.budgets] == [
        "min_passed",
        "min_equal",
        "max_perplexity_increase",
    ]
    assert result.state == "kept"
    assert result.answers is not None
    found = result.answers.perplexity
    assert found is not None
    assert found.a_of_a > 1
    for other in (found.b_of_a, found.b_of_b, found.a_of_b):
        assert other == pytest.approx(found.a_of_a, rel=1e-3)
    again = compared(*criteria("rounds=0", "by_turns=true"))
    assert again.by_turns
    assert again.answers is not None
    assert again.answers.questions == result.answers.questions
    ours = [process for process in processes() if str(tmp_path) in process or "pipeline-compare-" in process]
    assert ours == [], "nothing is left"


def processes() -> list[str]:
    """Command lines of all processes but this one."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid():
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines
