"""The response cache by itself: what a lookup and a store cost, and how well the index finds the nearest question.

    python benchmarks/cache.py [--entries 10000] [--vectors 100000] [--encoder FOLDER --pairs FILE]

Vectors are random around topics, as embeddings of questions are; a query is a stored vector, moved a little. With
--encoder and --pairs (see near_questions.py) they are embeddings of questions: about half of those in FILE are stored,
and the others are searched for. Times are medians of single calls, without the embedding.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench.statistics import percentile
from pipeline.cache.backend import Capacity
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.response_cache import HotTier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.sqlite import SqliteBackend
from pipeline.cache.tuning.pairs import read_pairs
from pipeline.cache.vector_index import VectorIndex

DIMENSIONS, TOPICS, QUERIES = 384, 2000, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--pairs", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exact(Path(folder) / "cache.db", chosen.entries)
    if chosen.encoder and chosen.pairs:
        nearest(*embedded(chosen.encoder, chosen.pairs))
    else:
        nearest(*around_topics(chosen.vectors))


def exact(file: Path, count: int) -> None:
    backend = SqliteBackend(file, Capacity(entries=2 * count))
    rng, now = np.random.default_rng(0), time.time()
    vector = unit(rng.standard_normal((1, DIMENSIONS)))[0]
    pieces = [StoredChunk(f"token{n} ", (n,)) for n in range(32)]
    entry = CacheEntry.of(pieces, finish_reason="stop", created=now, expires=now + 3600, output_tokens=32)
    questions = [question(n) for n in range(count)]
    report("ask: the key of a request", timed(question, range(2000)))
    report(
        f"store, durable, {count:,} entries",
        timed(lambda asked: backend.put(asked, entry, vector), questions),
    )
    keys = [questions[at].key for at in rng.permutation(count)]
    report("exact hit, SQLite", timed(lambda key: backend.get(key, now), keys))
    recent = HotTier(entries=count, max_bytes=2**30)
    for key in keys:
        recent.put(key, entry)
    report("exact hit, memory", timed(lambda key: recent.get(key, now), keys))
    backend.close()
    size = sum(path.stat().st_size for path in file.parent.iterdir()) / count
    print(f"  on disk {size:,.0f} bytes an entry, {len(entry.raw):,} of them the answer")


def around_topics(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and queries."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((TOPICS, DIMENSIONS)).astype(np.float32)
    vectors = unit(topics[rng.integers(TOPICS, size=count)] + 0.7 * rng.standard_normal((count, DIMENSIONS)))
    moved = vectors[rng.integers(count, size=QUERIES)] + 0.02 * rng.standard_normal((QUERIES, DIMENSIONS))
    return vectors, unit(moved)


def embedded(encoder: Path, pairs: Path) -> tuple[np.ndarray, np.ndarray]:
    """Questions that are stored, and others, as vectors."""
    embedder = Embedder(encoder)
    read = read_pairs(pairs.read_text(encoding="utf-8").splitlines())
    texts = dict.fromkeys(text for pair in read for text in (pair.a, pair.b))
    vectors = np.stack([vector for text in texts if (vector := embedder(text)) is not None])
    shuffled = vectors[np.random.default_rng(0).permutation(len(vectors))]
    half = (len(vectors) + 1) // 2
    return shuffled[:half], shuffled[half:]


def nearest(vectors: np.ndarray, queries: np.ndarray) -> None:
    count = len(vectors)
    index = VectorIndex(vectors.shape[1])
    began = time.perf_counter()
    index.add(np.arange(count), vectors)
    print(f"index of {count:,} vectors made in {time.perf_counter() - began:.1f} s")
    best = np.concatenate(
        [np.argmax(queries[at : at + 50] @ vectors.T, axis=1) for at in range(0, len(queries), 50)]
    )
    found = [index.search(query, 4) for query in queries]
    recall = float(np.mean([hits[0][0] == wanted for hits, wanted in zip(found, best, strict=True)]))
    report(
        f"nearest of {count:,}, recall@1 {recall:.3f}", timed(lambda query: index.search(query, 4), queries)
    )


def question(number: int) -> Question:
    messages = [
        {"role": "system", "content": "You answer questions about parcels. " * 8},
        {"role": "user", "content": f"Where is parcel number {number}?"},
    ]
    asked = make_question(Origin("d" * 64), messages, {"temperature": 0, "max_tokens": 64})
    assert asked.key
    return asked


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def timed(call: Callable[[Any], object], items: Iterable[Any]) -> list[float]:
    seconds = []
    for item in items:
        began = time.perf_counter()
        call(item)
        seconds.append(time.perf_counter() - began)
    return seconds


def report(what: str, seconds: list[float]) -> None:
    median, p99 = statistics.median(seconds) * 1e6, percentile(seconds, 99) * 1e6
    print(f"  {what:<48} median {median:9,.2f} µs   p99 {p99:9,.2f} µs")


if __name__ == "__main__":
    main()
