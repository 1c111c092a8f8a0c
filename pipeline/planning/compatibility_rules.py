"""Rules about what a recipe names: its release, its GPU, its formats, its speculation. Sizes are in `size_rules`.

Each function is one rule of contracts/data/compatibility.yaml, which has its severity and sources, under its id in
CHECKS.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import gpus, llm_args, llmapi, trtllm_build
from pipeline.contracts.compatibility import rule
from pipeline.contracts.history import precedes
from pipeline.contracts.releases import container, require
from pipeline.errors import UserError
from pipeline.planning.concern import Check, Said
from pipeline.planning.subject import Model, Subject
from pipeline.recipe import PyTorchRuntime, TensorRTRuntime

VERSION, KIND, GPU = "runtime.version", "runtime.kind", "runtime.gpu"
KV_CACHE, BATCH_TOKENS = "quantization.kv_cache", "limits.max_batch_tokens"


def _release(subject: Subject) -> Iterator[Said]:
    runtime = subject.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    try:
        require(runtime.version, runtime.kind)
        container(runtime.version)
    except UserError as error:
        yield Said((VERSION, KIND), str(error))


def _gpu(subject: Subject) -> Iterator[Said]:
    """The GPU is known, is not newer than the release, and runs each model's formats."""
    runtime = subject.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    try:
        gpu = gpus.gpu(runtime.gpu)
    except UserError as error:
        yield Said((GPU,), str(error))
        return
    version: str | None = runtime.version if _is_known(subject) else None
    said: dict[str, Said] = {}  # by reason: target and draft may share one
    for model in subject.models:
        keys = {"gpu": (GPU, VERSION), "weights": (model.format_key, GPU), "kv_cache": (KV_CACHE, GPU)}
        for form in _layer_formats(subject, model):
            for found in gpus.support(gpu, form, model.kv_cache, runtime.kind, version):
                text = f"{form}: {found.reason}" if form != model.format else found.reason
                said.setdefault(text, Said(keys[found.subject], text, "", found.severity, found.sources))
    yield from said.values()


def _layer_formats(subject: Subject, model: Model) -> tuple[str, ...]:
    """The formats that layers of a model may have; several only where the format is auto."""
    auto = subject.recipe.quantization.auto
    return auto.formats if model.format == "auto" and auto is not None else (model.format,)


def _is_known(subject: Subject) -> bool:
    return not list(_release(subject))


def _model_since(subject: Subject) -> Iterator[Said]:
    runtime = subject.gpu_runtime
    assert runtime is not None, "the rule is about TensorRT-LLM"
    first: Mapping[str, Mapping[str, str]] = rule("model.since").facts["models"]
    for model, sizes in subject.sized:
        since = first.get(sizes.architecture, {}).get(runtime.kind)
        if since is not None and precedes(runtime.version, since):
            yield Said(
                (VERSION, model.source_key),
                f"does not build {sizes.architecture}, which {model.source_key} is, with runtime.kind {runtime.kind}",
                f"at least {since}",
            )


