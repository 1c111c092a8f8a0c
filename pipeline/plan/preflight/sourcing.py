"""Rules about checkpoints, samples, adapters: what the hub answers, what a local folder holds, what a runtime applies.

Each function is one rule of contracts/data/rules, under its id in CHECKS or ADAPTER_CHECKS. An adapter of the Hub is
judged when the store has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts import llmapi
from pipeline.models.folder import ADAPTER_CONFIG, CONFIG
from pipeline.plan.preflight.context import Check, Context, Objection
from pipeline.recipe import HubSource, PyTorchRuntime

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
            entry = f"{fault.key} = {fault.value}" if fault.value is not None else fault.key
            yield Objection((model.source_key,), f"config.json: {entry}: {fault.problem}", fault.fix)


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
    model, dataset = context.target, context.emitted.dataset
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
    dataset = context.emitted.dataset
    if dataset is not None and dataset.problem:
        yield Objection((DATASET,), dataset.problem)


def _answers(context: Context, wanted: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Models and adapters of the hub: key of the source, repository, and what the hub answers for it."""
    statuses = context.machine.hub if context.machine is not None else {}
    keys = {model.role: model.source_key for model in context.models}
    for role, checkpoint in context.recipe.sources.items():
        key = keys.get(role, f"adapters.{role.partition('.')[2]}.source")
        if (
            isinstance(checkpoint.source, HubSource)
            and (status := statuses.get(checkpoint.source.repo)) in wanted
        ):
            yield key, checkpoint.source.repo, status


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


def _adapter_files(context: Context) -> Iterator[Objection]:
    for name, adapter in context.target.facts.adapters.items():
        for fault in adapter.faults:
            yield Objection((_key(name),), fault)


def _layers(context: Context) -> Iterator[Objection]:
    sizes = context.target.sizes
    if sizes is None:
        return
    for name, adapter in context.target.facts.adapters.items():
        for fault in adapter.base_faults(sizes):
            yield Objection((_key(name), "model.source"), fault)


def _release(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    assert isinstance(runtime, PyTorchRuntime), "the rule is about the PyTorch backend"
    if context.release_problem:
        return
    for name, adapter in context.target.facts.adapters.items():
        unknown = [
            module.name
            for module in adapter.modules
            if llmapi.lora_module(runtime.version, module.name) is None
        ]
        if unknown:
            yield Objection(
                (_key(name), "runtime.version"),
                f"adapts {unknown[0]}, to which TensorRT-LLM {runtime.version} applies no adapters",
                "another release, or merge the adapter into its base",
            )
        if adapter.has_alphas:
            yield Objection(
                (_key(name), "runtime.version"),
                "has alpha_pattern, which TensorRT-LLM does not read: layers would be scaled by lora_alpha",
                "train it with one lora_alpha, or merge it into its base",
            )


def _base(context: Context) -> Iterator[Objection]:
    source = context.recipe.model.source
    base = source.repo if isinstance(source, HubSource) else source.path.name
    for name, adapter in context.target.facts.adapters.items():
        trained = adapter.base.rstrip("/")
        both = "/" in base and trained.count("/") == 1 and not trained.startswith(("/", "."))
        same = trained.lower() == base.lower() if both else _last_part(trained) == _last_part(base)
        if trained and not same:
            yield Objection(
                (_key(name), "model.source"), f"was trained for {trained[:120]}, and model.source is {base}"
            )


def _graphs(context: Context) -> Iterator[Objection]:
    runtime = context.recipe.runtime
    if context.recipe.adapters and isinstance(runtime, PyTorchRuntime) and runtime.cuda_graphs:
        yield Objection(
            ("runtime.cuda_graphs", "adapters"),
            f"is turned off beside adapters: TensorRT-LLM {runtime.version} answered wrongly with both",
        )


def _key(name: str) -> str:
    return f"adapters.{name}.source"


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


ADAPTER_CHECKS: Mapping[str, Check] = {
    "adapter.files": _adapter_files,
    "adapter.layers": _layers,
    "adapter.release": _release,
    "adapter.base": _base,
    "adapter.graphs": _graphs,
}
