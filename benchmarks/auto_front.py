"""Format `auto` over budgets of bits, beside every uniform format: bits a weight against perplexity and KL divergence.

    python benchmarks/auto_front.py [--recipe tiny-cpu] [--formats int4_awq w4a16_nvfp4 fp8 int8_sq] [--bits 5 6 7]
    python benchmarks/auto_front.py --json                       the same as JSON
    python benchmarks/auto_front.py --picture front.svg          and as a picture

Each row is a build of the recipe up to `evaluate`: the figures are the gate's, of exported files on held-out text. The
budgets are the bits of every uniform format and those of `--bits`. Sensitivity is measured once; what the store has is
not made again, so that another budget takes as long as its own export.

A uniform format and the best `auto` that takes no more bits are told apart where the 95 % intervals of their KL
divergence are apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from pipeline.charts import inline_svg, svg_text
from pipeline.contracts.engine_memory import format_bits
from pipeline.prepare import prepare
from pipeline.progress import Silent
from pipeline.recipe import load_recipe
from pipeline.stages import Builder
from pipeline.stages.evaluate.results import read_metrics
from pipeline.store import Store

FORMATS = ("int4_awq", "w4a16_nvfp4", "fp8", "int8_sq")
BITS = (5.0, 6.0, 7.0)
# Figures are wanted, whatever they are.
OPEN_GATE = ("quantization.gate.max_perplexity_increase=10", "quantization.gate.min_top1_agreement=0")


@dataclass(frozen=True, slots=True)
class Row:
    """One build: what it was asked for, and how far it is from the original on held-out text."""

    format: str
    bits: float  # a weight of the linear layers, scales included
    perplexity_increase: float
    top1_agreement: float
    kl: float  # nats a position
    kl_low: float
    kl_high: float
    layers: dict[str, int]  # format -> number of layers

    @property
    def name(self) -> str:
        return self.format if self.format != "auto" else f"auto, {self.bits:.2f} bits"


def measure(recipe: str, store: Store, formats: Sequence[str], form: str, bits: float, block: int) -> Row:
    """Build a recipe up to its evaluation, in one format or under a budget."""
    overrides = [f"quantization.format={form}", f"quantization.awq_block_size={block}", *OPEN_GATE]
    if form == "auto":
        overrides.append(
            f"quantization.auto={{effective_bits: {bits}, formats: [{', '.join(sorted(formats))}]}}"
        )
    elif form not in ("int4_awq", "w4a8_awq"):
        overrides.remove(f"quantization.awq_block_size={block}")
    builder = Builder(prepare(load_recipe(recipe, overrides), store), store, Silent())
    calibrated, evaluation = builder.run("calibrate.target"), builder.run("evaluate")
    figures = read_metrics(evaluation.path)[0]
    kept = json.loads((calibrated.path / "calibration.json").read_text(encoding="utf-8"))
    chosen = kept.get("auto", {"effective_bits": bits, "formats": {form: 0}})
    return Row(
        form,
        chosen["effective_bits"],
        figures.perplexity_increase.value,
        figures.top1_agreement.value,
        figures.mean_kl.value,
        figures.mean_kl.low,
        figures.mean_kl.high,
        chosen["formats"],
    )


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare each uniform format with the best `auto` of no more bits."""
    found = []
    for candidate in rows:
        mixes = [row for row in rows if row.format == "auto" and row.bits <= candidate.bits]
        if candidate.format == "auto" or not mixes:
            continue
        best = min(mixes, key=lambda row: row.kl)
        word = "not told apart from"
        if best.kl_high < candidate.kl_low:
            word = "better than"
        elif best.kl_low > candidate.kl_high:
            word = "worse than"
        found.append(
            {"format": candidate.format, "bits": candidate.bits, "auto_bits": best.bits, "verdict": word}
        )
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown of the rows and of the verdicts."""
    rows = [Row(**row) for row in result["rows"]]
    lines = [
        (
            row.name,
            f"{row.bits:.2f}",
            f"{row.perplexity_increase:+.2%}",
            f"{row.top1_agreement:.2%}",
            f"{row.kl:.5f} [{row.kl_low:.5f}, {row.kl_high:.5f}]",
            ", ".join(f"{form} {count}" for form, count in row.layers.items())
            if row.format == "auto"
            else "",
        )
        for row in rows
    ]
    head = ("format", "bits a weight", "perplexity", "top-1 agreement", "KL, nats a position", "layers")
    said = [
        f"- `auto` at {row['auto_bits']:.2f} bits is {row['verdict']} `{row['format']}` at {row['bits']:.2f}."
        for row in result["verdicts"]
    ]
    return "\n".join([markdown(head, lines), "", *said])


def picture(result: dict[str, Any]) -> str:
    """An SVG of bits against KL divergence."""

    def draw() -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        rows = [Row(**row) for row in result["rows"]]
        front = sorted((row for row in rows if row.format == "auto"), key=lambda row: row.bits)
        axes.plot([row.bits for row in front], [row.kl for row in front], "o-", label="auto")
        for row in rows:
            if row.format != "auto":
                axes.plot([row.bits], [row.kl], "x")
                axes.annotate(row.format, (row.bits, row.kl), textcoords="offset points", xytext=(4, 4))
        axes.set(xlabel="bits a weight", ylabel="KL divergence, nats a position", yscale="log")
        axes.legend()
        return figure

    return svg_text(
        inline_svg(draw, "auto-front", "Bits a weight against KL divergence of auto and uniform formats")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny-cpu", help="name or file")
    parser.add_argument("--store", type=Path, help="folder; by default the usual store")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="to choose from, and each alone")
    parser.add_argument("--bits", nargs="*", type=float, default=list(BITS), help="more budgets")
    parser.add_argument("--block", type=int, default=64, help="weights that share an AWQ scale")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, help="file of an SVG")
    chosen = parser.parse_args()
    store = Store.at(chosen.store)
    bits = {form: format_bits(form, chosen.block) for form in chosen.formats}
    rows = [
        measure(chosen.recipe, store, chosen.formats, form, budget, chosen.block)
        for form, budget in bits.items()
    ]
    for budget in sorted({*bits.values(), *chosen.bits}):
        rows.append(measure(chosen.recipe, store, chosen.formats, "auto", budget, chosen.block))
    result = {"rows": [asdict(row) for row in rows], "verdicts": verdicts(rows)}
    if chosen.picture:
        chosen.picture.write_text(picture(result), encoding="utf-8")
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
