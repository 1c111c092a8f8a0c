"""What every backend does when others meddle: processes that write at once or die, damage, keys, servers that stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from pipeline.cache.backend import BackendDown
from pipeline.cache.encryption import AesGcmCodec
from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import ResponseCache
from tests.support.cache_asking import NOW, entry, question, unit
from tests.support.cache_places import Place
from tests.support.waiting import wait_for

WRITER = """
import sys
import numpy as np
from pipeline.cache.backends import open_backend
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, make_question
backend = open_backend(sys.argv[1], name=sys.argv[2])
for n in range(int(sys.argv[4])):
    text = f"{sys.argv[3]}-{n}"
    answer = CacheEntry.of([StoredChunk(text)], finish_reason="stop", created=1e6, expires=1e6 + 600)
    backend.put(make_question(Origin("package"), text, {"temperature": 0}), answer, np.eye(8, dtype=np.float32)[n % 8])
    print(text, flush=True)
"""


def needs_several_processes(place: Place) -> None:
    if not place.is_shared:
        pytest.skip("this one lives in one process")


def needs_sealing(place: Place) -> None:
    if place.url == "memory://":
        pytest.skip("nothing is written down")


def writer(place: Place, text: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, place.url, place.name, text, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_several_processes_write_at_once_and_all_see_everything(place: Place) -> None:
    needs_several_processes(place)
    writers = [writer(place, name, 60) for name in "abc"]
    for process in writers:
        process.communicate()
    assert [process.returncode for process in writers] == [0] * 3
    backend = place.open()
    assert all(backend.get(question(f"{name}-{n}").key, NOW) for name in "abc" for n in range(60))
    assert backend.usage().entries == 180


def test_kill_9_loses_nothing_that_was_acknowledged_and_leaves_nothing_half(place: Place) -> None:
    needs_several_processes(place)
    with writer(place, "k", 100_000) as process:
        assert process.stdout is not None
        written = [process.stdout.readline().strip() for _ in range(40)]
        os.kill(process.pid, signal.SIGKILL)
        written += process.stdout.read().split("\n")[:-1]
    backend = place.open()
    assert all(backend.get(question(text).key, NOW) for text in written)
    wait_for(lambda: len(list(backend.items())) == backend.usage().entries, "what was on its way")
    items = list(backend.items())
    assert len(items) == backend.usage().with_vectors
    assert len(items) - len(written) in (0, 1)
    assert backend.unreadable() == 0
    assert place.is_whole()
    assert backend.purge() == len(items)
    assert backend.usage().bytes == 0


def test_sealed_nothing_can_be_read_where_it_is_kept(place: Place) -> None:
    needs_sealing(place)
    secret = AesGcmCodec.new_secret()
    backend = place.open(codec=AesGcmCodec(secret))
    vector, key = unit(range(1, 9)), question("where is my parcel").key
    backend.put(question("where is my parcel"), entry("on its way"), vector)
    kept = place.raw()
    assert key in kept or key.hex().encode() in kept
    for secret_part in (b"parcel", b"its way", vector.tobytes(), vector.astype("<f2").tobytes()):
        assert secret_part not in kept
    again = place.open(codec=AesGcmCodec(secret))
    found = again.get(key, NOW)
    assert found is not None
    assert found.text == "on its way"
    assert [near.turn for near in again.near(question("").scope, vector, 1)] == ["where is my parcel"]


@pytest.mark.parametrize("sealed_by", ["another key", "nothing"])
def test_what_is_sealed_otherwise_is_missed_and_counted(place: Place, sealed_by: str) -> None:
    needs_sealing(place)
    place.open(codec=AesGcmCodec(AesGcmCodec.new_secret())).put(
        question("a"), entry("A"), np.eye(8, dtype=np.float32)[0]
    )
    other = place.open(codec=AesGcmCodec(AesGcmCodec.new_secret()) if sealed_by == "another key" else None)
    assert other.get(question("a").key, NOW) is None
    assert other.unreadable() == 1
    assert other.near(question("").scope, np.eye(8, dtype=np.float32)[0], 1) == []
    assert list(other.items()) == []
    other.put(question("a"), entry("B"))
    found = other.get(question("a").key, NOW)
    assert found is not None
    assert found.text == "B"


def test_what_is_damaged_is_missed_and_counted(place: Place) -> None:
    if place.url == "memory://":
        pytest.skip("memory is not damaged")
    backend = place.open()
    for text in "ab":
        backend.put(question(text), entry(text.upper()))
    place.damage(question("a").key)
    assert backend.get(question("a").key, NOW) is None
    assert backend.unreadable() == 1
    assert [kept.turn for kept in backend.items()] == ["b"]


def test_a_server_that_stops_makes_misses_and_is_used_again_when_it_is_back(served: Place) -> None:
    assert served.server is not None
    cache = ResponseCache(served.open())
    assert cache.store(question("a"), [StoredChunk("A")], finish_reason="stop")
    assert cache.lookup(question("a")) is not None
    cache.hot_tier.clear()
    served.server.stop()
    try:
        began = time.monotonic()
        assert [cache.lookup(question("a")) for _ in range(200)] == [None] * 200
        assert not cache.store(question("b"), [StoredChunk("B")], finish_reason="stop")
        assert time.monotonic() - began < 60, "not a timeout for each"
        with pytest.raises(BackendDown):
            served.open().get(question("a").key, NOW)
    finally:
        served.server.start()
    wait_for(
        lambda: cache.store(question("c"), [StoredChunk("C")], finish_reason="stop"),
        "storing after the restart",
    )
    assert cache.lookup(question("c")) is not None
    assert cache.counters["backend_down"] >= 200


def test_a_server_that_hangs_costs_one_timeout_and_not_one_a_request(served: Place) -> None:
    assert served.server is not None
    cache = ResponseCache(served.open())
    cache.store(question("a"), [StoredChunk("A")], finish_reason="stop")
    cache.hot_tier.clear()
    served.server.pause()
    try:
        began = time.monotonic()
        assert [cache.lookup(question("a")) for _ in range(200)] == [None] * 200
        assert time.monotonic() - began < 60, "a timeout is a second"
    finally:
        served.server.resume()
    wait_for(lambda: cache.lookup(question("a")) is not None, "a hit after the server went on")


def test_near_works_again_after_a_server_lost_everything(served: Place) -> None:
    assert served.server is not None
    backend = served.open()
    vector = np.eye(8, dtype=np.float32)[0]
    backend.put(question("a"), entry("A"), vector)
    assert len(backend.near(question("").scope, vector, 2)) == 1
    served.server.stop()
    served.server.start()

    def put() -> bool:
        try:
            backend.put(question("b"), entry("B"), vector)
        except BackendDown:
            return False
        return True

    wait_for(put, "a put after the restart")
    wait_for(
        lambda: "b" in {near.turn for near in backend.near(question("").scope, vector, 2)},
        "finding it by its meaning",
    )
