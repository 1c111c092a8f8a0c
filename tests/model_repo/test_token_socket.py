"""Tokens by a socket: nothing is lost, doubled or out of order, and nobody but the two models takes part."""

from __future__ import annotations

import os
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import token_socket
from shared.refusal import RequestRefused
from shared.token_socket import TokenReceiver, TokenSender, TokenTarget

from tests.support.waiting import wait_for


@pytest.fixture
def sender() -> Iterator[TokenSender]:
    sender = TokenSender()
    yield sender
    sender.close()


@pytest.fixture
def receiver() -> Iterator[TokenReceiver]:
    receiver = TokenReceiver()
    yield receiver
    receiver.close()


def send(name: str, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(message, f"\0pipeline-tokens-{name}")


@settings(max_examples=30)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2**31 - 1), max_size=200), st.booleans()),
        max_size=40,
    )
)
def test_joined_pieces_and_the_rest_are_all_tokens(steps: list[tuple[int, list[int], bool]]) -> None:
    """Steps are a stream, its new tokens, and whether they are sent at once or with later ones."""
    sender, receiver = TokenSender(), TokenReceiver()
    came: list[list[int]] = [[] for _ in range(5)]
    whole: list[list[int]] = [[] for _ in range(5)]
    with ExitStack() as listening:
        targets = [
            TokenTarget.read(listening.enter_context(receiver.listen(tokens.extend))) for tokens in came
        ]
        for stream, tokens, sends in steps:
            whole[stream] += tokens
            sender.put(targets[stream], tokens)
            if sends:
                assert sender.flush() == []
        rest = [sender.take_back(target) for target in targets]
        # As the last response does, which is read after everything that was sent before it.
        receiver.catch_up()
        assert [first + last for first, last in zip(came, rest, strict=True)] == whole
        assert [sender.take_back(target) for target in targets] == [[]] * 5
    receiver.close()
    sender.close()


def test_a_reader_that_is_behind_loses_nothing_and_holds_nobody_up(sender: TokenSender) -> None:
    """Its buffer is full; other readers get theirs, and the last response has what it did not take."""
    slow, quick = TokenReceiver(), TokenReceiver()
    held, reads, came, others = threading.Event(), threading.Event(), list[int](), list[int]()

    def hold(tokens: list[int]) -> None:
        reads.set()
        assert held.wait(30)
        came.extend(tokens)

    with slow.listen(hold) as first, quick.listen(others.extend) as second:
        mine, theirs = TokenTarget.read(first), TokenTarget.read(second)
        sender.put(mine, [0])
        sender.flush()
        assert reads.wait(30)
        for token in range(1, 5_000):
            sender.put(mine, [token])
            sender.put(theirs, [token])
            assert sender.flush() == []
            if token % 5 == 0:
                quick.catch_up()
        rest = sender.take_back(mine)
        assert len(rest) > 1_000
        held.set()
        slow.catch_up()
        assert came + rest == [*range(5_000)]
        others_rest = sender.take_back(theirs)
        quick.catch_up()
        assert others + others_rest == [*range(1, 5_000)]
    slow.close()
    quick.close()


def test_tokens_that_come_too_late_are_dropped(sender: TokenSender, receiver: TokenReceiver) -> None:
    late, came = list[int](), list[int]()
    with receiver.listen(came.extend) as open_one:
        with receiver.listen(late.extend) as parameter:
            over = TokenTarget.read(parameter)
        sender.put(over, [1, 2])
        sender.put(TokenTarget.read(open_one), [3])
        assert sender.flush() == []
        wait_for(lambda: came == [3], "the other request's token")
    assert not late


def test_a_reader_that_is_gone_is_told_and_others_go_on(sender: TokenSender, receiver: TokenReceiver) -> None:
    gone, came = TokenReceiver(), list[int]()
    with receiver.listen(came.extend) as stays, gone.listen(lambda _: None) as parameter:
        target = TokenTarget.read(parameter)
        gone.close()
        sender.put(target, [1])
        sender.put(TokenTarget.read(stays), [2])
        assert sender.flush() == [target.socket]
        assert sender.flush() == []
        assert sender.take_back(target) == []
        wait_for(lambda: came == [2], "the other reader's token")


@pytest.mark.parametrize(
    "parameter",
    [
        "", "x", f"{'a' * 32}", f"{'a' * 31}:{'0' * 15}", f"{'a' * 32}:{'0' * 16}", f"{'A' * 32}:{'0' * 15}",
        f"../{'a' * 29}:{'0' * 15}", f"{'a' * 32}:{'0' * 15}\n", f"{'a' * 32}:-{'0' * 14}", f"{'²' * 32}:{'0' * 15}",
    ],
)  # fmt: skip
def test_a_target_that_no_receiver_makes_is_refused(parameter: str) -> None:
    with pytest.raises(RequestRefused, match=r"token_socket = .*is for the text model beside this one"):
        TokenTarget.read(parameter)


def test_a_socket_takes_nothing_from_those_who_only_know_its_name(
    sender: TokenSender, receiver: TokenReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users may read names of sockets in /proc/net/unix. Neither a number that is guessed, nor a message that
    is none, nor one of another user reaches a request; and the reader goes on.
    """
    came: list[int] = []
    with receiver.listen(came.extend) as parameter:
        target = TokenTarget.read(parameter)
        for guess in (*range(64), target.number ^ 1):
            sender.put(TokenTarget(target.socket, guess), [1])
            sender.flush()
            receiver.catch_up()
        number = target.number
        for message in (b"", b"xyz", array("q", [number]).tobytes()[:5], array("q", [number]).tobytes(),
                        array("q", [number, -5]).tobytes(), array("q", [0, 2**62, 7]).tobytes()):  # fmt: skip
            send(target.socket, message)
            receiver.catch_up()
        with monkeypatch.context() as other_user:
            own = os.getuid()
            other_user.setattr(token_socket.os, "getuid", lambda: own + 1)
            sender.put(target, [2])
            sender.flush()
            receiver.catch_up()
        assert not came
        sender.put(target, [3])
        sender.flush()
        wait_for(lambda: came == [3], "the engine's token")


def test_numbers_of_requests_cannot_be_foreseen(receiver: TokenReceiver) -> None:
    with ExitStack() as listening:
        parameters = [listening.enter_context(receiver.listen(lambda _: None)) for _ in range(64)]
    numbers = [TokenTarget.read(parameter).number for parameter in parameters]
    assert len({*numbers}) == 64
    assert max(numbers) > 2**50
