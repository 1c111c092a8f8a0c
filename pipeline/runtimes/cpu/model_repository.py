"""A Triton model repository for the `cpu` runtime: the configs of its models, and the folders on disk.

    model_repository/
      preprocessing/      config.pbtxt, 1/{model.py, shared/, tokenizer/}
      tensorrt_llm/       config.pbtxt, 1/{model.py, …, shared/, engine/, target/, draft/, tokenizer/, adapters.npz}
      postprocessing/     config.pbtxt, 1/{model.py, shared/, tokenizer/}
      ensemble/           config.pbtxt, 1/
      tensorrt_llm_bls/   config.pbtxt, 1/{model.py, …, shared/, tokenizer/}
      tensorrt_llm_draft/ as tensorrt_llm, where tensorrt_llm_bls speculates
    deployment.json

Tensors and ensemble maps are those of TensorRT-LLM 1.2.1, so that a client cannot tell the difference; only
`tensorrt_llm` is another backend. Parameters that begin with `cpu_` are our own, the others mean what they mean
upstream. Paths are relative to the model's folder, so that the repository can be moved or copied.

A draft is the engine's own business, or a model of its own, `tensorrt_llm_draft`, as with `tensorrt`; then
`tensorrt_llm_bls` runs both in turns.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.contracts.inflight_batcher import tensors
from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds, token_ids
from pipeline.progress import Progress
from pipeline.recipe.runtime import Precision
from pipeline.runtimes.base import Engines
from pipeline.triton import text_models
from pipeline.triton.config import model_config
from pipeline.triton.deployment import (
    DRAFT_MODEL,
    ENTRY,
    REPOSITORY,
    TARGET_MODEL,
    TOKENIZER,
    VERSION,
    Deployment,
    DeploymentLimits,
)
from pipeline.triton.repository import (
    content_digest,
    copy_sources,
    finish,
    link_files,
    require,
    verify,
    versions,
    write_model,
)
from pipeline.triton.text_models import (
    ENGINE_INPUTS,
    LORA_NAME,
    PROMPT_LOG_PROBS,
    DraftLimits,
    TextSettings,
)

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


CONTRACT = "1.2.1"  # version of TensorRT-LLM whose tensors the models have
TARGET, DRAFT, ADAPTERS = f"{VERSION}/target", f"{VERSION}/draft", f"{VERSION}/adapters.npz"
TOKENS_PER_BLOCK = 32  # of the KV cache that OpenVINO's PagedAttention keeps on a CPU
_DRAFT_THREADS = 4  # the draft's engine gets one thread in so many


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """Serving settings of a recipe."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_batch_tokens: int | None = None  # in one step; None: the engine's own choice
    max_draft_tokens: int = 0  # proposed in one round; 0: there is no draft model
    speculation: Literal["engine", "bls"] = "engine"  # who runs draft and target in turns
    kv_cache_mib: int | None = None  # of all models; None: what the limits need
    draft_kv_share: float = 0.5  # of kv_cache_mib, where the draft has an engine of its own
    kv_cache_reuse: bool = True
    threads: int | None = None  # None: one a core
    precision: Precision = "auto"
    guided_decoding: bool = False  # answers that have a form, for requests that ask for one
    max_queue_size: int = 0  # 0: no limit
    max_queue_delay_us: int = 0
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 500
    decoupled: bool = True  # an answer may come in many responses; else in one
    adapters: tuple[str, ...] = ()  # LoRA adapters that requests may name

    @property
    def two_engines(self) -> bool:
        """Whether the draft is a model of its own."""
        return self.speculation == "bls" and self.max_draft_tokens > 0

    @property
    def text(self) -> TextSettings:
        """Settings of the models around the engine."""
        limits = DraftLimits(self.max_draft_tokens, self.max_input_tokens, self.max_output_tokens)
        return TextSettings(
            version=CONTRACT,
            max_concurrency=self.max_concurrency,
            max_queue_size=self.max_queue_size,
            max_queue_delay_us=self.max_queue_delay_us,
            cancellation_check_period_ms=self.cancellation_check_period_ms,
            draft=limits if self.two_engines else None,
            own_engine=True,
            tokens_per_block=TOKENS_PER_BLOCK,
            decoupled=self.decoupled,
            adapters=bool(self.adapters),
        )


