"""Rules about lengths and the tokens of a step.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import rule
from pipeline.planning.preflight.finding import Check, Said
from pipeline.planning.preflight.subject import Subject

BATCH_TOKENS = "limits.max_batch_tokens"


def _clipped_batch_tokens(subject: Subject) -> Iterator[Said]:
    limits = subject.recipe.limits
    most = limits.max_sequence_tokens * limits.max_concurrency
    if limits.max_batch_tokens is not None and limits.max_batch_tokens > most:
        yield Said(
            (BATCH_TOKENS, "limits.max_concurrency"),
            f"is cut to {most} by the engine builder, which is limits.max_concurrency whole sequences",
            f"at most {most}",
        )


def _large_batch_tokens(subject: Subject) -> Iterator[Said]:
    given, most = subject.recipe.limits.max_batch_tokens, rule("build.max_num_tokens_large").facts["most"]
    if given is not None and given > most:
        yield Said(
            (BATCH_TOKENS,), f"is more than {most}, which the engine builder warns of", f"at most {most}"
        )


CHECKS: Mapping[str, Check] = {
    "build.max_num_tokens_clip": _clipped_batch_tokens,
    "build.max_num_tokens_large": _large_batch_tokens,
}
