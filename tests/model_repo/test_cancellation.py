"""What is sent stays until it is; one thread asks whether clients have left, tells once, and never too late."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from shared.cancellation import CancellationWatch, WatchedSender

from tests.support.waiting import wait_for


class Response:
    """A response that notes how many of its tensors nobody holds any longer."""

    def __init__(self) -> None:
        self.tensors = [Tensor() for _ in range(3)]
        self._held = [weakref.ref(tensor) for tensor in self.tensors]

    @property
    def freed(self) -> int:
        return sum(tensor() is None for tensor in self._held)

    def output_tensors(self) -> list[Tensor]:
        return list(self.tensors)


class Tensor:
    pass


class Triton:
    """A response sender that, as Triton's, may not be asked once its final flag was sent, and drops tensors."""

    def __init__(self) -> None:
        self.cancelled = self.final = False
        self.asked = 0
        self.faults = 0

    def send(self, response: Response | None, flags: int) -> None:
        self.final |= bool(flags)
        if response is not None:
            response.tensors.clear()  # without holding the GIL
            self.faults += response.freed

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


def test_no_tensor_is_freed_while_it_is_sent() -> None:
    triton, response = Triton(), Response()
    WatchedSender(triton).send(response, flags=1)
    assert triton.faults == 0
    assert response.freed == 3


def test_triton_s_sender_is_freed_with_the_last_response(watch: CancellationWatch) -> None:
    """Although the watch keeps what it was given until it asks again."""
    triton = Triton()
    sender, gone = WatchedSender(triton), weakref.ref(triton)
    watch.watch(sender, lambda: None)
    del triton
    sender.send(Response(), flags=0)
    assert gone() is not None
    sender.send(flags=1)
    wait_for(lambda: gone() is None, "Triton's sender to be freed")


def test_nothing_is_asked_after_the_last_response(watch: CancellationWatch) -> None:
    tritons = [Triton() for _ in range(30)]
    for triton in tritons:
        sender = WatchedSender(triton)
        watch.watch(sender, lambda: None)
        wait_for(lambda triton=triton: triton.asked > 0, "a question")
        sender.send(Response())
        sender.send(flags=1)
    asked = [triton.asked for triton in tritons]
    later = Triton()
    watch.watch(WatchedSender(later), lambda: None)
    wait_for(lambda: later.asked > 2, "further rounds of questions")
    assert [triton.asked for triton in tritons] == asked
    assert sum(triton.faults for triton in tritons) == 0


def test_asking_takes_a_small_share_of_the_time() -> None:
    triton = Triton()
    start = time.monotonic()
    watch = CancellationWatch(period_s=0.0)
    watch.watch(WatchedSender(triton), lambda: None)
    time.sleep(0.5)
    watch.close()
    assert triton.asked <= 1 + (time.monotonic() - start) / (0.0005 * 20)