def _kv_cache_keeps_context(subject: Subject) -> Iterator[Said]:
    """FP8 KV cache beside weights of other formats: the builder turns paged context attention off."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for model in subject.models:
        if model.kv_cache != "fp8" or model.format in kept:
            continue
        unsure = model.format == "auto" and set(_layer_formats(subject, model)) & set(kept)
        yield _context_off(
            subject,
            (KV_CACHE, model.format_key),
            f"with {model.format_key} {model.format}",
            f"set {KV_CACHE} to auto, or {model.format_key} to {' or '.join(kept[:2])}",
            unsure=bool(unsure),
        )


def _int8_kv_cache(subject: Subject) -> Iterator[Said]:
    if any(model.kv_cache == "int8" for model in subject.models):
        yield _context_off(subject, (KV_CACHE,), "always", f"set {KV_CACHE} to auto or fp8", unsure=False)


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


def _same_vocabulary(subject: Subject) -> Iterator[Said]:
    draft, target = subject.draft, subject.target
    if draft is None or draft.is_head or draft.sizes is None or target.sizes is None:
        return
    if draft.sizes.vocab != target.sizes.vocab:
        yield Said(
            (draft.source_key, target.source_key),
            f"has a vocabulary of {draft.sizes.vocab} tokens, the target of {target.sizes.vocab}; they exchange ids",
            "choose a draft with the target's tokenizer",
        )


def _formats_of_speculation(subject: Subject) -> Iterator[Said]:
    tried: list[str] = rule("rt.spec_formats").facts["tried"]
    if subject.draft is not None and subject.target.format not in tried:
        yield Said(
            (subject.target.format_key, "draft"),
            f"as the target of a draft is not among what upstream describes, which is {', '.join(tried)}",
            "compare answers with and without the draft before relying on it",
        )


def _overlap(subject: Subject) -> Iterator[Said]:
    runtime = subject.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or not runtime.overlap_scheduler or not _is_known(subject):
        return
    method = _method(subject, runtime)
    if method is not None and llm_args.speculation(runtime.version, method).two_models:
        yield Said(
            ("runtime.overlap_scheduler", "runtime.speculation" if subject.draft is None else "draft"),
            f"cannot be true with {method} speculation, whose two models run in turns",
            "remove runtime.overlap_scheduler",
        )


def _method(subject: Subject, runtime: PyTorchRuntime) -> str | None:
    if subject.recipe.draft is not None:
        return subject.recipe.draft.method
    return runtime.speculation.method if runtime.speculation is not None else None


def _draft_ranks(subject: Subject) -> Iterator[Said]:
    draft, target = subject.draft, subject.target
    if draft is not None and draft.split.world > target.split.world:
        yield Said(
            (draft.tensor_key, target.tensor_key),
            f"needs {draft.split.world} GPUs, the target only {target.split.world}, and they share them",
            f"at most {target.split.world}",
        )


def _instances(subject: Subject) -> Iterator[Said]:
    runtime = subject.recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or runtime.instances == 1 or not _is_known(subject):
        return
    if not llmapi.has_instances(runtime.version):
        yield Said(
            ("runtime.instances", VERSION),
            f"must be 1: the llmapi model of TensorRT-LLM {runtime.version} cannot spread instances over GPUs",
            "remove runtime.instances, or choose a version that can",
        )


def _draft_length(subject: Subject) -> Iterator[Said]:
    draft, (least, most) = subject.recipe.draft, rule("rt.spec_length").facts["usual"]
    if draft is not None and not least <= draft.max_draft_tokens <= most:
        yield Said(("draft.max_draft_tokens",), f"is outside the usual {least} to {most}")


def _clipped_batch_tokens(subject: Subject) -> Iterator[Said]:
    limits = subject.recipe.limits
    most = limits.max_sequence_tokens * limits.max_concurrency
    if limits.max_batch_tokens is not None and limits.max_batch_tokens > most:
        yield Said(
            (BATCH_TOKENS, "limits.max_concurrency"),
            f"is cut to {most} by the engine builder, which is limits.max_concurrency whole sequences",
            f"at most {most}",
        )


def _large_batch_tokens(subject: Subject) -> Iterator[Said]:
    given, most = subject.recipe.limits.max_batch_tokens, rule("build.max_num_tokens_large").facts["most"]
    if given is not None and given > most:
        yield Said(
            (BATCH_TOKENS,), f"is more than {most}, which the engine builder warns of", f"at most {most}"
        )


def _known_issue(subject: Subject) -> Iterator[Said]:
    for issue in rule("known.issue").facts["issues"]:
        if _has(issue, subject):
            yield Said((issue["key"], VERSION), issue["problem"], issue["fix"])


def _has(issue: Mapping[str, Any], subject: Subject) -> bool:
    """Whether a recipe meets all conditions of an issue."""
    runtime, target = subject.gpu_runtime, subject.target
    assert runtime is not None, "the rule is about TensorRT-LLM"
    version, sm = runtime.version, {gpu.name: gpu.sm for gpu in gpus.gpus()}.get(runtime.gpu)
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


def _build_flags(subject: Subject) -> Iterator[Said]:
    runtime = subject.recipe.runtime
    if not isinstance(runtime, TensorRTRuntime) or not _is_known(subject):
        return
    allowed, key = trtllm_build.tunable(runtime.version), "runtime.build_flags"
    for flag in runtime.build_flags:
        name, equals, _ = flag.partition("=")
        if not equals:
            yield Said((key,), f"has {flag}, which has no value", f"write {flag}=enable")
        elif name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=3) or allowed
            yield Said((key, VERSION), f"may not have {name}", f"what it may have: {', '.join(near)}")
        else:
            for fault in trtllm_build.check(runtime.version, [f"--{flag}"]):
                yield Said((key, VERSION), f"has {fault.removeprefix('--')}")


CHECKS: Mapping[str, Check] = {
    "release": _release,
    "gpu": _gpu,
    "model.since": _model_since,
    "kvq.weight_combo": _kv_cache_keeps_context,
    "kvq.int8": _int8_kv_cache,
    "rt.spec_same_vocab": _same_vocabulary,
    "rt.spec_formats": _formats_of_speculation,
    "rt.spec_length": _draft_length,
    "rt.spec_overlap": _overlap,
    "draft.ranks": _draft_ranks,
    "llmapi.instances": _instances,
    "build.flags": _build_flags,
    "build.max_num_tokens_clip": _clipped_batch_tokens,
    "build.max_num_tokens_large": _large_batch_tokens,
    "known.issue": _known_issue,
}
