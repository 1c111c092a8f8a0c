"""Rules about what a recipe names: release, GPU, flags and models.

Each function is one rule of contracts/data/rules, under its id in RELEASE_CHECKS.
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
from pipeline.plan.preflight.context import Check, Context, Objection
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
