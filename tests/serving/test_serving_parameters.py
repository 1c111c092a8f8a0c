"""Inputs and outputs of our entry model beyond upstream's, on a real server: token ids, stops, biases, log probs of
prompts, tokens that were in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from pipeline.client import Answer, Client, Refused
from pipeline.serving.server import TritonServer
from tests.support.continued import ask as streamed
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import CHECKPOINTS, whole_blocks
from tests.support.streams import joined

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
# <|eot_id|>, which ends a turn.
END_ID = 5
PROMPTS = [TURN.format(question) for question in QUESTIONS]
# Longer than what the engine computes the logits of in one step.
LONG = "<|begin_of_text|>" + "How do I reset my password? " * 24
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, defaults={"temperature": 0, "max_tokens": 24}) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client: Client) -> Ask:
    return client.generate


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_log_probs_of_prompts_are_those_that_answers_had(client: Client) -> None:
    """The engine's own are those of transformers; here of several prompts at once, each twice, so that the second finds
    the first in the cache."""

    def asked(prompt: str) -> None:
        answer = streamed(client, prompt, max_tokens=8, log_probs=True).answer
        ids = ids_of(prompt) + list(answer.token_ids or ())
        none, three = (
            client.generate(ids, max_tokens=1, prompt_log_probs=k).prompt_log_probs for k in (0, 3)
        )
        assert none is not None
        assert three is not None
        assert three.token_ids == none.token_ids == tuple(ids)
        assert three.log_probs[0] is None
        np.testing.assert_allclose(three.log_probs[1:], none.log_probs[1:], atol=2e-4)  # type: ignore[arg-type]
        made = len(answer.log_probs or ())
        assert made > 3
        np.testing.assert_allclose(three.log_probs[-made:], answer.log_probs or (), atol=2e-4)  # type: ignore[arg-type]
        assert [len(top) for top in none.top_log_probs] == [0] * len(ids)
        assert [len(top) for top in three.top_log_probs] == [0] + [3] * (len(ids) - 1)
        for token, value, top in zip(
            ids[-made:], three.log_probs[-made:], three.top_log_probs[-made:], strict=True
        ):
            assert top[0] == (token, pytest.approx(value)), "it was the likeliest"
            assert [log_prob for _, log_prob in top] == sorted(
                (log_prob for _, log_prob in top), reverse=True
            )

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(asked, [*PROMPTS[:2], LONG]))


def test_they_come_with_the_first_chunk_of_a_stream(client: Client) -> None:
    with client.stream(PROMPTS[0], prompt_log_probs=1) as stream:
        chunks = list(stream)
    assert [chunk.prompt_log_probs is not None for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert len(chunks) > 5
    assert stream.text == client.generate(PROMPTS[0]).text


def test_token_ids_are_the_prompt_as_they_are(ask: Ask) -> None:
    ids = ids_of(PROMPTS[1])
    assert ask(ids).text == ask(PROMPTS[1]).text
    # As text, the tokenizer would put its own token in front.
    bare = ids_of("Hello")
    made = ask(bare, prompt_log_probs=0, max_tokens=1)
    assert made.prompt_log_probs is not None
    assert made.prompt_log_probs.token_ids == tuple(bare)
    with pytest.raises(Refused, match="prompt_token_ids = 2048: must be token ids, 0 to 2047"):
        ask([1, 2048])


def test_stop_tokens_end_the_answer_and_stay_out_of_it(ask: Ask) -> None:
    whole = ask(PROMPTS[0])
    tokens = ids_of(whole.text)
    stop = tokens[4]
    cut = ask(PROMPTS[0], stop_token_ids=[stop, 7])
    assert cut.finish_reason == "stop"
    assert cut.text == TOKENIZER.decode(tokens[: tokens.index(stop)])
    kept = ask(PROMPTS[0], stop_token_ids=[stop], include_stop_str_in_output=True)
    assert kept.text == TOKENIZER.decode(tokens[: tokens.index(stop) + 1])


def test_stop_texts_may_stay_in_the_answer(ask: Ask) -> None:
    whole = ask(PROMPTS[0]).text
    word = whole.split()[2]
    assert ask(PROMPTS[0], stop=word).text == whole[: whole.index(word)]
    end = whole.index(word) + len(word)
    assert ask(PROMPTS[0], stop=word, include_stop_str_in_output=True).text == whole[:end]


def test_end_tokens_are_ignored_and_special_tokens_shown(ask: Ask) -> None:
    ended = ask(PROMPTS[0], max_tokens=200)
    assert ended.finish_reason == "stop"
    on = ask(PROMPTS[0], max_tokens=200, ignore_eos=True)
    assert (on.finish_reason, on.stats.output_tokens) == ("length", 200)
    assert on.text.startswith(ended.text)
    shown = ask(PROMPTS[0], max_tokens=200, ignore_eos=True, skip_special_tokens=False)
    assert shown.text.startswith(f"{ended.text}<|eot_id|>")
    # What ends an answer is no text of it.
    assert ask(PROMPTS[0], max_tokens=200, skip_special_tokens=False).text == ended.text


def test_biases_move_the_choice(ask: Ask) -> None:
    first = ids_of(ask(PROMPTS[0]).text)[0]
    assert ids_of(ask(PROMPTS[0], logit_bias={first: -100}).text)[0] != first
    forced = ids_of("order")[0]
    made = ask(PROMPTS[0], logit_bias={forced: 100.0}, max_tokens=3)
    assert made.text == TOKENIZER.decode([forced] * 3)
    with pytest.raises(Refused, match="logit_bias_token_ids = 5000: must be token ids"):
        ask(PROMPTS[0], logit_bias={5000: 1.0})


def test_min_p_drops_what_is_unlikely(ask: Ask) -> None:
    wild: dict[str, Any] = {"temperature": 6.0, "seed": 1, "max_tokens": 12}
    greedy, sampled = ask(PROMPTS[0], max_tokens=12).text, ask(PROMPTS[0], **wild, top_p=1.0).text
    assert ask(PROMPTS[0], **wild, top_p=1.0, min_p=1.0).text == greedy
    assert ask(PROMPTS[0], **wild, top_p=1.0, min_p=0.0).text == sampled
    hardly = ask(PROMPTS[0], **wild, top_p=1.0, min_p=1e-9).text
    assert hardly != greedy
    assert ask(PROMPTS[0], **wild, min_p=1e-9).text == hardly, (
        "alone, it makes the request one that is sampled"
    )


def test_the_names_that_inputs_had_before_0_20_mean_the_same(server: TritonServer) -> None:
    """As clients of older releases, and genai-perf, still send them."""

    def answer(**inputs: Any) -> str:
        asked: dict[str, Any] = {"text_input": PROMPTS[0], "exclude_input_in_output": True, **inputs}
        return joined(server.grpc_url, "tensorrt_llm_bls", **asked)

    ended = answer(max_tokens=200)
    assert answer(max_tokens=200, min_length=200) == answer(max_tokens=200, min_tokens=200) != ended
    seven, wild = np.array([[7]], np.uint64), {"max_tokens": 12, "temperature": 6.0, "top_p": 1.0}
    assert answer(**wild, random_seed=seven) == answer(**wild, seed=seven) != answer(**wild, seed=8)
    with pytest.raises(InferenceServerException, match="seed: is given by its older name, too"):
        answer(**wild, seed=seven, random_seed=seven)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"min_p": 1.5}, "min_p = 1.5: must be at least 0 and at most 1"),
        ({"prompt_log_probs": 21}, "prompt_log_probs = 21"),
        ({"stop_token_ids": [9999]}, "stop_token_ids = 9999: must be token ids, 0 to 2047"),
    ],
)
def test_what_is_wrong_is_refused_by_name(ask: Ask, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        ask(PROMPTS[0], **more)


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_a_prompt_that_was_asked_before_is_found_in_whole_blocks(server: TritonServer, model: str) -> None:
    prompt = f"Reuse of {model}: " + " ".join(map(str, range(60)))
    with Client(server.grpc_url, model=model) as client:
        first, second = (client.generate(prompt, max_tokens=4, temperature=0) for _ in range(2))
        assert first.stats.cached_tokens == 0
        assert second.stats.cached_tokens == whole_blocks(second.stats)
        with client.stream(prompt + " and more", max_tokens=4, temperature=0) as stream:
            assert "".join(chunk.text for chunk in stream)
            longer = stream.stats
    assert longer.cached_tokens == whole_blocks(second.stats)
    assert second.text == first.text


def test_an_answer_that_a_stop_text_ends_tells_it_too(ask: Ask) -> None:
    prompt = TURN.format(f"{QUESTIONS[0]} {QUESTIONS[1]}")
    whole = ask(prompt, max_tokens=32).text
    stop = whole.split()[3]
    cut = ask(prompt, max_tokens=32, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.stats.cached_tokens == whole_blocks(cut.stats)
