"""What gRPC clients send is followed frame by frame, and passes unless it would harm Triton."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from pipeline.gateway.grpc_relay import MessageInspector, MessageLimits, MessageRefused, check_message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, PADDED = 1, 8
LIMITS = MessageLimits(message_bytes=1000, decompressed_bytes=5000, begun_bytes=3000, begun=8, connections=1)


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def request(**more: object) -> bytes:
    return bytes(pb.ModelInferRequest(model_name="tensorrt_llm_bls", id="1", **more).SerializeToString())


def prefixed(content: bytes, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(content)) + content


def harmful() -> bytes:
    asked = pb.ModelInferRequest(model_name="tensorrt_llm_bls")
    output = asked.outputs.add(name="text_output")
    output.parameters["classification"].int64_param = 1 << 40
    return bytes(asked.SerializeToString())


messages = st.sampled_from(
    [b"", request(), request(raw_input_contents=[b"classification" * 20, b"\xff" * 300])]
)


@st.composite
def sent(draw: st.DrawFn) -> bytes:
    """What a well-behaved client sends: calls on some streams, their frames mixed, split and padded."""
    queues = {}
    for stream in range(1, 2 * draw(st.integers(1, 5)), 2):
        left = b"".join(map(prefixed, draw(st.lists(messages, max_size=3))))
        pieces = []
        while left:
            size = draw(st.integers(1, max(1, len(left))))
            pieces.append(left[:size])
            left = left[size:]
        queues[stream] = pieces
    text = PREFACE + frame(SETTINGS, 0, 0, b"")
    for stream in queues:
        text += frame(HEADERS, 4, stream, b"\x82")
    while queues:
        stream = draw(st.sampled_from(sorted(queues)))
        pieces = queues[stream]
        piece, flags = (pieces.pop(0) if pieces else b""), 0
        if not pieces:
            del queues[stream]
            flags |= END_STREAM
        if draw(st.booleans()):
            padding = draw(st.integers(0, 9))
            piece, flags = bytes([padding]) + piece + bytes(padding), flags | PADDED
        text += frame(DATA, flags, stream, piece)
    return text


def in_pieces(text: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    while position < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[position : position + size])
        position += size
    return pieces


def feed(inspector: MessageInspector, pieces: list[bytes]) -> None:
    for piece in pieces:
        inspector.feed(piece)


SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=5)


@given(text=sent(), sizes=SIZES)
def test_what_clients_send_passes(text: bytes, sizes: list[int]) -> None:
    inspector = MessageInspector(replace(LIMITS, begun_bytes=10**6))
    feed(inspector, in_pieces(text, sizes))
    assert inspector.total.size == 0


@given(text=sent(), sizes=SIZES, bad=st.sampled_from([prefixed(harmful()), prefixed(bytes(1001))]))
def test_what_harms_is_refused_before_its_end_passes(text: bytes, sizes: list[int], bad: bytes) -> None:
    inspector = MessageInspector(replace(LIMITS, begun_bytes=10**6))
    text += frame(DATA, END_STREAM, 99, bad)
    with pytest.raises(MessageRefused):
        feed(inspector, in_pieces(text, sizes))


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_compressed_messages_are_judged_by_what_they_become(pack: object) -> None:
    assert callable(pack)
    check_message(pack(request()), compressed=True, limits=LIMITS)
    for content in (harmful(), bytes(5001)):
        with pytest.raises(MessageRefused):
            check_message(pack(content), compressed=True, limits=LIMITS)
    with pytest.raises(MessageRefused):
        check_message(pack(request())[:-9], compressed=True, limits=LIMITS)
    with pytest.raises(MessageRefused, match="is not known"):
        check_message(b"\x00snappy", compressed=True, limits=LIMITS)


def test_other_protocols_and_malformed_messages_are_refused() -> None:
    for text, why in (
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/2"),
        (PREFACE + frame(DATA, 0, 1, prefixed(b"\x0a\xff\xff\xff\xff")), "malformed"),
    ):
        with pytest.raises(MessageRefused, match=why):
            MessageInspector(LIMITS).feed(text)


def test_messages_that_begin_and_do_not_end_have_a_bound() -> None:
    """By their number, and all connections together by their bytes; a stream that ends gives back what it had."""
    inspector = MessageInspector(LIMITS)
    inspector.feed(PREFACE)
    for stream in range(3):
        inspector.feed(frame(DATA, 0, stream, prefixed(bytes(1000))[:10]))
    other = MessageInspector(LIMITS, inspector.total)
    other.feed(PREFACE)
    with pytest.raises(MessageRefused, match="3000 bytes have begun"):
        other.feed(frame(DATA, 0, 1, prefixed(b"1")))
    inspector.feed(frame(RST_STREAM, 0, 1, bytes(4)) + frame(DATA, END_STREAM, 2, b""))
    assert inspector.total.size == 1000
    inspector.close()
    assert inspector.total.size == 0
    with pytest.raises(MessageRefused, match="8 messages"):
        feed(inspector, [frame(DATA, 0, stream, b"\0") for stream in range(9)])
