"""Rules about where checkpoints come from: what the hub answers.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.planning.preflight.finding import Check, Said
from pipeline.planning.preflight.subject import Model, Subject
from pipeline.recipe import HubSource

_REFUSED, _MISSING = (401, 403), (404,)


def _gated(subject: Subject) -> Iterator[Said]:
    for model, repo, status in _answers(subject, _REFUSED):
        why = (
            "is gated, private or not there: without a token" if status == 401 else "is gated: to this token"
        )
        yield Said(
            (model.source_key,),
            f"{why} the hub answers {status}",
            f"accept the conditions at https://huggingface.co/{repo}, and set HF_TOKEN to a token that may read it",
        )


def _missing(subject: Subject) -> Iterator[Said]:
    for model, _, _ in _answers(subject, _MISSING):
        yield Said(
            (model.source_key, model.source_key.replace("source", "revision")),
            "has no config.json on the hub: it answers 404, as it does for a name or a revision that does not exist",
            "write another name or revision",
        )


def _answers(subject: Subject, wanted: tuple[int, ...]) -> Iterator[tuple[Model, str, int]]:
    """Models of the hub, by their repository and what it answers for them."""
    recipe, asked = subject.recipe, subject.machine.hub if subject.machine is not None else {}
    for model, checkpoint in zip(subject.models, (recipe.model, recipe.draft), strict=False):
        if checkpoint is None or not isinstance(checkpoint.source, HubSource):
            continue
        status = model.facts.access or asked.get(checkpoint.source.repo)
        if status in wanted:
            yield model, checkpoint.source.repo, status


CHECKS: Mapping[str, Check] = {"source.gated": _gated, "source.missing": _missing}
