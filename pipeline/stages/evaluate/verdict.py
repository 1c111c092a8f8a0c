"""The figures held against a recipe's budgets, and what to try where they are over. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.recipe import Gate
from pipeline.stages.evaluate.metrics import BootstrapEstimate, EvaluationMetrics
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One budget, and the figure that is held against it."""

    files: str  # the export: "hf", "trtllm-tp2"
    key: str  # of the recipe: "max_perplexity_increase"
    name: str  # "perplexity increase"
    figure: float
    limit: float
    passed: bool
    text: str  # "perplexity 45.59 -> 45.65, +0.12 % (at most 2 %)"
    close: bool  # the limit lies within the 95 % interval of the figure: more text could turn the verdict


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Whether all exports are within the budgets. `str` gives every figure, and what to try."""

    passed: bool
    summary: Mapping[str, str]  # export -> its figures, in one line
    checks: tuple[GateCheck, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        if self.passed:
            return "\n".join(f"{files}: {figures}" for files, figures in self.summary.items())
        lines = ["quantization costs more quality than the recipe allows"]
        for check in self.checks:
            lines.append(f"  {'within' if check.passed else 'OVER  '}  {check.files}: {check.text}")
        return "\n".join([*lines, "  What to try:", *(f"  - {advice}" for advice in self.advice)])

    def to_json(self) -> dict[str, Json]:
        """The verdict as values for `json.dumps`."""
        return {
            "passed": self.passed,
            "summary": dict(self.summary),
            "checks": [
                {
                    "files": check.files,
                    "key": check.key,
                    "figure": check.figure,
                    "limit": check.limit,
                    "passed": check.passed,
                    "close": check.close,
                    "text": check.text,
                }
                for check in self.checks
            ],
            "advice": list(self.advice),
        }


def judge(metrics: Sequence[EvaluationMetrics], gate: Gate | None) -> GateVerdict:
    """Hold the figures of every export against the budgets. Pure.

    Args:
        metrics: Of each export, those of the files that the runtime loads first.
        gate: The budgets; None lets everything pass.
    """
    checks = tuple(check for one in metrics for check in _checks(one, gate)) if gate is not None else ()
    passed = all(check.passed for check in checks)
    advice = () if passed else tuple(_advice(metrics[0], checks))
    return GateVerdict(passed, {one.files: _summary(one) for one in metrics}, checks, advice)


def _summary(metrics: EvaluationMetrics) -> str:
    return (
        f"perplexity {metrics.reference_perplexity:.4g} -> {metrics.quantized_perplexity:.4g} "
        f"({metrics.perplexity_increase.value:+.2%}), top-1 agreement {metrics.top1_agreement.value:.2%}, "
        f"KL {metrics.mean_kl.value:.2g} nats, over {metrics.positions} positions of {metrics.samples} samples"
    )


def _checks(metrics: EvaluationMetrics, gate: Gate) -> Iterator[GateCheck]:
    increase, agreement, kl = metrics.perplexity_increase, metrics.top1_agreement, metrics.mean_kl
    limit = gate.max_perplexity_increase
    yield GateCheck(
        metrics.files,
        "max_perplexity_increase",
        "perplexity increase",
        increase.value,
        limit,
        increase.value <= limit,
        f"perplexity {metrics.reference_perplexity:.4g} -> {metrics.quantized_perplexity:.4g}, "
        f"{increase.value:+.2%} [{increase.low:+.2%}, {increase.high:+.2%}] (at most {limit:+.2%})",
        _within(increase, limit),
    )
    limit = gate.min_top1_agreement
    yield GateCheck(
        metrics.files,
        "min_top1_agreement",
        "top-1 agreement",
        agreement.value,
        limit,
        agreement.value >= limit,
        f"top-1 agreement {agreement.value:.2%} [{agreement.low:.2%}, {agreement.high:.2%}] (at least {limit:.2%})",
        _within(agreement, limit),
    )
    if gate.max_kl is not None:
        yield GateCheck(
            metrics.files,
            "max_kl",
            "mean KL",
            kl.value,
            gate.max_kl,
            kl.value <= gate.max_kl,
            f"KL {kl.value:.3g} [{kl.low:.3g}, {kl.high:.3g}] nats (at most {gate.max_kl:g})",
            _within(kl, gate.max_kl),
        )


def _within(estimate: BootstrapEstimate, limit: float) -> bool:
    return estimate.low <= limit <= estimate.high


# What costs less quality than each format, nearest first.
_GENTLER = {
    "w4a8_awq": "int4_awq (inputs stay 16-bit), or fp8",
    "int4_awq": "fp8, or int8_sq",
    "nvfp4": "fp8",
    "fp8": "int8_sq, or none",
    "int8_sq": "fp8, or none",
}
_ENOUGH_SAMPLES = 512


def _advice(metrics: EvaluationMetrics, checks: tuple[GateCheck, ...]) -> Iterator[str]:
    if metrics.kv_cache is not None:
        yield "quantization.kv_cache: auto (keys and values stay 16-bit)"
    # W4A8 has groups of 128 only.
    if metrics.format == "int4_awq" and metrics.group_size == 128:
        yield "quantization.awq_block_size: 64 (twice as many scales)"
    if metrics.format in _GENTLER:
        yield f"quantization.format: {_GENTLER[metrics.format]}"
    known = metrics.calibration_samples
    if known is None or known < _ENOUGH_SAMPLES:
        have = "" if known is None else f", now {known}"
        yield f"quantization.calibration.samples: {_ENOUGH_SAMPLES} (more of them{have})"
    yield "quantization.calibration.dataset: text that is nearer to what the model will be asked"
    if any(check.close and not check.passed for check in checks):
        yield "quantization.gate.samples: more, for a limit lies within the error of its figure"
    failed = ", ".join(
        dict.fromkeys(f"quantization.gate.{check.key}" for check in checks if not check.passed)
    )
    yield f"if you can live with these figures, {failed}"
