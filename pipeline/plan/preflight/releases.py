"""Rules about what a recipe names: release, GPU, flags, models, and the formats of weights and KV cache.

Each function is one rule of contracts/data/rules, under its id in RELEASE_CHECKS or FORMAT_CHECKS.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import gpus, llm_args, llmapi, support, trtllm_build
from pipeline.contracts.engine_memory import format_bits
from pipeline.contracts.releases import half
from pipeline.contracts.rules import rule
from pipeline.contracts.version_range import is_candidate, precedes
from pipeline.errors import UserError
from pipeline.plan.plan import UNIFIED_ONLY
from pipeline.plan.preflight.context import Check, Context, Objection, RecipeModel
from pipeline.recipe import PyTorchRuntime, TensorRTRuntime
from pipeline.recipe.validators import AWQ

VERSION, KIND, GPU = "runtime.version", "runtime.kind", "runtime.gpu"
BUILD_FLAGS, KV_CACHE = "runtime.build_flags", "quantization.kv_cache"


def _release(context: Context) -> Iterator[Objection]:
    if context.release_problem:
        yield Objection((VERSION, KIND), context.release_problem)


def _frozen(context: Context) -> Iterator[Objection]:  # noqa: ARG001 - true of every recipe with engines
    yield Objection((KIND,), half("tensorrt"))


def _candidate(context: Context) -> Iterator[Objection]:
    runtime = context.gpu_runtime
    if runtime is not None and not context.release_problem and is_candidate(runtime.version):
        yield Objection((VERSION,), "is a release candidate: not final, and not in any Triton container")


def _evidence(context: Context) -> Iterator[Objection]:
    runtime = context.gpu_runtime
    if runtime is not None and not context.release_problem and (text := llm_args.rests_on(runtime.version)):
        yield Objection((VERSION,), f"is judged, as to arguments of the LLM API, by {text}")


def _gpu(context: Context) -> Iterator[Objection]:
    runtime = context.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    try:
        gpus.gpu(runtime.gpu)
    except UserError as error:
        yield Objection((GPU,), str(error))


def _class(context: Context) -> Iterator[Objection]:
    """Engines and CPU models are made from tensors that we read."""
    facts = rule("model.class").facts
    for model in context.models:
        doing = {"tensorrt": "converted", "cpu": "cpu" if model.format == "none" else "calibrated"}.get(
            context.kind, "calibrated"
        )
        known: list[str] = facts[doing]
        if model.architecture is not None and model.architecture not in known and context.is_read(model):
            how = "run with runtime.kind cpu" if doing == "cpu" else doing
            yield Objection(
                (model.source_key, KIND),
                f"is a {model.architecture or 'model of no named class'}, which cannot be {how}",
                f"one of {', '.join(known)}",
            )


def _rope(context: Context) -> Iterator[Objection]:
    """Rotary embeddings that engines are not built with here."""
    kinds: list[str] = rule("model.rope").facts["kinds"]
    for model in context.models:
        rope = model.sizes.rope if model.sizes is not None else {}
        if rope.get("kind", kinds[0]) not in kinds:
            text = f"turns positions by {rope['kind']}, which cannot be converted"
            yield Objection((model.source_key, KIND), text, f"one of {', '.join(kinds)}")
        if rope.get("partial_rotary_factor", 1) != 1:
            text = "turns a part of each head's channels (partial_rotary_factor), which cannot be converted"
            yield Objection((model.source_key, KIND), text, "another checkpoint, or runtime.kind pytorch")


def _served(context: Context) -> Iterator[Objection]:
    """A checkpoint that the PyTorch backend reads itself must be of a class that it has."""
    known = support.architectures()
    for model in context.models:
        if model.is_head or model.architecture is None or context.is_read(model):
            continue
        if model.architecture not in known:
            yield Objection(
                (model.source_key, KIND),
                f"is a {model.architecture or 'model of no named class'}, which is not among the models that the "
                "PyTorch backend of TensorRT-LLM serves",
                f"one of {', '.join(name for name in known if name.endswith('ForCausalLM'))}; or a model of text and "
                "images that is listed",
            )


def _refused(context: Context) -> Iterator[Objection]:
    """Refusals of the runtime itself, when it worked out its settings."""
    for fault in context.emitted.refusals if context.emitted is not None else ():
        yield Objection((fault.key or KIND,), fault.problem, fault.fix)


def _instances(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or runtime.instances == 1 or context.release_problem:
        return
    if not llmapi.has_instances(runtime.version):
        yield Objection(
            ("runtime.instances", VERSION),
            f"must be 1: the llmapi model of TensorRT-LLM {runtime.version} cannot spread instances over GPUs",
            f"remove runtime.instances, or set {VERSION} to {llmapi.versions_where(llmapi.has_instances)}",
        )


def _known_issue(context: Context) -> Iterator[Objection]:
    for issue in rule("known.issue").facts["issues"]:
        if _has(issue, context):
            yield Objection((issue["key"], VERSION), issue["problem"], issue["fix"])


def _has(issue: Mapping[str, Any], context: Context) -> bool:
    """Whether a recipe meets all conditions of an issue."""
    runtime, target = context.gpu_runtime, context.target
    assert runtime is not None, "the rule is about TensorRT-LLM"
    version, sm = runtime.version, context.gpu.sm if context.gpu is not None else None
    architecture = target.sizes.architecture if target.sizes is not None else None
    return (
        not precedes(version, issue["since"])
        and precedes(version, issue["until"])
        and runtime.kind in issue.get("runtimes", (runtime.kind,))
        and sm in issue.get("capabilities", (sm,))
        and architecture in issue.get("architectures", (architecture,))
        and target.format in issue.get("formats", (target.format,))
        and all(getattr(runtime, setting) > least for setting, least in issue["above"].items())
    )


def _build_flags(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if not isinstance(runtime, TensorRTRuntime) or context.release_problem:
        return
    keys = (BUILD_FLAGS, VERSION)
    names = [entry.partition("=")[0] for entry in runtime.build_flags]
    for name, entry in zip(names, runtime.build_flags, strict=True):
        if name in trtllm_build.tunable(runtime.version):
            for fault in _faults_of_value(runtime.version, name, entry):
                yield Objection(keys, f"has {entry}: {fault}", _right_values(runtime.version, name))
        else:
            unknown = f"trtllm-build {runtime.version} has no such flag"
            reason = trtllm_build.decided(runtime.version).get(name, unknown)
            yield Objection(keys, f"may not have {entry}: {reason}", _right_names(runtime.version, name))
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Objection(keys, f"has {name} more than once", "keep one of them")


def _faults_of_value(version: str, name: str, entry: str) -> Iterator[str]:
    """Faults that trtllm-build, or the engine that it would make, finds in the value of a flag."""
    words = trtllm_build.argv_of(entry)
    faults = trtllm_build.check(version, words)
    yield from (fault.removeprefix(f"{' '.join(words)}: ") for fault in faults)
    if not faults and trtllm_build.flags(version)[name].kind == "integer" and int(words[1]) < 1:
        yield "must be at least 1"


def _right_values(version: str, name: str) -> str:
    """How an entry for this flag is written."""
    flag = trtllm_build.flags(version)[name]
    *others, last = trtllm_build.entries_of(flag)
    any_number = ", or another number of at least 1" if flag.kind == "integer" else ""
    return f"write {', '.join(others)} or {last}" if others else f"write {last}{any_number}"


def _right_names(version: str, name: str) -> str:
    """Entries for flags that a recipe may have, for those with similar names if there are any."""
    allowed, known = trtllm_build.tunable(version), trtllm_build.flags(version)
    near = difflib.get_close_matches(name.lstrip("-"), allowed, n=3) or allowed
    return f"what it may have: {', '.join(trtllm_build.entries_of(known[one])[0] for one in near)}"


def _kv_cache_keeps_context(context: Context) -> Iterator[Objection]:
    """FP8 KV cache beside weights of other formats: the builder turns paged context attention off."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for model in context.models:
        if model.kv_cache != "fp8" or model.format in kept:
            continue
        unsure = model.format == "auto" and set(context.layer_formats(model)) & set(kept)
        yield _context_off(
            context,
            (KV_CACHE, model.format_key),
            f"with {model.format_key} {model.format}",
            f"set {KV_CACHE} to auto, or {model.format_key} to {' or '.join(kept[:2])}",
            unsure=bool(unsure),
        )


