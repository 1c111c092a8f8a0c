"""Rules about what the response cache answers.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Check, Said


def _unchecked(subject: Subject) -> Iterator[Said]:
    semantic = subject.recipe.cache.semantic
    if semantic is not None and semantic.checks == () and not semantic.scorer:
        yield Said(
            ("cache.semantic.checks",),
            "turns all checks of near questions off: unless the learned scorer decides, each gets the answer of the"
            f" nearest one from a cosine of {semantic.min_similarity:g} on, whatever it says",
            "leave it out for all checks, or name some",
        )


CHECKS: Mapping[str, Check] = {"cache.unchecked": _unchecked}
