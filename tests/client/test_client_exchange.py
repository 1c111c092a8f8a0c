"""Messages to chunks: the joined chunks are the answer, however it was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import (
    Cancelled,
    Chunk,
    ClientError,
    ModelNotFound,
    Refused,
    ServerFailed,
    Stats,
    percentile,
    wire,
)
from pipeline.client.exchange import Exchange
from pipeline.client.model import read_model
from pipeline.client.testing import bls, llmapi

NASTY = ["", "a", "안녕하세요", "Grüße 👩‍👩‍👧 \n", "   leading", "�really�", "\r\n\t"]
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=60))


def exchange(*, cumulative: bool = False, max_tokens: int | None = 100) -> Exchange:
    model = read_model(bls(cumulative=cumulative))
    return Exchange(model, url="host:1", request_id="r1", max_tokens=max_tokens)


def message(
    text: bytes | None = None, *, final: bool = False, shape: tuple[int, ...] = (1,), **counts: int
) -> pb.ModelStreamInferResponse:
    """A response; `shape` is that of its text: one dimension from TensorRT-LLM's models, two from others."""
    reply = pb.ModelStreamInferResponse()
    response = reply.infer_response
    response.parameters["triton_final_response"].bool_param = final
    if text is not None:
        response.outputs.add(name="text_output", datatype="BYTES", shape=shape)
        response.raw_output_contents.append(wire.encode("BYTES", [text]))
    for name, value in counts.items():
        response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        response.raw_output_contents.append(wire.encode("INT32", [value]))
    return reply


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def play(run: Exchange, messages: list[pb.ModelStreamInferResponse]) -> list[Chunk]:
    received = [run.receive(entry) for entry in messages]
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
    run = exchange()
    chunks = play(run, messages)
    assert "".join(chunk.text for chunk in chunks) == run.text == text
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
    run = exchange(cumulative=True)
    chunks = play(run, messages)
    assert "".join(chunk.text for chunk in chunks) == run.text == text


def test_a_model_that_does_not_accumulate_as_it_says_is_found_out() -> None:
    run = exchange(cumulative=True)
    run.receive(message(b"Hello"))
    with pytest.raises(ServerFailed, match="does not repeat the text so far"):
        run.receive(message(b" world"))


def test_the_llmapi_model_accumulates_and_tells_the_reason() -> None:
    run = Exchange(read_model(llmapi()), url="", request_id="", max_tokens=None)
    last = message(b"Hello", final=True)
    last.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1])
    last.infer_response.raw_output_contents.append(wire.encode("BYTES", ["length"]))
    chunks = play(run, [message(b"Hel"), last])
    assert [chunk.text for chunk in chunks] == ["Hel", "lo"]
    assert run.finish_reason == "length"


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (None, "unknown")])
def test_the_reason_follows_from_the_count(max_tokens: int | None, reason: str) -> None:
    run = exchange(max_tokens=max_tokens)
    play(run, [message(b"a", num_output_tokens=2), message(b"b", num_output_tokens=1), message(final=True)])
    assert run.finish_reason == reason
    assert run.stats().output_tokens == 3


def test_a_count_that_comes_once_is_the_total() -> None:
    run = exchange()
    play(
        run, [message(b"a"), message(b"b"), message(b"", final=True, num_output_tokens=7, num_input_tokens=5)]
    )
    assert run.stats().output_tokens == 7
    assert run.stats().input_tokens == 5
    assert run.stats().chunks == 2


def test_without_any_count_nothing_is_claimed() -> None:
    run = exchange()
    play(run, [message(b"a"), message(b"b"), message(final=True)])
    assert run.finish_reason == "unknown"
    assert run.stats().output_tokens is None
    assert run.stats().tpot_ms is None


def test_held_back_text_counts_as_a_token_but_gives_no_chunk() -> None:
    run = exchange()
    assert run.receive(message(b"")) is None
    assert run.started
    assert run.stats().ttft_ms is not None


def test_an_empty_answer_still_has_its_time() -> None:
    run = exchange()
    run.sent()
    (chunk,) = play(run, [message(final=True)])
    assert chunk == Chunk("", 0, "unknown")
    assert run.stats().ttft_ms == run.stats().total_ms


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
    run = exchange()
    with pytest.raises(kind) as caught:
        run.receive(error)
    assert "\n" not in str(caught.value)
    assert caught.value.request_id == "r1"
    assert run.stats().total_ms is not None


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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    np = pytest.importorskip("numpy")
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)
