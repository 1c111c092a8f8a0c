"""Rules about formats: of weights and KV cache, on a GPU, in a release, in calibration and in published checkpoints.

Each function is one rule of contracts/data/rules, under its id in FORMAT_CHECKS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import gpus, trtllm_build
from pipeline.contracts.engine_memory import format_bits
from pipeline.contracts.rules import rule
from pipeline.contracts.version_range import precedes
from pipeline.plan.plan import UNIFIED_ONLY
from pipeline.plan.preflight.context import Check, Context, Objection, RecipeModel
from pipeline.recipe.validators import AWQ

VERSION, KIND, GPU = "runtime.version", "runtime.kind", "runtime.gpu"
KV_CACHE = "quantization.kv_cache"


def _kv_cache_keeps_context(context: Context) -> Iterator[Objection]:
    """FP8 KV cache beside weights of other formats: the builder turns paged context attention off."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    recipe = context.recipe
    wanted = {
        "kv_cache.reuse": recipe.kv_cache.reuse,
        "scheduler.chunked_context": recipe.scheduler.chunked_context,
        "draft": recipe.draft is not None,
    }
    needing = [key for key, needs in wanted.items() if needs]
    for model in context.models:
        if model.kv_cache != "fp8" or model.format in kept:
            continue
        unsure = model.format == "auto" and set(context.layer_formats(model)) & set(kept)
        keys, when = (KV_CACHE, model.format_key), f"with {model.format_key} {model.format}"
        fix = f"set {KV_CACHE} to auto, or {model.format_key} to {' or '.join(kept[:2])}"
        text = f"makes the engine builder turn paged context attention off ({when})"
        if not needing:
            text += "; the engine then has no reuse, no chunked context and no draft"
            yield Objection(keys, text, fix, "warning")
            continue
        if "draft" not in needing:
            fix += "; or set " + " and ".join(f"{key} to false" for key in needing)
        text += f", and {', '.join(needing)} cannot do without it"
        yield Objection((*keys, *needing), text, fix, "warning" if unsure else None)


def _formats(context: Context) -> Iterator[Objection]:
    facts = rule("calibrate.formats").facts
    for model in context.models:
        known = _known_formats(facts, model, context.kind)
        of = f" for {model.architecture}" if model.architecture and model.format in facts["formats"] else ""
        unknown = [form for form in context.layer_formats(model) if form not in known]
        if model.format not in known:
            yield Objection((model.format_key,), f"cannot be made{of}", f"one of {', '.join(known)}")
        elif unknown and model.format == "auto":
            yield Objection(
                ("quantization.auto.formats",),
                f"has {', '.join(unknown)}, which cannot be made{of}",
                f"formats among {', '.join(form for form in known if form not in ('none', 'auto'))}",
            )
        elif (
            model.architecture in facts["cast"]
            and model.sizes
            and model.format != "none"
            and not model.is_cast
        ):
            yield Objection(
                (model.source_key, model.format_key),
                "has experts that are not in MXFP4, and only those are cast; gpt-oss is not calibrated",
                f"a checkpoint as it is published, or {model.format_key}: none",
            )


def _cast_loader(context: Context) -> Iterator[Objection]:
    """Experts of gpt-oss that the LLM API has to read."""
    runtime, facts = context.gpu_runtime, rule("cast.loader").facts
    assert runtime is not None, "the rule is about TensorRT-LLM"
    for model in context.models:
        since = facts["since"].get(model.format)
        if not model.is_cast or model.architecture not in rule("calibrate.formats").facts["cast"]:
            continue
        if since is None:
            problem, fix = (
                "is read of gpt-oss by no TensorRT-LLM",
                f"one of {', '.join(facts['since'])}, or none",
            )
            yield Objection((model.format_key, VERSION), problem, fix)
        elif precedes(runtime.version, since):
            problem = f"is read of gpt-oss by TensorRT-LLM since {since}"
            yield Objection((model.format_key, VERSION), problem, f"set {VERSION} to {since}, or a newer one")


def _engine_formats(context: Context) -> Iterator[Objection]:
    for model in context.models:
        if model.format in UNIFIED_ONLY:
            yield Objection(
                (model.format_key, KIND),
                "is no format of engines: they are made of one format, and of none with four-bit floats alone",
                f"set {KIND} to pytorch, or {model.format_key} to fp8",
            )


def _auto_budget(context: Context) -> Iterator[Objection]:
    """A budget that every candidate is over."""
    quantization = context.recipe.quantization
    if quantization.format != "auto" or quantization.auto is None:
        return
    bits = {form: format_bits(form, quantization.awq_block_size) for form in quantization.auto.formats}
    least = min(bits, key=bits.__getitem__)
    if quantization.auto.effective_bits < bits[least]:
        yield Objection(
            ("quantization.auto.effective_bits", "quantization.auto.formats"),
            f"is less than the {bits[least]:.4g} bits a weight of {least}, the smallest format, scales included",
            f"at least {math.ceil(bits[least] * 100) / 100:g}",
        )