def _context_off(context: Context, keys: tuple[str, ...], when: str, fix: str, *, unsure: bool) -> Objection:
    recipe = context.recipe
    wanted = {
        "kv_cache.reuse": recipe.kv_cache.reuse,
        "scheduler.chunked_context": recipe.scheduler.chunked_context,
        "draft": recipe.draft is not None,
    }
    needing = [key for key, needs in wanted.items() if needs]
    text = f"makes the engine builder turn paged context attention off ({when})"
    if not needing:
        return Objection(
            keys, f"{text}; the engine then has no reuse, no chunked context and no draft", fix, "warning"
        )
    off = "set " + " and ".join(f"{key} to false" for key in needing) if "draft" not in needing else ""
    return Objection(
        (*keys, *needing),
        f"{text}, and {', '.join(needing)} cannot do without it",
        f"{fix}; or {off}" if off else fix,
        "warning" if unsure else None,
    )


def _formats(context: Context) -> Iterator[Objection]:
    facts = rule("calibrate.formats").facts
    for model in context.models:
        known = _known_formats(facts, model)
        if model.format not in known:
            of = (
                f" for {model.sizes.architecture}" if model.sizes and model.format in facts["formats"] else ""
            )
            yield Objection(
                (model.format_key,), f"cannot be calibrated{of} yet", f"one of {', '.join(known)}"
            )


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


