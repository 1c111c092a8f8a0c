"""Rules about where checkpoints and samples come from: what the hub answers, and what a local folder holds.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.models.folder import ADAPTER_CONFIG, CONFIG
from pipeline.plan.preflight.context import Check, Context, Objection
from pipeline.recipe import HubSource

_REFUSED, _MISSING = (401, 403), (404,)
DATASET = "quantization.calibration.dataset"


def _gated(context: Context) -> Iterator[Objection]:
    for key, repo, status in _answers(context, _REFUSED):
        why = (
            "is gated, private or not there: without a token" if status == 401 else "is gated: to this token"
        )
        yield Objection(
            (key,),
            f"{why} the hub answers {status}",
            f"accept the conditions at https://huggingface.co/{repo}, and set HF_TOKEN to a token that may read it",
        )


def _missing(context: Context) -> Iterator[Objection]:
    for key, _, _ in _answers(context, _MISSING):
        section = key.removesuffix(".source")
        name = ADAPTER_CONFIG if section.startswith("adapters.") else CONFIG
        yield Objection(
            (key, f"{section}.revision"),
            f"has no {name} on the hub: it answers 404, as it does for a name or a revision that does not exist",
            "write another name or revision",
        )


def _files(context: Context) -> Iterator[Objection]:
    for model in context.models:
        if model.facts.problem:
            yield Objection((model.source_key,), model.facts.problem)


def _config(context: Context) -> Iterator[Objection]:
    for model in context.models:
        for fault in model.facts.config_faults if context.is_read(model) else ():
            said = f"{fault.key} = {fault.value}" if fault.value is not None else fault.key
            yield Objection((model.source_key,), f"config.json: {said}: {fault.problem}", fault.fix)


def _weights(context: Context) -> Iterator[Objection]:
    for model in context.models:
        for fault in model.facts.weight_faults:
            yield Objection((model.source_key,), fault)


def _tokenizer(context: Context) -> Iterator[Objection]:
    for model in context.models:
        used = model is context.target or (model.format != "none" and not model.is_head)
        if used and model.facts.has_tokenizer is False:
            yield Objection(
                (model.source_key,),
                "has no tokenizer.json",
                "where there is only tokenizer.model, load it with AutoTokenizer of transformers and call "
                "save_pretrained, which writes it",
            )


def _template(context: Context) -> Iterator[Objection]:
    """Without one a model completes texts, which is all that a base model does."""
    model, dataset = context.target, context.emitted.dataset if context.emitted is not None else None
    if model.facts.has_template is not False:
        return
    if dataset is not None and dataset.conversations:
        yield Objection(
            (model.source_key, DATASET),
            f"has no chat template, which the conversations of {DATASET} need",
            "give a data set of plain text, or add chat_template.jinja to the checkpoint",
        )
    else:
        yield Objection(
            (model.source_key,),
            "has no chat template: it is served for completions of text, and refuses chats",
            "if it is a model for chats, add chat_template.jinja to the checkpoint",
            severity="warning",
        )


def _dataset(context: Context) -> Iterator[Objection]:
    dataset = context.emitted.dataset if context.emitted is not None else None
    if dataset is not None and dataset.problem:
        yield Objection((DATASET,), dataset.problem)


def _answers(context: Context, wanted: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Models and adapters of the hub: key of the source, repository, and what the hub answers for it."""
    asked = context.machine.hub if context.machine is not None else {}
    keys = {model.role: model.source_key for model in context.models}
    for role, one in context.recipe.sources.items():
        key = keys.get(role, f"adapters.{role.partition('.')[2]}.source")
        if isinstance(one.source, HubSource) and (status := asked.get(one.source.repo)) in wanted:
            yield key, one.source.repo, status


CHECKS: Mapping[str, Check] = {
    "source.gated": _gated,
    "source.missing": _missing,
    "source.files": _files,
    "source.config": _config,
    "source.weights": _weights,
    "source.tokenizer": _tokenizer,
    "source.template": _template,
    "source.dataset": _dataset,
}
