"""Rules about what we ourselves can do: which models are read, which formats calibrated. Upstream may do more.

Each function is one rule of contracts/data/compatibility.yaml, which has its severity and sources, under its id in
CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts.compatibility import rule
from pipeline.planning.concern import Check, Said
from pipeline.planning.subject import Model, Subject


def _class(subject: Subject) -> Iterator[Said]:
    """Engines and CPU models are made from tensors that we read; `pytorch` reads an unquantized checkpoint itself."""
    facts = rule("model.class").facts
    for model, sizes in subject.sized:
        if subject.kind == "pytorch" and model.format == "none":
            continue
        doing = {"tensorrt": "converted", "cpu": "cpu"}.get(subject.kind, "calibrated")
        known: list[str] = facts[doing]
        if sizes.architecture not in known:
            how = "run with runtime.kind cpu" if doing == "cpu" else doing
            yield Said(
                (model.source_key, "runtime.kind"),
                f"is a {sizes.architecture or 'model of no named class'}, which cannot be {how}",
                f"one of {', '.join(known)}",
            )


def _formats(subject: Subject) -> Iterator[Said]:
    facts = rule("calibrate.formats").facts
    for model in subject.models:
        known = _known_formats(facts, model)
        if model.format not in known:
            of = (
                f" for {model.sizes.architecture}" if model.sizes and model.format in facts["formats"] else ""
            )
            yield Said((model.format_key,), f"cannot be calibrated{of} yet", f"one of {', '.join(known)}")
    cache = subject.recipe.quantization.kv_cache
    if cache not in facts["kv_caches"]:
        yield Said(
            ("quantization.kv_cache",), "cannot be calibrated yet", f"one of {', '.join(facts['kv_caches'])}"
        )


def _known_formats(facts: Mapping[str, Any], model: Model) -> list[str]:
    fused = model.sizes is not None and model.sizes.architecture in facts["fused"]
    return list(facts["fused_formats" if fused else "formats"])


CHECKS: Mapping[str, Check] = {"model.class": _class, "calibrate.formats": _formats}
