"""One thread asks about many requests, tells once, and never about one whose last response is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from shared.cancellation import CancellationWatch, WatchedSender


class Triton:
    """A response sender that, as Triton's, may not be asked once its final flag was sent."""

    def __init__(self) -> None:
        self.cancelled = self.final = False
        self.asked = 0
        self.faults = 0

    def send(self, response: Any, flags: int) -> None:  # noqa: ARG002
        self.final |= bool(flags)

    def is_cancelled(self) -> bool:
        self.asked += 1
        self.faults += self.final
        time.sleep(0.0005)  # the trip to the server
        self.faults += self.final
        return self.cancelled


@pytest.fixture
def watch() -> Iterator[CancellationWatch]:
    watch = CancellationWatch(period_s=0.001)
    yield watch
    watch.close()


def test_a_client_that_left_is_told_once(watch: CancellationWatch) -> None:
    triton, told = Triton(), threading.Semaphore(0)
    watch.watch(WatchedSender(triton), told.release)
    assert not told.acquire(timeout=0.05)
    triton.cancelled = True
    assert told.acquire(timeout=5)
    assert not told.acquire(timeout=0.1)


def test_nothing_is_asked_after_the_last_response(watch: CancellationWatch) -> None:
    tritons = [Triton() for _ in range(60)]
    for triton in tritons:
        sender = WatchedSender(triton)
        watch.watch(sender, lambda: None)
        sender.send("piece")
        time.sleep(0.002)
        sender.send(flags=1)
    time.sleep(0.05)
    asked = [triton.asked for triton in tritons]
    time.sleep(0.1)
    assert [triton.asked for triton in tritons] == asked
    assert sum(triton.faults for triton in tritons) == 0
    assert sum(asked) > 0


def test_asking_takes_a_small_share_of_the_time() -> None:
    triton = Triton()
    watch = CancellationWatch(period_s=0.0)
    watch.watch(WatchedSender(triton), lambda: None)
    time.sleep(0.5)
    watch.close()
    assert triton.asked < 0.5 / (0.0005 * 20)
