"""Rules about formats of weights and of the KV cache, and about the models that we can read.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.contracts.rules import rule
from pipeline.planning.preflight.finding import Check, Said
from pipeline.planning.preflight.subject import Model, Subject

KV_CACHE = "quantization.kv_cache"


def _kv_cache_keeps_context(subject: Subject) -> Iterator[Said]:
    """FP8 KV cache beside weights of other formats: the builder turns paged context attention off."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for model in subject.models:
        if model.kv_cache != "fp8" or model.format in kept:
            continue
        unsure = model.format == "auto" and set(subject.layer_formats(model)) & set(kept)
        yield _context_off(
            subject,
            (KV_CACHE, model.format_key),
            f"with {model.format_key} {model.format}",
            f"set {KV_CACHE} to auto, or {model.format_key} to {' or '.join(kept[:2])}",
            unsure=bool(unsure),
        )


def _int8_kv_cache(subject: Subject) -> Iterator[Said]:
    if any(model.kv_cache == "int8" for model in subject.models):
        yield _context_off(subject, (KV_CACHE,), "always", f"set {KV_CACHE} to auto or fp8", unsure=False)


def _context_off(subject: Subject, keys: tuple[str, ...], when: str, fix: str, *, unsure: bool) -> Said:
    recipe = subject.recipe
    wanted = {
        "kv_cache.reuse": recipe.kv_cache.reuse,
        "scheduler.chunked_context": recipe.scheduler.chunked_context,
        "draft": recipe.draft is not None,
    }
    needing = [key for key, needs in wanted.items() if needs]
    text = f"makes the engine builder turn paged context attention off ({when})"
    if not needing:
        return Said(
            keys, f"{text}; the engine then has no reuse, no chunked context and no draft", fix, "warning"
        )
    off = "set " + " and ".join(f"{key} to false" for key in needing) if "draft" not in needing else ""
    return Said(
        (*keys, *needing),
        f"{text}, and {', '.join(needing)} cannot do without it",
        f"{fix}; or {off}" if off else fix,
        "warning" if unsure else None,
    )


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


CHECKS: Mapping[str, Check] = {
    "kvq.weight_combo": _kv_cache_keeps_context,
    "kvq.int8": _int8_kv_cache,
    "model.class": _class,
    "calibrate.formats": _formats,
}
