"""Peers that keep answers in Redis, in memory or on the disk: RedisVL, LangChain, LiteLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis
from measuring import Questions

_DISTANCE = 0.15  # a cosine of 0.85


class _InRedis:
    def __init__(self, redis_url: str) -> None:
        self._server = redis.Redis.from_url(redis_url)
        self._server.flushall()
        self._before = self._held()

    def size(self) -> int | None:
        return self._held() - self._before

    def _held(self) -> int:
        return int(self._server.info("memory")["used_memory"])

    def close(self) -> None:
        self._server.close()


class RedisVL(_InRedis):
    def __init__(self, questions: Questions, _folder: Path, redis_url: str) -> None:
        from redisvl.extensions.cache.llm import SemanticCache
        from redisvl.utils.vectorize import CustomTextVectorizer

        super().__init__(redis_url)
        self._questions = questions
        self._cache = SemanticCache(
            "peer",
            redis_url=redis_url,
            distance_threshold=_DISTANCE,
            vectorizer=CustomTextVectorizer(
                embed=lambda _: self._questions.stored[0].tolist()
            ),  # to learn the size
        )

    def store(self, text: str, answer: str) -> None:
        self._cache.store(text, answer, vector=self._questions.embed(text).tolist())

    def lookup(self, text: str) -> str | None:
        found = self._cache.check(vector=self._questions.embed(text).tolist())
        return found[0]["response"] if found else None


def _embeddings(questions: Questions) -> Any:
    from langchain_core.embeddings import Embeddings

    class Given(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [self.embed_query(text) for text in texts]

        def embed_query(self, text: str) -> list[float]:
            known = text.split()[-1].rstrip("?").isdigit()
            return (questions.embed(text) if known else questions.stored[0]).tolist()

    return Given()


class LangChainSemantic(_InRedis):
    def __init__(self, questions: Questions, _folder: Path, redis_url: str) -> None:
        from langchain_redis import RedisSemanticCache

        super().__init__(redis_url)
        self._cache = RedisSemanticCache(
            embeddings=_embeddings(questions), redis_url=redis_url, distance_threshold=_DISTANCE
        )

    def store(self, text: str, answer: str) -> None:
        _update(self._cache, text, answer)

    def lookup(self, text: str) -> str | None:
        return _found(self._cache, text)


class LangChainRedis(_InRedis):
    def __init__(self, _questions: Questions, _folder: Path, redis_url: str) -> None:
        from langchain_community.cache import RedisCache  # that of langchain-redis needs RedisJSON

        super().__init__(redis_url)
        self._cache = RedisCache(self._server)

    def store(self, text: str, answer: str) -> None:
        _update(self._cache, text, answer)

    def lookup(self, text: str) -> str | None:
        return _found(self._cache, text)


class LangChainMemory:
    def __init__(self, _questions: Questions, _folder: Path, _redis_url: str) -> None:
        from langchain_core.caches import InMemoryCache

        self._cache = InMemoryCache()

    def store(self, text: str, answer: str) -> None:
        _update(self._cache, text, answer)

    def lookup(self, text: str) -> str | None:
        return _found(self._cache, text)

    def size(self) -> int | None:
        return None

    def close(self) -> None:
        self._cache.clear()


def _update(cache: Any, text: str, answer: str) -> None:
    from langchain_core.outputs import Generation

    cache.update(text, "model", [Generation(text=answer)])


def _found(cache: Any, text: str) -> str | None:
    found = cache.lookup(text, "model")
    return found[0].text if found else None


class _LiteLLM:
    kind = "local"

    def __init__(self, _questions: Questions, folder: Path, redis_url: str) -> None:
        from urllib.parse import urlsplit

        from litellm.caching.caching import Cache

        self._folder = folder
        parts = urlsplit(redis_url)
        where = {
            "redis": {"host": parts.hostname, "port": str(parts.port)},
            "disk": {"disk_cache_dir": str(folder)},
        }
        self._redis = _InRedis(redis_url) if self.kind == "redis" else None
        self._cache = Cache(type=self.kind, **where.get(self.kind, {}))  # type: ignore[arg-type]

    def store(self, text: str, answer: str) -> None:
        self._cache.add_cache(answer, **_request(text))

    def lookup(self, text: str) -> str | None:
        return self._cache.get_cache(**_request(text))

    def size(self) -> int | None:
        if self._redis is not None:
            return self._redis.size()
        files = [path for path in self._folder.rglob("*") if path.is_file()] if self._folder.is_dir() else []
        return sum(path.stat().st_size for path in files) or None

    def close(self) -> None:
        if self._redis is not None:
            self._redis.close()


class LiteLLMLocal(_LiteLLM):
    pass


class LiteLLMDisk(_LiteLLM):
    kind = "disk"


class LiteLLMRedis(_LiteLLM):
    kind = "redis"


def _request(text: str) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 64,
    }
