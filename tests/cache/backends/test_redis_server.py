"""What is particular to Redis and Valkey: passwords, TLS, a server that is full, one that drops entries by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import redis

from pipeline.cache.backend import PASSWORD, BackendDown, Capacity
from pipeline.cache.backends import open_backend
from pipeline.cache.encryption import AesGcmCodec
from tests.support.cache_asking import NOW, entry, question
from tests.support.certificates import self_signed
from tests.support.servers import RedisServer, Unavailable

pytestmark = pytest.mark.servers

EYE = np.eye(8, dtype=np.float32)


def server(kind: str = "redis", *options: str, search: bool = False) -> RedisServer:
    try:
        return RedisServer(kind, search=search, options=options)
    except Unavailable as error:
        pytest.skip(f"no server of {kind} here: {error}")


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_the_password_is_that_of_the_environment_and_is_never_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(kind, "--requirepass", "open sesame") as running:
        for given, refusal in ((None, "Authentication required"), ("wrong word", "invalid|WRONGPASS")):
            if given is not None:
                monkeypatch.setenv(PASSWORD, given)
            backend = open_backend(running.url)
            with pytest.raises(BackendDown, match=refusal) as told:
                backend.get(question("a").key, NOW)
            assert "word" not in str(told.value).replace("password", "")
            backend.close()
        monkeypatch.setenv(PASSWORD, "open sesame")
        backend = open_backend(running.url)
        backend.put(question("a"), entry("A"))
        assert backend.get(question("a").key, NOW) is not None
        assert "sesame" not in str(backend.describe())
        assert "sesame" not in repr(vars(backend)["_server"].address)
        backend.close()


def test_tls_with_the_authority_that_is_named_and_no_other(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("cache.crt", "cache.key")]
    for file, content in zip(files, self_signed("127.0.0.1"), strict=True):
        file.write_bytes(content)
    certificate, key = map(str, files)
    running = server()
    running.options = (
        "--port", "0", "--tls-port", str(running.port), "--tls-cert-file", certificate, "--tls-key-file", key,
        "--tls-ca-cert-file", certificate, "--tls-auth-clients", "no",
    )  # fmt: skip
    with running:
        backend = open_backend(f"rediss://127.0.0.1:{running.port}/0?ca={certificate}")
        backend.put(question("a"), entry("A"))
        assert backend.get(question("a").key, NOW) is not None
        backend.close()
        for url, why in (
            (f"rediss://127.0.0.1:{running.port}", "certificate verify failed"),
            (f"rediss://localhost:{running.port}/0?ca={certificate}", "Hostname mismatch"),
            (f"redis://127.0.0.1:{running.port}", "127.0.0.1"),
        ):
            stranger = open_backend(url)
            with pytest.raises(BackendDown, match=why):
                stranger.get(question("a").key, NOW)
            stranger.close()


def test_a_server_that_is_full_refuses_puts_and_still_answers() -> None:
    with server("redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as running:
        backend = open_backend(running.url)

        def fill() -> None:
            for n in range(1000):
                backend.put(question(str(n)), entry("x" * 10_000))

        with pytest.raises(BackendDown, match="maxmemory"):
            fill()
        kept = backend.usage().entries
        assert kept == len(list(backend.items())) > 10  # nothing half
        assert backend.get(question("0").key, NOW) is not None
        assert backend.purge() == kept
        backend.put(question("again"), entry("x"))
        backend.close()


def test_what_the_server_dropped_by_itself_is_missed_and_its_room_is_given_back() -> None:
    with server() as running:
        backend = open_backend(running.url, Capacity(entries=4))
        for n in range(4):
            backend.put(question(str(n)), entry("x", created=NOW + n), EYE[n])
        client = redis.Redis(port=running.port)
        for name in client.scan_iter("*entry:*"):
            client.delete(name)
        client.close()
        assert backend.get(question("1").key, NOW) is None
        assert backend.near(question("").scope, EYE[1], 4) == []
        assert list(backend.items()) == []
        for n in range(4, 8):
            backend.put(question(str(n)), entry("x", created=NOW + n), EYE[n])
        assert backend.usage().entries == len(list(backend.items())) == 4
        assert backend.purge() == 4
        assert backend.usage().bytes == 0
        backend.close()


def test_an_entry_leaves_the_server_when_it_expires_though_nobody_asks() -> None:
    with server() as running:
        backend = open_backend(running.url)
        backend.put(question("a"), entry("A", ttl_s=600))
        backend.get(question("a").key, NOW + 599)
        client = redis.Redis(port=running.port)
        (name,) = client.scan_iter("*entry:*")
        assert 0 < client.ttl(name) <= 600
        client.close()
        backend.put(question("b"), entry("B", created=NOW + 601))
        assert [kept.turn for kept in backend.items()] == ["b"]
        assert backend.usage().entries == 1
        backend.close()


def test_embeddings_that_are_sealed_are_not_given_to_the_query_engine() -> None:
    with server(search=True) as running:
        open_one = open_backend(running.url, name="open")
        sealed = open_backend(running.url, name="sealed", codec=AesGcmCodec(AesGcmCodec.new_secret()))
        for backend in (open_one, sealed):
            backend.put(question("a"), entry("A"), EYE[0])
            assert [near.turn for near in backend.near(question("").scope, EYE[0], 1)] == ["a"]
        assert open_one.describe()["embeddings"] == "query engine"
        assert sealed.describe()["embeddings"] == "indexed in memory"
        client = redis.Redis(port=running.port)
        assert client.execute_command("FT._LIST") == [b"pipeline:{open}:near:8"]
        client.close()
        open_one.close()
        sealed.close()
