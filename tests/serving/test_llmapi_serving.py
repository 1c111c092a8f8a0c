"""The `llmapi` model of the pytorch runtime under a real Triton; only the LLM itself is a stand-in."""

from __future__ import annotations

import ast
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pipeline.client import Client, Refused
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings
from pipeline.serving.live import MetricsPage
from pipeline.serving.server import TritonServer
from tests.support.llmapi import package, served, statuses, tensors
from tests.support.streams import Response, stream
from tests.support.waiting import wait_for

MODEL = "tensorrt_llm"
PROMPT = "where is my mail"


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, status: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("llmapi")
    settings = LlmapiSettings(
        "1.2.1", cancellation_check_period_ms=20, guided_decoding=True, prompt_log_probs=True
    )
    made = package(folder, settings, guided_decoding_backend="xgrammar")
    with served(made, status, folder / "triton.log", STANDIN_TOKEN_S="0.003") as server:
        yield server


def ask(
    server: TritonServer, *, leave_after: int = 0, request_id: str = "", **inputs: object
) -> list[Response]:
    asked = tensors(**inputs)
    return list(stream(server.grpc_url, MODEL, leave_after=leave_after, request_id=request_id, **asked))


def error_of(server: TritonServer, request_id: str = "", **inputs: object) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask(server, request_id=request_id, **inputs)
    message = caught.value.message()
    assert "\n" not in message
    return message


def figure(status: Path, name: str) -> int:
    return sum(count[name] for count in statuses(status))


def test_each_response_repeats_the_text_so_far_and_without_streaming_there_is_one(llm: TritonServer) -> None:
    asked = {"text_input": PROMPT, "sampling_param_max_tokens": 20}
    responses = ask(llm, **asked, streaming=True)
    texts = [response.text for response in responses]
    assert 10 < len(texts) <= 20  # what a newer one makes superfluous may be left out
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [response.final for response in responses] == [False] * (len(texts) - 1) + [True]
    assert len(set(texts)) == len(texts)
    assert responses[0].outputs["text_output"].shape == (1,)
    (whole,) = ask(llm, **asked)
    assert (whole.final, whole.text) == (True, texts[-1])


def test_the_clients_of_this_project(llm: TritonServer) -> None:
    """Deltas, joined, are the text; characters of several bytes and all."""
    (whole,) = ask(llm, text_input=PROMPT, sampling_param_max_tokens=60)
    with Client(llm.grpc_url, model=MODEL) as client:
        with client.stream(PROMPT, max_tokens=60) as answer:
            chunks = [chunk.text for chunk in answer]
            assert answer.finish_reason == "length"
        assert "".join(chunks) == whole.text
        assert (answer.stats.acceptance, answer.stats.cached_tokens) == (0.75, 32)
        assert len(chunks) > 1
        short = client.generate("a short one", max_tokens=60)
        assert (short.finish_reason, short.stats.cached_tokens) == ("stop", 32)
        stopped = client.generate(PROMPT, max_tokens=60, stop=[whole.text[9:13]])
        assert (stopped.text, stopped.finish_reason) == (whole.text[:9], "stop")
        assert client.generate(PROMPT, max_tokens=60, seed=5).text != whole.text
        with pytest.raises(Refused, match="num_draft_tokens"):
            client.generate(PROMPT, num_draft_tokens=3)


def test_why_it_ended_is_told_when_asked(llm: TritonServer) -> None:
    asked = {"text_input": PROMPT, "return_finish_reason": True, "return_stop_reason": True}
    (whole,) = ask(llm, **asked, sampling_param_max_tokens=30)
    assert whole.outputs["finish_reason"].tolist() == [b"length"]
    assert whole.outputs["stop_reason"].tolist() == [b"None"]  # as upstream
    word = whole.text[5:8]
    (cut,) = ask(llm, **asked, sampling_param_max_tokens=30, sampling_param_stop=["never said", word])
    assert cut.outputs["finish_reason"].tolist() == [b"stop"]
    assert cut.outputs["stop_reason"].tolist() == [word.encode()]
    assert cut.text == whole.text[: whole.text.index(word)]


def test_stop_words_end_a_stream_where_they_end_the_whole_answer(llm: TritonServer) -> None:
    """The LLM hands on the beginning of one as it comes; what has gone out is never taken back."""
    asked = {"text_input": PROMPT, "sampling_param_max_tokens": 24, "return_output_ids": True}
    (plain,) = ask(llm, **asked)

    def check(stop: list[str]) -> None:
        for kept in (False, True):
            more = {"sampling_param_stop": stop, "sampling_param_include_stop_str_in_output": kept}
            (whole,) = ask(llm, **asked, **more)
            streamed = ask(llm, **asked, **more, streaming=True)
            texts = [response.text for response in streamed]
            assert texts[-1] == whole.text, stop
            assert all(later.startswith(earlier) for earlier, later in pairwise(texts)), stop
            assert streamed[-1].tokens == whole.tokens, stop

    words = [[plain.text[at : at + length]] for at in range(3, 20, 3) for length in (1, 2, 4)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, [*words, [plain.text[14:18], plain.text[8:11]], ["never said"], [""]]))


