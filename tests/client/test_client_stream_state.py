"""Messages to chunks: the joined chunks are the answer, however it was cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import (
    Cancelled,
    Chunk,
    Client,
    ClientError,
    ModelNotFound,
    PartialAnswer,
    Refused,
    ServerFailed,
    ServerLost,
    Stats,
)
from pipeline.client.log_probs import TopLogProbsRequest
from pipeline.client.sampling import read_sampling
from pipeline.client.stream_state import StreamState
from pipeline.client.tensors import encode, read_signature
from pipeline.client.testing import Ending, FakeServer, Received, Reply, bls, llmapi

NASTY = ["", "a", "안녕하세요", "Grüße 👩‍👩‍👧 \n", "   leading", "�really�", "\r\n\t"]
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=60))


def new_state(*, cumulative: bool = False, max_tokens: int | None = 100) -> StreamState:
    model = read_signature(bls(cumulative=cumulative))
    return StreamState(model, url="host:1", request_id="r1", max_tokens=max_tokens)


def message(
    text: bytes | None = None, *, final: bool = False, shape: tuple[int, ...] = (1,), **counts: int
) -> pb.ModelStreamInferResponse:
    """A response; `shape` is that of its text: one dimension from TensorRT-LLM's models, two from others."""
    reply = pb.ModelStreamInferResponse()
    response = reply.infer_response
    response.parameters["triton_final_response"].bool_param = final
    if text is not None:
        response.outputs.add(name="text_output", datatype="BYTES", shape=shape)
        response.raw_output_contents.append(encode("BYTES", [text]))
    for name, value in counts.items():
        response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        response.raw_output_contents.append(encode("INT32", [value]))
    return reply


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def receive_all(state: StreamState, messages: list[pb.ModelStreamInferResponse]) -> list[Chunk]:
    received = [state.receive(entry.SerializeToString()) for entry in messages]
    return [chunk for chunk in received if chunk is not None]


@given(TEXTS, st.lists(st.integers(min_value=0), max_size=8), st.booleans(), st.sampled_from([(1,), (1, 1)]))
def test_chunks_join_to_the_text_wherever_it_is_cut(
    text: str, cuts: list[int], mark_last: bool, shape: tuple[int, ...]
) -> None:
    messages = [message(part, shape=shape) for part in pieces(text.encode(), cuts)]
    if mark_last:
        messages[-1].infer_response.parameters["triton_final_response"].bool_param = True
    else:
        messages.append(message(final=True))
    state = new_state()
    chunks = receive_all(state, messages)
    assert "".join(chunk.text for chunk in chunks) == state.text == text
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.text for chunk in chunks[:-1])


@given(TEXTS, st.lists(st.integers(min_value=0), max_size=8), st.booleans())
def test_cumulative_text_becomes_the_same_chunks(text: str, cuts: list[int], mark_last: bool) -> None:
    data = text.encode()
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    # as the LLM API's detokenizer does: what is not a whole character yet shows as U+FFFD
    messages = [message(data[:end].decode(errors="replace").encode()) for end in ends]
    messages = messages[:-1] + (
        [message(data, final=True)] if mark_last else [message(data), message(final=True)]
    )
    state = new_state(cumulative=True)
    chunks = receive_all(state, messages)
    assert "".join(chunk.text for chunk in chunks) == state.text == text


def test_a_model_that_does_not_accumulate_as_it_says_is_found_out() -> None:
    state = new_state(cumulative=True)
    state.receive(message(b"Hello").SerializeToString())
    with pytest.raises(ServerFailed, match="does not repeat the text so far"):
        state.receive(message(b" world").SerializeToString())


def test_the_llmapi_model_accumulates_and_tells_the_reason() -> None:
    state = StreamState(read_signature(llmapi()), url="", request_id="", max_tokens=None)
    last = message(b"Hello", final=True)
    last.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1])
    last.infer_response.raw_output_contents.append(encode("BYTES", ["length"]))
    chunks = receive_all(state, [message(b"Hel"), last])
    assert [chunk.text for chunk in chunks] == ["Hel", "lo"]
    assert state.finish_reason == "length"


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (None, "unknown")])
def test_the_reason_follows_from_the_count(max_tokens: int | None, reason: str) -> None:
    state = new_state(max_tokens=max_tokens)
    receive_all(
        state, [message(b"a", num_output_tokens=2), message(b"b", num_output_tokens=1), message(final=True)]
    )
    assert state.finish_reason == reason
    assert state.stats().output_tokens == 3


