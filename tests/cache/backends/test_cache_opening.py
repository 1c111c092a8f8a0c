"""From an address to a backend: what kind it is, what is wrong with it, what is missing for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.cache.backend import PASSWORD
from pipeline.cache.backends import open_backend
from pipeline.cache.redis_server import RedisAddress
from tests.support.cache_asking import NOW, entry, question


@pytest.mark.parametrize("form", ["{path}", "file://{path}", "sqlite://{path}"])
def test_a_file_is_one_file_however_it_is_written(tmp_path: Path, form: str) -> None:
    file = tmp_path / "a b.db"
    first = open_backend(file)
    first.put(question("a"), entry("A"))
    first.close()
    path = str(file) if form == "{path}" else str(file).replace(" ", "%20")
    again = open_backend(form.format(path=path))
    assert again.get(question("a").key, NOW) is not None
    assert again.describe()["kind"] == "sqlite"
    again.close()


def test_in_memory_each_opening_is_a_cache_of_its_own() -> None:
    first, second = open_backend("memory://"), open_backend("memory://")
    first.put(question("a"), entry("A"))
    assert first.usage().entries == 1
    assert second.usage().entries == 0


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("redis://host", "redis", "cache"),
        ("postgresql://host/db", "psycopg", "pgvector"),
    ],
)
def test_a_missing_distribution_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{module}.*pip install .*\[{extra}\]'"):
        open_backend(url)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9", "postgresql://ada@127.0.0.1:9/x"])
def test_a_server_that_is_down_can_be_opened_and_closed(url: str) -> None:
    open_backend(url).close()


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        (
            "memcached://host",
            "memcached:// is not a backend of the response cache: a path, or one of file://",
        ),
        ("qdrant://host:6333", "qdrant:// is not a backend of the response cache"),
        ("postgresql://host/db?sslmod=require", "sslmod"),
        ("postgresql://ada:secret@host/db", "put it into PIPELINE_CACHE_PASSWORD"),
    ],
)
def test_an_address_that_is_none_is_told(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as told:
        open_backend(url)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("redis://", "it names no host"),
        ("http://host", "http:// is none of redis://"),
        ("redis://host:port", "Port could not be cast"),
        ("redis://host/1?ca=x&db=3", "db is no option: only ca is; ca needs rediss://"),
        ("rediss://ada:lovelace@host", "put it into PIPELINE_CACHE_PASSWORD"),
    ],
)
def test_an_address_of_redis_that_is_none(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as told:
        RedisAddress.parse(url)
    assert "lovelace" not in str(told.value)


def test_options_of_a_redis_client() -> None:
    address = RedisAddress.parse("valkeys://ada@cache.internal:7000/3?ca=/etc/ca.pem")
    assert str(address) == "cache.internal:7000/3"
    options = address.options({PASSWORD: "open sesame"})
    assert options == {
        "host": "cache.internal", "port": 7000, "db": 3, "username": "ada", "password": "open sesame",
        "ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": "/etc/ca.pem",
    }  # fmt: skip
