"""Rules about what a recipe names: release, GPU, flags, models, and features that upstream lists for PyTorch.

Each function is one rule of contracts/data/rules, under its id in RELEASE_CHECKS or SUPPORT_CHECKS; sentences about
support are those of `pipeline.plan.compatibility`. A class that a release does not list may run all the same, and is
warned about.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts import gpus, llm_args, llmapi, support, trtllm_build
from pipeline.contracts.releases import half
from pipeline.contracts.rules import rule
from pipeline.contracts.version_range import is_candidate, precedes
from pipeline.errors import UserError
from pipeline.plan.compatibility import FEATURES, SupportIssue, feature_issue, why_not_listed, why_not_on
from pipeline.plan.preflight.context import Check, Context, Objection, RecipeModel
from pipeline.plan.preflight.formats import on_gpu
from pipeline.recipe import PyTorchRuntime, TensorRTRuntime

VERSION, KIND, GPU = "runtime.version", "runtime.kind", "runtime.gpu"
BUILD_FLAGS = "runtime.build_flags"


def _release(context: Context) -> Iterator[Objection]:
    if context.release_problem:
        yield Objection((VERSION, KIND), context.release_problem)


def _frozen(context: Context) -> Iterator[Objection]:  # noqa: ARG001 - true of every recipe with engines
    yield Objection((KIND,), half("tensorrt"))


def _candidate(context: Context) -> Iterator[Objection]:
    if context.version is not None and is_candidate(context.version):
        yield Objection((VERSION,), "is a release candidate: not final, and not in any Triton container")


def _evidence(context: Context) -> Iterator[Objection]:
    if context.version is not None and (text := llm_args.rests_on(context.version)):
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
    for fault in context.emitted.refusals:
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
    argv = trtllm_build.argv_of(entry)
    faults = trtllm_build.check(version, argv)
    yield from (fault.removeprefix(f"{' '.join(argv)}: ") for fault in faults)
    if not faults and trtllm_build.flags(version)[name].kind == "integer" and int(argv[1]) < 1:
        yield "must be at least 1"


def _right_values(version: str, name: str) -> str:
    """How an entry for this flag is written."""
    flag = trtllm_build.flags(version)[name]
    *examples, last = trtllm_build.entries_of(flag)
    any_number = ", or another number of at least 1" if flag.kind == "integer" else ""
    return f"write {', '.join(examples)} or {last}" if examples else f"write {last}{any_number}"


def _right_names(version: str, name: str) -> str:
    """Entries for flags that a recipe may have, for those with similar names if there are any."""
    allowed, known = trtllm_build.tunable(version), trtllm_build.flags(version)
    near = difflib.get_close_matches(name.lstrip("-"), allowed, n=3) or allowed
    return f"what it may have: {', '.join(trtllm_build.entries_of(known[flag])[0] for flag in near)}"


RELEASE_CHECKS: Mapping[str, Check] = {
    "release": _release,
    "release.frozen": _frozen,
    "release.candidate": _candidate,
    "release.evidence": _evidence,
    "gpu.known": _gpu,
    "gpu.since": on_gpu("gpu.since"),
    "model.class": _class,
    "model.rope": _rope,
    "model.served": _served,
    "runtime.refuses": _refused,
    "llmapi.instances": _instances,
    "known.issue": _known_issue,
    "build.flags": _build_flags,
}


LLM_ARGS, ADAPTERS = "runtime.llm_args", "adapters"


def _listed(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served_models(context):
        if (issue := why_not_listed(architecture, version)) is not None:
            yield _objection((VERSION, model.source_key), issue)


def _model_gpu(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served_models(context):
        if (issue := why_not_on(architecture, version, context.gpu)) is not None:
            yield _objection((GPU, model.source_key), issue)


def _features(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served_models(context):
        if model is not context.target:
            continue
        runtime = context.recipe.runtime
        assert isinstance(runtime, PyTorchRuntime), "the rules are about the PyTorch backend"
        arguments = [
            f"{section}.{name}"
            for section, values in runtime.llm_args.items()
            if isinstance(values, Mapping)
            for name in values
        ]
        for feature, key in _used(context).items():
            if (issue := feature_issue(architecture, feature, version, context.gpu, arguments)) is not None:
                yield _objection((key, VERSION, GPU), issue)


def _together(context: Context) -> Iterator[Objection]:
    used = _used(context)
    for first, second in support.untested_together():
        if first in used and second in used:
            keys = (used[first], used[second])
            yield Objection(
                keys if keys[0] in (LLM_ARGS, ADAPTERS) else keys[::-1],
                f"upstream has not tested {FEATURES[first].label} together with {FEATURES[second].label}",
                f"{FEATURES[first].without}, or {FEATURES[second].without}",
            )


def _served_models(context: Context) -> Iterator[tuple[RecipeModel, str, str]]:
    """The models whose class is known, but heads, with the release that is to serve them."""
    for model in context.models:
        if model.architecture and not model.is_head and context.version is not None:
            yield model, model.architecture, context.version


def _used(context: Context) -> dict[str, str]:
    """Feature that the recipe uses -> the key that says so."""
    recipe, arguments = context.recipe, context.arguments
    runtime = recipe.runtime
    assert isinstance(runtime, PyTorchRuntime), "the rules are about the PyTorch backend"
    llm_args = runtime.llm_args
    proposing = (
        "draft" if recipe.draft is not None else "runtime.speculation" if runtime.speculation else LLM_ARGS
    )
    speculation = arguments.get("speculative_config") or {}
    decoding = speculation.get("decoding_type")
    features = {
        "overlap": ("runtime.overlap_scheduler", arguments.get("disable_overlap_scheduler") is False),
        "attention_dp": ("runtime.attention_dp", runtime.attention_dp),
        "disaggregation": (LLM_ARGS, llm_args.get("cache_transceiver_config")),
        "chunked_prefill": ("scheduler.chunked_context", recipe.scheduler.chunked_context),
        "mtp": (proposing, decoding == "MTP"),
        "eagle3": (proposing, decoding in ("Eagle", "Eagle3")),
        "kv_reuse": ("kv_cache.reuse", recipe.kv_cache.reuse),
        "guided_decoding": ("guided_decoding", recipe.guided_decoding),
        "lora": (
            ADAPTERS if recipe.adapters else LLM_ARGS,
            recipe.adapters or llm_args.get("enable_lora") or llm_args.get("lora_config"),
        ),
        "expert_parallel": ("runtime.expert_parallel", (runtime.expert_parallel or 1) > 1),
        "pipeline_parallel": ("runtime.pipeline_parallel", runtime.pipeline_parallel > 1),
        "speculation": (proposing, decoding is not None),
    }
    return {feature: key for feature, (key, uses) in features.items() if uses}


def _objection(keys: tuple[str, ...], issue: SupportIssue) -> Objection:
    return Objection(keys, issue.problem, issue.fix, issue.severity)


SUPPORT_CHECKS: Mapping[str, Check] = {
    "model.listed": _listed,
    "model.gpu": _model_gpu,
    "feature.supported": _features,
    "feature.together": _together,
}
