"""Rules that span fields of a recipe. Each message names the fields and the fix.

A rule reads plain values by dotted key, so that it can run on a recipe of which other parts are wrong:
where a value that it reads is itself at fault, the rule is left out. What a TensorRT-LLM version or a GPU
can do is not judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from pipeline.recipe.quantization import MAX_SAMPLES, MIN_SAMPLES
from pipeline.recipe.sections import InvalidValue, RecipeValues

AWQ = ("int4_awq", "w4a8_awq")
# Settings of `runtime.llm_args.lora_config` that follow from the adapters of the recipe, and some that do not.
LORA_DECIDED = (
    "lora_dir", "lora_ckpt_source", "max_lora_rank", "lora_target_modules", "trtllm_modules_to_hf_modules",
)  # fmt: skip
LORA_LEFT = ("max_loras", "max_cpu_loras")


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule, with the keys that it is about; the first is the one to change."""

    keys: tuple[str, ...]
    text: str
    fix: str
    rule: str = ""  # id of the rule of preflight that it is the same as, where there is one

    def as_error(self) -> PydanticCustomError:
        return PydanticCustomError(
            "rule", "{text}", {"text": self.text, "fix": self.fix, "keys": self.keys, "rule": self.rule}
        )


Rule = Callable[[RecipeValues], Iterator[Problem]]


def broken_rules(values: RecipeValues) -> list[Problem]:
    """Return the problems of all rules that can be judged; a rule that reads an invalid value is left out."""
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems += rule(values)
        except InvalidValue:
            continue
    return problems


def _revision_of_hub(values: RecipeValues) -> Iterator[Problem]:
    for role in ("model", "draft", *(f"adapters.{name}" for name in values["adapters"] or ())):
        source, revision = f"{role}.source", f"{role}.revision"
        if values[revision] is not None and str(values[source]).startswith("local:"):
            yield Problem(
                (revision, source), f"is given, but {source} is a local folder, which has no revisions",
                f"remove {revision}",
            )  # fmt: skip


def _calibration_needed(values: RecipeValues) -> Iterator[Problem]:
    has_calibration = values["quantization.calibration"] is not None
    quantized = {key: values[key] for key in ("quantization.format", "draft.quantization")}
    needing = [key for key, value in quantized.items() if value not in (None, "none")]
    if needing and not has_calibration:
        yield Problem(
            ("quantization.calibration", *needing),
            f"is missing, but {needing[0]} is {quantized[needing[0]]}",
            "add quantization.calibration.dataset, such as support, or set quantization.format to none",
        )
    if has_calibration and not needing:
        yield Problem(
            ("quantization.calibration", "quantization.format"), "is given, but quantization.format is none",
            "remove quantization.calibration (--set quantization.calibration=null), or choose a format",
        )  # fmt: skip


def _gate_needs_format(values: RecipeValues) -> Iterator[Problem]:
    if values["quantization.gate"] is not None and values["quantization.format"] == "none":
        yield Problem(
            ("quantization.gate", "quantization.format"),
            "is given, but quantization.format is none, so there is nothing to compare",
            "remove quantization.gate (--set quantization.gate=null), or choose a format",
        )


def _sample_count(values: RecipeValues) -> Iterator[Problem]:
    samples, allowed = "quantization.calibration.samples", "quantization.calibration.allow_sample_count"
    if (
        values[samples] is not None
        and not MIN_SAMPLES <= values[samples] <= MAX_SAMPLES
        and not values[allowed]
    ):
        yield Problem(
            (samples, allowed), f"must be {MIN_SAMPLES} to {MAX_SAMPLES}",
            f"or set {allowed} to true, which the manifests then record",
        )  # fmt: skip


def _awq_block_size(values: RecipeValues) -> Iterator[Problem]:
    key = "quantization.awq_block_size"
    formats = {values["quantization.format"], values["draft.quantization"]}
    formats |= set(values["quantization.auto.formats"] or ())
    if values[key] != 128 and not formats & set(AWQ):
        yield Problem(
            (key, "quantization.format"),
            f"is given, but quantization.format {values['quantization.format']} has no AWQ blocks",
            f"remove {key}, or set quantization.format to int4_awq or w4a8_awq",
        )


