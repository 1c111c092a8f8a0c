"""Rules about formats of weights and of the KV cache.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import gpus, trtllm_build
from pipeline.contracts.rules import rule
from pipeline.plan.preflight.context import Model, Subject
from pipeline.plan.preflight.finding import Check, Said
from pipeline.recipe.validators import AWQ

VERSION, GPU, KV_CACHE = "runtime.version", "runtime.gpu", "quantization.kv_cache"
BY_GPU = (
    "sm.fp8", "sm.w4a8_arch", "sm.nvfp4", "sm.awq_blackwell", "sm.bf16", "sm.fp8_kv_ampere", "sm.listed",
    "sm.runtime_format",
)  # fmt: skip


def _kv_cache_keeps_context(subject: Subject) -> Iterator[Said]:
    """FP8 KV cache beside weights of other formats: the builder turns paged context attention off."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for model in subject.models:
        if model.kv_cache != "fp8" or model.format in kept:
            continue
        unsure = model.format == "auto" and set(subject.layer_formats(model)) & set(kept)
        yield _context_off(
            subject,
            (KV_CACHE, model.format_key),
            f"with {model.format_key} {model.format}",
            f"set {KV_CACHE} to auto, or {model.format_key} to {' or '.join(kept[:2])}",
            unsure=bool(unsure),
        )


def _context_off(subject: Subject, keys: tuple[str, ...], when: str, fix: str, *, unsure: bool) -> Said:
    recipe = subject.recipe
    wanted = {
        "kv_cache.reuse": recipe.kv_cache.reuse,
        "scheduler.chunked_context": recipe.scheduler.chunked_context,
        "draft": recipe.draft is not None,
    }
    needing = [key for key, needs in wanted.items() if needs]
    text = f"makes the engine builder turn paged context attention off ({when})"
    if not needing:
        return Said(
            keys, f"{text}; the engine then has no reuse, no chunked context and no draft", fix, "warning"
        )
    off = "set " + " and ".join(f"{key} to false" for key in needing) if "draft" not in needing else ""
    return Said(
        (*keys, *needing),
        f"{text}, and {', '.join(needing)} cannot do without it",
        f"{fix}; or {off}" if off else fix,
        "warning" if unsure else None,
    )


def _formats(subject: Subject) -> Iterator[Said]:
    facts = rule("calibrate.formats").facts
    for model in subject.models:
        known = _known_formats(facts, model)
        if model.format not in known:
            of = (
                f" for {model.sizes.architecture}" if model.sizes and model.format in facts["formats"] else ""
            )
            yield Said((model.format_key,), f"cannot be calibrated{of} yet", f"one of {', '.join(known)}")


def _known_formats(facts: Mapping[str, Any], model: Model) -> list[str]:
    fused = model.sizes is not None and model.sizes.architecture in facts["fused"]
    return list(facts["fused_formats" if fused else "formats"])


def _awq_samples(subject: Subject) -> Iterator[Said]:
    calibration, most = subject.recipe.quantization.calibration, rule("calib.awq_sizes").facts["most"]
    awq = any(set(subject.layer_formats(model)) & set(AWQ) for model in subject.models)
    if calibration is not None and awq and calibration.samples > most:
        yield Said(
            ("quantization.calibration.samples", "quantization.format"),
            f"is more than the {most} to which upstream's own script cuts calibration of AWQ; all are taken here",
        )


def _fp8_context(subject: Subject) -> Iterator[Said]:
    gpu, oldest = subject.gpu, trtllm_build.data()["fp8_context"]["oldest_sm"]
    if gpu is None:
        return  # gpu.known says so
    kept = (*rule("kvq.weight_combo").facts["kept_with"], "auto")
    formats = {model.role: model.format for model in subject.models}
    for role, flags in subject.engines:
        if flags["use_fp8_context_fmha"] != "enable":
            continue
        wrong = {
            f"compute capability {gpu.capability}": gpu.sm < oldest,
            f"weights of {formats[role]}": formats[role] not in kept,
            "use_paged_context_fmha disable": flags["use_paged_context_fmha"] != "enable",
        }
        if any(wrong.values()):
            reasons = ", ".join(reason for reason, holds in wrong.items() if holds)
            yield Said(
                (KV_CACHE, GPU), f"makes attention over prompts of the {role} compute in FP8, with {reasons}"
            )


def _engine_in_llm_api(subject: Subject) -> Iterator[Said]:
    arguments = subject.arguments
    dtype = (arguments.get("kv_cache_config") or {}).get("dtype", "auto")
    if arguments.get("backend", "pytorch") != "pytorch" and dtype != "auto":
        yield Said(
            (KV_CACHE,),
            f"is given to an engine as {dtype}, which has the type of its KV cache built in",
            "auto",
        )


def on_gpu(name: str) -> Check:
    """The check of a rule whose edges are data of the GPUs (contracts/data/gpus.yaml)."""

    def check(subject: Subject) -> Iterator[Said]:
        for found, model, form in _unsupported(subject):
            if found.rule == name:
                text = f"{form}: {found.reason}" if form != model.format else found.reason
                keys = {
                    "gpu": (GPU, VERSION),
                    "weights": (model.format_key, GPU),
                    "kv_cache": (KV_CACHE, GPU),
                }
                yield Said(keys[found.subject], text, "", found.severity, found.sources)

    return check


def _unsupported(subject: Subject) -> Iterator[tuple[gpus.Finding, Model, str]]:
    """What speaks against each model's formats on the GPU, each reason once: target and draft may share one."""
    runtime = subject.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    if subject.gpu is None:
        return  # gpu.known says so
    version = None if subject.release_problem else runtime.version
    seen: set[str] = set()
    for model in subject.models:
        for form in subject.layer_formats(model):
            for found in gpus.support(subject.gpu, form, model.kv_cache, runtime.kind, version):
                if found.reason not in seen:
                    seen.add(found.reason)
                    yield found, model, form


CHECKS: Mapping[str, Check] = {
    **{name: on_gpu(name) for name in BY_GPU},
    "sm.fp8_ctx_fmha": _fp8_context,
    "kvq.engine_llmapi": _engine_in_llm_api,
    "kvq.weight_combo": _kv_cache_keeps_context,
    "calib.awq_sizes": _awq_samples,
    "calibrate.formats": _formats,
}