def cpu_models(settings: CpuSettings, ids: TokenIds) -> tuple[ModelConfig, ...]:
    """The configs, in the order in which text passes the models; a draft comes last."""
    configs = (
        text_models.preprocessing(settings.text, ids),
        _engine(TARGET_MODEL, settings, ids),
        text_models.postprocessing(settings.text),
        text_models.ensemble(settings.text),
        text_models.tensorrt_llm_bls(settings.text, ids),
    )
    return (*configs, _engine(DRAFT_MODEL, settings, ids)) if settings.two_engines else configs


def _engine(name: str, settings: CpuSettings, ids: TokenIds) -> ModelConfig:
    have = tensors(TARGET_MODEL, CONTRACT)
    is_draft, rounds = name == DRAFT_MODEL, settings.two_engines
    longest_input = settings.max_input_tokens + (settings.max_output_tokens - 1 if rounds else 0)
    parameters = {
        "gpt_model_path": TARGET,
        "exclude_input_in_output": "false",
        "enable_kv_cache_reuse": _flag(settings.kv_cache_reuse),
        "cancellation_check_period_ms": str(settings.cancellation_check_period_ms),
        "stats_check_period_ms": str(settings.stats_check_period_ms),
        "cpu_max_input_tokens": str(longest_input),  # a round sends the answer so far, too
        "cpu_max_output_tokens": str(settings.max_output_tokens),
        "cpu_max_sequence_tokens": str(settings.max_input_tokens + settings.max_output_tokens),
        "cpu_max_concurrency": str(settings.max_concurrency),
        "cpu_precision": settings.precision,
    }
    if settings.max_draft_tokens:
        parameters["cpu_max_draft_tokens"] = "0" if is_draft else str(settings.max_draft_tokens)
        if not rounds:
            parameters["cpu_draft_model_path"] = DRAFT
    if settings.guided_decoding and not is_draft:  # a draft of its own never sees such a request
        parameters |= {
            "guided_decoding_backend": "llguidance",
            "tokenizer_dir": TOKENIZER,
            "end_id": str(ids.end),
        }
    adapted = bool(settings.adapters) and not is_draft
    optional = {
        "cpu_adapters_path": ADAPTERS if adapted else None,
        "cpu_max_batch_tokens": settings.max_batch_tokens,
        "cpu_kv_cache_mib": _kv_cache_mib(settings, is_draft),
        "cpu_threads": _threads(settings, is_draft),
    }
    parameters |= {name: str(value) for name, value in optional.items() if value is not None}
    return model_config(
        name,
        backend="python",
        max_batch_size=settings.max_concurrency,
        instances=1,  # one engine batches all requests
        decoupled=settings.decoupled,
        dynamic_batching=settings.text.queue,
        inputs=(*have.inputs, *ENGINE_INPUTS, *((LORA_NAME,) if adapted else ())),
        outputs=(*have.outputs, *PROMPT_LOG_PROBS),
        parameters=parameters,
    )


def _kv_cache_mib(settings: CpuSettings, is_draft: bool) -> int | None:
    if settings.kv_cache_mib is None or not settings.two_engines:
        return settings.kv_cache_mib
    draft = max(1, round(settings.kv_cache_mib * settings.draft_kv_share))
    return draft if is_draft else max(1, settings.kv_cache_mib - draft)