def _auto_budget(values: RecipeValues) -> Iterator[Problem]:
    is_auto, has_budget = values["quantization.format"] == "auto", values["quantization.auto"] is not None
    if is_auto and not has_budget:
        yield Problem(
            ("quantization.auto", "quantization.format"), "is missing, but quantization.format is auto",
            "add quantization.auto.effective_bits, such as 6.0",
        )  # fmt: skip
    if has_budget and not is_auto:
        yield Problem(
            ("quantization.auto", "quantization.format"),
            f"is given, but quantization.format is {values['quantization.format']}",
            "remove quantization.auto, or set quantization.format to auto",
        )


def _slo_percentiles(values: RecipeValues) -> Iterator[Problem]:
    for name in ("ttft", "itl"):
        p95, p99 = f"slo.{name}_p95_ms", f"slo.{name}_p99_ms"
        if values[p95] is not None and values[p99] is not None and values[p99] < values[p95]:
            yield Problem(
                (p99, p95),
                f"is {values[p99]:g}, less than {p95}, which is {values[p95]:g}",
                f"set {p99} to {p95} or more",
            )


def _nvfp4_needs_gpu(values: RecipeValues) -> Iterator[Problem]:
    if values["runtime.kind"] != "cpu":
        return
    for key in ("quantization.format", "draft.quantization", "quantization.auto.formats"):
        if values[key] == "nvfp4" or (isinstance(values[key], list) and "nvfp4" in values[key]):
            yield Problem(
                (key, "runtime.kind"), "needs a GPU, but runtime.kind is cpu",
                f"set {key} to w4a16_nvfp4, fp8 or int4_awq, or runtime.kind to tensorrt or pytorch",
            )  # fmt: skip


def _kv_cache_format(values: RecipeValues) -> Iterator[Problem]:
    key = "quantization.kv_cache"
    unscaled = values["quantization.format"] == "none" and values["runtime.kind"] != "pytorch"
    if values[key] not in (None, "auto") and unscaled:
        yield Problem(
            (key, "quantization.format"),
            "needs scales from calibration, but quantization.format is none",
            f"set {key} to auto, or choose a quantization.format such as fp8",
        )


def _draft_fits_limits(values: RecipeValues) -> Iterator[Problem]:
    drafted, longest = values["draft.max_draft_tokens"], values["limits.max_output_tokens"]
    if drafted is not None and drafted >= longest:
        yield Problem(
            ("draft.max_draft_tokens", "limits.max_output_tokens"),
            f"must be less than limits.max_output_tokens, which is {longest}",
            f"at most {longest - 1}" if longest > 1 else "raise limits.max_output_tokens",
        )


