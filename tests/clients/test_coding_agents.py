"""Coding agents with their defaults: each completes a turn, whatever it sends besides what the gateway has.

They send prompts of 10,000 to 30,000 words, so that they ask a checkpoint with long positions. It answers everything
with the same words: judged is that the program takes a whole turn, without an error of the API, not what it is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from tests.support.models import make_answering_checkpoint
from tests.support.programs import Program

MODEL, ANSWER, QUESTION = "long-cpu", "Your order is here.", "Where is my order?"
RECIPE = f"""\
name: {MODEL}
model: {{source: "local:checkpoint"}}
runtime: {{kind: cpu, threads: 1}}
limits: {{max_input_tokens: 98304, max_output_tokens: 64, max_concurrency: 4}}
"""
TURN_S = 900.0

Install = Callable[[str], Program]


@pytest.fixture(scope="module")
def url(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a gateway in front of the checkpoint; no agent is told the limits of the model."""
    folder = tmp_path_factory.mktemp("long")
    make_answering_checkpoint(folder / "checkpoint", ANSWER, max_positions=131_072)
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
    words = (str(folder / "recipe.yaml"), "--build", "--set", "gateway.idle_timeout_s=0", *store.argv)
    deployment = ServedDeployment.start(words, MODEL, store.running, folder / "logs", deadline_s=600)
    try:
        yield deployment.record.gateway_url
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def program(url: str) -> Install:
    """`program("codex")` -> the program of that folder, installed, with the variables that agents read."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
        "MODEL": MODEL,
    }
    return lambda name: Program.install(name, variables)


def test_claude_code(program: Install) -> None:
    claude = program("claude_code")
    # The package of the platform has the program; npm's own has a script that copies it at its installation.
    (native,) = claude.environment.glob("node_modules/@anthropic-ai/claude-code-*/claude")
    done = claude.call([native, "-p", QUESTION, "--output-format", "json"], timeout_s=TURN_S)
    ended = json.loads(done.stdout.splitlines()[-1])
    assert (ended["result"], ended["is_error"], ended["stop_reason"]) == (ANSWER, False, "end_turn")
    assert ended["usage"]["input_tokens"] > 10_000


def test_the_sdk_of_claude_code(program: Install) -> None:
    ended = program("claude_agent_sdk").script("turn.mjs", QUESTION, timeout_s=TURN_S)
    assert ended == {"text": ANSWER, "error": False, "turns": 1}


def test_codex(program: Install, url: str) -> None:
    codex = program("codex")
    provider = {
        "name": "gateway",
        "base_url": f"{url}/v1",
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
    }
    settings = {"model": MODEL, "model_provider": "gateway"} | {
        f"model_providers.gateway.{name}": value for name, value in provider.items()
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    done = codex.call(
        [codex.command("codex"), "exec", "--skip-git-repo-check", "--json", *options, QUESTION],
        timeout_s=TURN_S,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["type"] for event in events][-1] == "turn.completed"
    assert [text for event in events if (text := event.get("item", {}).get("text"))] == [ANSWER]
    assert events[-1]["usage"]["input_tokens"] > 10_000


def test_qwen_code(program: Install) -> None:
    qwen = program("qwen_code")
    done = qwen.call([qwen.command("qwen"), "-p", QUESTION, "--output-format", "json"], timeout_s=TURN_S)
    (ended,) = (event for event in json.loads(done.stdout) if event["type"] == "result")
    assert (ended["result"], ended["is_error"]) == (ANSWER, False)


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi(program: Install, url: str, tmp_path: Path, api: str) -> None:
    base_url = url if api == "anthropic-messages" else f"{url}/v1"
    provider = {"baseUrl": base_url, "api": api, "apiKey": "none", "models": [{"id": MODEL}]}
    (tmp_path / "models.json").write_text(json.dumps({"providers": {"gateway": provider}}))
    pi = program("pi")
    done = pi.call(
        [pi.command("pi"), "--provider", "gateway", "--model", MODEL, "--mode", "json", "-p", QUESTION],
        timeout_s=TURN_S, PI_CODING_AGENT_DIR=str(tmp_path),
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert said(events[-1]) == [ANSWER]


def said(ended: Mapping[str, list[Mapping[str, object]]]) -> list[object]:
    """The texts of the assistant in pi's last event, which has all messages."""
    answers = [message for message in ended["messages"] if message["role"] == "assistant"]
    assert [answer["stopReason"] for answer in answers] == ["stop"]
    parts = answers[0]["content"]
    assert isinstance(parts, list)
    return [part["text"] for part in parts]
