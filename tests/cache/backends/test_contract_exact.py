"""What every backend does with exact keys: answers, their age, and how many there may be."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cache.backend import Candidate, Capacity, EntryFilter
from pipeline.cache.backends import open_backend
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, engine_id, make_question, tenant_id
from pipeline.cache.near_hits import NearHitLog, near_hits_place
from tests.support.cache_asking import NOW, entry, question
from tests.support.cache_places import Place

TEXTS = ["", "a", "\0 and \x1a", "한국어 🤖 ß", "{scope} \r\n $3 'quoted'", "long " * 20_000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bytes_in_are_bytes_out(place: Place, text: str) -> None:
    backend = place.open()
    kept = CacheEntry.of(
        [StoredChunk(text, (1, 2**31 - 1), (-0.5, 0.0), 0.01), StoredChunk(text)],
        finish_reason="stop", created=NOW, expires=NOW + 9, input_tokens=7, output_tokens=2,
    )  # fmt: skip
    backend.put(question(text), kept)
    assert backend.get(question(text).key, NOW) == kept
    assert [(found.turn, found.entry) for found in place.open().items()] == [(text, kept)]


def test_what_was_not_put_is_not_there(place: Place) -> None:
    backend = place.open()
    assert backend.get(question("a").key, NOW) is None
    backend.put(question("a"), entry("A"))
    assert backend.get(question("b").key, NOW) is None
    assert backend.get(question("a", tenant="other").key, NOW) is None


def test_a_hit_does_not_prolong_a_life(place: Place) -> None:
    backend = place.open()
    backend.put(question("a"), entry("A", ttl_s=3))
    for after in (0, 1, 2, 2.9):
        assert backend.get(question("a").key, NOW + after) is not None
    assert backend.get(question("a").key, NOW + 3) is None


def test_a_new_answer_replaces_the_old_one(place: Place) -> None:
    backend = place.open()
    backend.put(question("a"), entry("old"))
    before = backend.removals()
    backend.put(question("a"), entry("new"))
    found = backend.get(question("a").key, NOW)
    assert found is not None
    assert found.text == "new"
    assert backend.usage().entries == 1
    assert backend.removals() != before


def test_what_was_used_longest_ago_goes_first(place: Place) -> None:
    backend = place.open(Capacity(entries=64))
    for n in range(64):
        backend.put(question(str(n)), entry("x", created=NOW + n))
    backend.get(question("0").key, NOW + 100)
    backend.put(question("one more"), entry("x", created=NOW + 101))
    assert 60 <= backend.usage().entries <= 64
    assert backend.get(question("0").key, NOW + 102) is not None
    assert backend.get(question("1").key, NOW + 102) is None


def test_bytes_are_limited_too(place: Place) -> None:
    backend = place.open(Capacity(bytes=100_000))
    for n in range(50):
        backend.put(question(str(n)), entry("x" * 5000, created=NOW + n))
    assert 50_000 < backend.usage().bytes <= 100_000
    assert backend.get(question("49").key, NOW + 50) is not None


def test_what_is_larger_than_the_whole_cache_costs_no_other_entry(place: Place) -> None:
    backend = place.open(Capacity(bytes=10_000))
    backend.put(question("small"), entry("x"))
    backend.put(question("large"), entry("old"))
    backend.put(question("large"), entry("x" * 20_000))
    assert backend.get(question("small").key, NOW) is not None
    assert backend.get(question("large").key, NOW) is None


def test_what_expired_makes_room_before_what_is_used(place: Place) -> None:
    backend = place.open(Capacity(entries=64))
    for n in range(64):
        backend.put(question(str(n)), entry("x", created=NOW + n, ttl_s=5 if n % 2 else 5000))
    backend.put(question("one more"), entry("x", created=NOW + 500))
    assert all(backend.get(question(str(n)).key, NOW + 500) for n in range(0, 64, 2))


def test_purge_by_scope_and_age(place: Place) -> None:
    backend = place.open()
    for n in range(4):
        backend.put(question(str(n), tenant=str(n % 2)), entry("x", created=NOW + n))
    assert backend.purge(EntryFilter(scope=question("", tenant="0").scope, before=NOW + 1)) == 1
    assert backend.purge(EntryFilter(scope=question("", tenant="1").scope)) == 2
    assert [kept.turn for kept in backend.items()] == ["2"]
    assert backend.purge() == 1
    fill = backend.usage()
    assert (fill.entries, fill.bytes, fill.with_vectors, fill.oldest) == (0, 0, 0, None)


def test_purge_by_engine_and_tenant(place: Place) -> None:
    backend = place.open()
    for engine in ("old", "new"):
        for tenant in ("a", "b"):
            for text in ("1", "2"):
                asked = make_question(Origin(engine, tenant=tenant), text, {"temperature": 0})
                backend.put(asked, entry(f"{engine} {tenant}"), np.eye(8, dtype=np.float32)[0])
    assert backend.purge(EntryFilter(engine=engine_id("old"), tenant=tenant_id("b"))) == 2
    assert backend.purge(EntryFilter(engine=engine_id("old"))) == 2
    assert backend.purge(EntryFilter(tenant=tenant_id("a"))) == 2
    left = list(backend.items())
    assert [kept.entry.text for kept in left] == ["new b"] * 2
    assert {(kept.engine, kept.tenant) for kept in left} == {(engine_id("new"), tenant_id("b"))}
    assert backend.purge(EntryFilter(tenant=tenant_id("nobody"))) == 0


def test_items_are_listed_whole_and_the_newest_first(place: Place) -> None:
    backend = place.open()
    for n in range(300):
        backend.put(question(str(n), tenant="t"), entry(f"answer {n}", created=NOW + n))
    backend.get(question("7", tenant="t").key, NOW + 1000)
    items = list(backend.items())
    assert [kept.turn for kept in items] == [str(n) for n in reversed(range(300))]
    assert {kept.scope for kept in items} == {question("", tenant="t").scope}
    assert all(kept.key == question(kept.turn, tenant="t").key for kept in items)
    assert all(kept.used == kept.entry.created for kept in items if kept.turn != "7")
    assert backend.remove([kept.key for kept in items[:150]] + [b"0" * 16]) == 150
    assert backend.usage().entries == 150
    assert backend.usage().oldest == NOW


def test_caches_of_two_names_do_not_meet(place: Place) -> None:
    if place.url.endswith(".db"):
        pytest.skip("a file holds one cache")
    first, second = place.open(), place.open(name=place.name + "-other")
    first.put(question("a"), entry("A"))
    assert second.get(question("a").key, NOW) is None
    assert second.purge() == 0
    assert first.usage().entries == 1


def test_near_hits_are_kept_beside_answers_and_each_mark_is_counted_once(place: Place) -> None:
    """As cache and reviewer have them, in two processes where the place is shared."""
    answers = place.open()
    kept, asked = question("a"), [question("b"), question("c", tenant="ada")]
    answers.put(kept, entry("A"))
    where, name = near_hits_place(place.url, place.name)
    shared = place.is_shared
    log = NearHitLog(open_backend(where, name=name) if shared else place.open(name=name), 600)
    reviewer = NearHitLog(open_backend(where, name=name)) if shared else log
    for asked_question in asked:
        log.note(asked_question, Candidate(kept.key, kept.turn, 0.9), NOW, print)
    log.flush()
    found = {hit.question.turn: hit for hit in reviewer.hits(NOW)}
    assert {turn: (hit.kept, hit.key, hit.similarity) for turn, hit in found.items()} == {
        "b": ("a", kept.key, 0.9),
        "c": ("a", kept.key, 0.9),
    }
    assert log.take_marks() == 0
    for hit in found.values():
        reviewer.judge(hit, wrong=True, now=NOW)
    assert [log.take_marks(), log.take_marks()] == [2, 0]
    assert (list(log.hits(NOW)), answers.usage().entries) == ([], 1)
    for asked_question in {log, reviewer}:
        asked_question.close()