def _batch_fits_concurrency(values: RecipeValues) -> Iterator[Problem]:
    key, budget, concurrency = (
        "limits.max_batch_tokens",
        values["limits.max_batch_tokens"],
        values["limits.max_concurrency"],
    )
    drafted = values["draft.max_draft_tokens"] or 0
    ranks = (values["runtime.tensor_parallel"] or 1) if values["runtime.attention_dp"] else 1
    least = -(-concurrency // ranks) * (drafted + 1)
    if budget is not None and budget < least:
        product = f"limits.max_concurrency {concurrency}"
        product += f" / runtime.tensor_parallel {ranks}" if ranks > 1 else ""
        product += f" x (draft.max_draft_tokens {drafted} + 1)" if drafted else ""
        yield Problem(
            (key, "limits.max_concurrency", *(["draft.max_draft_tokens"] if drafted else [])),
            f"must hold one step of all requests: {product}", f"at least {least}",
        )  # fmt: skip


def _batch_fits_prompt(values: RecipeValues) -> Iterator[Problem]:
    """On tensorrt, a draft and its target are sent the answer so far with the prompt, and the target the drafts too."""
    key, budget, longest = (
        "limits.max_batch_tokens",
        values["limits.max_batch_tokens"],
        values["limits.max_input_tokens"],
    )
    keys: tuple[str, ...] = (key, "limits.max_input_tokens", "scheduler.chunked_context")
    needing = "limits.max_input_tokens"
    if values["runtime.kind"] == "tensorrt" and values["draft"] is not None:
        whole = longest + values["limits.max_output_tokens"]
        longest = min(whole - 1 + values["draft.max_draft_tokens"], whole * values["limits.max_concurrency"])
        keys = (*keys, "limits.max_output_tokens", "draft.max_draft_tokens")
        needing = "prompt, answer and drafts together,"
    if budget is not None and budget < longest and not values["scheduler.chunked_context"]:
        yield Problem(
            keys,
            f"must hold {needing} {longest}, because scheduler.chunked_context is false",
            f"at least {longest}, or set scheduler.chunked_context to true",
        )


def _expert_parallel(values: RecipeValues) -> Iterator[Problem]:
    experts, tensors = values["runtime.expert_parallel"], values["runtime.tensor_parallel"]
    if experts is not None and tensors is not None and tensors % experts:
        yield Problem(
            ("runtime.expert_parallel", "runtime.tensor_parallel"),
            f"must divide runtime.tensor_parallel, which is {tensors}",
            "one of " + ", ".join(str(n) for n in range(1, tensors + 1) if tensors % n == 0),
            "moe.ep",
        )


def _graph_batch(values: RecipeValues) -> Iterator[Problem]:
    key, graphs, sizes = (
        "runtime.max_graph_batch",
        "runtime.cuda_graphs",
        "runtime.llm_args.cuda_graph_config.batch_sizes",
    )
    if values[key] is None:
        return
    if not values[graphs]:
        yield Problem((key, graphs), f"is given, but {graphs} is false", f"remove {key}, or {graphs}")
    if values[sizes]:
        yield Problem((key, sizes), f"is given, and {sizes} too", f"remove {key}, or {sizes}")


def _exports_cover_runtime(values: RecipeValues) -> Iterator[Problem]:
    key, sizes = "quantization.export_tensor_parallel", values["quantization.export_tensor_parallel"]
    needed = values["runtime.tensor_parallel"] if values["runtime.kind"] == "tensorrt" else None
    if sizes is not None and values["quantization.format"] in ("auto", "w4a16_nvfp4"):
        yield Problem(
            (key, "quantization.format"),
            f"is given, but no engine takes quantization.format {values['quantization.format']}",
            f"remove {key} (--set {key}=null)",
        )
        return
    if sizes is not None and needed is not None and needed not in sizes:
        yield Problem(
            (key, "runtime.tensor_parallel"), f"lacks runtime.tensor_parallel, which is {needed}",
            f"add {needed}, or remove {key}", "ckpt.mapping",
        )  # fmt: skip


def _speculation_method(values: RecipeValues) -> Iterator[Problem]:
    kind = values["runtime.kind"]
    if values["draft.method"] == "eagle3" and kind != "pytorch":
        yield Problem(
            ("draft.method", "runtime.kind"), f"needs runtime.kind pytorch, but it is {kind}",
            "set draft.method to draft_target, or runtime.kind to pytorch", "rt.backend_supports_spec",
        )  # fmt: skip
    if values["draft"] is not None and kind == "pytorch" and values["runtime.speculation"] is not None:
        yield Problem(
            ("runtime.speculation", "draft"), "is given, and draft too; one of them proposes tokens",
            "remove runtime.speculation or draft",
        )  # fmt: skip


def _draft_parallel(values: RecipeValues) -> Iterator[Problem]:
    key, kind = "draft.tensor_parallel", values["runtime.kind"]
    if values[key] not in (None, 1) and kind != "tensorrt":
        yield Problem(
            (key, "runtime.kind"), f"needs runtime.kind tensorrt, but it is {kind}",
            f"remove {key}",
        )  # fmt: skip


def _draft_needs_reuse(values: RecipeValues) -> Iterator[Problem]:
    by_bls = values["runtime.kind"] == "cpu" and values["runtime.speculation"] == "bls"
    if not by_bls and values["runtime.kind"] != "tensorrt":
        return
    how = "runtime.speculation bls" if by_bls else "runtime.kind tensorrt"
    if values["draft"] is not None and not values["kv_cache.reuse"]:
        yield Problem(
            ("kv_cache.reuse", "draft", "runtime.kind"),
            f"must be true: with {how} a draft and its target take turns on one text, and would "
            "compute all of it anew in every round",
            "remove kv_cache.reuse, or draft",
            "rt.spec_kv_reuse",
        )


def _bls_needs_draft(values: RecipeValues) -> Iterator[Problem]:
    if values["runtime.kind"] == "cpu" and values["runtime.speculation"] == "bls" and values["draft"] is None:
        yield Problem(
            ("runtime.speculation", "draft"), "is bls, but there is no draft",
            "remove runtime.speculation, or give a draft",
        )  # fmt: skip


def _gpu_memory(values: RecipeValues) -> Iterator[Problem]:
    if values["runtime.kind"] != "cpu":
        return
    if values["kv_cache.memory_fraction"] is not None:
        yield Problem(
            ("kv_cache.memory_fraction", "runtime.kind"), "is a share of GPU memory, but runtime.kind is cpu",
            "remove kv_cache.memory_fraction, and set runtime.kv_cache_mib if the size matters",
        )  # fmt: skip
    if values["kv_cache.host_memory_gib"]:
        yield Problem(
            ("kv_cache.host_memory_gib", "runtime.kind"), "relieves GPU memory, but runtime.kind is cpu",
            "remove kv_cache.host_memory_gib",
        )  # fmt: skip


def _cpu_scheduler(values: RecipeValues) -> Iterator[Problem]:
    if values["runtime.kind"] != "cpu":
        return
    if values["scheduler.policy"] != "guaranteed_no_evict":
        yield Problem(
            ("scheduler.policy", "runtime.kind"),
            "is not offered by runtime.kind cpu, which never evicts a running request",
            "set scheduler.policy to guaranteed_no_evict",
        )
    if not values["scheduler.chunked_context"]:
        yield Problem(
            ("scheduler.chunked_context", "runtime.kind"),
            "cannot be turned off with runtime.kind cpu, which always splits long prompts",
            "remove scheduler.chunked_context",
        )


def _semantic_needs_cache(values: RecipeValues) -> Iterator[Problem]:
    if values["cache.semantic"] is not None and not values["cache.enabled"]:
        yield Problem(
            ("cache.semantic", "cache.enabled"), "is given, but cache.enabled is false",
            "set cache.enabled to true, or remove cache.semantic",
        )  # fmt: skip


def _adapters(values: RecipeValues) -> Iterator[Problem]:
    adapters = values["adapters"]
    if not adapters:
        return
    if values["runtime.kind"] == "tensorrt":
        yield Problem(
            ("adapters", "runtime.kind"), "are served by runtime.kind pytorch and cpu, but it is tensorrt",
            "set runtime.kind to pytorch, or remove adapters",
        )  # fmt: skip
    lora_config = values["runtime.llm_args.lora_config"] if values["runtime.kind"] == "pytorch" else None
    decided = [name for name in LORA_DECIDED if isinstance(lora_config, Mapping) and name in lora_config]
    if decided or (
        values["runtime.kind"] == "pytorch" and values["runtime.llm_args.enable_lora"] is not None
    ):
        names = [*(f"lora_config.{name}" for name in decided)] or ["enable_lora"]
        yield Problem(
            ("runtime.llm_args", "adapters"), f"has {', '.join(names)}, which adapters decide",
            f"remove it; {', '.join(LORA_LEFT)} of lora_config may stand beside adapters",
        )  # fmt: skip


def _ports_are_open(values: RecipeValues) -> Iterator[Problem]:
    for protocol in ("http", "grpc"):
        key, opens = f"triton.{protocol}_port", f"serving.{protocol}"
        if values[key] is not None and not values[opens]:
            yield Problem(
                (key, opens), f"is given, but {opens} is false", f"set {opens} to true, or remove {key}"
            )


def _kubernetes(values: RecipeValues) -> Iterator[Problem]:
    least, most = "kubernetes.min_replicas", "kubernetes.max_replicas"
    if values[most] < values[least]:
        yield Problem(
            (most, least), f"is less than {least}, which is {values[least]}", f"at least {values[least]}"
        )
    if values["kubernetes.expose"] is not None and values["kubernetes.hostname"] is None:
        yield Problem(
            ("kubernetes.expose", "kubernetes.hostname"), "needs the name by which clients come",
            "add kubernetes.hostname",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    _revision_of_hub, _calibration_needed, _gate_needs_format, _sample_count, _awq_block_size, _auto_budget,
    _slo_percentiles,
    _nvfp4_needs_gpu, _kv_cache_format, _draft_fits_limits, _batch_fits_concurrency, _batch_fits_prompt,
    _expert_parallel, _graph_batch, _exports_cover_runtime, _speculation_method, _draft_parallel, _draft_needs_reuse,
    _bls_needs_draft, _gpu_memory,
    _cpu_scheduler, _adapters, _semantic_needs_cache, _ports_are_open, _kubernetes,
)  # fmt: skip
