"""Draft and target as two models of one server, run in turns by the entry model: the target's text, in blocks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from pipeline.client import Client
from pipeline.serving.server import TritonServer
from tests.serving.test_serving_cancel import ENDLESS, LONG, cut_short
from tests.support.engine import QUESTIONS, TURN, prompts
from tests.support.served import CHECKPOINTS, SETTINGS, package_support_pair, whole_blocks
from tests.support.streams import Response, joined, stream, tensor

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target/tokenizer.json"))
HELDOUT = Path(__file__).resolve().parents[2] / "calibration/support/heldout.jsonl"
BLS, DRAFTED = "tensorrt_llm_bls", 4  # tokens that a round proposes
ASKED = TURN.format(QUESTIONS[2])  # its answer has emoji, and a draft that errs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("rounds")
    settings = replace(SETTINGS, max_draft_tokens=DRAFTED, speculation="bls")
    package = package_support_pair(folder, draft=True, settings=settings)
    with TritonServer.of_package(package, log_file=folder / "log") as server:
        yield server


@dataclass(frozen=True)
class Answered:
    """What a stream with all its figures was."""

    responses: list[Response]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def rounds(self) -> list[int]:
        """Tokens of each response."""
        told = (response.outputs.get("output_log_probs") for response in self.responses)
        return [log_probs.size for log_probs in told if log_probs is not None and log_probs.size]

    def figure(self, name: str) -> Any:
        return next(
            response.outputs[name].item() for response in reversed(self.responses) if name in response.outputs
        )


FIGURES = {
    "return_log_probs": True, "return_perf_metrics": True,
    "return_num_input_tokens": True, "return_num_output_tokens": True,
}  # fmt: skip


def ask(server: TritonServer, prompt: str = ASKED, max_tokens: int = 60, **more: Any) -> Answered:
    asked = {"text_input": prompt, "max_tokens": max_tokens, "stream": True} | FIGURES | more
    return Answered(list(stream(server.grpc_url, BLS, **asked)))


def questions(count: int) -> list[str]:
    """Half of the kind that both models know, half noise, where they seldom agree."""
    lines = HELDOUT.read_text(encoding="utf-8").splitlines()[: count // 2]
    known = [TURN.format(json.loads(line)["messages"][0]["content"]) for line in lines]
    return known + [TOKENIZER.decode(ids) for ids in prompts(count - len(known), longest=40)]


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_text_is_that_of_the_target_alone(server: TritonServer, count: int) -> None:
    asked = questions(count)
    assert len(set(asked)) == count
    rounds = tokens = accepted = proposed = ended_within_a_block = 0
    for prompt in asked:
        drafted, alone = ask(server, prompt), ask(server, prompt, num_draft_tokens=0)
        assert drafted.text == alone.text
        assert drafted.figure("num_output_tokens") == alone.figure("num_output_tokens") == sum(drafted.rounds)
        assert drafted.figure("num_input_tokens") == alone.figure("num_input_tokens")
        assert alone.figure("total_draft_tokens") == 0
        assert drafted.figure("acceptance_rate") == pytest.approx(
            drafted.figure("total_accepted_draft_tokens") / max(1, drafted.figure("total_draft_tokens"))
        )
        rounds += len(drafted.rounds)
        tokens += sum(drafted.rounds)
        accepted += drafted.figure("total_accepted_draft_tokens")
        proposed += drafted.figure("total_draft_tokens")
        ended_within_a_block += sum(drafted.rounds) - drafted.figure("total_accepted_draft_tokens") < len(
            drafted.rounds
        )
    assert 0.2 < accepted / proposed < 1
    assert rounds < 0.7 * tokens
    assert ended_within_a_block  # the target added no token of its own to the last block


def test_it_streams_after_each_verification(server: TritonServer) -> None:
    drafted = ask(server)
    assert len(drafted.rounds) >= 4
    assert max(drafted.rounds) == DRAFTED + 1
    assert drafted.text == ask(server, stream=False, exclude_input_in_output=True).text
    whole = ask(server, stream=False)
    assert whole.text.endswith(drafted.text)
    assert whole.rounds == [sum(drafted.rounds)]
    times = [drafted.figure(f"{name}_time_ns") for name in ("arrival", "first_token", "last_token")]
    assert times == sorted(set(times))


def test_log_probs_are_the_targets(server: TritonServer) -> None:
    values = []
    for drafts in (DRAFTED, 0):
        rows = [
            response.outputs["output_log_probs"].reshape(-1)
            for response in ask(server, num_draft_tokens=drafts).responses
            if "output_log_probs" in response.outputs
        ]
        values.append(np.concatenate(rows))
        last = ask(server, num_draft_tokens=drafts).figure("cum_log_probs")
        assert last == pytest.approx(values[-1].sum(), abs=1e-3)
    assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 50},
        {"bad_words": [" is", "No"]},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {
            "logit_bias_token_ids": np.array([[17, 40]], np.int32),
            "logit_bias_values": np.array([[4.0, -9.0]], np.float32),
        },
        {"stop_token_ids": np.array([[300, 17]], np.int32), "include_stop_str_in_output": True},
        {"end_id": -1, "max_tokens": 80},
        {"max_tokens": 1},
    ],
    ids=lambda more: "+".join(more),
)
def test_what_shapes_an_answer_shapes_all_of_it(server: TritonServer, more: dict[str, Any]) -> None:
    drafted, alone = ask(server, **more), ask(server, num_draft_tokens=0, **more)
    assert drafted.text == alone.text
    assert sum(drafted.rounds) == sum(alone.rounds) >= more.get("min_tokens", 1)


def test_stop_words_wherever_they_fall(server: TritonServer) -> None:
    """In a block, across two, and where no tokens line up with them; the last of several that is found counts not."""
    text = ask(server).text
    for at in range(0, len(text) - 3, 9):
        word = text[at : at + 4]
        drafted = ask(server, stop_words=["never there", word, text[at : at + 9]])
        assert drafted.text == text[: text.index(word)]


def test_more_draft_tokens_than_the_target_checks_are_cut(server: TritonServer) -> None:
    assert ask(server, num_draft_tokens=50).rounds == ask(server, num_draft_tokens=DRAFTED).rounds
    assert max(ask(server, num_draft_tokens=2).rounds) == 3


def test_eight_at_once(server: TritonServer) -> None:
    asked = questions(8)
    alone = [ask(server, prompt, num_draft_tokens=0).text for prompt in asked]
    drafted: dict[int, str] = {}

    def generate(number: int) -> None:
        drafted[number] = ask(server, asked[number]).text

    threads = [threading.Thread(target=generate, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [drafted[number] for number in range(8)] == alone


SAMPLED = {"temperature": 1.0, "top_k": 50, "seed": 11}


def test_logits_decide_if_asked(server: TritonServer) -> None:
    greedy = ask(server, use_draft_logits=True)
    assert (greedy.text, greedy.rounds) == (ask(server).text, ask(server).rounds)
    sampled = ask(server, use_draft_logits=True, **SAMPLED)
    assert sampled.figure("total_accepted_draft_tokens") > 0
    assert sampled.text == ask(server, use_draft_logits=True, **SAMPLED).text


def test_sampled_rounds_do_not_repeat_their_random_numbers(server: TritonServer) -> None:
    """Near to uniform, a target that began anew with the same seed would say the same in each round."""
    flat = {"end_id": -1, "temperature": 50.0, "top_k": 2000, "seed": 3, "stop_words": []}
    asked = {"text_input": ASKED, "max_tokens": 40, "stream": False, "exclude_input_in_output": True} | flat
    text = joined(server.grpc_url, BLS, **asked).replace("\N{REPLACEMENT CHARACTER}", "")
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert len(set(ids)) > len(ids) / 2


def test_the_target_alone_answers_as_if_there_were_no_draft(server: TritonServer) -> None:
    """With the request's own seed, for one."""
    ids = TOKENIZER.encode(ASKED, add_special_tokens=False).ids
    made = [
        token
        for response in stream(
            server.grpc_url,
            "tensorrt_llm",
            input_ids=np.array([ids], np.int32),
            input_lengths=len(ids),
            request_output_len=40,
            streaming=True,
            end_id=5,
            temperature=1.0,
            runtime_top_k=50,
            seed=11,
        )
        for token in response.tokens
    ]
    assert ask(server, num_draft_tokens=0, max_tokens=40, **SAMPLED).text == TOKENIZER.decode(made)


