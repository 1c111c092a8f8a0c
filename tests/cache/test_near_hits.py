"""Near hits that are kept for a person: which ones, for how long, who may read them, and what a mark does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.backend import BackendDown, EntryFilter
from pipeline.cache.encryption import AesGcmCodec
from pipeline.cache.entry import StoredChunk
from pipeline.cache.key import tenant_id
from pipeline.cache.near_hits import NEAR_HITS, NearHitLog, near_hits_place
from pipeline.cache.redaction import Redaction
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.cache.sqlite import SqliteBackend
from pipeline.recipe import load_recipe
from pipeline.stages.response_cache import open_response_cache
from pipeline.store import Store
from tests.support.cache_asking import NOW, Broken, Fine, Letters, question

KEPT, ASKED = "where is my parcel", "Where is my parcel?"


def cache_of(folder: Path, **parts: Any) -> ResponseCache:
    """A cache on the files of a folder."""
    backend = SqliteBackend(folder / "cache.db")
    log = parts.pop("near_hits", None) or NearHitLog(SqliteBackend(folder / "near.db", NEAR_HITS), 600)
    layer = SemanticLayer(backend, Letters(b"one"), Fine(), 0.7)
    return ResponseCache(backend, semantic=layer, near_hits=log, clock=lambda: NOW, **parts)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResponseCache]:
    made = cache_of(tmp_path)
    assert made.store(question(KEPT), [StoredChunk("There.")], finish_reason="stop")
    yield made
    made.close()


def log_of(cache: ResponseCache) -> NearHitLog:
    assert cache.near_hits is not None
    cache.near_hits.flush()
    return cache.near_hits


def kind(cache: ResponseCache, turn: str, tenant: str = "") -> str | None:
    hit = cache.lookup(question(turn, tenant))
    return None if hit is None else hit.cached.kind


def test_a_near_hit_is_kept_once_and_an_exact_one_never(cache: ResponseCache) -> None:
    assert [kind(cache, turn) for turn in (KEPT, ASKED, ASKED, "is it?")] == [
        "exact",
        "semantic",
        "semantic",
        None,
    ]
    (hit,) = log_of(cache).hits(NOW)
    assert (hit.question.turn, hit.kept, hit.served) == (ASKED, KEPT, NOW)
    assert hit.similarity == pytest.approx(1)
    assert hit.question.key == question(ASKED).key
    entry = cache.backend.get(hit.key, NOW)
    assert entry is not None
    assert entry.text == "There."
    assert list(log_of(cache).hits(NOW + 601)) == []


def test_a_mark_is_counted_once_by_one_process(cache: ResponseCache, tmp_path: Path) -> None:
    assert kind(cache, ASKED) == "semantic"
    (hit,) = log_of(cache).hits(NOW)
    gateways = [cache, cache_of(tmp_path)]
    reviewer = NearHitLog(SqliteBackend(tmp_path / "near.db", NEAR_HITS))
    for gateway in gateways:
        gateway.count_marks()
    assert [gateway.counters["false_hit_reported"] for gateway in gateways] == [0, 0]
    reviewer.judge(hit, wrong=True, now=NOW)
    assert list(reviewer.hits(NOW)) == []
    for gateway in gateways * 2:
        gateway.count_marks()
    assert sum(gateway.counters["false_hit_reported"] for gateway in gateways) == 1
    reviewer.close()
    gateways[1].close()


def test_one_that_was_right_is_taken_from_the_list_and_counts_nothing(cache: ResponseCache) -> None:
    assert kind(cache, ASKED) == "semantic"
    log = log_of(cache)
    (hit,) = log.hits(NOW)
    log.judge(hit, wrong=False, now=NOW)
    cache.count_marks()
    assert (list(log.hits(NOW)), cache.counters["false_hit_reported"]) == ([], 0)


def test_a_question_that_may_not_be_kept_is_not(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, redactor=Redaction())
    cache.store(question("mail ada@example.org now"), [StoredChunk("Yes.")], finish_reason="stop")
    cache.store(question("mail somebody now please"), [StoredChunk("Yes.")], finish_reason="stop")
    assert kind(cache, "now mail somebody please") == "semantic"
    assert len(list(log_of(cache).hits(NOW))) == 1
    cache.semantic = SemanticLayer(cache.backend, Letters(b"one"), Fine(), 0.3)
    assert kind(cache, "mail ada@example.org please") == "semantic"
    assert len(list(log_of(cache).hits(NOW))) == 1
    cache.close()


@pytest.mark.parametrize("error", [TypeError, BackendDown])
def test_what_fails_when_it_is_kept_costs_no_hit(tmp_path: Path, error: type[Exception]) -> None:
    class Fails(Broken):
        def __getattr__(self, name: str) -> Any:
            if name == "put":
                raise error("of our own")
            return super().__getattr__(name)

    backend: Any = Fails(SqliteBackend(tmp_path / "near.db"), "items")
    cache = cache_of(tmp_path, near_hits=NearHitLog(backend))
    cache.store(question(KEPT), [StoredChunk("There.")], finish_reason="stop")
    assert kind(cache, ASKED) == "semantic"
    assert cache.near_hits is not None
    cache.near_hits.flush()
    cache.count_marks()
    # What lies there is read whenever something was removed, or first of all; a server that is down is told elsewhere.
    assert cache.counters["failed_review"] == (2 if error is TypeError else 1)
    assert cache.counters["failed_lookup"] == 0
    cache.close()


def test_what_goes_for_a_tenant_goes_for_its_near_hits(cache: ResponseCache) -> None:
    cache.store(question(KEPT, "ada"), [StoredChunk("Here.")], finish_reason="stop")
    assert [kind(cache, ASKED, tenant) for tenant in ("", "ada")] == ["semantic"] * 2
    log = log_of(cache)
    assert log.purge(EntryFilter(tenant=tenant_id("ada"))) == 1
    assert [hit.question.tenant for hit in log.hits(NOW)] == [tenant_id("")]


def test_with_a_key_nothing_lies_in_clear_text(tmp_path: Path) -> None:
    codec = AesGcmCodec(AesGcmCodec.new_secret())
    log = NearHitLog(SqliteBackend(tmp_path / "near.db", NEAR_HITS, codec=codec), 600)
    cache = cache_of(tmp_path, near_hits=log)
    cache.store(question("a secret parcel"), [StoredChunk("There.")], finish_reason="stop")
    assert kind(cache, "secret parcel a") == "semantic"
    assert [hit.kept for hit in log_of(cache).hits(NOW)] == ["a secret parcel"]
    cache.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("near.db*"))
    assert b"secret" not in stored


def test_where_they_lie() -> None:
    assert near_hits_place("file:///var/answers.db", "shop") == (Path("/var/answers.near-hits.db"), "shop")
    assert near_hits_place("redis://host:6379/0", "shop") == ("redis://host:6379/0", "shop.near-hits")


def test_a_recipe_keeps_them_beside_its_answers_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from pipeline.cache.semantic.onnx_export import write_onnx
    from tests.support.encoder import write_encoder

    encoder = write_encoder(tmp_path / "encoder")
    write_onnx(encoder, encoder / "model.onnx")
    for review in (False, True):
        semantic = f"{{embedder: 'local:{encoder}', review: {str(review).lower()}}}"
        given = load_recipe("tiny-cpu", ["cache.enabled=true", f"cache.semantic={semantic}"])
        cache = open_response_cache(given, Store(tmp_path / "store"))
        assert cache is not None
        cache.close()
        found = {path.name for path in (tmp_path / "store").rglob("*.db")}
        assert found == {"tiny-cpu.db", *(["tiny-cpu.near-hits.db"] if review else [])}


def test_in_shadow_the_model_answers_and_a_mark_harms_nothing(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, shadow=True)
    cache.store(question(KEPT), [StoredChunk("There.")], finish_reason="stop")
    assert [kind(cache, turn) for turn in (ASKED, KEPT)] == [None, "exact"]
    assert (cache.counters["shadow_semantic"], cache.counters["hit_semantic"]) == (1, 0)
    log = log_of(cache)
    (hit,) = log.hits(NOW)
    assert (hit.shadow, hit.kept) == (True, KEPT)
    log.judge(hit, wrong=True, now=NOW)
    cache.count_marks()
    assert (list(log.hits(NOW)), cache.counters["false_hit_reported"]) == ([], 0)
    cache.close()
