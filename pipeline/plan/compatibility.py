"""Whether a combination of release, runtime, GPU, formats and model exists, every reason why not, and what would. Pure.

>>> check_compatibility("1.2.1", "tensorrt", "b200-sxm-180g", "int4_awq").offered
False
>>> check_compatibility("1.1.0", "pytorch", None, architecture="GptOssForCausalLM").features["kv_reuse"].answer
'no'
>>> why_not_listed("GlmMoeDsaForCausalLM", "1.2.1").fix
'set runtime.version to 1.3.0rc29 or 1.4.0rc1'
>>> feature_issue("GptOssForCausalLM", "kv_reuse", "1.1.0", None).fix
'set kv_cache.reuse to false, or runtime.version to 1.2.0, 1.2.1, 1.3.0rc29 or 1.4.0rc1'
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pipeline.contracts import support
from pipeline.contracts.gpus import Gpu, format_issues, gpu, gpus
from pipeline.contracts.images import serving_image
from pipeline.contracts.releases import Track, require_runtime
from pipeline.contracts.rules import Severity, rule
from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class CompatibilityIssue:
    """One reason against a combination."""

    severity: Severity
    text: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FeatureAnswer:
    """Upstream's answer to a feature of a model, on the GPU that was asked for."""

    label: str
    answer: support.Answer
    capabilities: str  # compute capabilities that it holds for, "9.0, 10.0"; empty: all
    needs: tuple[str, ...]  # arguments of the LLM API, one of which it takes; empty: none
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether a release, a runtime, a GPU, formats and a model go together, with every reason why not."""

    version: str
    runtime: Track
    image: str | None  # of the container that would serve; None where there is none
    reasons: tuple[CompatibilityIssue, ...]
    # Feature -> upstream's answer; None: its matrix has no row for the model, or no model was asked for.
    features: Mapping[str, FeatureAnswer] | None = None

    @property
    def offered(self) -> bool:
        """Whether no reason is an error."""
        return not any(reason.severity == "error" for reason in self.reasons)


def check_compatibility(
    version: str,
    runtime: Track,
    on: str | None,
    form: str = "none",
    kv_cache: str = "auto",
    architecture: str | None = None,
) -> Compatibility:
    """Check one combination, and collect all reasons against it.

    Args:
        on: Name of a GPU; None: any.
        architecture: Class that the model's config.json names, such as "LlamaForCausalLM"; None: any.
    """
    image, reasons = None, []
    try:
        require_runtime(version, runtime)
        image = serving_image(version, runtime).name
    except UserError as error:
        reasons.append(CompatibilityIssue("error", str(error), rule("release").sources))
    device: Gpu | None = None
    try:
        device = gpu(on) if on is not None else None
    except UserError as error:
        reasons.append(CompatibilityIssue("error", str(error), rule("gpu.known").sources))
    if device is not None:
        findings = format_issues(device, form, kv_cache, runtime, version if image else None)
        reasons += [
            CompatibilityIssue(finding.severity, finding.reason, finding.sources) for finding in findings
        ]
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    if runtime == "tensorrt" and kv_cache == "fp8" and form not in kept:
        text = f"a KV cache of fp8 with weights of {form} leaves no reuse, no chunked context and no draft"
        reasons.append(CompatibilityIssue("warning", text, rule("kvq.weight_combo").sources))
    features: dict[str, FeatureAnswer] = {}
    if architecture is not None and image is not None:
        reasons += _of_model(architecture, version, runtime, device)
        if runtime == "pytorch":
            sm = device.sm if device is not None else None
            matrix = support.feature_support(architecture, version)
            features = {
                name: FeatureAnswer(
                    FEATURES[name].label, answer.on(sm), answer.capabilities, answer.needs, answer.sources
                )
                for name, answer in matrix.items()
            }
    return Compatibility(version, runtime, image, tuple(reasons), features or None)


def _of_model(
    architecture: str, version: str, runtime: Track, on: Gpu | None
) -> Iterator[CompatibilityIssue]:
    if runtime == "tensorrt":
        converted: list[str] = rule("model.class").facts["converted"]
        if architecture not in converted:
            text = f"{architecture} cannot be converted; engines are made of {', '.join(converted)}"
            yield CompatibilityIssue("error", text, rule("model.class").sources)
        return
    if architecture not in support.architectures():
        text = f"{architecture} is not among the models that the PyTorch backend of TensorRT-LLM serves"
        yield CompatibilityIssue("error", text, rule("model.served").sources)
    for issue in (why_not_listed(architecture, version), why_not_on(architecture, version, on)):
        if issue is not None:
            text = f"{issue.problem} ({issue.fix})" if issue.fix else issue.problem
            yield CompatibilityIssue(issue.severity, text, issue.sources)


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
    answer = support.model_support(architecture, version)
    if on is None or answer.on(on.sm) == "yes":
        return None
    return SupportIssue(
        "error",
        f"{architecture} runs on compute capability {answer.capabilities} only, and {on.name} has {on.capability}",
        f"set runtime.gpu to {_gpus_of(answer)}",
        answer.sources,
    )


def feature_issue(
    architecture: str, feature: str, version: str, on: Gpu | None, arguments: Collection[str] = ()
) -> SupportIssue | None:
    """Object to a feature that upstream's matrix has as No (an error) or Untested (a warning) for a class.

    Args:
        on: The GPU; None: a GPU that can.
        arguments: Arguments of `runtime.llm_args`, by their dotted paths.

    Returns:
        None where it says Yes, or has no row for the class.
    """
    feature_row = support.feature_support(architecture, version).get(feature)
    answer = feature_row.on(on.sm if on is not None else None) if feature_row is not None else "yes"
    if feature_row is None:
        return None
    text = FEATURES[feature]
    if answer == "yes" and feature_row.needs and not {*feature_row.needs} & {*arguments}:
        argument = f"runtime.llm_args.{feature_row.needs[0]}"
        return SupportIssue(
            "error",
            f"{text.label} with {architecture} takes {argument} in TensorRT-LLM {version}",
            f"{text.without}, or give {argument}",
            feature_row.sources,
        )
    if answer == "yes":
        return None
    subject = f"{text.label} with {architecture}"
    where = f"TensorRT-LLM {version}"
    fixes = [text.without]
    if on is not None and feature_row.answer == "yes":
        where += f" on compute capability {on.capability}, only on {feature_row.capabilities}"
        fixes.append(f"runtime.gpu to {_gpus_of(feature_row)}")
    if better := _releases_with(architecture, feature, on):
        fixes.append(f"runtime.version to {_either(better)}")
    if answer == "untested":
        return SupportIssue(
            "warning",
            f"upstream has not tested {subject} in {where}",
            ", or ".join(fixes),
            feature_row.sources,
        )
    return SupportIssue(
        "error", f"upstream does not have {subject} in {where}", ", or ".join(fixes), feature_row.sources
    )


def _releases_with(architecture: str, feature: str, on: Gpu | None) -> tuple[str, ...]:
    sm = on.sm if on is not None else None
    return tuple(
        version
        for version in support.listing(architecture)
        if (answer := support.feature_support(architecture, version).get(feature)) is not None
        and answer.on(sm) == "yes"
        and not answer.needs
    )


def _gpus_of(answer: support.Support) -> str:
    """GPUs that an answer holds for, the first few."""
    return _either(tuple(product.name for product in gpus() if answer.on(product.sm) == "yes")[:3])


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
