"""`pipeline cache` on servers, by a recipe and by an address."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from pipeline.cache.backends import open_backend
from pipeline.cache.encryption import KEY, AesGcmCodec
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, make_question
from pipeline.cli.cache import command
from pipeline.errors import UserError
from tests.support.servers import PostgresServer, RedisServer, Server, Unavailable

KINDS = ("redis", "valkey", "postgres")


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.servers) for kind in KINDS])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    try:
        made = PostgresServer() if request.param == "postgres" else RedisServer(request.param)
    except Unavailable as error:
        pytest.skip(f"no server of {request.param} here: {error}")
    with made as running:
        yield running


@pytest.fixture
def address(server: RedisServer | PostgresServer) -> Iterator[str]:
    backend = open_backend(server.url, name="tiny-cpu")
    now = time.time()
    for n in range(4):
        origin = Origin(f"engine {n % 2}", tenant="ada" if n < 3 else "bo")
        answer = CacheEntry.of(
            [StoredChunk(f"answer {n}")], finish_reason="stop", created=now + n, expires=now + 600
        )
        backend.put(make_question(origin, f"question {n}", {"temperature": 0}), answer)
    yield server.url
    backend.purge()
    backend.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=True)


def by_recipe(verb: str, address: str, *rest: str) -> Result:
    kind = "pgvector" if address.startswith("postgres") else "redis"
    return run(verb, "tiny-cpu", "--set", f"cache.backend={{kind: {kind}, url: '{address}'}}", *rest)


def test_stats_and_show_by_recipe_and_by_address(address: str) -> None:
    told = json.loads(by_recipe("stats", address, "--json").output)
    assert told == json.loads(run("stats", f"{address}#tiny-cpu", "--json").output)
    assert told["entries"] == 4
    assert told["kind"] in ("redis", "valkey", "pgvector")
    assert json.loads(run("stats", f"{address}#another", "--json").output)["entries"] == 0
    rows = json.loads(by_recipe("show", address, "--json").output)
    assert [row["answer"] for row in rows] == [f"answer {n}" for n in (3, 2, 1, 0)]


def test_purge_by_tenant_engine_and_scope(address: str) -> None:
    rows = json.loads(by_recipe("show", address, "--json").output)
    assert "1 removed" in by_recipe("purge", address, "--only", "tenant=bo", "--yes").output
    engine = next(row["engine"] for row in rows if row["question"] == "question 1")
    assert "1 removed" in by_recipe("purge", address, "--only", f"engine={engine}", "--yes").output
    assert "2 removed" in by_recipe("purge", address, "--only", f"scope={rows[-1]['scope']}", "--yes").output
    assert by_recipe("purge", address, "--only", "scope=no hex", "--yes").exit_code == 2
    assert by_recipe("purge", address, "--only", "key=00", "--only", "tenant=bo", "--yes").exit_code == 2


def test_audit_and_export(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(by_recipe("audit", address, "--json").output) == {
        "checked": 4, "held": [], "unreadable": 0
    }  # fmt: skip
    rows = [json.loads(line) for line in by_recipe("export", address).output.splitlines()]
    assert {row["question"] for row in rows} == {f"question {n}" for n in range(4)}
    monkeypatch.setenv(KEY, AesGcmCodec.new_secret())
    sealed = by_recipe("audit", address, "--json")
    assert json.loads(sealed.stdout)["unreadable"] == 4
    assert sealed.exit_code == 1


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("redis://127.0.0.1:9", "127.0.0.1:9/0: Error 111"),
        ("postgresql://ada@127.0.0.1:9/db", "127.0.0.1:9/db: "),
        ("redis://ada:secret@127.0.0.1", "put it into PIPELINE_CACHE_PASSWORD"),
        ("postgresql://127.0.0.1/db?password=secret", "put it into PIPELINE_CACHE_PASSWORD"),
        ("redis://127.0.0.1/none?tls=1", "the database is a number, not none; tls is no option"),
        ("memcached://host", "is not a backend of the response cache"),
        ("file://answers.db", "with three slashes"),
        ("no-such.db", "there is no response cache (no-such.db)"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line_without_a_password(address: str, told: str) -> None:
    failure = run("stats", address).exception
    assert isinstance(failure, UserError)
    assert told in str(failure)
    assert "secret" not in str(failure)
    assert "\n" not in str(failure)
