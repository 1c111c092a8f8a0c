"""Freeze the samples to files: what is calibrated on can be read, hashed and used again.

calibration.jsonl and heldout.jsonl hold one {"tokens": […]} a line, never padded; dataset.json says where they come
from. The same inputs give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.sources.dataset import HELDOUT, TRAIN, DatasetFiles, resolve_dataset, sha256_of
from pipeline.stages.dataset.rows import DatasetRow, read_rows
from pipeline.stages.dataset.sampling import Sample, SampleDraw, SampleEncoder, draw
from pipeline.store import Json


def freeze(
    dataset: NamedDataset | LocalSource,
    checkpoint_dir: Path,
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    heldout_samples: int,
    into: Path,
    progress: Progress,
) -> dict[str, Json]:
    """Draw, template, tokenize and cut samples, and write them into a folder.

    Args:
        checkpoint_dir: Its tokenizer and chat template are used.
        samples: For calibration.
        max_tokens: Longer rows are cut.
        heldout_samples: For the gate; from the set's held-out split, else from the rows that calibration left.

    Returns:
        Facts for the manifest: name, license, digests, counts and lengths.

    Raises:
        UserError: The set does not exist, cannot be read, or has fewer usable samples than were asked for.
    """
    files = resolve_dataset(dataset)
    encoder = SampleEncoder(checkpoint_dir)
    train = _rows(files, TRAIN)
    calibration = draw(
        train,
        encoder,
        count=samples,
        max_tokens=max_tokens,
        seed=seed,
        purpose="calibration",
        progress=progress,
    )
    has_heldout = HELDOUT in files.paths
    rows = _rows(files, HELDOUT) if has_heldout else train
    heldout = draw(
        rows,
        encoder,
        count=heldout_samples,
        max_tokens=max_tokens,
        seed=seed,
        purpose="held-out",
        without=calibration.samples,
        same_file=not has_heldout,
        progress=progress,
    )
    _check_counts(
        files, [("calibration", samples, calibration, train), ("held-out", heldout_samples, heldout, rows)]
    )
    for name, drawn in (("calibration", calibration), ("heldout", heldout)):
        _write(into / f"{name}.jsonl", drawn.samples)
    facts: dict[str, Json] = {
        "dataset": files.name,
        "license": files.license,
        "files": files.digests(),
        "seed": seed,
        "max_tokens": max_tokens,
        **encoder.facts(),
        "calibration": _facts(into / "calibration.jsonl", calibration),
        "heldout": _facts(into / "heldout.jsonl", heldout),
        "prompt": _prompt(encoder, rows, heldout, max_tokens),
    }
    (into / "dataset.json").write_text(
        json.dumps(facts, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    for name, drawn in (("calibration", calibration), ("held-out", heldout)):
        tokens = sum(len(sample.tokens) for sample in drawn.samples)
        cut = sum(sample.cut for sample in drawn.samples)
        shortened = f", {cut} cut to {max_tokens}" if cut else ""
        progress.say(f"    {name}: {len(drawn.samples)} samples of {files.name}, {tokens} tokens{shortened}")
    return {key: value for key, value in facts.items() if key != "prompt"}


def _rows(files: DatasetFiles, split: str) -> list[DatasetRow]:
    return read_rows(files.paths[split], files.column, files.any_kind)


def _check_counts(files: DatasetFiles, draws: list[tuple[str, int, SampleDraw, list[DatasetRow]]]) -> None:
    problems = []
    for purpose, wanted, drawn, rows in draws:
        if len(drawn.samples) < wanted:
            reasons = "".join(
                f"; {count} passed over: {why}" for why, count in sorted(drawn.passed_over.items())
            )
            problems.append(
                f"  {purpose}: {wanted} samples asked for, {len(drawn.samples)} usable of {len(rows)} rows{reasons}"
            )
    if problems:
        fix = (
            "  Ask for fewer (quantization.calibration.samples, with allow_sample_count: true below 128; "
            "quantization.gate.samples), or give a larger set."
        )
        raise UserError("\n".join([f"data set {files.name} is too small:", *problems, fix]))


def _write(path: Path, samples: list[Sample]) -> None:
    lines = [json.dumps({"tokens": list(sample.tokens)}, separators=(",", ":")) for sample in samples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _facts(path: Path, drawn: SampleDraw) -> dict[str, Json]:
    lengths = sorted(len(sample.tokens) for sample in drawn.samples)
    return {
        "sha256": sha256_of(path),
        "samples": len(lengths),
        "tokens": sum(lengths),
        "shortest": lengths[0],
        "median": lengths[len(lengths) // 2],
        "longest": lengths[-1],
        "cut": sum(sample.cut for sample in drawn.samples),
        "passed_over": dict(sorted(drawn.passed_over.items())),
        "rows": [sample.row for sample in drawn.samples],
    }


def _prompt(
    encoder: SampleEncoder, rows: list[DatasetRow], heldout: SampleDraw, max_tokens: int
) -> dict[str, Json]:
    """A held-out question, for the sample answer that calibration shows."""
    tokens, question, answer = encoder.encode_prompt(rows[heldout.samples[0].row])
    return {"tokens": list(tokens[:max_tokens]), "text": question, "expected": answer}