def test_figures_have_the_types_that_the_config_declares(llm: TritonServer) -> None:
    (answer,) = ask(
        llm,
        text_input=PROMPT,
        sampling_param_max_tokens=8,
        sampling_param_return_perf_metrics=True,
        return_cumulative_logprob=True,
    )
    outputs = answer.outputs
    assert outputs["cumulative_logprob"].dtype == np.float32
    assert outputs["cumulative_logprob"].tolist() == [-2.0]
    assert outputs["kv_cache_hit_rate"].tolist() == [0.25]
    assert outputs["acceptance_rate"].tolist() == [0.75]
    assert outputs["total_draft_tokens"].tolist() == [32]
    assert outputs["kv_cache_missed_block"].dtype == np.int32
    assert outputs["last_token_time_ns"].dtype == np.int64
    assert outputs["last_token_time_ns"][0] - outputs["arrival_time_ns"][0] >= 8 * 3_000_000
    (plain,) = ask(llm, text_input=PROMPT, sampling_param_max_tokens=8)
    assert set(plain.outputs) == {"text_output"}


def test_outputs_that_a_client_does_not_want_do_no_harm(llm: TritonServer) -> None:
    """Triton drops them without holding the GIL; were nothing else to hold them, the model's process would crash."""
    asked = tensors(
        text_input=PROMPT,
        streaming=True,
        sampling_param_max_tokens=40,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
    )

    def answer(_: int) -> list[Response]:
        return list(stream(llm.grpc_url, MODEL, wanted=["text_output"], **asked))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(answer, range(32)))
    assert {tuple(response.outputs) for responses in answers for response in responses} == {("text_output",)}
    assert len({responses[-1].text for responses in answers}) == 1


def test_progress_is_shown_so_that_busy_is_told_from_hung(llm: TritonServer) -> None:
    def progress() -> float:
        page = MetricsPage.fetch(llm.metrics_url)
        assert page is not None
        return page.total("pipeline_responses_total", model="tensorrt_llm") or 0.0

    def moves() -> bool:
        with Client(llm.grpc_url, model="tensorrt_llm") as client:
            client.generate("Hello", max_tokens=4)
        return progress() > before

    before = progress()
    wait_for(moves, "progress")


def test_many_at_once(llm: TritonServer) -> None:
    prompts = [f"order {number}" for number in range(12)]

    def answer(prompt: str) -> str:
        return ask(llm, text_input=prompt, streaming=True, sampling_param_max_tokens=40)[-1].text

    alone = [answer(prompt) for prompt in prompts[:4]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(answer, prompts))
    assert together[:4] == alone
    assert len(set(together)) == len(prompts)


