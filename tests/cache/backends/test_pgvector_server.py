"""What is particular to PostgreSQL: a role that owns nothing, its password, a scope that is searched by the index."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import psycopg
import pytest

from pipeline.cache.backend import PASSWORD, BackendDown
from pipeline.cache.backends import open_backend
from tests.support.cache_asking import NOW, entry, question, unit
from tests.support.servers import PostgresServer, Unavailable
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    try:
        made = PostgresServer()
    except Unavailable as error:
        pytest.skip(f"no server of postgres here: {error}")
    with made as running:
        yield running


def test_a_role_that_may_create_with_the_password_of_the_environment(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(server.url, autocommit=True) as owner:
        owner.execute("CREATE ROLE ada LOGIN PASSWORD 'open sesame'")
        owner.execute("CREATE EXTENSION vector")
        owner.execute("GRANT CREATE ON DATABASE postgres TO ada")
    url = server.url.replace("tests@", "ada@")
    server.ask_for_password("ada")
    wait_for(lambda: refusal(url) != "", "a question for the password")
    monkeypatch.setenv(PASSWORD, "wrong word")
    assert "password authentication failed" in refusal(url)
    assert "wrong word" not in refusal(url)
    # libpq's own comes first: the other one may be that of a Redis server.
    monkeypatch.setenv("PGPASSWORD", "open sesame")
    assert refusal(url) == ""
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setenv(PASSWORD, "open sesame")
    assert refusal(url) == ""
    backend = open_backend(url)
    backend.put(question("a"), entry("A"), np.eye(8, dtype=np.float32)[0])
    assert [near.turn for near in backend.near(question("").scope, np.eye(8, dtype=np.float32)[0], 1)] == [
        "a"
    ]
    assert "sesame" not in str(backend.describe())
    backend.close()


def test_several_that_come_first_at_once_make_the_tables_once(server: PostgresServer) -> None:
    start, eye = threading.Barrier(6), np.eye(8, dtype=np.float32)

    def put(number: int) -> None:
        with closing(open_backend(server.url)) as backend:
            start.wait(timeout=30)
            backend.put(question(f"{number}"), entry("A"), eye[number])

    for _ in range(3):
        with psycopg.connect(server.url, autocommit=True) as owner:
            owner.execute("DROP SCHEMA IF EXISTS pipeline_cache_1 CASCADE")
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(put, range(6)))
        with closing(open_backend(server.url)) as backend:
            assert len(backend.near(question("").scope, eye[0], 9)) == 6


def test_what_somebody_dropped_is_made_again(server: PostgresServer) -> None:
    backend = open_backend(server.url)
    eye = np.eye(8, dtype=np.float32)
    backend.put(question("a"), entry("A"), eye[0])
    with psycopg.connect(server.url) as owner:
        owner.execute("DROP SCHEMA pipeline_cache_1 CASCADE")
        owner.execute("DROP EXTENSION vector")
    with pytest.raises(BackendDown, match="does not exist"):
        backend.get(question("a").key, NOW)
    assert backend.get(question("a").key, NOW) is None
    backend.put(question("b"), entry("B"), eye[0])
    assert [near.turn for near in backend.near(question("").scope, eye[0], 1)] == ["b"]
    backend.close()
    with psycopg.connect(server.url) as owner:
        made = owner.execute("SELECT indexname FROM pg_indexes WHERE indexname LIKE 'near%'").fetchall()
    assert made == [("near_8",)]


def refusal(url: str) -> str:
    backend = open_backend(url)
    try:
        backend.get(question("a").key, NOW)
    except BackendDown as error:
        return str(error)
    finally:
        backend.close()
    return ""


@pytest.mark.slow
def test_a_large_scope_is_searched_by_the_index_and_finds_what_comparing_all_finds(
    server: PostgresServer,
) -> None:
    rng = np.random.default_rng(0)
    vectors = unit_rows(rng.standard_normal((1050, 16)))
    backend = open_backend(server.url)
    for n in range(1050):
        backend.put(question(str(n)), entry("x"), vectors[n])
        if n % 10 == 0:
            backend.put(question(str(n), tenant="other"), entry("x"), vectors[n])
    queries = unit_rows(rng.standard_normal((50, 16)))
    for tenant, step in (("", 1), ("other", 10)):
        scope = question("", tenant=tenant).scope
        found = [backend.near(scope, query, 1)[0].turn for query in queries]
        best = [str(step * int(np.argmax(vectors[::step] @ query))) for query in queries]
        assert np.mean([a == b for a, b in zip(found, best, strict=True)]) > 0.95
    wait_for(lambda: scans(server, "near_16") > 0, "a count of the searches")
    backend.close()


def scans(server: PostgresServer, index: str) -> int:
    with psycopg.connect(server.url) as connection:
        query = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = %s"
        row = connection.execute(query, (index,)).fetchone()
    return int(row[0]) if row else 0


def unit_rows(rows: np.ndarray) -> np.ndarray:
    return np.stack([unit(row) for row in rows])
