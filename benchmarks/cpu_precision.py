"""The CPU engine in f32 and in bf16: time of a step by size of the model and load, and what bf16 costs in quality.

    python benchmarks/cpu_precision.py [--hidden 256 512 1024]      random Llamas of four layers, a size each
    python benchmarks/cpu_precision.py CHECKPOINT [--samples 16]    one model, with perplexity and top-1 agreement

A step decodes one token of each sequence, behind 64 others; "prompt" computes 512 tokens of one. Both types take turns,
round by round, and medians are reported. Quality is measured by the engine itself, on held-out text of
calibration/support: each token is predicted from those before it. Resident memory is that of a process of its own, with
a KV cache of 64 MiB, beside what `pipeline plan` counts. "auto" is what the engine would choose here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.common import ROOT, markdown
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import deployment_spec, plan_memory
from pipeline.plan.plan import TARGET
from pipeline.progress import Silent
from pipeline.recipe import Recipe
from pipeline.runtimes.cpu.engine import EngineSettings
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.paged_model import PagedModel, TokenSlice
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.models import make_checkpoint

PRECISIONS = ("f32", "bf16")
LOADS = {"1": 1, "8": 8, "16": 16}
PAST, PROMPT, LENGTH = 64, 512, 256


def load(folder: Path, precision: str) -> PagedModel:
    model = PagedModel(folder, EngineSettings(precision=precision, threads=None))  # type: ignore[arg-type]
    model.allocate([64] * len(model.windows))
    return model


def _tables(model: PagedModel, tokens: int) -> list[BlockTable]:
    blocks = np.arange(-(-tokens // model.block_size), dtype=np.int32)
    return [BlockTable(blocks) for _ in model.windows]


def steps(model: PagedModel) -> dict[str, list[TokenSlice]]:
    """Load -> the step that it asks for; sequences read the same blocks, which costs the same."""
    tables = _tables(model, PROMPT)
    found = {name: [TokenSlice([9], PAST, tables, 1)] * count for name, count in LOADS.items()}
    return found | {"prompt": [TokenSlice([9] * PROMPT, 0, tables, 1)]}


def step_ms(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Load -> precision -> median time of a step."""
    models = {precision: load(folder, precision) for precision in PRECISIONS}
    taken: dict[str, dict[str, list[float]]] = {}
    for at in range(-2, rounds):  # the first rounds warm up
        for precision, model in models.items():
            for name, step in steps(model).items():
                started = time.perf_counter()
                model.forward(step)
                if at >= 0:
                    times = taken.setdefault(name, {}).setdefault(precision, [])
                    times.append(1e3 * (time.perf_counter() - started))
    return {
        name: {precision: statistics.median(times) for precision, times in by.items()}
        for name, by in taken.items()
    }


def resident_mib(folder: Path, precision: str) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_resident_mib, (folder, precision))


def _resident_mib(folder: Path, precision: str) -> int:
    model = PagedModel(folder, EngineSettings(precision=precision))  # type: ignore[arg-type]
    model.allocate([(64 << 20) // sum(model.block_bytes)] * len(model.windows))
    for step in steps(model).values():
        model.forward(step)
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096 >> 20


def planned_mib(checkpoint: Path, precision: str) -> int:
    recipe = Recipe.model_validate(
        {
            "name": "planned",
            "model": {"source": f"local:{checkpoint.resolve()}"},
            "runtime": {"kind": "cpu", "precision": precision, "kv_cache_mib": 64},
            "limits": {"max_input_tokens": PROMPT, "max_output_tokens": LENGTH, "max_concurrency": 16},
        }
    )
    sizes = ModelSizes.from_config(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    assert sizes is not None
    asked = deployment_spec(recipe, {TARGET: sizes}, ram_bytes=1 << 40)
    assert asked is not None
    return plan_memory(asked).ranks[0].used >> 20


def texts(checkpoint: Path, count: int) -> Iterator[list[int]]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    lines = (ROOT / "calibration/support/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:count]:
        text = "\n".join(turn["content"] for turn in json.loads(line)["messages"])
        yield tokenizer.encode(text).ids[:LENGTH]


def log_probs(model: PagedModel, tokens: list[int]) -> npt.NDArray[np.float64]:
    """[len(tokens) - 1, vocab]: of the token that follows each but the last."""
    logits = model.forward([TokenSlice(tokens, 0, _tables(model, len(tokens)), len(tokens))])[:-1].astype(
        np.float64
    )
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def quality(folder: Path, checkpoint: Path, samples: int) -> dict[str, float]:
    """Perplexity of both, and the share of positions where their best tokens are the same."""
    exact, rounded = (load(folder, precision) for precision in PRECISIONS)
    losses, same = np.zeros(2), list[bool]()
    for tokens in texts(checkpoint, samples):
        both = [log_probs(model, tokens) for model in (exact, rounded)]
        losses -= [values[np.arange(len(tokens) - 1), tokens[1:]].sum() for values in both]
        same += (both[0].argmax(axis=-1) == both[1].argmax(axis=-1)).tolist()
    first, second = np.exp(losses / len(same))
    return {
        "positions": len(same),
        "f32_perplexity": first,
        "bf16_perplexity": second,
        "perplexity_increase": second / first - 1,
        "top1_agreement": sum(same) / len(same),
    }


def run(checkpoint: Path | None, hidden: list[int], rounds: int, samples: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        made = {
            f"hidden {size}": Path(temporary, f"checkpoint-{size}")
            for size in (hidden if checkpoint is None else ())
        }
        for size, folder in zip(hidden, made.values(), strict=False):
            heads = size // 64
            make_checkpoint(folder, hidden=size, layers=4, heads=heads, kv_heads=max(1, heads // 4),
                            intermediate=4 * size, vocab=4096)  # fmt: skip
        for name, source in (made if checkpoint is None else {checkpoint.name: checkpoint}).items():
            folder = Path(temporary, "ir", name)
            build_ir(source, folder, progress=Silent())
            found.append(
                {
                    "model": name,
                    "auto": PagedModel(folder, EngineSettings()).precision,
                    "step_ms": step_ms(folder, rounds),
                    **({"quality": quality(folder, source, samples)} if checkpoint else {}),
                    "resident_mib": {precision: resident_mib(folder, precision) for precision in PRECISIONS},
                    "planned_mib": {precision: planned_mib(source, precision) for precision in PRECISIONS},
                }
            )
    return found


def table(result: list[dict[str, Any]]) -> str:
    rows = [
        (
            row["model"],
            load,
            *(f"{times[name]:.3f}" for name in PRECISIONS),
            f"{times['f32'] / times['bf16']:.2f}",
        )
        for row in result
        for load, times in row["step_ms"].items()
    ]
    text = markdown(("model", "sequences", "f32, ms", "bf16, ms", "times as fast"), rows)
    for row in result:
        memory = ", ".join(
            f"{size} MiB in {name} (planned: {row['planned_mib'][name]})"
            for name, size in row["resident_mib"].items()
        )
        text += f"\n\n{row['model']}: auto is {row['auto']} here; resident {memory}."
        if found := row.get("quality"):
            text += (
                f" Perplexity {found['f32_perplexity']:.4f} in f32, {found['bf16_perplexity']:.4f} in bf16 "
                f"({found['perplexity_increase']:+.3%}), top-1 agreement {found['top1_agreement']:.2%}, over "
                f"{found['positions']} positions."
            )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=16, help="texts whose perplexity is measured")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args()
    result = run(chosen.checkpoint, chosen.hidden, chosen.rounds, chosen.samples)
    print(json.dumps(result, indent=2) if chosen.json else table(result))


if __name__ == "__main__":
    main()
