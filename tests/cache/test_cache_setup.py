"""From settings, and from a recipe, to a cache that works; all that is wrong is told at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cache.encryption import KEY, AesGcmCodec, KeySource
from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.setup import CacheSetupError, SentenceEncoder, make_redaction, open_cache
from pipeline.errors import UserError
from pipeline.gateway.served_model import semantic_embedder
from pipeline.recipe import CacheSettings, Recipe, load_recipe
from pipeline.stages.response_cache import cache_place, obtain_encoder, open_response_cache
from pipeline.store import Store
from tests.support.cache_asking import Fine, question
from tests.support.encoder import write_encoder


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny-cpu", ["cache.enabled=true", *overrides])


def keep(cache: ResponseCache, turn: str, answer: str) -> bool:
    return cache.store(question(turn), [StoredChunk(answer)], finish_reason="stop")


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    settings = CacheSettings(redaction={"phone_regions": ["XX"]}, encryption={"key_env": "MY_KEY"})
    with pytest.raises(CacheSetupError) as caught:
        open_cache(settings, tmp_path / "cache.db")
    told = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in told] == ["redaction", "backend"]
    assert "XX" in told[0]
    assert "MY_KEY holds no key" in told[1]


def test_a_cache_without_a_place_or_without_its_encoder(tmp_path: Path) -> None:
    semantic, place = CacheSettings(semantic={}), tmp_path / "cache.db"
    with pytest.raises(CacheSetupError, match=r"backend: no file is named: give backend\.path, or a place"):
        open_cache(CacheSettings())
    with pytest.raises(CacheSetupError, match=r"semantic: hf:.*MiniLM.* is not a local folder"):
        open_cache(semantic, place)
    with pytest.raises(
        CacheSetupError, match=r"semantic: .*needs tokenizer\.json and one of model_int8\.onnx"
    ):
        open_cache(semantic, place, encoder=SentenceEncoder(tmp_path))


def test_the_settings_of_a_recipe(tmp_path: Path) -> None:
    given = recipe(
        "cache.ttl_s=50", "cache.max_entries=7", "cache.max_mib=3",
        "cache.cache_sampled=true", "cache.replay_pace=0.5",
        "cache.redaction={kinds: [card, phone], phone_regions: [GB],"
        " patterns: [{name: customer, pattern: 'C-\\d{8}'}]}",
    )  # fmt: skip
    cache = open_response_cache(given, Store(tmp_path))
    assert cache is not None
    assert (cache.ttl_s, cache.keep_sampled, cache.pace) == (50, True, 0.5)
    for number in range(9):
        keep(cache, str(number), "x")
    assert cache.backend.usage().entries <= 7
    cache.close()
    redaction = make_redaction(given.cache)
    assert redaction.objection("", "C-12345678") == "customer"
    assert redaction.objection("", "ada@example.org") is None
    assert redaction.objection("", "020 7946 0958") == "phone"
    assert redaction.objection("", "(555) 010-9999") is None
    assert open_response_cache(recipe("cache.enabled=false"), Store(tmp_path)) is None


def test_languages_may_not_be_empty() -> None:
    with pytest.raises(UserError, match="languages: is empty \\(name at least one"):
        recipe("cache.semantic={languages: []}")


def test_encryption_by_a_key_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    file = tmp_path / "cache.key"
    given = recipe(f"cache.encryption={{key_file: {file}}}")
    with pytest.raises(
        UserError, match=r"tiny-cpu: the response cache cannot be used:\n  backend: .*cache.key"
    ):
        open_response_cache(given, Store(tmp_path))
    file.write_text(AesGcmCodec.new_secret() + "\n")
    for expected in (None, "a secret word"):
        cache = open_response_cache(given, Store(tmp_path))
        assert cache is not None
        hit = cache.lookup(question("Hi"))
        assert (None if hit is None else hit.entry.text) == expected
        keep(cache, "Hi", "a secret word")
        cache.close()
    place = cache_place(given, Store(tmp_path))
    assert isinstance(place, Path)
    assert all(b"secret word" not in path.read_bytes() for path in place.parent.iterdir())


def test_encryption_without_a_key_is_never_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match="to be encrypted, and the environment variable MY_KEY holds no key"):
        open_response_cache(recipe("cache.encryption={key_env: MY_KEY}"), Store(tmp_path))


def test_an_encoder_is_made_once_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    checkpoint = write_encoder(tmp_path / "my-encoder")
    store = Store(tmp_path / "store")
    # By default near questions are measured and not served.
    semantic = f"min_similarity: 0.999, embedder: 'local:{checkpoint}'"
    given = recipe(f"cache.semantic={{{semantic}, mode: serve}}")
    found = obtain_encoder(given, store)
    assert found.name == "my-encoder"
    assert obtain_encoder(given, store).folder == found.folder
    cache = open_cache(given.cache, tmp_path / "cache.db", encoder=found, verifier=Fine())
    embedder = semantic_embedder(cache)
    assert embedder is not None
    assert embedder.identity.startswith("my-encoder/model")
    keep(cache, "where is my parcel ?", "there")
    hit = cache.lookup(question("Where is my PARCEL?"))
    assert hit is not None
    assert (hit.cached.kind, hit.entry.text) == ("semantic", "there")
    assert cache.lookup(question("is the shop open ?")) is None
    cache.close()
    for unserved in (semantic, f"{semantic}, mode: serve, tenants: [faq]"):
        given = recipe(f"cache.semantic={{{unserved}}}")
        cache = open_cache(given.cache, tmp_path / "cache.db", encoder=found, verifier=Fine())
        assert cache.lookup(question("Where is my PARCEL?")) is None
        assert cache.counters["shadow_semantic"] == ("tenants" not in unserved)
        cache.close()
    prepared = recipe(f"cache.semantic={{embedder: 'local:{found.folder}'}}")
    assert obtain_encoder(prepared, store).folder == found.folder


def test_a_checkpoint_that_is_no_encoder(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    checkpoint = write_encoder(tmp_path / "encoder")
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"bert"', '"gpt2"'))
    given = recipe(f"cache.semantic={{embedder: 'local:{checkpoint}'}}")
    with pytest.raises(UserError, match=r"cache.semantic.embedder: .*not an encoder.*model_type = gpt2"):
        open_response_cache(given, Store(tmp_path / "store"))


HEAVY = (
    "torch", "transformers", "onnx", "onnxruntime", "tokenizers", "redis", "psycopg", "cryptography",
    "starlette", "uvicorn", "fastapi", "faiss", "scipy", "pandas", "openvino", "huggingface_hub",
)  # fmt: skip


def test_an_application_with_client_and_cache_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from pipeline.client import Client; from pipeline.cache import *;"
        "from pipeline.recipe import CacheSettings;"
        "print([name for name in ('phonenumbers', 'stdnum') if name in sys.modules]);"
        f"open_cache(CacheSettings(), {str(tmp_path / 'cache.db')!r}).close();"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]


@pytest.mark.parametrize("content", [b"\xff\xfesecret", b"secret!", "secrét".encode(), b"c2VjcmV0"])
def test_a_file_that_holds_no_key_is_told_without_what_it_holds(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(CacheSetupError, match="the key of the response cache") as caught:
        open_cache(CacheSettings(encryption={"key_file": str(tmp_path / "key")}), tmp_path / "cache.db")
    assert not any(part in str(caught.value) for part in ("secr", "c2Vj", "0xff", "xe9"))


def test_a_key_that_every_account_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(AesGcmCodec.new_secret())
    for mode, warned in ((0o600, False), (0o604, True)):
        (tmp_path / "key").chmod(mode)
        assert KeySource(file=tmp_path / "key").read()
        assert ("every account of this machine may read the key" in caplog.text) is warned
