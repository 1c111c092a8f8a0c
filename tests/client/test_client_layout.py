"""Messages whose layout repeats are read without being parsed, and come to the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import Chunk
from pipeline.client.layout import MessageLayout
from pipeline.client.stream_state import StreamState
from pipeline.client.tensors import encode, read_signature
from pipeline.client.testing import bls

# Long ones, too: their lengths take two or three bytes.
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["x" * 120, "x" * 124, "é" * 200, "y" * 20_000]))
CONTENTS = st.lists(st.binary(max_size=140), max_size=3)


def response(contents: Sequence[bytes], *, request_id: str = "r1") -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    message.infer_response.model_name, message.infer_response.id = "tensorrt_llm_bls", request_id
    message.infer_response.parameters["triton_final_response"].bool_param = False
    for number, content in enumerate(contents):
        message.infer_response.outputs.add(name=f"tensor{number}", datatype="BYTES", shape=[1])
        message.infer_response.raw_output_contents.append(content)
    return message


@given(CONTENTS, CONTENTS, st.sampled_from(["r1", "r2"]))
def test_contents_are_those_of_the_parser_or_left_to_it(
    first: list[bytes], second: list[bytes], request_id: str
) -> None:
    message = response(first)
    layout = MessageLayout.of(message.SerializeToString(), message)
    if layout is None:
        assert any(len(content) > 127 for content in first)
        return
    other = response(second, request_id=request_id)
    found = layout.contents(other.SerializeToString())
    alike = request_id == "r1" and len(first) == len(second)
    assert found == (second if alike and all(len(content) < 128 for content in second) else None)


@given(CONTENTS, st.binary(max_size=60), st.integers(0, 400))
def test_bytes_that_are_no_message_are_left_to_the_parser(
    contents: list[bytes], noise: bytes, at: int
) -> None:
    message = response(contents)
    raw = message.SerializeToString()
    layout = MessageLayout.of(raw, message)
    harmed = raw[: at % (len(raw) + 1)] + noise
    if layout is None or (found := layout.contents(harmed)) is None:
        return
    assert found == list(pb.ModelStreamInferResponse.FromString(harmed).infer_response.raw_output_contents)


def messages_of(texts: Sequence[str], token_ids: Sequence[int]) -> list[bytes]:
    """As the entry model sends them: text, count and ids of each step, then an empty last one."""
    made: list[bytes] = []
    for text, token in zip([*texts, ""], [*token_ids, 0], strict=False):
        message = pb.ModelStreamInferResponse()
        answer = message.infer_response
        answer.parameters["triton_final_response"].bool_param = len(made) == len(texts)
        values: dict[str, tuple[str, list[Any]]] = {
            "text_output": ("BYTES", [text]), "output_ids": ("INT32", [token] * (token % 3)),
            "num_output_tokens": ("INT32", [token % 3]), "num_input_tokens": ("INT32", [7]),
        }  # fmt: skip
        for name, (datatype, numbers) in values.items():
            answer.outputs.add(name=name, datatype=datatype, shape=[1, len(numbers)])
            answer.raw_output_contents.append(encode(datatype, numbers))
        made.append(message.SerializeToString())
    return made


@given(st.lists(TEXTS, max_size=12), st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_an_answer_is_the_same_whether_its_messages_are_parsed_or_not(
    texts: list[str], token_ids: list[int]
) -> None:
    def received(*, parsed: bool) -> tuple[list[Chunk], StreamState]:
        state = StreamState(read_signature(bls()), url="host:1", request_id="r1", max_tokens=99)
        chunks = []
        for raw in messages_of(texts, token_ids):
            if parsed:
                state._layout = None
            chunks.append(state.receive(raw))
        return [chunk for chunk in chunks if chunk is not None], state

    (chunks, state), (others, other) = received(parsed=False), received(parsed=True)
    assert chunks == others
    assert state.text == other.text == "".join(texts)
    assert state.answer().token_ids == other.answer().token_ids
    assert state.stats().output_tokens == other.stats().output_tokens
    assert state.stats().chunks == other.stats().chunks
    assert state.stats().input_tokens == other.stats().input_tokens == 7
