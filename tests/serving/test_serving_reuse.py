"""Tokens of a prompt that were in the engine's KV cache, as a client of a real server reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeline.client import Client, Stats
from pipeline.runtimes.cpu.model_repository import TOKENS_PER_BLOCK
from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import SETTINGS, package_support_pair


def new_prompt(name: str) -> str:
    """A prompt of several blocks that no other test asks with."""
    return f"Reuse of {name}: " + " ".join(map(str, range(60)))


def in_blocks(stats: Stats) -> int:
    """Whole blocks of a prompt, all of which was computed before: its last token is always computed again."""
    assert stats.input_tokens is not None
    return (stats.input_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Draft and target as models of their own, which tensorrt_llm_bls runs in turns."""
    folder = tmp_path_factory.mktemp("two")
    settings = replace(SETTINGS, max_draft_tokens=4, speculation="bls")
    package = package_support_pair(folder, draft=True, settings=settings)
    with TritonServer.of_package(package, log_file=folder / "log") as server:
        yield server


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_a_prompt_that_was_asked_before_is_found_in_whole_blocks(server: TritonServer, model: str) -> None:
    prompt = new_prompt(model)
    with Client(server.grpc_url, model=model) as client:
        first, second = (client.generate(prompt, max_tokens=4, temperature=0) for _ in range(2))
        assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, in_blocks(second.stats))
        with client.stream(prompt + " and more", max_tokens=4, temperature=0) as stream:
            assert "".join(chunk.text for chunk in stream)
            longer = stream.stats
    assert longer.cached_tokens == in_blocks(second.stats)
    assert second.text == first.text


def test_an_answer_that_a_stop_text_ends_tells_it_too(server: TritonServer) -> None:
    prompt = TURN.format(f"{QUESTIONS[0]} {QUESTIONS[1]}")
    with Client(server.grpc_url) as client:
        whole = client.generate(prompt, max_tokens=32, temperature=0).text
        stop = whole.split()[3]
        cut = client.generate(prompt, max_tokens=32, temperature=0, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.stats.cached_tokens == in_blocks(cut.stats)


def test_a_draft_of_its_own_changes_nothing(two_engines: TritonServer) -> None:
    """Rounds find what the answer itself left; that is not counted."""
    prompt = new_prompt("two engines")
    with Client(two_engines.grpc_url) as client:
        first, second = (client.generate(prompt, max_tokens=24, temperature=0) for _ in range(2))
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, in_blocks(second.stats))
