"""Recipes of the tensorrt runtime, one by one and any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from pipeline.contracts.trtllm_build import versions
from pipeline.recipe import Recipe

FORMATS = ("none", "fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4")
GPUS = {"nvfp4": "b200-sxm-180g"}


def recipe(
    weights: str = "none",
    kv: str = "auto",
    *,
    version: str = "1.2.1",
    on: str | None = None,
    draft: Mapping[str, Any] | None = None,
    tensor: int = 1,
    limits: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Recipe:
    needs = weights != "none" or (draft or {}).get("quantization", "none") != "none"
    quantization: dict[str, Any] = {"format": weights, "kv_cache": kv}
    quantization |= {"calibration": {"dataset": "support"}} if needs else {}
    quantization |= {"auto": {"effective_bits": 6.0}} if weights == "auto" else {}
    return Recipe.model_validate(
        {
            "name": "r",
            "model": {"source": "hf:a/b"},
            "draft": {"source": "hf:a/d", "max_draft_tokens": 5, **draft} if draft is not None else None,
            "quantization": quantization,
            "runtime": {
                "kind": "tensorrt",
                "version": version,
                "gpu": on or GPUS.get(weights, "h100-sxm-80g"),
                "tensor_parallel": tensor,
            },
            "limits": {"max_input_tokens": 8192, "max_output_tokens": 1024, "max_concurrency": 64}
            | dict(limits or {}),
            **sections,
        }
    )


def roles(made: Recipe) -> tuple[str, ...]:
    return ("target",) if made.draft is None else ("target", "draft")


_any = st.builds(
    recipe,
    st.sampled_from(FORMATS),
    st.sampled_from(["auto", "fp8"]),
    version=st.sampled_from(versions()),
    on=st.sampled_from(["a100-sxm-80g", "l40s-48g", "h100-sxm-80g", "b200-sxm-180g", "rtx-pro-6000-96g"]),
    draft=st.one_of(st.none(), st.fixed_dictionaries({"max_draft_tokens": st.integers(1, 16)})),
    tensor=st.sampled_from([1, 2, 4, 8]),
    limits=st.fixed_dictionaries(
        {
            "max_input_tokens": st.integers(1, 40_000),
            "max_output_tokens": st.integers(17, 4000),
            "max_concurrency": st.integers(1, 1024),
        },
        optional={"max_batch_tokens": st.integers(1, 70_000)},
    ),
    scheduler=st.fixed_dictionaries({"chunked_context": st.booleans()}),
    kv_cache=st.fixed_dictionaries({"reuse": st.booleans()}),
)


def _valid(strategy: Any) -> Any:
    """Those that break no rule of recipes."""

    @st.composite
    def drawn(draw: Any) -> Recipe:
        try:
            made: Recipe = draw(strategy)
        except ValueError:
            assume(False)
        return made

    return drawn()


recipes = _valid(_any)  # all that break no rule of recipes
