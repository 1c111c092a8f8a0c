"""Cost of a hit, a put and a semantic lookup on each backend of the response cache, in one run.

    python benchmarks/cache_backends.py [--entries 10000] [--vectors 20000] [--only redis,pgvector]

Servers are those that the tests install, on this machine: a network adds its round trip (one a hit, one a put, one or
two a semantic lookup). Times are medians of single calls from one thread, without the embedding. Recall is whether the
nearest question is the first candidate. Bytes are what a server holds more an entry, the answer not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench.statistics import percentile
from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.backends import open_backend
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from tests.support.servers import PostgresServer, RedisServer, Server, Unavailable

DIMENSIONS, TOPICS, QUERIES = 384, 2000, 300
SERVERS: dict[str, Callable[[], Server] | None] = {
    "sqlite": None,
    "redis": RedisServer,
    "redis-query-engine": lambda: RedisServer(search=True),
    "valkey": lambda: RedisServer("valkey"),
    "pgvector": PostgresServer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--vectors", type=int, default=20_000)
    parser.add_argument("--only", default=",".join(SERVERS))
    chosen = parser.parse_args()
    print(
        f"{'':20} {'hit':>9} {'hit p99':>9} {'miss':>9} {'put':>9} | near, {chosen.vectors:,} embeddings:"
        f" {'median':>9} {'p99':>9} {'recall':>7} {'put':>9} {'bytes':>7}"
    )
    for kind in chosen.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with place(kind, Path(folder)) as (url, server):
                    print(f"{kind:20} {exact(url, chosen.entries)} | {near(url, server, chosen.vectors)}")
            except Unavailable as error:
                print(f"{kind:20} not measured: {error}")


@contextmanager
def place(kind: str, folder: Path) -> Iterator[tuple[str, Server | None]]:
    make = SERVERS[kind]
    if make is None:
        yield str(folder / "cache.db"), None
        return
    with make() as server:
        yield server.url, server  # type: ignore[attr-defined]


def exact(url: str, count: int) -> str:
    backend = open_backend(url, Capacity(entries=2 * count), name="exact")
    rng, now = np.random.default_rng(0), time.time()
    questions = [question(n) for n in range(count)]
    put = timed(lambda asked: backend.put(asked, answer(now)), questions)
    hit = timed(lambda asked: backend.get(asked.key, now), [questions[at] for at in rng.permutation(count)])
    missing = [question(n) for n in range(count, count + 1000)]
    miss = timed(lambda asked: backend.get(asked.key, now), missing)
    backend.close()
    return f"{us(hit)} {us(hit, 99)} {us(miss)} {us(put)}"


def near(url: str, server: Server | None, count: int) -> str:
    rng, now = np.random.default_rng(0), time.time()
    topics = rng.standard_normal((TOPICS, DIMENSIONS)).astype(np.float32)
    vectors = unit(topics[rng.integers(TOPICS, size=count)] + 0.7 * rng.standard_normal((count, DIMENSIONS)))
    queries = unit(
        vectors[rng.integers(count, size=QUERIES)] + 0.02 * rng.standard_normal((QUERIES, DIMENSIONS))
    )
    backend = open_backend(url, Capacity(entries=2 * count), name="near")
    questions = [question(n) for n in range(count)]
    before = held(server, url)
    put = timed(lambda pair: backend.put(pair[0], answer(now), pair[1]), zip(questions, vectors, strict=True))
    size = (held(server, url) - before) / count - len(answer(now).raw)
    scope = questions[0].scope
    best = np.concatenate(
        [np.argmax(queries[at : at + 50] @ vectors.T, axis=1) for at in range(0, QUERIES, 50)]
    )
    found = [first(backend, scope, query) for query in queries]  # the first search may build an index
    recall = float(np.mean([key == questions[at].key for key, at in zip(found, best, strict=True)]))
    search = timed(lambda query: backend.near(scope, query, 4), queries)
    backend.close()
    return f"{'':27} {us(search)} {us(search, 99)} {recall:7.3f} {us(put)} {size:7,.0f}"


def first(backend: Backend, scope: bytes, query: Any) -> bytes | None:
    found = backend.near(scope, query, 4)
    return found[0].key if found else None


def held(server: Server | None, url: str) -> int:
    """Bytes that a backend takes: memory of Redis, files of the others."""
    if isinstance(server, RedisServer):
        import redis

        client = redis.Redis(port=server.port)
        memory = int(client.info("memory")["used_memory"])
        client.close()
        return memory
    folder = server.folder if server is not None else Path(url).parent
    if isinstance(server, PostgresServer):
        import psycopg

        with psycopg.connect(server.url) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        return int(row[0]) if row else 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def question(number: int) -> Question:
    return make_question(
        Origin("d" * 64), f"Where is parcel number {number}?", {"temperature": 0, "max_tokens": 64}
    )


def answer(now: float) -> CacheEntry:
    pieces = [StoredChunk(f"token{n} ", (n,)) for n in range(32)]
    return CacheEntry.of(pieces, finish_reason="stop", created=now, expires=now + 3600, output_tokens=32)


def unit(vectors: Any) -> Any:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def timed(call: Callable[[Any], object], items: Iterable[Any]) -> list[float]:
    seconds = []
    for item in items:
        began = time.perf_counter()
        call(item)
        seconds.append(time.perf_counter() - began)
    return seconds


def us(seconds: list[float], percent: int = 50) -> str:
    value = percentile(seconds, percent)
    return f"{value * 1e6:6,.0f} µs"


if __name__ == "__main__":
    main()
