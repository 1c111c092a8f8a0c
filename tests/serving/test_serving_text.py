"""What a client reads from a real server: the right text, whole characters, the same through every model."""

from __future__ import annotations

import itertools
import json
import queue
import re
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.serving.server import TritonServer
from tests.support import nasty_tokenizers
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import CHECKPOINTS, package_random
from tests.support.streams import generated, joined, stream

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
END_ID = 5
PROMPT = TURN.format(QUESTIONS[0])
WILD = {"temperature": 8.0, "top_k": 2000, "max_tokens": 60}  # torn characters, special tokens, anything


def as_engine_inputs(prompt: str, **more: object) -> dict[str, object]:
    ids = TOKENIZER.encode(prompt, add_special_tokens=False).ids
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "end_id": END_ID,
        **more,
    }


@pytest.mark.parametrize("question", QUESTIONS[:2])
def test_the_three_ways_agree(server: TritonServer, question: str) -> None:
    prompt = TURN.format(question)
    direct = generated(server.grpc_url, **as_engine_inputs(prompt, request_output_len=48, streaming=True))
    text = TOKENIZER.decode(direct)
    assert text.strip()
    assert joined(server.grpc_url, "tensorrt_llm_bls", text_input=prompt, max_tokens=48, stream=True) == text
    assert joined(server.grpc_url, "ensemble", text_input=prompt, max_tokens=48, stream=True) == text


@pytest.mark.parametrize("seed", range(2))
def test_torn_characters_join(server: TritonServer, seed: int) -> None:
    """Sampled almost evenly: most characters that are not ASCII are torn or broken."""
    wild = {"request_output_len": 60, "streaming": True, "temperature": 8.0, "runtime_top_k": 2000}
    direct = generated(server.grpc_url, **as_engine_inputs(PROMPT, seed=seed, **wild))
    asked = {"text_input": PROMPT, "stream": True, "seed": seed, **WILD}
    parts = [response.text for response in stream(server.grpc_url, "tensorrt_llm_bls", **asked)]
    assert "".join(parts) == TOKENIZER.decode(direct)
    assert len(parts) > 10


@pytest.mark.parametrize("text", ["안녕하세요", "👩‍👩‍👧", "naïve café"])
def test_characters_of_many_tokens_come_whole(server: TritonServer, text: str) -> None:
    """The model is made to write a text: each of its tokens in turn gets a bias that nothing outweighs."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    written = []
    for step in range(len(ids)):
        bias = np.zeros((1, 2048), np.float32)
        bias[0, ids[step]] = 1e4
        prompt = TURN.format("Say it.") + TOKENIZER.decode(ids[:step])
        written += generated(
            server.grpc_url,
            **as_engine_inputs(prompt, request_output_len=1, streaming=True, embedding_bias=bias),
        )
    assert written == ids
    asked = {"text_input": PROMPT + text, "max_tokens": 1, "exclude_input_in_output": False}
    assert text in joined(server.grpc_url, "tensorrt_llm_bls", **asked)


def test_without_stream_everything_comes_at_once(server: TritonServer) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 32}
    answer = joined(server.grpc_url, "tensorrt_llm_bls", stream=True, **asked)
    responses = stream(server.grpc_url, "tensorrt_llm_bls", exclude_input_in_output=True, **asked)
    assert [response.text for response in responses if response.text] == [answer]
    with_prompt = joined(server.grpc_url, "tensorrt_llm_bls", **asked)
    assert with_prompt == joined(server.grpc_url, "ensemble", **asked)
    assert with_prompt.endswith(answer)
    assert QUESTIONS[0] in with_prompt


def test_stop_words_end_the_text_before_them(server: TritonServer) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 48, "stream": True}
    whole = joined(server.grpc_url, "tensorrt_llm_bls", **asked)
    words = re.findall(r"\w+", whole)
    for stop in (words[3], words[3][:-1] or words[4], f"{words[3]} {words[4]}"):
        cut = joined(server.grpc_url, "tensorrt_llm_bls", stop_words=[stop], **asked)
        assert cut == whole[: whole.index(stop)] if stop in whole else whole
    both = joined(server.grpc_url, "tensorrt_llm_bls", stop_words=[words[5], words[2]], **asked)
    assert both == whole[: min(whole.index(words[5]), whole.index(words[2]))]
    at_once = joined(server.grpc_url, "tensorrt_llm_bls", **{**asked, "stream": False}, stop_words=[words[3]])
    assert at_once.endswith(whole[: whole.index(words[3])])


def test_bad_words_do_not_come(server: TritonServer) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 24, "stream": True}
    first = joined(server.grpc_url, "tensorrt_llm_bls", **asked).split()[0]
    without = joined(server.grpc_url, "tensorrt_llm_bls", bad_words=[first], **asked)
    assert without
    assert not without.startswith(first)


def test_biased_words_come(server: TritonServer) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 4, "stream": True}
    for model in ("tensorrt_llm_bls", "ensemble"):
        text = joined(
            server.grpc_url, model, embedding_bias_words=["?"],
            embedding_bias_weights=np.array([[1e4]], np.float32), **asked,
        )  # fmt: skip
        assert text == "????"


def test_a_batch_is_answered_row_by_row(server: TritonServer) -> None:
    prompts = [TURN.format(question) for question in QUESTIONS[:3]]
    alone = [
        joined(server.grpc_url, "tensorrt_llm_bls", text_input=p, max_tokens=20, stream=True) for p in prompts
    ]
    for model in ("tensorrt_llm_bls", "ensemble"):
        texts = ["", "", ""]
        for response in stream(
            server.grpc_url,
            model,
            text_input=np.array([[p.encode()] for p in prompts], np.object_),
            max_tokens=np.full((3, 1), 20, np.int32),
            stream=np.full((3, 1), True),
        ):
            if "text_output" in response.outputs:
                texts[response.outputs["batch_index"][0, 0]] += response.text
        assert texts == alone


def test_costs_come_with_the_last_tokens_if_asked_for(server: TritonServer) -> None:
    flags = {"return_perf_metrics": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    for model in ("tensorrt_llm_bls", "ensemble"):
        responses = list(
            stream(server.grpc_url, model, text_input=PROMPT, max_tokens=8, stream=True, **flags)
        )
        last = next(r.outputs for r in reversed(responses) if r.outputs)
        assert last["num_input_tokens"].item() == len(TOKENIZER.encode(PROMPT, add_special_tokens=False).ids)
        assert last["num_output_tokens"].item() == 8
        assert last["kv_cache_alloc_total_blocks"].item() > 0
        times = [
            last[f"{name}_time_ns"].item()
            for name in ("arrival", "first_scheduled", "first_token", "last_token")
        ]
        assert times == sorted(times)
        plain = list(stream(server.grpc_url, model, text_input=PROMPT, max_tokens=8, stream=True))
        assert not any("num_input_tokens" in r.outputs or "acceptance_rate" in r.outputs for r in plain)


def test_bos_is_not_doubled(server: TritonServer) -> None:
    """A templated prompt begins with BOS; with one or with none the tokenizer's own makes exactly one."""
    counts = []
    for prompt in (PROMPT, PROMPT.removeprefix("<|begin_of_text|>")):
        asked = {"text_input": prompt, "max_tokens": 1, "return_num_input_tokens": True}
        first = next(stream(server.grpc_url, "tensorrt_llm_bls", **asked))
        counts.append(first.outputs["num_input_tokens"].item())
    has_bos = TOKENIZER.encode("x").ids[0] == TOKENIZER.token_to_id("<|begin_of_text|>")
    assert counts[0] - counts[1] == (0 if has_bos else 1)


