"""What releases of TensorRT-LLM name or type in their own way, read from a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of tensors as one release has them.

    >>> Dialect.of({"input": [{"name": "random_seed"}], "output": []}).seed
    'random_seed'
    """

    min_tokens: str = "min_tokens"  # `min_length` before 0.20
    seed: str = "seed"  # `random_seed` before 0.20
    logits: npt.DTypeLike = np.float32  # of `draft_logits`, and of `generation_logits`

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dialect:
        """That of a model and of the engine behind it, which are of one release and one type of logits."""
        inputs = {tensor["name"] for tensor in config["input"]}
        types = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
        return cls(
            min_tokens="min_length" if "min_length" in inputs else "min_tokens",
            seed="random_seed" if "random_seed" in inputs else "seed",
            logits=np.float16 if types.get("generation_logits") == "TYPE_FP16" else np.float32,
        )
