"""Rules about the LoRA adapters of a recipe: whether the runtime applies all that they hold.

Each function is one rule of contracts/data/rules/adapters.yaml, under its id in CHECKS. An adapter of the Hub is judged
when the store has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts import llmapi
from pipeline.plan.preflight.context import Check, Context, Objection
from pipeline.recipe import HubSource, PyTorchRuntime


def _files(context: Context) -> Iterator[Objection]:
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
        same = trained.lower() == base.lower() if both else _last(trained) == _last(base)
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


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower()


CHECKS: Mapping[str, Check] = {
    "adapter.files": _files,
    "adapter.layers": _layers,
    "adapter.release": _release,
    "adapter.base": _base,
    "adapter.graphs": _graphs,
}
