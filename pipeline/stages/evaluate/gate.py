"""The gate: figures held against the budgets of the recipe, and the report that each judgement leaves.

Judged are the files that the recipe's runtime loads, and those that were exported besides; all must be within the
budgets. The figures are an artifact and do not depend on the budgets, so a changed budget is judged in no time. The
report (report.json and report.html, under `reports/` in the store) has the verdict, the figures, the spread of the KL
divergence and the worst positions. The page is one file: its style and its picture are inside, and it needs no script
and no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from pipeline.errors import GateFailed
from pipeline.progress import Progress
from pipeline.recipe import Gate, Recipe
from pipeline.stages.evaluate.results import BootstrapEstimate, EvaluationMetrics, KlHistogram, read_metrics
from pipeline.store import Artifact, Store, digest_of

_WIDTH, _HEIGHT = 760, 200  # of the picture, in its own units


def write_report(metrics: Sequence[EvaluationMetrics], verdict: GateVerdict, directory: Path) -> None:
    """Write report.json and report.html into a folder, made if need be; nothing where they say the same already.

    Args:
        metrics: Figures of each export, those of the files that the runtime loads first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = {"verdict": asdict(verdict), "metrics": [asdict(export) for export in metrics]}
    text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    page, data = directory / "report.html", directory / "report.json"
    if page.is_file() and data.is_file() and data.read_text(encoding="utf-8") == text:
        return
    page.write_text(render(metrics, verdict), encoding="utf-8")
    data.write_text(text, encoding="utf-8")


def render(metrics: Sequence[EvaluationMetrics], verdict: GateVerdict) -> str:
    """Render report.html."""
    import jinja2

    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        exports=metrics, verdict=verdict, bars=bars, width=_WIDTH, height=_HEIGHT
    )


def bars(histogram: KlHistogram) -> list[dict[str, float | int | str]]:
    """Lay out a histogram, one bar a bin.

    Returns:
        x, y, width, height and middle in the units of the picture (760 x 200), label of the axis, and title.
    """
    top = max((*histogram.counts, 1))
    step = _WIDTH / max(len(histogram.counts), 1)
    drawn: list[dict[str, float | int | str]] = []
    for index, count in enumerate(histogram.counts):
        tall = _HEIGHT * count / top
        low, high = histogram.edges[index], histogram.edges[index + 1]
        drawn.append(
            {
                "x": round(index * step + 1, 2),
                "y": round(_HEIGHT - tall, 2),
                "width": round(step - 2, 2),
                "height": round(tall, 2),
                "middle": round((index + 0.5) * step, 2),
                "label": f"{low:.0e}" if index % 4 == 0 else "",
                "title": f"{count} positions between {low:.1e} and {high:.1e} nats",
            }
        )
    return drawn


def hold_to_gate(recipe: Recipe, evaluation: Artifact, store: Store, progress: Progress) -> None:
    """Judge an evaluation by the budgets of a recipe, write the report, and say the figures of each export.

    Raises:
        GateFailed: A budget is exceeded; the message has the figures, what to try, and where the report is.
    """
    metrics = read_metrics(evaluation.path)
    verdict = judge(metrics, recipe.quantization.gate)
    report = report_folder(store, recipe, evaluation)
    try:
        write_report(metrics, verdict, report)
        kept = str(report / "report.html")
    except OSError as error:
        # A store that is only read, or a full disk; the verdict holds without the report.
        kept = f"cannot be written: {error.strerror}"
    if not verdict.passed:
        raise GateFailed(f"recipe {recipe.name}: {verdict}\nreport: {kept}")
    loaded = f", which {recipe.runtime.kind} loads"
    own = {metric.name for metric in metrics if metric.files == metrics[0].files}
    for files, figures in verdict.summary.items():
        progress.say(f"    gate: {files}{loaded if files in own else ''}: {figures}")
    progress.say(f"    report: {kept}")


def report_folder(store: Store, recipe: Recipe, evaluation: Artifact) -> Path:
    """The folder of the store for what the gate of a recipe says of an evaluation."""
    gate = None if recipe.quantization.gate is None else recipe.quantization.gate.model_dump(mode="json")
    judged = digest_of({"evaluation": evaluation.digest, "gate": gate})
    return store.reports / f"{recipe.name}-{judged[:12]}"


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One budget, and the figure that is held against it."""

    files: str  # the export: "hf", "hf in bf16", "trtllm-tp2"
    key: str  # of the recipe: "max_perplexity_increase"
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


def judge(metrics: Sequence[EvaluationMetrics], gate: Gate | None) -> GateVerdict:
    """Hold the figures of every export against the budgets. Pure.

    Args:
        metrics: Figures of each export, those of the files that the runtime loads first.
        gate: The budgets; None lets everything pass.
    """
    checks = tuple(check for metric in metrics for check in _checks(metric, gate)) if gate is not None else ()
    passed = all(check.passed for check in checks)
    advice = () if passed else tuple(_advice(metrics[0], checks))
    return GateVerdict(passed, {metric.name: _summary(metric) for metric in metrics}, checks, advice)


def _summary(metrics: EvaluationMetrics) -> str:
    beside = ""
    if (loss := metrics.beside_f32) is not None:
        beside = (
            f"; beside f32: perplexity {loss.perplexity_increase.value:+.2%}, "
            f"top-1 agreement {loss.top1_agreement.value:.2%}"
        )
    return (
        f"perplexity {metrics.reference_perplexity:.4g} -> {metrics.quantized_perplexity:.4g} "
        f"({metrics.perplexity_increase.value:+.2%}), top-1 agreement {metrics.top1_agreement.value:.2%}, "
        f"KL {metrics.mean_kl.value:.2g} nats, over {metrics.positions} positions of {metrics.samples} samples{beside}"
    )


def _checks(metrics: EvaluationMetrics, gate: Gate) -> Iterator[GateCheck]:
    increase, agreement, kl = metrics.perplexity_increase, metrics.top1_agreement, metrics.mean_kl
    limit = gate.max_perplexity_increase
    yield GateCheck(
        metrics.name,
        "max_perplexity_increase",
        increase.value,
        limit,
        increase.value <= limit,
        f"perplexity {metrics.reference_perplexity:.4g} -> {metrics.quantized_perplexity:.4g}, "
        f"{increase.value:+.2%} [{increase.low:+.2%}, {increase.high:+.2%}] (at most {limit:+.2%})",
        _within(increase, limit),
    )
    limit = gate.min_top1_agreement
    yield GateCheck(
        metrics.name,
        "min_top1_agreement",
        agreement.value,
        limit,
        agreement.value >= limit,
        f"top-1 agreement {agreement.value:.2%} [{agreement.low:.2%}, {agreement.high:.2%}] (at least {limit:.2%})",
        _within(agreement, limit),
    )
    if gate.max_kl is not None:
        yield GateCheck(
            metrics.name,
            "max_kl",
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
    "nvfp4": "w4a16_nvfp4 (inputs stay 16-bit), or fp8",
    "w4a16_nvfp4": "int4_awq, or fp8",
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
    if metrics.format == "auto":
        yield "quantization.auto.effective_bits: more (what was measured is kept)"
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