def test_a_count_that_comes_once_is_the_total() -> None:
    state = new_state()
    receive_all(
        state,
        [message(b"a"), message(b"b"), message(b"", final=True, num_output_tokens=7, num_input_tokens=5)],
    )
    assert state.stats().output_tokens == 7
    assert state.stats().input_tokens == 5
    assert state.stats().chunks == 2


def test_without_any_count_nothing_is_claimed() -> None:
    state = new_state()
    receive_all(state, [message(b"a"), message(b"b"), message(final=True)])
    assert state.finish_reason == "unknown"
    assert state.stats().output_tokens is None
    assert state.stats().tpot_ms is None


def test_held_back_text_counts_as_a_token_but_gives_no_chunk() -> None:
    state = new_state()
    assert state.receive(message(b"").SerializeToString()) is None
    assert state.started
    assert state.stats().ttft_ms is not None


def test_an_empty_answer_still_has_its_time() -> None:
    state = new_state()
    (chunk,) = receive_all(state, [message(final=True)])
    assert chunk == Chunk("", 0, "unknown")
    assert state.stats().ttft_ms == state.stats().total_ms


@pytest.mark.parametrize(
    ("text", "marked", "kind"),
    [
        ("Request for unknown model: 'x' is not found", False, ModelNotFound),
        ("unexpected inference input 'y' for model 'x'", False, Refused),
        ("in ensemble 'x', Exceeds maximum queue size", False, ServerFailed),
        ("Traceback (most recent call last):\n  File x\nValueError: top_p: what", True, ServerFailed),
        ("KeyError: 'text'", True, ServerFailed),
        ("out of memory: 5 = 5", True, ServerFailed),
        ("max_tokens = [[0]]: must be 1 or more", True, Refused),
        ("text_input: is not UTF-8", True, Refused),
        ("Prompt length (9) exceeds maximum input length (8). Set log level to info", True, Refused),
        ("Request cancelled", True, Cancelled),
    ],
)
def test_errors_in_messages(text: str, marked: bool, kind: type[ClientError]) -> None:
    error = pb.ModelStreamInferResponse(error_message=text)
    if marked:
        error.infer_response.parameters["triton_final_response"].bool_param = True
    state = new_state()
    with pytest.raises(kind) as caught:
        state.receive(error.SerializeToString())
    assert "\n" not in str(caught.value)
    assert caught.value.request_id == "r1"
    assert state.stats().total_ms is not None


def test_bytes_that_are_no_message_break_the_answer_off() -> None:
    state = new_state()
    state.receive(message(b"Hello").SerializeToString())
    with pytest.raises(ServerFailed, match="no message") as caught:
        state.receive(b"\xff" * 9)
    assert caught.value.text == "Hello"


def test_figures() -> None:
    stats = Stats(
        ttft_ms=10,
        itl_ms=(2, 4, 6),
        total_ms=22,
        chunks=4,
        output_tokens=7,
        draft_tokens=8,
        accepted_tokens=6,
    )
    assert stats.tpot_ms == 2
    assert stats.acceptance == 0.75
    assert stats.tokens_per_s == pytest.approx(7 / 0.022)
    assert stats.itl_percentile(50) == 4
    assert stats.as_dict()["acceptance"] == 0.75
    assert Stats().acceptance is Stats().tpot_ms is Stats().tokens_per_s is Stats().itl_percentile(50) is None


