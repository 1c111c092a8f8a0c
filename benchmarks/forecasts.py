#!/usr/bin/env python3
"""Forecasts of `pipeline plan` beside AIConfigurator's, on the same published measurements of servers.

    python benchmarks/forecasts.py [--every 1] [--json]

AIConfigurator is installed into an environment of its own, with the operators that it has measured; only the set-ups of
our rows are asked of it. Both are held against means of closed loops: so many requests at a time, all of which start at
once. Ours are fitted to these rows; the column "left out" is of fits without the set-up, as `pipeline plan accuracy`
has them. AIConfigurator is told model, GPU, formats, split, lengths and requests at a time, and nothing of the front
end; rows that it has no estimate for are left out of all columns but the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Mapping
from typing import Any

from benchmarks.common import HERE, markdown, peer_environment
from pipeline.plan.performance.accuracy import compute_figure
from pipeline.plan.performance.estimates import QUANTITY_NAMES, Quantity, figure_classes
from pipeline.plan.performance.published import PublishedFigure, figures

# Model of a row -> model, and formats of matrices and experts, as AIConfigurator names them.
MODELS: Mapping[str, tuple[str, str, str | None]] = {
    "llama-3.1-8b": ("meta-llama/Meta-Llama-3.1-8B", "float16", None),
    "llama-3.1-70b": ("nvidia/Llama-3.1-70B-Instruct-FP8", "fp8_static", None),
    "qwen3-32b": ("Qwen/Qwen3-32B", "fp8", None),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B-FP8", "fp8_block", "fp8_block"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "fp8_block", "fp8_block"),
    "deepseek-v3-nvfp4": ("nvidia/DeepSeek-V3.1-NVFP4", "nvfp4", "nvfp4"),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "float16", "w4a8_mxfp4_mxfp8"),
}
SYSTEMS = {"h100-sxm-80g": "h100_sxm", "h200-sxm-141g": "h200_sxm", "b200-sxm-180g": "b200_sxm"}
QUANTITIES: tuple[Quantity, ...] = ("tpot", "ttft-loaded")


def arguments(figure: PublishedFigure) -> dict[str, Any]:
    """Make the arguments of AIConfigurator's `cli_estimate` for a set-up."""
    model, matrices, experts = MODELS[figure.model]
    split, work = figure.split, figure.work
    asked: dict[str, Any] = {
        "model_path": model,
        "system_name": SYSTEMS[figure.gpu],
        "isl": work.prompt_tokens,
        "osl": work.output_tokens,
        "batch_size": -(-figure.batch // split.request_groups),
        "tp_size": split.shared,
        "attention_dp_size": split.request_groups,
        "gemm_quant_mode": matrices,
        "kvcache_quant_mode": "fp8" if figure.kv_cache == "fp8" else "float16",
    }
    if experts is not None:
        asked |= {
            "moe_quant_mode": experts,
            "moe_tp_size": split.expert_tensor,
            "moe_ep_size": split.expert,
        }
    return asked


def compared(every: int) -> list[dict[str, Any]]:
    """Compute the errors of both, class by class."""
    rows = [figure for figure in figures() if figure.kind == "closed-loop"][::every]
    program = peer_environment("aiconfigurator") / "python"
    done = subprocess.run(
        [program, HERE / "peers" / "estimates_aiconfigurator.py"],
        input=json.dumps([arguments(row) for row in rows]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    errors: dict[tuple[Quantity, tuple[str, str, str]], list[tuple[float, float]]] = {}
    for figure, answer in zip(rows, json.loads(done.stdout), strict=True):
        if answer is None:
            continue
        ours = compute_figure(figure)
        theirs: Mapping[Quantity, float] = {"ttft-loaded": answer[0], "tpot": answer[1]}
        for quantity in QUANTITIES:
            if (measured := figure.measured.get(quantity)) is not None:
                pair = (ours[quantity] / measured - 1, theirs[quantity] / measured - 1)
                errors.setdefault((quantity, figure.group), []).append(pair)
    return [row(quantity, group, errors.get((quantity, group), [])) for quantity, group in classes(rows)]


def classes(rows: list[PublishedFigure]) -> list[tuple[Quantity, tuple[str, str, str]]]:
    """List the classes of rows."""
    groups = sorted({row.group for row in rows})
    return [(quantity, group) for quantity in QUANTITIES for group in groups]


def row(quantity: Quantity, group: tuple[str, str, str], pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Sum up the errors of a class."""
    stored = next(
        figure_class
        for figure_class in figure_classes()
        if (figure_class.quantity, figure_class.structure, figure_class.format, figure_class.generation)
        == (quantity, *group)
    )
    ours, theirs = zip(*pairs, strict=True) if pairs else ((), ())
    return {
        "quantity": QUANTITY_NAMES[quantity],
        "class": stored.name,
        "rows": len(pairs),
        "ours": median(ours),
        "aiconfigurator": median(theirs),
        "bias": statistics.median(ours) if ours else None,
        "aiconfigurator_bias": statistics.median(theirs) if theirs else None,
        "left_out": stored.median,
    }


def median(errors: tuple[float, ...]) -> float | None:
    """Median of absolute errors."""
    return statistics.median(map(abs, errors)) if errors else None


def table(rows: list[dict[str, Any]]) -> str:
    """Render the errors as Markdown."""
    head = ("class", "rows", "ours", "AIConfigurator", "ours, bias", "AIConfigurator, bias", "ours, left out")
    lines = []
    for row in rows:
        figures_ = (row["ours"], row["aiconfigurator"])
        biases = (row["bias"], row["aiconfigurator_bias"])
        lines.append(
            (
                f"{row['quantity']}: {row['class']}",
                str(row["rows"]),
                *("-" if value is None else f"{value:.1%}" for value in figures_),
                *("-" if value is None else f"{value:+.1%}" for value in biases),
                f"{row['left_out']:.1%}",
            )
        )
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="of the rows, every so many (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args()
    rows = compared(wanted.every)
    print(json.dumps(rows) if wanted.json else table(rows))


if __name__ == "__main__":
    main()
