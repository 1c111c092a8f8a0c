"""One case of a rule: a recipe, and what is changed of what is known, or of what will be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.contracts.rules import Severity
from pipeline.models.adapter import Adapter, AdapterModule
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.model_facts import ModelFacts, TokenizerFacts, offline_facts, tokenizer_corpus
from pipeline.plan.preflight import Finding, GeneratedConfig, findings
from pipeline.plan.preflight.context import DatasetFacts
from pipeline.prepare.facts import read_settings
from pipeline.recipe import load_recipe
from tests.support.tensorrt import DRAFTED

# The first with a draft.
FP8, LLAMA_70B, QWEN72, MIXTRAL = "llama-3.1-8b-fp8", "llama-3.3-70b-fp8", "qwen2.5-72b-fp8", "mixtral-8x7b"
EAGLE, NVFP4, AWQ = "llama-3.1-8b-eagle3", "llama-3.3-70b-nvfp4", "llama-3.1-8b-int4-awq"
QWEN3, PHI, TINY = "qwen3-32b-fp8", "phi-4-fp8", "tiny-cpu"
TP, PP, EP = "runtime.tensor_parallel", "runtime.pipeline_parallel", "runtime.expert_parallel"
PLAIN = ("quantization.kv_cache=auto",)
TO_AWQ = ("quantization.format=int4_awq", *PLAIN)
W4A8 = ("quantization.format=w4a8_awq",)
NO_CONTEXT = ("kv_cache.reuse=false", "scheduler.chunked_context=false", "limits.max_batch_tokens=8192")
TO_PYTORCH = ("runtime.kind=pytorch",)
NGRAM = ("runtime.speculation={method: ngram, max_draft_tokens: 4}",)

Models = Callable[[dict[str, ModelFacts]], Mapping[str, ModelFacts]]
Emitted = Callable[[GeneratedConfig], GeneratedConfig]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, and the gravest answer of the rule; None: it says nothing."""

    rule: str
    says: Severity | None
    recipe: str
    overrides: tuple[str, ...] = ()
    models: Models | None = None  # changes what is known of the models
    emitted: Emitted | None = None  # changes what will be written
    machine: MachineFacts | None = None

    def __str__(self) -> str:
        return f"{self.rule}-{self.says}-{self.recipe}"

    def findings(self) -> tuple[Finding, ...]:
        """Those of the rule."""
        recipe = load_recipe(self.recipe, (*(DRAFTED if self.recipe == FP8 else ()), *self.overrides))
        known, written = offline_facts(recipe), read_settings(recipe)
        models = self.models(known) if self.models else known
        found = findings(recipe, models, self.machine, self.emitted(written) if self.emitted else written)
        return tuple(finding for finding in found if finding.rule == self.rule)


def sized(role: str = "target", **changes: Any) -> Models:
    """Other sizes of one model."""

    def change(known: dict[str, ModelFacts]) -> Mapping[str, ModelFacts]:
        sizes = known[role].sizes
        assert sizes is not None
        return known | {role: replace(known[role], sizes=replace(sizes, **changes))}

    return change


def published(form: str, by: str = "") -> Models:
    """Weights of the target that are published in a format, stored `by` the rules of a program."""

    def change(known: dict[str, ModelFacts]) -> Mapping[str, ModelFacts]:
        sizes = known["target"].sizes
        assert sizes is not None
        layer = sizes.blocks[0]
        stored = replace(layer, weights=tuple(replace(weight, stored=form) for weight in layer.weights))
        changed = replace(sizes, blocks=(stored, *sizes.blocks[1:]), quantized_by=by)
        return known | {"target": replace(known["target"], sizes=changed)}

    return change


def known(role: str = "target", **changes: Any) -> Models:
    """Other facts of one model."""
    return lambda facts: facts | {role: replace(facts[role], **changes)}


def unread(architecture: str, role: str = "target") -> Models:
    """A model of which only the class is known."""
    return known(role, sizes=None, architecture=architecture)


def adapted(
    layer: str = "layers.0.self_attn.q_proj", shape: tuple[int, int] = (8192, 8192), **facts: Any
) -> Models:
    """An adapter "tone" of one layer of the target, of a shape [outputs, inputs]."""
    module = AdapterModule(layer, f"base_model.model.model.{layer}", 8, shape[1], shape[0], 2.0)
    return known(adapters={"tone": Adapter(modules=(module,), **facts)})


def samples(**facts: Any) -> Emitted:
    """Other calibration samples."""
    return lambda written: replace(written, dataset=DatasetFacts(**facts))


def flags(role: str = "target", **changes: str) -> Emitted:
    """Other values of flags of trtllm-build: the last one counts."""

    def change(written: GeneratedConfig) -> GeneratedConfig:
        settings = written.build[role]
        argv = [
            *settings["flags"],
            *(word for name, value in changes.items() for word in (f"--{name}", value)),
        ]  # type: ignore[misc]
        words = [word for word in argv if word]
        return replace(written, build={**written.build, role: {**settings, "flags": words}})

    return change


def arguments(**changes: Any) -> Emitted:
    """Other arguments of the LLM API."""

    def change(written: GeneratedConfig) -> GeneratedConfig:
        settings = {**written.build["target"], "arguments": {**written.arguments, **changes}}
        return replace(written, build={**written.build, "target": settings})

    return change


def package(**changes: Any) -> Emitted:
    """Other settings of the package; a mapping changes keys of its section."""

    def change(written: GeneratedConfig) -> GeneratedConfig:
        merged = {
            name: {**written.of_package(name), **value} if isinstance(value, Mapping) else value
            for name, value in changes.items()
        }
        return replace(written, package={**written.package, **merged})

    return change


Ids = tuple[tuple[int, ...], ...] | None
IDS: Ids = tuple((number,) for number in range(len(tokenizer_corpus())))
ONE_DIFFERS: Ids = (*((number,) for number in range(len(tokenizer_corpus()) - 1)), (0,))
FILES, SPECIAL = {"tokenizer.json": "same"}, {"<eos>": 2}


def tokenizers(
    draft_special: Mapping[str, int] = SPECIAL,
    draft_files: Mapping[str, str] = FILES,
    draft_ids: Ids = IDS,
) -> Models:
    """Facts of the models, with these tokenizers."""

    def change(known: dict[str, ModelFacts]) -> Mapping[str, ModelFacts]:
        found = {
            "target": TokenizerFacts(FILES, SPECIAL, IDS),
            "draft": TokenizerFacts(draft_files, draft_special, draft_ids),
        }
        return {role: replace(facts, tokenizer=found[role]) for role, facts in known.items()}

    return change
