"""Answers that go on after tokens that another server made: with them, they are what one server would have said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.client import Client, PartialAnswer, Refused
from pipeline.serving.server import TritonServer
from tests.support import nasty_tokenizers
from tests.support.continued import ask, continued
from tests.support.engine import QUESTIONS, TURN
from tests.support.llmapi import package as llmapi_package
from tests.support.llmapi import served as llmapi_served
from tests.support.served import CHECKPOINTS, SETTINGS, package_random, package_support_pair
from tests.support.streams import stream

pytestmark = pytest.mark.servers

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
PROMPT = TURN.format(QUESTIONS[2])
# Torn characters, special tokens, anything.
WILD: Mapping[str, Any] = {"temperature": 8.0, "top_k": 2000, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


def id_of(word: str) -> int:
    token: int = TOKENIZER.encode(word, add_special_tokens=False).ids[0]
    return token


SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"max_tokens": 24},
    "cut off": {"max_tokens": 5},
    "to its end": {"max_tokens": 200},
    "sampled": {"temperature": 1.5, "top_p": 0.9, "seed": 7, "max_tokens": 24},
    "wild": WILD,
    "wild, with special tokens": {**WILD, "seed": 9, "skip_special_tokens": False},
    "not shorter": {"max_tokens": 24, "min_tokens": 20, "logit_bias": {id_of("<|eot_id|>"): 30.0}},
    "penalties": {"max_tokens": 24, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias and bad words": {"max_tokens": 24, "logit_bias": {id_of(" the"): 3.0}, "bad_words": [" order", "."]},
    "beyond its end": {"max_tokens": 40, "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_both_parts_are_what_one_server_says(client: Client, name: str) -> None:
    """Sampled ones, too: the engine draws by seed and position."""
    sampling = {"temperature": 0.0, **SAMPLINGS[name]}
    whole = ask(client, PROMPT, **sampling)
    assert len(whole.chunks) > 2
    for prior, rest in continued(client, PROMPT, whole, **sampling):
        assert prior.text + "".join(chunk.text for chunk in rest.chunks) == whole.answer.text
        told, expected = rest.answer, whole.answer
        assert (told.text, told.finish_reason) == (expected.text, expected.finish_reason)
        assert told.token_ids == expected.token_ids
        counts = (told.stats.input_tokens, told.stats.output_tokens)
        assert counts == (expected.stats.input_tokens, expected.stats.output_tokens)


def stops(text: str) -> Iterator[str]:
    """Words that lie anywhere in a text: across tokens, and such that their beginning comes before they do."""
    middle = len(text) // 2
    yield text[middle - 3 : middle + 4]
    yield text[middle : middle + 11]
    yield text[-6:]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_word_may_lie_across_the_seam(client: Client, keeps: bool) -> None:
    text = client.generate(PROMPT, temperature=0, max_tokens=40).text
    for stop in stops(text):
        sampling: Any = {"temperature": 0.0, "max_tokens": 40, "stop": [stop, "never said"]}
        sampling["include_stop_str_in_output"] = keeps
        whole = ask(client, PROMPT, **sampling)
        cut = text.index(stop) + len(stop) * keeps
        assert (whole.answer.text, whole.answer.finish_reason) == (text[:cut], "stop")
        for prior, rest in continued(client, PROMPT, whole, **sampling):
            assert prior.text + "".join(chunk.text for chunk in rest.chunks) == text[:cut]
            assert rest.answer.finish_reason == "stop"


def test_log_probs_after_the_seam_are_those_of_one_server(client: Client) -> None:
    sampling: Any = {"temperature": 0.0, "max_tokens": 16, "log_probs": True, "frequency_penalty": 0.5}
    whole = ask(client, PROMPT, **sampling)
    assert whole.answer.log_probs is not None
    for prior, rest in continued(client, PROMPT, whole, **sampling):
        left = whole.answer.log_probs[len(prior.token_ids) :]
        np.testing.assert_allclose(rest.answer.log_probs or (), left, atol=1e-4)
        for chunk in rest.chunks:
            assert len(chunk.token_ids or ()) == len(chunk.log_probs or ())


def test_an_answer_longer_than_prompts_may_be_goes_on(client: Client) -> None:
    sampling: Any = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
    whole = ask(client, PROMPT, **sampling)
    prior = whole.partial(len(whole.chunks) - 20)
    assert len(prior.token_ids) > SETTINGS.max_input_tokens
    assert ask(client, PROMPT, prior, **sampling).answer.text == whole.answer.text


def test_a_prompt_of_token_ids_goes_on_as_it_is(client: Client) -> None:
    prompt = tuple(TOKENIZER.encode(PROMPT, add_special_tokens=False).ids)
    whole = ask(client, prompt, temperature=0, max_tokens=12)
    for _, rest in continued(client, prompt, whole, temperature=0, max_tokens=12):
        assert rest.answer.text == whole.answer.text


def test_an_engine_that_takes_it_for_a_part_of_the_prompt_goes_on(package: Path, tmp_path: Path) -> None:
    """As TensorRT-LLM's does: the entry model asks for fewer tokens, and for other random numbers."""
    copied = tmp_path / "package"
    shutil.copytree(package, copied)
    config = copied / "model_repository" / "tensorrt_llm_bls" / "config.pbtxt"
    text = config.read_text()
    told = 'key: "engine_takes_prior_output" value { string_value: "true"'
    assert told in text
    config.write_text(text.replace(told, told.replace("true", "false")))
    with TritonServer.of_package(copied) as server, Client(server.grpc_url) as client:
        for name in ("greedy", "cut off", "to its end", "not shorter", "penalties", "bias and bad words"):
            sampling: Any = {"temperature": 0.0, **SAMPLINGS[name]}
            whole = ask(client, PROMPT, **sampling)
            for prior, rest in continued(client, PROMPT, whole, **sampling):
                assert prior.text + "".join(chunk.text for chunk in rest.chunks) == whole.answer.text
                told_of, expected = rest.answer, whole.answer
                assert told_of.finish_reason == expected.finish_reason
                counts = (told_of.stats.input_tokens, told_of.stats.output_tokens)
                assert counts == (expected.stats.input_tokens, expected.stats.output_tokens)
        wild = ask(client, PROMPT, **WILD, ignore_eos=True)
        rest = ask(client, PROMPT, wild.partial(6), **WILD, ignore_eos=True)
        again = ask(client, PROMPT, wild.partial(6), **WILD, ignore_eos=True)
        assert rest.answer.token_ids == again.answer.token_ids, "from a seed that is made of the request's"
        assert len(rest.answer.token_ids or ()) == WILD["max_tokens"]
        came = len(wild.partial(6).token_ids)
        assert rest.answer.token_ids[came:] != wild.answer.token_ids[: WILD["max_tokens"] - came]  # type: ignore[index]