def _known_formats(facts: Mapping[str, Any], model: RecipeModel) -> list[str]:
    fused = model.sizes is not None and model.sizes.architecture in facts["fused"]
    return list(facts["fused_formats" if fused else "formats"])


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


def _on_gpu(name: str) -> Check:
    """Make the check of a rule whose limits are data of the GPUs (contracts/data/gpus.yaml)."""

    def check(context: Context) -> Iterator[Objection]:
        for found, model, form in _unsupported(context):
            if found.rule == name:
                published = form in _published(model)
                text = f"{form}: {found.reason}" if form != model.format else found.reason
                text = f"weights are published in {text}" if published else text
                keys = {
                    "gpu": (GPU, VERSION),
                    "weights": (GPU, model.source_key) if published else (model.format_key, GPU),
                    "kv_cache": (KV_CACHE, GPU),
                }
                yield Objection(keys[found.subject], text, "", found.severity, found.sources)

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
    version = None if context.release_problem else runtime.version
    seen: set[str] = set()
    for model in context.models:
        for form in _published(model) or context.layer_formats(model):
            for found in gpus.format_issues(context.gpu, form, model.kv_cache, runtime.kind, version):
                if found.reason not in seen:
                    seen.add(found.reason)
                    yield found, model, form


_BY_GPU = (
    "sm.fp8", "sm.w4a8_arch", "sm.nvfp4", "sm.awq_blackwell", "sm.bf16", "sm.fp8_kv_ampere", "sm.listed",
    "sm.runtime_format",
)  # fmt: skip
FORMAT_CHECKS: Mapping[str, Check] = {
    **{name: _on_gpu(name) for name in _BY_GPU},
    "sm.fp8_ctx_fmha": _fp8_context,
    "kvq.engine_llmapi": _engine_in_llm_api,
    "kvq.weight_combo": _kv_cache_keeps_context,
    "calib.awq_sizes": _awq_samples,
    "calibrate.formats": _formats,
    "calibrate.engines": _engine_formats,
    "auto.budget": _auto_budget,
    "ckpt.compressed": _compressed,
}
RELEASE_CHECKS: Mapping[str, Check] = {
    "release": _release,
    "release.frozen": _frozen,
    "release.candidate": _candidate,
    "release.evidence": _evidence,
    "gpu.known": _gpu,
    "gpu.since": _on_gpu("gpu.since"),
    "model.class": _class,
    "model.rope": _rope,
    "model.served": _served,
    "runtime.refuses": _refused,
    "llmapi.instances": _instances,
    "known.issue": _known_issue,
    "build.flags": _build_flags,
}