def _compressed(context: Context) -> Iterator[Objection]:
    """A checkpoint of compressed-tensors that the LLM API reads by itself."""
    runtime, facts = context.gpu_runtime, rule("ckpt.compressed").facts
    assert runtime is not None, "the rule is about TensorRT-LLM"
    for model in context.models:
        sizes = model.sizes
        if model.format != "none" or sizes is None or sizes.quantized_by != "compressed-tensors":
            continue
        since: dict[str, str] = facts["since"]
        for form in sizes.stored_formats:
            if form not in since:
                known = ", ".join(since)
                yield Objection(
                    (model.source_key, KIND),
                    f"is stored by compressed-tensors in {form}, which no TensorRT-LLM reads (it reads {known})",
                    f"set {KIND} to cpu, or quantize the original: {model.format_key}",
                )
            elif precedes(runtime.version, since[form]):
                yield Objection(
                    (model.source_key, VERSION),
                    f"is stored by compressed-tensors in {form}, which TensorRT-LLM reads since {since[form]}",
                    f"set {VERSION} to {since[form]}",
                )
        if len(sizes.stored_formats) > 1:
            yield Objection(
                (model.source_key, VERSION),
                f"mixes {' and '.join(sizes.stored_formats)} in groups of compressed-tensors, which the main branch of "
                "TensorRT-LLM reads; whether a release does is not known",
                "try it before relying on it",
                "warning",
            )


def _known_formats(facts: Mapping[str, Any], model: RecipeModel, kind: str) -> list[str]:
    if model.architecture in facts["cast"]:
        return list(facts["cast_formats"])
    if model.architecture in facts["joined"]:
        return list(facts["joined_engine_formats" if kind == "tensorrt" else "joined_formats"])
    return list(facts["formats"])


def _awq_samples(context: Context) -> Iterator[Objection]:
    calibration, most = context.recipe.quantization.calibration, rule("calib.awq_sizes").facts["most"]
    awq = any(set(context.layer_formats(model)) & set(AWQ) for model in context.models)
    if calibration is not None and awq and calibration.samples > most:
        yield Objection(
            ("quantization.calibration.samples", "quantization.format"),
            f"is more than the {most} to which upstream's own script cuts calibration of AWQ; all are taken here",
        )


def _fp8_context(context: Context) -> Iterator[Objection]:
    gpu, oldest = context.gpu, trtllm_build.data()["fp8_context"]["oldest_sm"]
    if gpu is None:
        return  # gpu.known says so
    kept = (*rule("kvq.weight_combo").facts["kept_with"], "auto")
    formats = {model.role: model.format for model in context.models}
    for role, flags in context.engines:
        if flags["use_fp8_context_fmha"] != "enable":
            continue
        wrong = {
            f"compute capability {gpu.capability}": gpu.sm < oldest,
            f"weights of {formats[role]}": formats[role] not in kept,
            "use_paged_context_fmha disable": flags["use_paged_context_fmha"] != "enable",
        }
        if any(wrong.values()):
            reasons = ", ".join(reason for reason, holds in wrong.items() if holds)
            yield Objection(
                (KV_CACHE, GPU), f"makes attention over prompts of the {role} compute in FP8, with {reasons}"
            )


def _engine_in_llm_api(context: Context) -> Iterator[Objection]:
    arguments = context.arguments
    dtype = (arguments.get("kv_cache_config") or {}).get("dtype", "auto")
    if arguments.get("backend", "pytorch") != "pytorch" and dtype != "auto":
        yield Objection(
            (KV_CACHE,),
            f"is given to an engine as {dtype}, which has the type of its KV cache built in",
            "auto",
        )


def on_gpu(name: str) -> Check:
    """Make the check of a rule whose limits are data of the GPUs (contracts/data/gpus.yaml)."""

    def check(context: Context) -> Iterator[Objection]:
        for issue, model, form in _unsupported(context):
            if issue.rule == name:
                published = form in _published(model)
                text = f"{form}: {issue.reason}" if form != model.format else issue.reason
                text = f"weights are published in {text}" if published else text
                keys = {
                    "gpu": (GPU, VERSION),
                    "weights": (GPU, model.source_key) if published else (model.format_key, GPU),
                    "kv_cache": (KV_CACHE, GPU),
                }
                yield Objection(keys[issue.subject], text, "", issue.severity, issue.sources)

    return check


def _published(model: RecipeModel) -> tuple[str, ...]:
    """Formats that a checkpoint is published in, and served in as it is."""
    return model.sizes.stored_formats if model.format == "none" and model.sizes is not None else ()


def _unsupported(context: Context) -> Iterator[tuple[gpus.FormatIssue, RecipeModel, str]]:
    """Objections to each model's formats on the GPU, each reason once: target and draft may share one."""
    runtime = context.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    if context.gpu is None:
        return  # gpu.known says so
    reasons: set[str] = set()
    for model in context.models:
        for form in _published(model) or context.layer_formats(model):
            for issue in gpus.format_issues(context.gpu, form, model.kv_cache, runtime.kind, context.version):
                if issue.reason not in reasons:
                    reasons.add(issue.reason)
                    yield issue, model, form


_BY_GPU = (
    "sm.fp8", "sm.w4a8_arch", "sm.nvfp4", "sm.awq_blackwell", "sm.bf16", "sm.fp8_kv_ampere", "sm.listed",
    "sm.runtime_format",
)  # fmt: skip
FORMAT_CHECKS: Mapping[str, Check] = {
    **{name: on_gpu(name) for name in _BY_GPU},
    "sm.fp8_ctx_fmha": _fp8_context,
    "kvq.engine_llmapi": _engine_in_llm_api,
    "kvq.weight_combo": _kv_cache_keeps_context,
    "calib.awq_sizes": _awq_samples,
    "calibrate.formats": _formats,
    "calibrate.engines": _engine_formats,
    "cast.loader": _cast_loader,
    "auto.budget": _auto_budget,
    "ckpt.compressed": _compressed,
}