TWO_ROWS = {
    "text_input": np.array([[b"a"], [b"b"]], np.object_), "max_tokens": np.array([[4], [4]], np.int32),
    "stream": np.array([[True], [True]]), "num_draft_tokens": np.array([[4], [4]], np.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beam_width": 2, "stream": False}, "beam_width = 2: speculation is for one beam"),
        ({"num_return_sequences": 2}, "num_return_sequences = 2: speculation is for one answer"),
        ({"return_context_logits": True}, "return_context_logits = true: speculation returns no logits"),
        (
            {"return_generation_logits": True},
            "return_generation_logits = true: speculation returns no logits",
        ),
        (
            {"return_prompt_log_probs": 0},
            "return_prompt_log_probs: speculation returns no logits",
        ),
        (
            {"guided_decoding_guide_type": "json"},
            "guided_decoding_guide_type: would begin anew with each round",
        ),
        (TWO_ROWS, "num_draft_tokens: speculation is for one prompt at a time, and there are 2"),
        ({"num_draft_tokens": -1}, "num_draft_tokens = -1: must be 0 or more"),
        ({"max_tokens": 701}, "max_tokens = 701: must be 1 to 700 tokens here"),
        ({"text_input": "a b " * 200}, "text_input: [0-9]+ tokens; at most 256 here"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_go_with_a_draft_is_refused_by_name(
    server: TritonServer, more: dict[str, Any], message: str
) -> None:
    asked = {"text_input": ASKED, "max_tokens": 4, "stream": True, "num_draft_tokens": 4} | more
    with pytest.raises(InferenceServerException, match=message):
        list(stream(server.grpc_url, BLS, **asked))


def test_what_does_not_go_with_a_draft_goes_without(server: TritonServer) -> None:
    asked = {"text_input": ASKED, "max_tokens": 6, "stream": True, "return_generation_logits": True}
    rows = [
        response.outputs["generation_logits"]
        for response in stream(server.grpc_url, BLS, **asked)
        if "generation_logits" in response.outputs
    ]
    assert np.concatenate(rows, axis=2).shape == (1, 1, 6, 2048)
    asked = {"text_input": ASKED, "max_tokens": 6, "stream": True, "return_prompt_log_probs": 3}
    first, *others = stream(server.grpc_url, BLS, **asked)
    tokens = len(TOKENIZER.encode(ASKED, add_special_tokens=False).ids)
    assert (
        first.outputs["prompt_log_probs"].shape
        == first.outputs["prompt_log_probs_ids"].shape
        == (1, tokens, 4)
    )
    assert not any("prompt_log_probs" in response.outputs for response in others)


@pytest.mark.parametrize("drafts", [DRAFTED, 0])
def test_leaving_between_rounds_frees_both_engines(server: TritonServer, drafts: int) -> None:
    asked = {"text_input": ASKED, "stream": True, "max_tokens": LONG, "num_draft_tokens": drafts, **ENDLESS}

    def leave() -> None:
        for _ in stream(server.grpc_url, BLS, leave_after=3, **asked):
            pass

    assert 0 < cut_short(server, leave) < LONG


@contextmanager
def stopping(url: str, request_id: str) -> Iterator[None]:
    """Stops the target's request of that id again and again: one that arrives between two rounds finds none."""
    over = threading.Event()
    stop = {"input_ids": np.array([[1]], np.int32), "input_lengths": 1, "request_output_len": 1, "stop": True}
    tensors = [tensor(name, value) for name, value in stop.items()]

    def run() -> None:
        answered = threading.Semaphore(0)
        with grpc.InferenceServerClient(url) as client:
            client.start_stream(lambda **_: answered.release())
            while not over.is_set():
                client.async_stream_infer(
                    "tensorrt_llm", tensors, request_id=request_id, enable_empty_final_response=True
                )
                answered.acquire(timeout=60)
            client.stop_stream()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def test_stop_by_id_ends_the_answer_during_a_round(server: TritonServer) -> None:
    id = "0123456789abcdef"
    asked = {"text_input": ASKED, "stream": True, "max_tokens": LONG, **FIGURES, **ENDLESS}
    answer = stream(server.grpc_url, BLS, request_id=id, **asked)
    first = next(answer)
    with stopping(server.grpc_url, id):
        answered = Answered([first, *answer])
    assert answered.responses[-1].final
    assert sum(answered.rounds) == answered.figure("num_output_tokens") < LONG


def test_an_answer_of_a_form_comes_from_the_target_alone(server: TritonServer) -> None:
    """Each round is a call of its own, and would begin the form anew."""
    held = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(ab|ba){4}"}
    answered = ask(server, **held)
    assert re.fullmatch("(ab|ba){4}", answered.text)
    assert answered.figure("total_draft_tokens") == 0
    with pytest.raises(InferenceServerException, match=r"^guided_decoding_guide_type: would begin anew"):
        ask(server, num_draft_tokens=2, **held)


def test_tokens_from_the_cache_are_those_that_were_there_before_the_answer(server: TritonServer) -> None:
    """Rounds find what the answer itself left; that is not counted."""
    with Client(server.grpc_url) as client:
        prompt = "Reuse of two engines: " + " ".join(map(str, range(60)))
        first, second = (client.generate(prompt, max_tokens=24, temperature=0) for _ in range(2))
    assert first.stats.cached_tokens == 0
    assert second.stats.cached_tokens == whole_blocks(second.stats)
