"""Runtimes that execute the model: a union told apart by `kind`. Their work is done in `pipeline.runtimes`.

Which versions exist, and what each can do on which GPU, are facts of `pipeline.contracts`; here is their
form.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from pipeline.recipe.sections import RecipeSection, matching, require_tag

Version = Annotated[
    str,
    *matching(
        r"\d+\.\d+\.\d+(rc\d+|\.post\d+)?",
        "write all three numbers, like 1.2.1",
        "is not a version of TensorRT-LLM",
    ),
]
Gpu = Annotated[
    str,
    *matching(
        "[a-z0-9]+(-[a-z0-9]+)*",
        "write lower-case words joined by hyphens, like h100-sxm-80g",
        "is not the name of a GPU",
    ),
]


Precision = Literal["auto", "f32", "bf16"]


class CpuRuntime(RecipeSection):
    """The embedded default: OpenVINO with a paged KV cache and in-flight batching, on this machine's CPU."""

    model_config = ConfigDict(json_schema_extra=require_tag)

    kind: Literal["cpu"] = Field(default="cpu", description="Which runtime this is.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="Threads of the engine; by default one a core."
    )
    kv_cache_mib: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Memory of the KV cache; by default what the limits need.",
    )
    precision: Precision = Field(
        default="auto",
        description="Type of activations and KV cache; weights stay as calibrated. auto is bf16 where the serving "
        "processor has it (AVX512_BF16, AMX) and the model is large enough to gain, else f32, for large models with a "
        "KV cache in f16; bf16 alone needs it.",
    )
    speculation: Literal["engine", "bls"] = Field(
        default="engine",
        description="Who runs a draft: the target's engine, or tensorrt_llm_bls with an engine for each, as on a GPU.",
    )
    simulate_activations: bool = Field(
        default=False,
        description="Round activations as the calibrated format does on a GPU; slower.",
    )


class _GpuRuntime(RecipeSection):
    """Settings that the two TensorRT-LLM runtimes share."""

    version: Version = Field(description="Version of TensorRT-LLM.", examples=["1.2.1"])
    gpu: Gpu = Field(description="The GPU that the engine is for.", examples=["h100-sxm-80g"])
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="GPUs that share each layer.")
    pipeline_parallel: int = Field(
        default=1, ge=1, le=64, description="Groups of GPUs that share the layers."
    )
    expert_parallel: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Groups of the tensor-parallel GPUs that hold different experts; the GPUs of a group share each "
        "expert (upstream's moe_tensor_parallel_size is tensor_parallel / expert_parallel).",
    )


class TensorRTRuntime(_GpuRuntime):
    """Engines built ahead of time by trtllm-build, served by the C++ backend: frozen, TensorRT-LLM 1.0 to 1.2.1."""

    kind: Literal["tensorrt"] = Field(description="Which runtime this is.")
    build_flags: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Further flags of trtllm-build for the target's engine, which no other key sets: name=value, or "
        "the name alone of a flag without a value.",
        examples=[["reduce_fusion=enable", "user_buffer=enable", "fast_build"]],
    )


class NGramSpeculation(RecipeSection):
    """Tokens proposed from repetitions in the text so far."""

    method: Literal["ngram"] = Field(description="How tokens are proposed.")
    max_draft_tokens: int = Field(ge=1, le=64, description="Tokens proposed in one round.")
    max_matching_tokens: int = Field(
        default=2, ge=1, le=32, description="Longest repetition that is looked for."
    )


class MtpSpeculation(RecipeSection):
    """Tokens proposed by the multi-token prediction layers that the checkpoint brings along."""

    method: Literal["mtp"] = Field(description="How tokens are proposed.")
    layers: int = Field(
        default=1, ge=1, le=16, description="Prediction layers, which is tokens proposed in one round."
    )


Speculation = Annotated[NGramSpeculation | MtpSpeculation, Field(discriminator="method")]


class PyTorchRuntime(_GpuRuntime):
    """TensorRT-LLM's PyTorch backend behind the `llmapi` model (1.0 and newer, candidates of 1.3 and 1.4 too)."""

    kind: Literal["pytorch"] = Field(description="Which runtime this is.")
    attention_dp: bool = Field(
        default=False,
        description="Attention data parallelism: each tensor-parallel GPU holds all but the routed experts whole, and "
        "has requests of its own. limits.max_concurrency counts those of all; limits.max_batch_tokens is that of each.",
    )
    cuda_graphs: bool = Field(default=True, description="Replay decoding steps as CUDA graphs.")
    max_graph_batch: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="Largest batch of one GPU that CUDA graphs are captured for; by default all its requests.",
    )
    overlap_scheduler: bool | None = Field(
        default=None,
        description="Prepare a step while the last one runs; by default wherever the speculation allows it.",
    )
    speculation: Speculation | None = Field(
        default=None, description="Speculation that needs no draft model."
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="Copies of the model, each on GPUs of its own (1.3 and newer)."
    )
    llm_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further arguments of the LLM API, which no other key sets, under upstream's names; the plan "
        "counts a few of them, and names the others.",
        examples=[{"moe_config": {"backend": "TRTLLM"}, "stream_interval": 20}],
    )

    def __hash__(self) -> int:
        # of arguments the names alone: their values may be lists and mappings
        return hash((*(value for name, value in self if name != "llm_args"), frozenset(self.llm_args)))


Runtime = Annotated[CpuRuntime | TensorRTRuntime | PyTorchRuntime, Field(discriminator="kind")]
