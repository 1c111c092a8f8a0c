"""Whether a combination of release, runtime, GPU and formats exists, and every reason why not. Pure.

>>> check_compatibility("1.2.1", "tensorrt", "b200-sxm-180g", "int4_awq").offered
False
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.contracts.gpus import format_issues, gpu
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
class Compatibility:
    """Whether a release, a runtime, a GPU and formats go together, with every reason why not."""

    version: str
    runtime: Track
    image: str | None  # of the container that would serve; None where there is none
    reasons: tuple[CompatibilityIssue, ...]

    @property
    def offered(self) -> bool:
        """Whether no reason is an error."""
        return not any(reason.severity == "error" for reason in self.reasons)


def check_compatibility(
    version: str, runtime: Track, on: str | None, form: str = "none", kv_cache: str = "auto"
) -> Compatibility:
    """Check one combination, and collect all reasons against it.

    Args:
        on: Name of a GPU; None: any.
    """
    image, reasons = None, []
    try:
        require_runtime(version, runtime)
        image = serving_image(version, runtime).name
    except UserError as error:
        reasons.append(CompatibilityIssue("error", str(error), rule("release").sources))
    if on is not None:
        try:
            findings = format_issues(gpu(on), form, kv_cache, runtime, version if image else None)
            reasons += [CompatibilityIssue(found.severity, found.reason, found.sources) for found in findings]
        except UserError as error:
            reasons.append(CompatibilityIssue("error", str(error), rule("gpu.known").sources))
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    if runtime == "tensorrt" and kv_cache == "fp8" and form not in kept:
        text = f"a KV cache of fp8 with weights of {form} leaves no reuse, no chunked context and no draft"
        reasons.append(CompatibilityIssue("warning", text, rule("kvq.weight_combo").sources))
    return Compatibility(version, runtime, image, tuple(reasons))
