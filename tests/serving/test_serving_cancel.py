"""A client that leaves, or says stop, frees the engine; a client that stays is not disturbed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pipeline.client import AsyncClient
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import DRAFT_MODEL, TARGET_MODEL
from tests.support.engine import QUESTIONS, TURN
from tests.support.streams import Response, joined, metrics, stream
from tests.support.waiting import wait_for

PROMPT = TURN.format(QUESTIONS[0])
IDS = np.array([[1, 3, 629, 4, 5, 6]], np.int32)
LONG = 700  # tokens: long enough to leave in the middle, even on a fast machine
ENDLESS = {"end_id": -1, "temperature": 3.0, "top_k": 2000}


def gauge(server: TritonServer, family: str, kind: str, model: str = "tensorrt_llm") -> float:
    page = metrics(server.metrics_url).items()
    return next(
        value for name, value in page if family in name and f'"{kind}"' in name and f'"{model}"' in name
    )


def settled(server: TritonServer) -> float:
    """Waits until the engines are empty and say the same twice; the tokens that the target has made."""
    last = -1.0

    def at_rest() -> bool:
        nonlocal last
        time.sleep(0.2)  # longer than the period in which metrics are set
        before, last = last, gauge(server, "general_metrics", "generated_tokens")
        return last == before and not any(
            gauge(server, family, kind, model)
            for family, kind in (("request_metrics", "active"), ("kv_cache_block_metrics", "used"))
            for model in server.deployment.models
            if model in (TARGET_MODEL, DRAFT_MODEL)
        )

    wait_for(at_rest, "rest", 60)
    return last


def cut_short(server: TritonServer, attempt: Callable[[], None]) -> float:
    """Tokens that were made in an attempt.

    A busy machine may complete an answer before it hears that nobody wants it, so it gets more chances.
    """
    made = 0.0
    for _ in range(5):
        before = settled(server)
        attempt()
        made = settled(server) - before
        if made < LONG:
            break
    return made


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "tensorrt_llm"])
def test_leaving_frees_the_engine(server: TritonServer, model: str) -> None:
    if model == "tensorrt_llm":
        asked = {
            "input_ids": IDS, "input_lengths": np.array([[6]], np.int32),
            "request_output_len": np.array([[LONG]], np.int32), "streaming": True,
            "end_id": -1, "temperature": 3.0, "runtime_top_k": 2000,
        }  # fmt: skip
    else:
        asked = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, **ENDLESS}

    def leave() -> None:
        for _ in stream(server.grpc_url, model, leave_after=3, **asked):
            pass

    assert 3 <= cut_short(server, leave) < LONG


def test_stop_ends_the_request_of_that_id_and_no_other(server: TritonServer) -> None:
    """All places of the engine are taken, so that the one request waits when it is stopped."""
    asked = {
        "input_ids": IDS, "input_lengths": np.array([[6]], np.int32), "streaming": True,
        "request_output_len": np.array([[LONG]], np.int32), "end_id": -1, "temperature": 3.0, "runtime_top_k": 2000,
    }  # fmt: skip
    others = [stream(server.grpc_url, "tensorrt_llm", request_id=f"other {n}", **asked) for n in range(8)]
    counts = [len(next(other).tokens) for other in others]
    waiting: list[Response] = []
    waiter = threading.Thread(
        target=lambda: waiting.extend(stream(server.grpc_url, "tensorrt_llm", request_id="one", **asked))
    )
    waiter.start()
    while waiter.is_alive():
        answer = list(stream(server.grpc_url, "tensorrt_llm", request_id="one", stop=True, **asked))
        assert [response.final for response in answer] == [True]
        assert not answer[0].outputs
    assert sum(len(response.tokens) for response in waiting) < LONG
    counts = [count + sum(len(r.tokens) for r in other) for count, other in zip(counts, others, strict=True)]
    assert counts == [LONG] * 8


@pytest.mark.parametrize("asked_to_stop", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_stop_ends_an_answer_of_the_entry_model_too(server: TritonServer, asked_to_stop: str) -> None:
    """By the client's own id, when that is long enough to be no one else's."""
    id = "0123456789abcdef"
    asked = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, **ENDLESS}
    stop = {"text_input": "", "max_tokens": 1, "stop": True}
    if asked_to_stop == "tensorrt_llm":
        lengths = {"input_lengths": np.array([[6]], np.int32), "request_output_len": 1}
        stop = {"input_ids": IDS, **lengths, "stop": True}

    def ask_and_stop() -> None:
        answer = stream(server.grpc_url, "tensorrt_llm_bls", request_id=id, **asked)
        next(answer)
        (said,) = stream(server.grpc_url, asked_to_stop, request_id=id, **stop)
        assert said.final
        assert not said.outputs
        assert list(answer)[-1].final

    assert cut_short(server, ask_and_stop) < LONG


def test_a_stop_names_a_request(server: TritonServer) -> None:
    """One that has ended is no fault: it may have ended just now."""
    stop = {"text_input": "", "max_tokens": 1, "stop": True}
    (said,) = stream(server.grpc_url, "tensorrt_llm_bls", request_id="that is long over", **stop)
    assert said.final
    with pytest.raises(InferenceServerException, match="give the id of the request that is to end"):
        list(stream(server.grpc_url, "tensorrt_llm_bls", request_id="short", **stop))


def test_of_two_answers_with_one_id_the_other_is_not_cut_when_one_is_left(server: TritonServer) -> None:
    """Clients may call two requests alike; what our client sends is told apart all the same."""

    async def ask(client: AsyncClient, leave: bool) -> str:
        sampling = {"max_tokens": 64, "min_tokens": 64, "temperature": 0}
        async with client.stream(PROMPT, request_id="the same id for both", **sampling) as stream:
            async for _ in stream:
                if leave:
                    break
        return stream.text

    async def work() -> list[str]:
        async with AsyncClient(server.grpc_url) as client:
            return await asyncio.gather(ask(client, True), ask(client, False), ask(client, False))

    left, *whole = asyncio.run(work())
    assert whole[0] == whole[1]
    assert len(left) < len(whole[0])


def test_a_stop_word_ends_the_engines_work(server: TritonServer) -> None:
    """Even one that no tokens of the engine line up with."""
    before = settled(server)
    asked = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, **ENDLESS, "seed": 3}
    whole = joined(server.grpc_url, "tensorrt_llm_bls", **asked)
    middle = settled(server)
    assert middle - before == LONG
    at = next(i for i in range(12, len(whole)) if whole[i : i + 2].isalpha() and whole[i : i + 2].isascii())
    stop = whole[at : at + 2]
    cut = joined(server.grpc_url, "tensorrt_llm_bls", stop_words=[stop], **asked)
    assert cut == whole[: whole.index(stop)]
    assert settled(server) - middle < LONG


def test_leaving_many_at_once_leaves_the_others_alone(server: TritonServer) -> None:
    alone = joined(server.grpc_url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=40, stream=True)
    asked = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, **ENDLESS}
    leaving = [stream(server.grpc_url, "tensorrt_llm_bls", **asked) for _ in range(3)]
    for client in leaving:
        next(client)
    staying = stream(server.grpc_url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=40, stream=True)
    text = next(staying).text
    for client in leaving:
        client.close()
    assert text + "".join(response.text for response in staying) == alone
    # Its blocks are free again.
    settled(server)
