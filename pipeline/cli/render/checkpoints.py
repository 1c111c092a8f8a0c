"""Table of published checkpoints (`pipeline plan models`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pipeline.cli.output import aligned
from pipeline.plan.checkpoint_summary import CheckpointSummary, named_parameters
from pipeline.plan.lint import Finding
from pipeline.plan.memory.tensors import active_parameters, parameter_counts

_HEADER = (
    "model",
    "parameters",
    "active",
    "weights",
    "by format",
    "KV cache",
    "a token",
    "a sequence",
    "layers",
)


def models_json(summaries: Sequence[CheckpointSummary]) -> str:
    """Render every figure."""
    return json.dumps({"schema": 1, "models": [model.document() for model in summaries]}, indent=2)


def models_lines(summaries: Sequence[CheckpointSummary]) -> Iterator[str]:
    """Render a line for each checkpoint, published figures in brackets, and why others are refused."""
    rows = [_HEADER, *(_row(model) for model in summaries if model.sizes is not None)]
    yield from aligned(rows)
    for model in summaries:
        if model.sizes is None:
            yield ""
            yield f"{model.name}: cannot be read"
            yield from (f"  {fault}" for fault in model.faults)
        elif model.findings:
            yield ""
            yield f"{model.name}: {_count(model.findings)}"
            yield from (f"  {finding}" for finding in model.findings)
    if unread := sum(model.sizes is not None and model.findings is None for model in summaries):
        yield ""
        yield f"Files of weights were not judged of {unread}: no safetensors are there."


def _row(checkpoint: CheckpointSummary) -> tuple[str, ...]:
    assert checkpoint.sizes is not None, "the caller looked"
    counts = parameter_counts(checkpoint.sizes)
    named, active = named_parameters(checkpoint.name)
    draft, vision = sum(weight.parameters for weight in checkpoint.sizes.draft), counts["vision"]
    total = _billions(sum(counts.values()))
    total += f", {_billions(vision)} of a tower" if vision else ""
    total += f", and {_billions(draft)} MTP" if draft else ""
    size = sum(checkpoint.bytes_by_format.values())
    forms = ", ".join(f"{form} {_giga(count)}" for form, count in checkpoint.bytes_by_format.items())
    kinds = (
        f"{each.layers} {each.kind}" + (f" of {each.window}" if each.window else "")
        for each in checkpoint.caches
    )
    token = sum(each.token_bytes for each in checkpoint.caches)
    state = sum(each.sequence_bytes for each in checkpoint.caches)
    return (
        checkpoint.name,
        total + ("" if named is None else f" ({named / 1e9:g})"),
        _billions(active_parameters(checkpoint.sizes)) + ("" if active is None else f" ({active / 1e9:g})"),
        f"{_giga(size)} GB"
        + ("" if checkpoint.index_bytes is None else f" ({_giga(checkpoint.index_bytes)})"),
        forms,
        checkpoint.kv_cache,
        f"{token / 1024:.1f} KiB",
        f"{state / 2**20:.1f} MiB" if state else "-",
        ", ".join(kinds),
    )


def _count(findings: Sequence[Finding]) -> str:
    kinds = {"error": "errors", "warning": "warnings", "not judged": "not judged"}
    counts = ((kind, sum(finding.severity == kind for finding in findings)) for kind in kinds)
    return ", ".join(f"{count} {kind if count == 1 else kinds[kind]}" for kind, count in counts if count)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} G"


def _giga(size: int) -> str:
    return f"{size / 1e9:.1f}"