def _threads(settings: CpuSettings, is_draft: bool) -> int | None:
    """One request keeps one engine busy at a time, many keep both: together they have the threads that one would."""
    if settings.threads is None or not settings.two_engines:
        return settings.threads
    draft = max(1, settings.threads // _DRAFT_THREADS)
    return draft if is_draft else max(1, settings.threads - draft)


def _flag(value: bool) -> str:
    return "true" if value else "false"


ENGINE = Path(__file__).parent / "engine"  # Python package that travels inside the repository
_ENGINE_FILES = ("openvino_model.xml", "openvino_model.bin", "engine.json")


def package_cpu(
    name: str,
    settings: CpuSettings,
    sources: Engines,
    into: Path,
    progress: Progress,
    engine_code: Path = ENGINE,
) -> dict[str, Any]:
    """Make `into/model_repository` and `into/deployment.json`; return the facts of them.

    Raises:
        StageError: A source lacks a file, or what was written does not read back as it was meant.
    """
    for folder in filter(None, (sources.target, sources.draft)):
        require(folder, *_ENGINE_FILES)
    facts = json.loads((sources.target / "engine.json").read_text(encoding="utf-8"))
    ids = token_ids(sources.tokenizer, facts["vocab_size"])
    if sources.draft is not None:
        settings = replace(settings, draft_kv_share=_draft_kv_share(sources.target, sources.draft))
    configs = cpu_models(settings, ids)
    repository = into / REPOSITORY
    engines = {TARGET_MODEL: sources.target, DRAFT_MODEL: sources.draft}
    for config in configs:
        is_engine = config.name in engines
        version = write_model(
            config, repository, sources.tokenizer, sources=TARGET_MODEL if is_engine else None
        )
        if is_engine:
            copy_sources(engine_code, version / "engine")
        if "cpu_adapters_path" in config.parameters:
            write_adapters(sources.adapters, facts["linears"], repository / config.name / ADAPTERS)
        if (engine := engines.get(config.name)) is not None:
            link_files(engine, repository / config.name / TARGET, _ENGINE_FILES)
        if sources.draft is not None and "cpu_draft_model_path" in config.parameters:
            link_files(sources.draft, repository / config.name / DRAFT, _ENGINE_FILES)
    verify(repository, configs)
    deployment = Deployment(
        name=name,
        runtime="cpu",
        entry_model=ENTRY,
        models=tuple(config.name for config in configs),
        limits=deployment_limits(settings),
        tokenizer_dir=f"{REPOSITORY}/preprocessing/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        digest=content_digest(repository),
        guided_decoding=settings.guided_decoding,
        structural_tags=settings.guided_decoding,
        adapters=settings.adapters,
        versions=versions(CONTRACT, "openvino", "tokenizers", "llguidance"),
    )
    return finish(deployment, into, progress)


def write_adapters(folders: Mapping[str, Path], linears: Collection[str], into: Path) -> None:
    """Write the adapters as the engine reads them (`engine/adapters.py`), scaled, in float32.

    Args:
        folders: Name -> folder of the fetched adapter.
        linears: Linear layers of the model.

    Raises:
        StageError: An adapter changes a layer that the model lacks.
    """
    import numpy as np

    from pipeline.models.adapter import read_adapter
    from pipeline.models.tensors import TensorFiles

    read = {name: (read_adapter(folder), TensorFiles(folder)) for name, folder in folders.items()}
    rank = max(adapter.rank for adapter, _ in read.values())
    stacked: dict[str, Any] = {}
    for number, (name, (adapter, files)) in enumerate(read.items()):
        for module in adapter.modules:
            layer = f"model.{module.name}"
            if layer not in linears:
                raise StageError(f"adapter {name}: the model has no linear layer {layer}")
            for part, size in (("A", module.inputs), ("B", module.outputs)):
                stack = stacked.setdefault(f"{layer}.{part}", np.zeros((len(read), rank, size), np.float32))
                values = files[f"{module.tensor}.lora_{part}.weight"].astype(np.float32)
                stack[number, : module.rank] = values if part == "A" else values.T * module.scale
    flat = {name: stack.reshape(-1, stack.shape[-1]) for name, stack in stacked.items()}
    np.savez(into, names=np.array(list(read)), rank=np.int64(rank), **flat)


def deployment_limits(settings: CpuSettings) -> DeploymentLimits:
    """Limits of requests."""
    return DeploymentLimits(
        max_input_tokens=settings.max_input_tokens,
        max_output_tokens=settings.max_output_tokens,
        max_concurrency=settings.max_concurrency,
        max_draft_tokens=settings.max_draft_tokens,
    )


def _draft_kv_share(target: Path, draft: Path) -> float:
    """The draft's part of the bytes that a token takes in both KV caches."""

    def token_values(folder: Path) -> int:
        facts = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        return int(facts["layers"] * facts["kv_heads"] * facts["head_dim"])

    values = token_values(draft)
    return values / (values + token_values(target))
