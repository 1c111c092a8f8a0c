"""GPTCache: SQLite for answers, faiss for embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gptcache import Cache, Config
from gptcache.adapter.api import get, put
from gptcache.manager import CacheBase, VectorBase, get_data_manager
from gptcache.processor.pre import get_prompt
from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation
from measuring import Questions


class GPTCache:
    def __init__(self, questions: Questions, folder: Path, _redis_url: str) -> None:
        folder.mkdir()
        self._folder = folder
        manager = get_data_manager(
            CacheBase("sqlite", sql_url=f"sqlite:///{folder}/answers.db"),
            VectorBase("faiss", dimension=questions.stored.shape[1], index_path=str(folder / "faiss.index")),
            max_size=10**9,
        )
        self._cache = Cache()
        self._cache.init(
            pre_embedding_func=get_prompt,
            embedding_func=lambda text, **_: np.asarray(questions.embed(text), "float32"),
            data_manager=manager,
            similarity_evaluation=SearchDistanceEvaluation(),
            config=Config(similarity_threshold=0.8),
        )

    def store(self, text: str, answer: str) -> None:
        put(text, answer, cache_obj=self._cache)

    def lookup(self, text: str) -> str | None:
        found: Any = get(text, cache_obj=self._cache)
        return found

    def size(self) -> int | None:
        self._cache.flush()
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self._cache.data_manager.close()
