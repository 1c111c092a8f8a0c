"""Recipes of the tensorrt runtime, and the files of its checkpoints and engines, as deep as tests look: config.json in
upstream's shape, and bytes for weights and plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from pipeline.contracts.trtllm_build import versions
from pipeline.plan.parallelism import Parallelism
from pipeline.recipe import Recipe
from pipeline.runtimes.tensorrt.flags import ALGORITHMS

# A draft for Llama 3.1 8B, as overrides of a recipe for it.
DRAFTED = (
    'draft={source: "hf:meta-llama/Llama-3.2-1B-Instruct", revision: 9213176726f574b556790deb65791e0c5aa438b6, '
    "max_draft_tokens: 5}",
)
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


def rank_config(
    *,
    weights: str = "none",
    kv_cache: str | None = None,
    sizes: Parallelism | None = None,
    architecture: str = "LlamaForCausalLM",
) -> dict[str, Any]:
    """config.json of a small Llama. `weights`: in the recipe's words; `kv_cache`: in upstream's."""
    sizes = sizes or Parallelism()
    return {
        "architecture": architecture,
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_size": 32,
        "max_position_embeddings": 131072,
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "silu",
        "mapping": {
            "world_size": sizes.world,
            "tp_size": sizes.tensor,
            "pp_size": sizes.pipeline,
            "moe_tp_size": sizes.tensor // sizes.expert,
            "moe_ep_size": sizes.expert,
        },
        "quantization": {"quant_algo": ALGORITHMS[weights], "kv_cache_quant_algo": kv_cache},
    }


def make_ranks(folder: Path, *, rank_bytes: int = 3000, **config: Any) -> Path:
    """Write config.json and a file for each rank into a new folder; the folder."""
    folder.mkdir(parents=True)
    content = rank_config(**config)
    (folder / "config.json").write_text(json.dumps(content))
    for rank in range(content["mapping"]["world_size"]):
        (folder / f"rank{rank}.safetensors").write_bytes(bytes([rank]) * rank_bytes)
    return folder


def engine_config(
    *,
    version: str = "1.2.1",
    quantization: str = "none",
    kv_cache: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    vocab_size: int = 2048,
    max_draft_len: int = 0,
    paged_context_fmha: bool = True,
    logits_dtype: str = "float32",
    **build: Any,
) -> dict[str, Any]:
    """config.json of a Llama 3.1 8B; `build` replaces values of its build_config."""
    world = tensor_parallel * pipeline_parallel
    return {
        "version": version,
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": logits_dtype,
            "vocab_size": vocab_size,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_size": 128,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mapping": {
                "world_size": world,
                "tp_size": tensor_parallel,
                "pp_size": pipeline_parallel,
                "moe_tp_size": tensor_parallel,
                "moe_ep_size": 1,
            },
            "quantization": {
                "quant_algo": ALGORITHMS[quantization],
                "kv_cache_quant_algo": kv_cache,
                "group_size": 128,
            },
        },
        "build_config": {
            "max_input_len": 8192,
            "max_seq_len": 9216 + max_draft_len,
            "opt_batch_size": 8,
            "max_batch_size": 64,
            "max_beam_width": 1,
            "max_num_tokens": 8192,
            "opt_num_tokens": 64,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "speculative_decoding_mode": 2 if max_draft_len else 1,
            "max_draft_len": max_draft_len,
            "strongly_typed": True,
            "plugin_config": {
                "gpt_attention_plugin": "auto",
                "context_fmha": True,
                "paged_kv_cache": True,
                "remove_input_padding": True,
                "tokens_per_block": 32,
                "use_paged_context_fmha": paged_context_fmha,
                "use_fp8_context_fmha": quantization == "fp8" and kv_cache == "FP8",
            },
        }
        | build,
    }


def make_engine(folder: Path, *, plan_bytes: int = 1024, **config: Any) -> Path:
    """Write config.json and the plan of each rank into a new folder; the folder."""
    folder.mkdir(parents=True)
    content = engine_config(**config)
    (folder / "config.json").write_text(json.dumps(content, indent=4))
    for rank in range(content["pretrained_config"]["mapping"]["world_size"]):
        (folder / f"rank{rank}.engine").write_bytes(bytes([rank % 256]) * plan_bytes)
    return folder