def test_draft_tokens_are_verified(server: TritonServer) -> None:
    """The response holds the accepted prefix and one token more, and ends there."""
    answer = generated(server.grpc_url, **as_engine_inputs(PROMPT, request_output_len=12, streaming=True))
    wrong = (answer[2] + 1) % 2048
    for drafts, accepted in (([*answer[:4]], 4), ([*answer[:2], wrong, answer[3]], 2), ([wrong], 0)):
        asked = as_engine_inputs(
            PROMPT, request_output_len=len(drafts) + 1, draft_input_ids=np.array([drafts], np.int32),
            exclude_input_in_output=True, return_perf_metrics=True,
        )  # fmt: skip
        responses = list(stream(server.grpc_url, "tensorrt_llm", **asked))
        assert [id for r in responses for id in r.tokens] == answer[: accepted + 1]
        last = responses[-1].outputs
        assert last["total_draft_tokens"].item() == len(drafts)
        assert last["total_accepted_draft_tokens"].item() == accepted
        assert last["acceptance_rate"].item() == pytest.approx(accepted / len(drafts))


def test_eight_streams_at_once_are_right_and_not_one_after_the_other(server: TritonServer) -> None:
    prompts = [TURN.format(f"{QUESTIONS[i % 4]} {i}") for i in range(8)]
    alone = [
        joined(server.grpc_url, "tensorrt_llm_bls", text_input=p, max_tokens=40, stream=True) for p in prompts
    ]
    together: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def ask(index: int) -> None:
        asked = {"text_input": prompts[index], "max_tokens": 40, "stream": True}
        together.put((index, joined(server.grpc_url, "tensorrt_llm_bls", **asked)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text for _, text in sorted(together.get() for _ in threads)] == alone


def test_http_answers_whole_and_streams_events(server: TritonServer) -> None:
    """The HTTP endpoints that need no client: /generate, and /generate_stream with server-sent events."""
    body = {"text_input": PROMPT, "max_tokens": 24, "exclude_input_in_output": True}
    text = joined(server.grpc_url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=24, stream=True)
    model = f"{server.http_url}/v2/models/tensorrt_llm_bls"

    def request(call: str) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{model}/{call}", json.dumps(body).encode(), headers)

    with urllib.request.urlopen(request("generate"), timeout=20) as answer:
        assert json.loads(answer.read())["text_output"] == text
    body["stream"] = True
    with urllib.request.urlopen(request("generate_stream"), timeout=20) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == text


@pytest.mark.servers
def test_byte_fallback_and_accumulated_text(tmp_path: Path) -> None:
    """A sentencepiece-type tokenizer behind the server, and the option that repeats all text so far."""
    tokenizer = nasty_tokenizers.byte_fallback()
    package = package_random(tmp_path, tokenizer.to_str(), vocab=tokenizer.get_vocab_size())
    config = package / "model_repository" / "tensorrt_llm_bls" / "config.pbtxt"
    key = '"accumulate_tokens" value { string_value: '
    config.write_text(config.read_text().replace(f'{key}"false"', f'{key}"true"'))
    prompt = "plain words, 안녕 😀"
    ids = tokenizer.encode(prompt).ids
    wild = {"temperature": 4.0, "seed": 1, "end_id": -1}
    direct = {"input_ids": np.array([ids], np.int32), "input_lengths": len(ids), "request_output_len": 80}
    asked = {"text_input": prompt, "top_k": 290, "max_tokens": 80, "stream": True}
    with TritonServer.of_package(package, log_file=tmp_path / "log") as server:
        tokens = generated(server.grpc_url, streaming=True, runtime_top_k=290, **wild, **direct)
        assert len(tokens) == 80
        responses = stream(server.grpc_url, "tensorrt_llm_bls", **asked, **wild)
        texts = [response.text for response in responses if response.text]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == tokenizer.decode(tokens)