@given(
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 3),
    vocabulary=st.integers(1, 6000),
    k=st.integers(1, 20),
    temperature=st.floats(0.1, 3),
)
def test_top_log_probs_are_the_greatest_of_the_softmax(
    seed: int, positions: int, vocabulary: int, k: int, temperature: float
) -> None:
    """Rounded, so that many are equal: of those, the first come first."""
    logits = (
        np.random.default_rng(seed).normal(0, 4, (1, 1, positions, vocabulary)).round(1).astype(np.float32)
    )
    found = TopLogProbsRequest(k, temperature).read("FP32", logits.tobytes(), positions)
    assert len(found) == positions
    for row, pairs in zip(logits[0, 0].astype(float), found, strict=True):
        order = np.lexsort((np.arange(vocabulary), -row))[:k]
        log_probs = row / temperature - np.logaddexp.reduce(row / temperature)
        assert [id for id, _ in pairs] == order.tolist()
        assert [value for _, value in pairs] == pytest.approx(log_probs[order], abs=1e-5)


def test_logits_in_half_precision() -> None:
    (pairs,) = TopLogProbsRequest(1).read("FP16", np.zeros((1, 1, 1, 4), np.float16).tobytes(), 1)
    assert pairs == ((0, pytest.approx(math.log(1 / 4))),)


def test_tokens_that_cannot_come_are_none_of_the_top() -> None:
    logits = np.full((1, 1, 1, 2000), -np.inf, np.float32)
    logits[..., [7, 9]] = 1.0
    (pairs,) = TopLogProbsRequest(3).read("FP32", logits.tobytes(), 1)
    assert pairs == ((7, pytest.approx(math.log(1 / 2))), (9, pytest.approx(math.log(1 / 2))))


def test_no_tokens_no_top_log_probs() -> None:
    assert TopLogProbsRequest(3).read("FP32", b"", 0) == ()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "needs log_probs = True"),
        ({"log_probs": True, "presence_penalty": 0.5}, "cannot be told with presence_penalty = 0.5"),
        ({"log_probs": True, "bad_words": "x"}, "cannot be told with bad_words"),
    ],
)
def test_what_top_log_probs_do_not_go_with(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(Refused, match=f"top_log_probs: {problem}"):
        read_sampling({"top_log_probs": 3, **fields})
    read_sampling({"top_log_probs": 3, "log_probs": True, "presence_penalty": 0, "min_tokens": 0})


# An answer that goes on after its server was lost.


@pytest.mark.parametrize("cumulative", [False, True])
def test_an_answer_goes_on_after_what_had_come(cumulative: bool) -> None:
    """Chunks are new ones; text, token ids, counts and the reason to end are those of the whole."""
    pieces = ("one ", "two ", "three")

    def script(received: Received) -> Reply:
        had = len(received.tensors.get("prior_output_ids", ()))
        if not had:
            return Reply(pieces[:2], token_ids=[7, 8], ending=Ending.LOST)
        # A model that repeats the text so far does so from the beginning of the answer.
        texts = ("".join(pieces),) if cumulative else pieces[had:]
        ids = range(7, 10) if cumulative else [9]
        return Reply(
            texts, token_ids=ids, tokens_per_chunk=len(ids) if cumulative else 1, input_tokens=5 + had
        )

    model = bls(cumulative=cumulative)
    with FakeServer(script, model=model) as server, Client(server.url) as client:
        with pytest.raises(ServerLost) as caught, client.stream("Hi", max_tokens=3, token_ids=True) as first:
            list(first)
        partial = caught.value.partial
        assert partial == PartialAnswer((7, 8), "one two ")
        with client.stream("Hi", max_tokens=3, token_ids=True, prior=partial) as rest:
            assert "".join(chunk.text for chunk in rest) == "three"
        answer = rest.answer()
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("one two three", (7, 8, 9), "length")
        if not cumulative:
            assert (answer.stats.input_tokens, answer.stats.output_tokens) == (5, 3)
        assert server.requests[1].tensors["prior_output_ids"] == [7, 8]


def test_what_had_come_is_known_only_with_its_tokens() -> None:
    lost = Reply(["one "], token_ids=[7], ending=Ending.LOST)
    with FakeServer(lost) as server, Client(server.url) as client, pytest.raises(ServerLost) as caught:
        client.generate("Hi", max_tokens=3)
    assert caught.value.partial is None
    refused = pytest.raises(Refused, match="does not go on with answers")
    with FakeServer(model=bls(upstream=True)) as server, Client(server.url) as client, refused:
        client.generate("Hi", max_tokens=3, prior=PartialAnswer((7,), "one "))