def test_over_http(llm: TritonServer) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 5, "streaming": True}
    request = urllib.request.Request(
        f"{llm.http_url}/v2/models/{MODEL}/generate_stream",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    assert 1 < len(events) <= 5
    texts = [event["text_output"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def idle(status: Path) -> Callable[[], bool]:
    return lambda: figure(status, "active") == 0


def test_a_client_that_leaves_frees_the_engine(llm: TritonServer, status: Path) -> None:
    before, aborted = figure(status, "tokens"), figure(status, "aborted")
    ask(llm, text_input="endless", streaming=True, sampling_param_max_tokens=690, leave_after=3)
    wait_for(idle(status), "the end of a request whose client left")
    assert figure(status, "aborted") == aborted + 1
    assert figure(status, "tokens") - before < 690
    (answer,) = ask(llm, text_input=PROMPT, sampling_param_max_tokens=3)
    assert answer.text


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_with_the_same_id_ends_a_request(llm: TritonServer, status: Path, streaming: bool) -> None:
    failed: list[str] = []

    def run() -> None:
        failed.append(
            error_of(llm, "mine", text_input="endless", streaming=streaming, sampling_param_max_tokens=690)
        )

    before = figure(status, "tokens")
    other = threading.Thread(target=run)
    other.start()
    wait_for(lambda: figure(status, "tokens") > before, "the first token")
    message = error_of(llm, "mine", text_input="", stop=True)
    other.join(timeout=10)
    assert failed == ["Request cancelled by client"]
    assert message == "Request cancelled by client"
    wait_for(idle(status), "the end of a request that was stopped")
    assert figure(status, "tokens") - before < 690


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": np.array([[b"a"]], np.object_)}, "unexpected shape for input 'text_input'"),
        ({"text_input": ["a", "b"]}, "text_input: has shape [2]; this model takes one prompt"),
        ({"text_input": b"\xff"}, "text_input: is not UTF-8"),
        ({"text_input": "a", "sampling_param_temperature": -1.0}, "require temperature >= 0"),
        ({"text_input": "", "prompt_token_ids": [5] * 8200}, "should not exceed max_num_tokens (8192)"),
        ({"text_input": "", "stop": True}, "A request id must be provided"),
        (
            {"text_input": "a", "lora_name": "x"},
            "lora_name: model.yaml has neither enable_lora nor lora_config",
        ),
        (
            {"text_input": "a", "guided_decoding_guide_type": "yaml"},
            "guided_decoding_guide_type = yaml: must be json, json_schema, regex, ebnf_grammar or structural_tag",
        ),
        (
            {"text_input": "a", "guided_decoding_guide": "a"},
            "guided_decoding_guide_type: is missing, but there is a guided_decoding_guide",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_answered_is_refused(
    llm: TritonServer, inputs: dict[str, object], message: str
) -> None:
    given = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in inputs.items() if name not in given}
    with pytest.raises(InferenceServerException) as caught:
        list(stream(llm.grpc_url, MODEL, **given, **tensors(**others)))
    assert message in caught.value.message()


def test_an_error_of_the_llm_reaches_the_client_after_what_it_said(llm: TritonServer, status: Path) -> None:
    asked = tensors(text_input="breaks", streaming=True, sampling_param_max_tokens=9)
    answer = stream(llm.grpc_url, MODEL, **asked)
    assert next(answer).text
    with pytest.raises(InferenceServerException, match="RequestError: the engine ran out of luck"):
        list(answer)
    wait_for(idle(status), "the end of a request that failed")
    assert ask(llm, text_input=PROMPT, sampling_param_max_tokens=3)


@pytest.mark.parametrize(
    ("kind", "guide", "meant"),
    [
        ("json", None, "json_object=True"),
        ("json_schema", '{"type": "object"}', 'json=\'{"type": "object"}\''),
        ("regex", "[0-9]+", "regex='[0-9]+'"),
        ("ebnf_grammar", 'root ::= "a"', "grammar='root ::= \"a\"'"),
    ],
)
def test_guides_reach_the_llm(llm: TritonServer, kind: str, guide: str | None, meant: str) -> None:
    """The client sends the same tensors as to the other runtimes; the stand-in repeats what it was to hold to."""
    with Client(llm.grpc_url, model=MODEL) as client:
        answer = client.generate(PROMPT, max_tokens=90, guide_type=kind, guide=guide)
    assert meant in answer.text


def test_parameters_reach_the_llm_under_its_names(llm: TritonServer) -> None:
    """The stand-in repeats the arguments of SamplingParams that are not defaults."""
    with Client(llm.grpc_url, model=MODEL) as client:
        answer = client.generate(
            "sampling", max_tokens=400, ignore_eos=True, stop_token_ids=[7, 9], include_stop_str_in_output=True,
            skip_special_tokens=False, min_tokens=3, logit_bias={5: -1.5, 299: 100.0}, presence_penalty=0.0,
        )  # fmt: skip
        with pytest.raises(Refused, match="does not take min_p"):
            client.generate("sampling", max_tokens=4, min_p=0.1)
        with pytest.raises(Refused, match=r"sampling_param_presence_penalty = 0\.5: .* ignores it"):
            client.generate("sampling", max_tokens=4, presence_penalty=0.5)
        with pytest.raises(
            Refused, match="logit_bias_token_ids: must be numbers for token ids from 0 to 299"
        ):
            client.generate("sampling", max_tokens=4, logit_bias={300: 1.0})
    said = ast.literal_eval(answer.text)
    assert said == {
        "max_tokens": 400, "ignore_eos": True, "stop_token_ids": [7, 9], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "min_tokens": 3, "embedding_bias": {5: -1.5, 299: 100.0}, "best_of": 1,
        "presence_penalty": 0.0, "exclude_input_from_output": False, "return_perf_metrics": True,
    }  # fmt: skip


def test_log_probs_of_prompts_come_from_the_logits_of_the_llm(llm: TritonServer) -> None:
    prompt = [5, 250, 5, 17]
    with (
        Client(llm.grpc_url, model=MODEL) as client,
        client.stream(prompt, max_tokens=6, prompt_log_probs=2) as stream,
    ):
        first, *others = list(stream)
    made = first.prompt_log_probs
    assert made is not None
    assert not others
    assert made.token_ids == tuple(prompt)
    best = -np.log(np.exp(-np.arange(300) / 8).sum())
    for (before, token), value, top in zip(
        pairwise(prompt), made.log_probs[1:], made.top_log_probs[1:], strict=True
    ):
        assert value == pytest.approx(best - (token - before) % 300 / 8, abs=1e-4)
        assert top == (
            (before, pytest.approx(best, abs=1e-4)),
            (before + 1, pytest.approx(best - 1 / 8, abs=1e-4)),
        )
    assert first.text
