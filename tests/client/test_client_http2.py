"""The HTTP/2 side of the asyncio client, against a server that says exactly what a test tells it to."""

from __future__ import annotations

import asyncio

import grpc
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import KeepAlive
from pipeline.client.http2 import Call, Calls
from pipeline.client.http2.call import WINDOW
from pipeline.client.http2.fields import Fields
from pipeline.client.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    Code,
    Kind,
    Reader,
    Setting,
    frame,
    header_block,
    header_frames,
    reset,
    settings,
    window_update,
)
from tests.support.http2_server import Server, calls, everything, failure, on_a_loop, packed


@given(
    messages=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    in_frames=st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_messages_come_whole_however_they_are_cut(
    messages: list[bytes], cuts: list[int], in_frames: list[int]
) -> None:
    call = Call(b"", b"", bytes)
    content = b"".join(map(packed, messages))
    sent, turn = b"", 0
    while content:
        size = in_frames[turn % len(in_frames)]
        ping = turn % 3 == 2
        part, content, turn = content[:size], content[size:], turn + 1
        sent += frame(Kind.DATA, 0, 1, part)
        sent += frame(Kind.PING, 0, 0, b"8 octets") * ping
    reader, turn = Reader(), 0
    while sent:
        size = cuts[turn % len(cuts)]
        for kind, _, _, payload in reader.feed(sent[:size]):
            if kind == Kind.DATA:
                call.data(payload)
        sent, turn = sent[size:], turn + 1
    call.headers({":status": "200", "grpc-status": "0"}, last=True)
    assert asyncio.run(everything(call)) == messages


@given(st.lists(st.tuples(st.from_regex(r"[a-z-]+", fullmatch=True), st.text("abc XYZ", max_size=300))))
def test_header_blocks_are_read_by_others(fields: list[tuple[str, str]]) -> None:
    read = hpack.Decoder().decode(header_block(fields))
    assert [(str(name), str(value)) for name, value in read] == fields


# Some that a table of HPACK has, some that are put into it, many that push others out of it.
_FIELDS = st.tuples(
    st.sampled_from([":status", "grpc-status", "x-a"]), st.sampled_from(["200", "0", "b", "c" * 900])
)


@given(st.lists(st.lists(_FIELDS, max_size=6), max_size=12), st.sets(st.integers(0, 11)))
def test_blocks_that_come_again_are_read_as_any_other(
    blocks: list[list[tuple[str, str]]], resized: set[int]
) -> None:
    server, known, client = hpack.Encoder(), Fields(), hpack.Decoder()
    for number, fields in enumerate(blocks * 2):
        if number in resized:
            server.header_table_size = 2048 if server.header_table_size == 4096 else 4096
        block = server.encode(fields)
        assert known.read(block) == {str(name): str(value) for name, value in client.decode(block)}


@on_a_loop
async def test_a_call_and_its_answer() -> None:
    async def peer(server: Server) -> None:
        _, _, stream, block = await server.until(Kind.HEADERS)
        fields = {str(name): str(value) for name, value in hpack.Decoder().decode(block)}
        assert (fields[":path"], fields["te"], fields["trace"]) == ("/s/m", "trailers", "on")
        _, flags, _, content = await server.until(Kind.DATA)
        assert (content, flags) == (packed(b"ask"), END_STREAM)
        server.answer(stream, b"one", b"", b"three")
        server.answer(await server.request(), b"again")

    async with calls(peer) as made:
        assert await everything(made(b"ask", (("trace", "on"),))) == [b"one", b"", b"three"]
        assert await everything(made(b"ask")) == [b"again"]


@on_a_loop
async def test_padding_trailers_in_parts_and_huffman_are_understood() -> None:
    async def peer(server: Server) -> None:
        stream = await server.request()
        server.send(server.headers(stream, {":status": "200"}))
        server.send(frame(Kind.DATA, PADDED, stream, b"\x03" + packed(b"text") + bytes(3)))
        block = hpack.Encoder().encode(
            [("grpc-status", "5"), ("grpc-message", "n%C3%B6 model")], huffman=True
        )
        server.send(frame(Kind.HEADERS, END_STREAM, stream, block[:4]))
        server.send(frame(Kind.CONTINUATION, END_HEADERS, stream, block[4:]))

    async with calls(peer) as made:
        call = made(b"ask")
        assert await call.read() == b"text"
        error = await failure(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "nö model")


@on_a_loop
async def test_a_long_request_goes_as_the_server_takes_it() -> None:
    request = bytes(range(256)) * 1000
    got = bytearray()

    async def peer(server: Server) -> None:
        while len(got) < len(request) + 5:
            _, flags, stream, content = await server.until(Kind.DATA)
            assert len(content) <= 16_384
            got.extend(content)
            server.send(window_update(stream, len(content)), window_update(0, len(content)))
        assert flags & END_STREAM
        server.answer(stream, b"done")

    async with calls(peer, first=settings({Setting.INITIAL_WINDOW_SIZE: 1000})) as made:
        assert await everything(made(request)) == [b"done"]
    assert got == packed(request)


@on_a_loop
async def test_who_does_not_read_holds_the_server_back_and_who_reads_lets_it_go_on() -> None:
    message, count = bytes(1000), WINDOW // 1000 + 2000
    credit = WINDOW
    stalled = asyncio.Event()

    async def peer(server: Server) -> None:
        nonlocal credit
        stream = await server.request()
        server.send(server.headers(stream, {":status": "200"}))
        for _ in range(count):
            while credit < 1005:
                stalled.set()
                _, _, _, size = await server.until(Kind.WINDOW_UPDATE, lambda one: one[2] == stream)
                credit += int.from_bytes(size, "big")
            credit -= 1005
            server.send(frame(Kind.DATA, 0, stream, packed(message)))
        server.send(server.headers(stream, {"grpc-status": "0"}, END_HEADERS | END_STREAM))

    async with calls(peer) as made:
        call = made(b"ask")
        await stalled.wait()
        assert len(await everything(call)) == count


@on_a_loop
async def test_a_message_longer_than_the_window_comes() -> None:
    message = bytes(WINDOW * 2)

    async def peer(server: Server) -> None:
        stream, credit = await server.request(), WINDOW
        server.send(server.headers(stream, {":status": "200"}))
        left = packed(message)
        while left:
            size = min(len(left), 16_384, credit)
            if not size:
                _, _, _, more = await server.until(Kind.WINDOW_UPDATE, lambda one: one[2] == stream)
                credit += int.from_bytes(more, "big")
                continue
            server.send(frame(Kind.DATA, 0, stream, left[:size]))
            left, credit = left[size:], credit - size
        server.send(server.headers(stream, {"grpc-status": "0"}, END_HEADERS | END_STREAM))

    async with calls(peer) as made:
        assert await everything(made(b"ask")) == [message]


@on_a_loop
async def test_cancelling_resets_the_stream_and_leaves_the_others() -> None:
    async def peer(server: Server) -> None:
        first, second = await server.request(), await server.request()
        _, _, stream, why = await server.until(Kind.RST_STREAM)
        assert (stream, int.from_bytes(why, "big")) == (first, Code.CANCEL)
        server.answer(first, b"late")  # was under way
        server.answer(second, b"other")

    async with calls(peer) as made:
        one, other = made(b"one"), made(b"other")
        waits = asyncio.ensure_future(failure(one))
        await asyncio.sleep(0)
        while one.unsent:
            await asyncio.sleep(0.001)
        one.cancel()
        assert (await waits).code() is grpc.StatusCode.CANCELLED
        assert await everything(other) == [b"other"]


@on_a_loop
async def test_what_is_cancelled_before_there_is_a_connection_is_not_sent() -> None:
    async def peer(server: Server) -> None:
        assert await server.request() == 1
        server.answer(1, b"second")

    async with calls(peer) as made:
        made(b"first").cancel()
        assert await everything(made(b"second")) == [b"second"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.REFUSED_STREAM, grpc.StatusCode.UNAVAILABLE),
        (Code.CANCEL, grpc.StatusCode.CANCELLED),
        (Code.ENHANCE_YOUR_CALM, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Code.PROTOCOL_ERROR, grpc.StatusCode.INTERNAL),
    ],
)
@on_a_loop
async def test_a_stream_that_is_reset(code: Code, status: grpc.StatusCode) -> None:
    async def peer(server: Server) -> None:
        server.send(reset(await server.request(), code))

    async with calls(peer) as made:
        assert (await failure(made(b"ask"))).code() is status