@pytest.mark.parametrize("speculation", ["engine", "bls"])
def test_answers_with_a_draft_go_on(tmp_path: Path, speculation: Any) -> None:
    settings = replace(SETTINGS, max_draft_tokens=4, speculation=speculation)
    package = package_support_pair(tmp_path, draft=True, settings=settings)
    with (
        TritonServer.of_package(package, log_file=tmp_path / "log") as server,
        Client(server.grpc_url) as client,
    ):
        for sampling in ({"max_tokens": 40}, {"max_tokens": 40, "min_tokens": 30, "stop": ["account"]}):
            whole = ask(client, PROMPT, temperature=0, **sampling)
            for prior, rest in continued(client, PROMPT, whole, temperature=0, **sampling):
                assert prior.text + "".join(chunk.text for chunk in rest.chunks) == whole.answer.text
                assert rest.answer.finish_reason == whole.answer.finish_reason
                assert rest.answer.stats.output_tokens == whole.answer.stats.output_tokens
        late = ask(client, PROMPT, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
        rest = ask(client, PROMPT, late.partial(3), temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
        # With a draft of its own each round has a seed; the length is that of the whole all the same.
        assert len(rest.answer.token_ids or ()) == 30


def test_a_tokenizer_that_falls_back_to_bytes_may_tear_characters(tmp_path: Path) -> None:
    tokenizer = nasty_tokenizers.byte_fallback()
    package = package_random(tmp_path, tokenizer.to_str(), vocab=tokenizer.get_vocab_size())
    with TritonServer.of_package(package) as server, Client(server.grpc_url) as client:
        for seed in range(4):
            sampling: Any = {
                "temperature": 4.0,
                "top_k": 290,
                "seed": seed,
                "max_tokens": 24,
                "ignore_eos": True,
            }
            whole = ask(client, "a", **sampling)
            for prior, rest in continued(client, "a", whole, **sampling):
                assert prior.text + "".join(chunk.text for chunk in rest.chunks) == whole.answer.text


def test_the_llm_apis_answers_go_on(tmp_path: Path) -> None:
    """Its model repeats the text so far; of an answer that goes on, it is made of all tokens by the model itself."""
    made = llmapi_package(tmp_path / "made")
    with (
        llmapi_served(made, tmp_path / "status", tmp_path / "log", STANDIN_TOKEN_S="0.001") as server,
        Client(server.grpc_url, model="tensorrt_llm") as client,
    ):
        for prompt in ("where is my mail", "an emoji"):
            text = client.generate(prompt, max_tokens=24).text
            for more in ({}, {"stop": [text[14:18], text[9:12]]}, {"stop": ["never said"], "min_tokens": 20}):
                sampling: Any = {"max_tokens": 24, **more}
                whole = ask(client, prompt, **sampling)
                for prior, rest in continued(client, prompt, whole, **sampling):
                    assert prior.text + "".join(chunk.text for chunk in rest.chunks) == whole.answer.text
                    assert rest.answer.finish_reason == whole.answer.finish_reason
        for fields in ({"guide_type": "json"}, {"prompt_log_probs": 0}):
            with pytest.raises(Refused):
                ask(client, "x", PartialAnswer((60,), ""), max_tokens=4, **fields)  # type: ignore[arg-type]


def test_what_cannot_go_on_is_refused(server: TritonServer, client: Client) -> None:
    def error(**inputs: Any) -> str:
        (response,) = [r for r in stream(server.grpc_url, "tensorrt_llm_bls", max_tokens=4, **inputs) if r]
        return response.text

    prior = np.array([[5]], np.int32)
    for inputs, why in (
        ({"prior_output_ids": prior}, "prior_output_ids: needs stream = true"),
        ({"return_output_ids": True}, "return_output_ids: needs stream = true"),
        ({"prior_output_ids": np.array([[99_999]], np.int32), "stream": True}, "prior_output_ids = 99999"),
    ):
        with pytest.raises(Exception, match=why):
            error(text_input=PROMPT, **inputs)
    form: Any = {"guide_type": "json", "max_tokens": 8}
    with pytest.raises(Refused, match="prior_output_len"):
        ask(client, PROMPT, PartialAnswer((5,), ""), **form)
