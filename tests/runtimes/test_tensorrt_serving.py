"""Recipe and engines to the values of Triton's models: what agrees, and what is refused and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from pipeline.recipe import Recipe, load_recipe
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.model_repository import EngineModelSettings, TensorRTSettings
from pipeline.runtimes.tensorrt.triton_settings import engine_settings
from tests.support.tensorrt import DRAFTED, make_engine

GIB = 2**30
GPU = 80 * GIB


def recipe(*overrides: str) -> Recipe:
    return load_recipe("llama-3.1-8b-fp8", (*DRAFTED, "quantization.kv_cache=auto", *overrides))


ALONE = ("draft=null",)


class Engines:
    """Engines of the recipe, with some values changed and plans of the given size (none are written)."""

    def __init__(self, folder: Path) -> None:
        base: dict[str, Any] = {"version": "1.2.1", "vocab_size": 128256}
        self.target = EngineFolder.read(
            make_engine(folder / "target", quantization="fp8", max_draft_len=5, **base)
        )
        self.draft = EngineFolder.read(make_engine(folder / "draft", **base))

    def settings(
        self,
        chosen: Recipe,
        *,
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
        gpu: int = GPU,
    ) -> TensorRTSettings:
        first = replace(self.target, **{"rank_bytes": (9 * GIB,), **(target or {})})
        second = replace(self.draft, **{"rank_bytes": (3 * GIB,), **(draft or {})})
        return engine_settings(chosen, first, second if chosen.draft else None, gpu)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))


def test_alone_an_engine_gets_the_recipes_fraction(engines: Engines) -> None:
    chosen = engines.settings(recipe(*ALONE, "kv_cache.memory_fraction=0.8"))
    assert chosen.target == EngineModelSettings((0,), 0.8, None, chosen.target.data_types)
    assert chosen.draft is None
    assert engines.settings(recipe(*ALONE, "kv_cache.memory_fraction=null")).target.memory_fraction == 0.9


def test_a_draft_shares_the_gpu(engines: Engines) -> None:
    """Both hold the same tokens; together no more than the recipe's fraction of what is left."""
    chosen = engines.settings(recipe())
    assert chosen.draft is not None
    tokens = chosen.target.max_kv_tokens
    assert tokens is not None
    assert tokens == chosen.draft.max_kv_tokens
    a_token = 2 * (2 * 32 * 8 * 128 * 2)  # both engines are a Llama 3.1 8B in bfloat16
    assert 0 < tokens * a_token <= 0.9 * (80 - 3.5 - 12) * GIB
    assert tokens * a_token > 0.85 * (80 - 3.5 - 12 - 2) * GIB
    assert 0.4 < chosen.target.memory_fraction < 0.9


def test_a_draft_lies_on_the_first_of_the_targets_gpus(engines: Engines) -> None:
    chosen = engines.settings(
        recipe("runtime.tensor_parallel=4", "draft.tensor_parallel=2"),
        target={"tensor_parallel": 4, "rank_bytes": (3 * GIB,) * 4},
        draft={"tensor_parallel": 2, "rank_bytes": (2 * GIB,) * 2},
    )
    assert chosen.draft is not None
    assert (chosen.target.gpus, chosen.draft.gpus) == ((0, 1, 2, 3), (0, 1))


def test_a_pair_that_does_not_fit_is_refused(engines: Engines) -> None:
    with pytest.raises(
        StageError, match=r"do not fit on one h100-sxm-80g together: beside 73\.0 GiB of weights"
    ):
        engines.settings(recipe(), target={"rank_bytes": (70 * GIB,)})


def test_host_memory_is_a_ranks_share(engines: Engines) -> None:
    assert engines.settings(recipe("kv_cache.host_memory_gib=8")).host_memory_bytes == 4 * GIB
    assert engines.settings(recipe(*ALONE)).host_memory_bytes == 0


def test_all_models_have_the_transaction_policy_of_the_recipe(engines: Engines) -> None:
    assert engines.settings(recipe()).decoupled
    assert not engines.settings(recipe("serving.decoupled=false")).decoupled


FP8_KV = {"kv_cache_quantization": "FP8", "use_paged_context_fmha": False}


