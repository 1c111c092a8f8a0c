"""Rules about models and features that upstream lists for the PyTorch backend, by release and GPU.

Each function is one rule of contracts/data/rules, under its id in CHECKS; the sentences are those of
`pipeline.plan.supported`. A class that a release does not list may run all the same, and is warned about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts import support
from pipeline.plan.preflight.context import Check, Context, Objection, RecipeModel
from pipeline.plan.supported import FEATURES, SupportIssue, feature_issue, why_not_listed, why_not_on
from pipeline.recipe import PyTorchRuntime

VERSION, GPU, LLM_ARGS, ADAPTERS = "runtime.version", "runtime.gpu", "runtime.llm_args", "adapters"


def _listed(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served(context):
        if (issue := why_not_listed(architecture, version)) is not None:
            yield _objection((VERSION, model.source_key), issue)


def _gpu(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served(context):
        if (issue := why_not_on(architecture, version, context.gpu)) is not None:
            yield _objection((GPU, model.source_key), issue)


def _features(context: Context) -> Iterator[Objection]:
    for model, architecture, version in _served(context):
        if model is not context.target:
            continue
        runtime = context.recipe.runtime
        assert isinstance(runtime, PyTorchRuntime), "the rules are about the PyTorch backend"
        given = [
            f"{section}.{name}"
            for section, values in runtime.llm_args.items()
            if isinstance(values, Mapping)
            for name in values
        ]
        for feature, key in _used(context).items():
            if (issue := feature_issue(architecture, feature, version, context.gpu, given)) is not None:
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


def _served(context: Context) -> Iterator[tuple[RecipeModel, str, str]]:
    """The models whose class is known, but heads, with the release that is to serve them."""
    for model in context.models:
        if model.architecture and not model.is_head and context.version is not None:
            yield model, model.architecture, context.version


def _used(context: Context) -> dict[str, str]:
    """Feature that the recipe uses -> the key that says so."""
    recipe, arguments = context.recipe, context.arguments
    runtime = recipe.runtime
    assert isinstance(runtime, PyTorchRuntime), "the rules are about the PyTorch backend"
    given = runtime.llm_args
    proposing = (
        "draft" if recipe.draft is not None else "runtime.speculation" if runtime.speculation else LLM_ARGS
    )
    speculation = arguments.get("speculative_config") or {}
    way = speculation.get("decoding_type")
    found = {
        "overlap": ("runtime.overlap_scheduler", arguments.get("disable_overlap_scheduler") is False),
        "attention_dp": ("runtime.attention_dp", runtime.attention_dp),
        "disaggregation": (LLM_ARGS, given.get("cache_transceiver_config")),
        "chunked_prefill": ("scheduler.chunked_context", recipe.scheduler.chunked_context),
        "mtp": (proposing, way == "MTP"),
        "eagle3": (proposing, way in ("Eagle", "Eagle3")),
        "kv_reuse": ("kv_cache.reuse", recipe.kv_cache.reuse),
        "guided_decoding": ("guided_decoding", recipe.guided_decoding),
        "lora": (
            ADAPTERS if recipe.adapters else LLM_ARGS,
            recipe.adapters or given.get("enable_lora") or given.get("lora_config"),
        ),
        "expert_parallel": ("runtime.expert_parallel", (runtime.expert_parallel or 1) > 1),
        "pipeline_parallel": ("runtime.pipeline_parallel", runtime.pipeline_parallel > 1),
        "speculation": (proposing, way is not None),
    }
    return {feature: key for feature, (key, uses) in found.items() if uses}


def _objection(keys: tuple[str, ...], issue: SupportIssue) -> Objection:
    return Objection(keys, issue.problem, issue.fix, issue.severity)


CHECKS: Mapping[str, Check] = {
    "model.listed": _listed,
    "model.gpu": _gpu,
    "feature.supported": _features,
    "feature.together": _together,
}
