"""Whether a combination of release, runtime, GPU, formats and model exists, and every reason why not. Pure.

>>> check_compatibility("1.2.1", "tensorrt", "b200-sxm-180g", "int4_awq").offered
False
>>> check_compatibility("1.1.0", "pytorch", None, architecture="GptOssForCausalLM").features["kv_reuse"].answer
'no'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.contracts import support
from pipeline.contracts.gpus import Gpu, format_issues, gpu
from pipeline.contracts.images import serving_image
from pipeline.contracts.releases import Track, require_runtime
from pipeline.contracts.rules import Severity, rule
from pipeline.errors import UserError
from pipeline.plan.supported import FEATURES, why_not_listed, why_not_on


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
        reasons += [CompatibilityIssue(found.severity, found.reason, found.sources) for found in findings]
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    if runtime == "tensorrt" and kv_cache == "fp8" and form not in kept:
        text = f"a KV cache of fp8 with weights of {form} leaves no reuse, no chunked context and no draft"
        reasons.append(CompatibilityIssue("warning", text, rule("kvq.weight_combo").sources))
    features: dict[str, FeatureAnswer] = {}
    if architecture is not None and image is not None:
        reasons += _of_model(architecture, version, runtime, device)
        if runtime == "pytorch":
            sm = device.sm if device is not None else None
            found = support.feature_support(architecture, version)
            features = {
                name: FeatureAnswer(
                    FEATURES[name].label, answer.on(sm), answer.capabilities, answer.needs, answer.sources
                )
                for name, answer in found.items()
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