@pytest.mark.parametrize("kv_cache", ["FP8", "INT8"])
@pytest.mark.parametrize("quantization", ["W4A16_AWQ", None])
def test_awq_weights_with_an_fp8_kv_cache_lose_paged_context_fmha(
    engines: Engines, quantization: str | None, kv_cache: str
) -> None:
    """The builder turns it off without failing; what the recipe wants of it cannot be had."""
    built = {"quantization": quantization, "kv_cache_quantization": kv_cache, "use_paged_context_fmha": False}
    with pytest.raises(StageError) as refused:
        engines.settings(recipe(*ALONE), target=built)
    for part in (
        "scheduler.chunked_context and kv_cache.reuse need paged context FMHA",
        "use_paged_context_fmha = false",
        f"weights {quantization or 'bfloat16'}, KV cache {kv_cache}",
        "set quantization.kv_cache to auto",
    ):
        assert part in str(refused.value)


def test_without_paged_context_fmha_the_rest_can_be_had(engines: Engines) -> None:
    plain = recipe(*ALONE, "scheduler.chunked_context=false", "kv_cache.reuse=false")
    chosen = engines.settings(plain, target=FP8_KV)
    assert not chosen.chunked_context
    assert not chosen.kv_cache_reuse
    for key in ("scheduler.chunked_context", "kv_cache.reuse"):
        with pytest.raises(StageError, match=f"{key} needs paged context FMHA"):
            engines.settings(
                recipe(*ALONE, "scheduler.chunked_context=false", "kv_cache.reuse=false", f"{key}=true"),
                target=FP8_KV,
            )


def test_a_draft_needs_paged_context_fmha_in_both_engines(engines: Engines) -> None:
    with pytest.raises(
        StageError, match=r"kv_cache\.reuse and draft need paged context FMHA, but the draft's"
    ):
        engines.settings(recipe("scheduler.chunked_context=false"), draft=FP8_KV)


@pytest.mark.parametrize(
    ("role", "built", "said"),
    [
        (
            "target",
            {"version": "1.2.0"},
            "runtime.version is 1.2.1, but the target's engine was built by 1.2.0",
        ),
        ("draft", {"version": "1.1.0"}, "but the draft's engine was built by 1.1.0"),
        ("target", {"tensor_parallel": 2}, "tensor 1 x pipeline 1 GPUs, but its engine is for 2 x 1"),
        ("target", {"max_batch_size": 8}, "limits.max_concurrency is 64, but the target's engine takes 8"),
        (
            "draft",
            {"max_seq_len": 4096},
            "limits allow 9216 tokens in a sequence, but the draft's engine 4096",
        ),
        ("target", {"max_draft_len": 4}, "draft.max_draft_tokens is 5, but the target's engine verifies 4"),
        ("target", {"verifies_drafts": False}, "speculative_decoding_mode draft_tokens_external"),
        ("draft", {"vocab_size": 32000}, "a vocabulary of 128256 tokens, the draft's of 32000"),
    ],
)
def test_each_disagreement_is_named(engines: Engines, role: str, built: dict[str, Any], said: str) -> None:
    with pytest.raises(StageError) as refused:
        engines.settings(
            recipe(), target=built if role == "target" else None, draft=built if role == "draft" else None
        )
    assert said in str(refused.value)


def test_all_disagreements_are_said_at_once(engines: Engines) -> None:
    with pytest.raises(StageError) as refused:
        engines.settings(recipe(), target={"version": "1.2.0"}, draft={"vocab_size": 7})
    assert str(refused.value).count(";") >= 1


def test_a_vocabulary_that_only_one_export_padded_is_the_same(engines: Engines) -> None:
    """AWQ exports round it up to 64."""
    padded = {"vocab_size": 50304}
    assert engines.settings(recipe(), target=padded, draft={"vocab_size": 50257}).draft is not None


def test_types_follow_the_engine(engines: Engines) -> None:
    types = engines.settings(recipe(), target={"logits_dtype": "float16"}).target.data_types
    assert (types.logits_datatype, types.prompt_embedding_table_data_type) == ("TYPE_FP16", "TYPE_BF16")


@pytest.mark.parametrize(("said", "on"), [("true", True), ("false", False), ("null", False)])
def test_guided_decoding_is_for_recipes_that_ask(engines: Engines, said: str, on: bool) -> None:
    assert engines.settings(recipe(f"guided_decoding={said}")).guided_decoding is on


def test_log_probs_of_prompts_need_an_engine_that_gathers_logits(engines: Engines) -> None:
    chosen = recipe(*ALONE, "serving.prompt_log_probs=true", "kv_cache.reuse=false")
    with pytest.raises(StageError, match="needs an engine that was built with gather_context_logits"):
        engines.settings(chosen)
    assert engines.settings(chosen, target={"gather_context_logits": True}).prompt_log_probs
    assert not engines.settings(recipe(*ALONE)).prompt_log_probs
