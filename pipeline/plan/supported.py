"""Sentences about models and features that upstream lists: which release or GPU can, and how to do without. Pure.

>>> why_not_listed("GlmMoeDsaForCausalLM", "1.2.1").fix
'set runtime.version to 1.3.0rc29 or 1.4.0rc1'
>>> feature_issue("GptOssForCausalLM", "kv_reuse", "1.1.0", None).fix
'set kv_cache.reuse to false, or runtime.version to 1.2.0, 1.2.1, 1.3.0rc29 or 1.4.0rc1'
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.contracts import support
from pipeline.contracts.gpus import Gpu, gpus
from pipeline.contracts.rules import Severity


@dataclass(frozen=True, slots=True)
class Feature:
    """How a sentence names a feature, and how a recipe does without it."""

    label: str
    without: str


FEATURES: Mapping[str, Feature] = {
    "overlap": Feature("the overlap scheduler", "set runtime.overlap_scheduler to false"),
    "attention_dp": Feature("attention data parallelism", "set runtime.attention_dp to false"),
    "disaggregation": Feature(
        "disaggregated serving", "remove cache_transceiver_config from runtime.llm_args"
    ),
    "chunked_prefill": Feature("chunked prefill", "set scheduler.chunked_context to false"),
    "mtp": Feature("MTP", "remove runtime.speculation"),
    "eagle3": Feature("an Eagle-3 head", "remove draft"),
    "kv_reuse": Feature("reuse of the KV cache", "set kv_cache.reuse to false"),
    "guided_decoding": Feature("guided decoding", "remove guided_decoding"),
    "lora": Feature("LoRA", "remove adapters, and enable_lora and lora_config from runtime.llm_args"),
    "expert_parallel": Feature("expert parallelism", "remove runtime.expert_parallel"),
    "pipeline_parallel": Feature("pipeline parallelism", "set runtime.pipeline_parallel to 1"),
    "speculation": Feature("speculation", "do without it"),
}


@dataclass(frozen=True, slots=True)
class SupportIssue:
    """Why upstream does not say that a model, or a feature of it, works."""

    severity: Severity
    problem: str
    fix: str
    sources: tuple[str, ...]


def why_not_listed(architecture: str, version: str) -> SupportIssue | None:
    """Warn of a class that upstream's page of a release does not list; None where it does, or no page ever did."""
    having = support.listing(architecture)
    if version in having or architecture not in support.architectures():
        return None
    problem = f"{architecture} is not among the models that upstream lists for TensorRT-LLM {version}"
    if not having:
        return SupportIssue(
            "warning", f"{problem}, nor for any release that is known", "", support.sources_of(version)
        )
    return SupportIssue(
        "warning",
        f"{problem}; {having[0]} is the first that it is listed for",
        f"set runtime.version to {_either(having)}",
        support.sources_of(version),
    )


def why_not_on(architecture: str, version: str, on: Gpu | None) -> SupportIssue | None:
    """Refuse a GPU on which upstream does not have a class; None where it has, or says nothing of it."""
    found = support.model_support(architecture, version)
    if on is None or found.on(on.sm) == "yes":
        return None
    return SupportIssue(
        "error",
        f"{architecture} runs on compute capability {found.capabilities} only, and {on.name} has {on.capability}",
        f"set runtime.gpu to {_gpus_of(found)}",
        found.sources,
    )


def feature_issue(
    architecture: str, feature: str, version: str, on: Gpu | None, given: Collection[str] = ()
) -> SupportIssue | None:
    """Object to a feature that upstream's matrix has as No (an error) or Untested (a warning) for a class.

    Args:
        on: The GPU; None: one that can.
        given: Arguments of `runtime.llm_args`, by their dotted paths.

    Returns:
        None where it says Yes, or has no row for the class.
    """
    found = support.feature_support(architecture, version).get(feature)
    answer = found.on(on.sm if on is not None else None) if found is not None else "yes"
    if found is None:
        return None
    text = FEATURES[feature]
    if answer == "yes" and found.needs and not {*found.needs} & {*given}:
        argument = f"runtime.llm_args.{found.needs[0]}"
        return SupportIssue(
            "error",
            f"{text.label} with {architecture} takes {argument} in TensorRT-LLM {version}",
            f"{text.without}, or give {argument}",
            found.sources,
        )
    if answer == "yes":
        return None
    who = f"{text.label} with {architecture}"
    where = f"TensorRT-LLM {version}"
    fixes = [text.without]
    if on is not None and found.answer == "yes":
        where += f" on compute capability {on.capability}, only on {found.capabilities}"
        fixes.append(f"runtime.gpu to {_gpus_of(found)}")
    if better := _releases_with(architecture, feature, on):
        fixes.append(f"runtime.version to {_either(better)}")
    if answer == "untested":
        return SupportIssue(
            "warning", f"upstream has not tested {who} in {where}", ", or ".join(fixes), found.sources
        )
    return SupportIssue(
        "error", f"upstream does not have {who} in {where}", ", or ".join(fixes), found.sources
    )


def _releases_with(architecture: str, feature: str, on: Gpu | None) -> tuple[str, ...]:
    sm = on.sm if on is not None else None
    return tuple(
        version
        for version in support.listing(architecture)
        if (found := support.feature_support(architecture, version).get(feature)) is not None
        and found.on(sm) == "yes"
        and not found.needs
    )


def _gpus_of(found: support.Support) -> str:
    """GPUs that an answer holds for, the first few."""
    return _either(tuple(product.name for product in gpus() if found.on(product.sm) == "yes")[:3])


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