@on_a_loop
async def test_going_away_ends_what_was_not_taken_and_the_next_call_has_a_new_connection() -> None:
    connections = 0

    async def peer(server: Server) -> None:
        nonlocal connections
        connections += 1
        first = await server.request()
        if connections == 1:
            await server.request()
            server.send(frame(Kind.GOAWAY, 0, 0, first.to_bytes(4, "big") + bytes(4) + b"maintenance"))
        server.answer(first, b"taken")

    async with calls(peer) as made:
        taken, refused = made(b"one"), made(b"two")
        error = await failure(refused)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "maintenance" in (error.details() or "")
        assert await everything(taken) == [b"taken"]
        assert await everything(made(b"three")) == [b"taken"]
    assert connections == 2


@on_a_loop
async def test_more_calls_than_a_connection_takes_go_over_several() -> None:
    connections = 0

    async def peer(server: Server) -> None:
        nonlocal connections
        connections += 1
        while True:
            server.answer(await server.request(), b"ok")

    async with calls(peer, first=settings({Setting.MAX_CONCURRENT_STREAMS: 2})) as made:
        answers = await asyncio.gather(*(everything(made(b"ask")) for _ in range(7)))
        assert answers == [[b"ok"]] * 7
    assert 1 < connections <= 7


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", "does not speak HTTP/2"),
        (frame(Kind.PING, 0, 0, bytes(8)), "does not speak HTTP/2"),
        (settings({Setting.MAX_CONCURRENT_STREAMS: 0}), "takes no calls"),
        (b"", "closed the connection"),
    ],
)
@on_a_loop
async def test_servers_of_another_kind(first: bytes, told: str) -> None:
    async def peer(server: Server) -> None:
        if first:
            await server.until(Kind.HEADERS)

    async with calls(peer, first=first) as made:
        error = await failure(made(b"ask"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert told in (error.details() or "")


@on_a_loop
async def test_a_proxy_that_answers_for_the_server() -> None:
    async def peer(server: Server) -> None:
        stream = await server.request()
        server.send(server.headers(stream, {":status": "503"}, END_HEADERS | END_STREAM))

    async with calls(peer) as made:
        error = await failure(made(b"ask"))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "HTTP status 503")


@on_a_loop
async def test_pings_are_answered_and_a_dead_server_is_noticed() -> None:
    async def peer(server: Server) -> None:
        server.send(frame(Kind.PING, 0, 0, b"are you?"))
        assert await server.until(Kind.PING, lambda one: bool(one[1] & ACK))
        await server.until(Kind.PING, lambda one: not one[1] & ACK)  # and says nothing
        await server.until(Kind.RST_STREAM)

    async with calls(peer, keep_alive=KeepAlive(time_s=0.05, timeout_s=0.05)) as made:
        error = await failure(made(b"ask"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping" in (error.details() or "")


@on_a_loop
async def test_closing_cancels_what_is_under_way() -> None:
    async def peer(server: Server) -> None:
        await server.until(Kind.RST_STREAM)

    async with calls(peer) as made:
        call = made(b"ask")
        waits = asyncio.ensure_future(failure(call))
        while call.unsent:
            await asyncio.sleep(0.001)
        made.close()
        assert (await waits).code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("pair", [("Upper", "x"), ("a b", "x"), ("line", "x\r\ny"), ("line", "ü")])
def test_metadata_that_cannot_be_sent(pair: tuple[str, str]) -> None:
    made = Calls("127.0.0.1:1", "/s/m", encode=bytes, decode=bytes, keep_alive=KeepAlive())
    with pytest.raises(ValueError, match="cannot be sent"):
        made(b"ask", [pair])


def test_long_headers_take_several_frames() -> None:
    block = header_block([("long", "x" * 40_000)])
    frames = list(Reader().feed(header_frames(1, block)))
    assert [one[0] for one in frames] == [Kind.HEADERS, Kind.CONTINUATION, Kind.CONTINUATION]
    assert [bool(one[1] & END_HEADERS) for one in frames] == [False, False, True]
    assert b"".join(one[3] for one in frames) == block
