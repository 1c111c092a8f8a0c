"""Records of a migration: each says what was, what is instead, why, and who says so.

Text, JSON and tables are made of them. Settings of an engine are paired with arguments of the LLM API by
`contracts/data/migration.yaml`; their values are those that the runtimes of both recipes work out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.client.sampling import PARAMETERS, SamplingParameter
from pipeline.contracts import inflight_batcher, llmapi, trtllm_build
from pipeline.contracts import migration as contract
from pipeline.contracts.migration import EngineSetting
from pipeline.plan.performance import Forecast
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight import GeneratedConfig
from pipeline.prepare.facts import read_settings
from pipeline.prepare.report import PlanReport
from pipeline.recipe import PyTorchRuntime, Recipe, TensorRTRuntime
from pipeline.recipe.sections import RecipeValues
from pipeline.triton.deployment import TARGET_MODEL

Place = Literal["recipe", "engine", "triton", "requests"]
Effect = Literal["changed", "removed", "means", "carried over", "no counterpart"]
_PLACES: Mapping[contract.Kind, Place] = {"flags": "engine", "parameters": "triton", "triton": "triton"}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing of a deployment on engines, and what it is with the LLM API.

    Attributes:
        place: Key of the recipe, flag of trtllm-build, setting of config.pbtxt, or parameter of requests.
        effect: "means" is a key that stays and means something else; "carried over" is another name of the same.
        key: Name before.
        before: Value before.
        new_key: Name now: a key of the recipe, or a dotted argument of the LLM API; None: there is none.
        after: Value now; None with a `new_key` is the default of the release.
        reason: Why, or what differs; empty where nothing but the name does.
        sources: Documents that say so.
    """

    place: Place
    effect: Effect
    key: str
    before: Any
    new_key: str | None
    after: Any
    reason: str
    sources: tuple[str, ...]


def setting_changes(before: Recipe, after: Recipe, removed: Sequence[str]) -> Iterator[Change]:
    """Yield every setting of the engines of `before`, with its argument of the LLM API in `after`.

    Args:
        removed: Keys removed from the recipe, whose settings are not listed again.
    """
    assert isinstance(before.runtime, TensorRTRuntime), "the caller looked"
    assert isinstance(after.runtime, PyTorchRuntime), "it was made so"
    own, arguments = RecipeValues(before.model_dump(mode="json")), read_settings(after).arguments
    flags = _flags(read_settings(before))
    own_flags = {entry.partition("=")[0] for entry in before.runtime.build_flags}
    for fact in contract.settings():
        if fact.kind == "flags":
            value = None if fact.name in own_flags else flags.get(fact.name)
        else:
            value = own[fact.key] if fact.key is not None else None
        if value is None or (value == 0 and value is not False):
            continue
        if any(f"{fact.key}.".startswith(f"{gone}.") for gone in removed):
            continue
        yield _paired(fact, value, after.runtime.version, arguments)


def _paired(fact: EngineSetting, value: Any, version: str, arguments: Mapping[str, Any]) -> Change:
    place, name = _PLACES[fact.kind], f"--{fact.name}" if fact.kind == "flags" else fact.name
    argument = fact.argument_in(version)
    if argument is not None:
        after = RecipeValues(arguments)[argument]
        return Change(place, "carried over", name, value, argument, after, fact.because, fact.sources)
    if fact.key is not None:
        return Change(place, "carried over", name, value, fact.key, value, fact.because, fact.sources)
    return Change(place, "no counterpart", name, value, None, None, fact.reason, fact.sources)


def _flags(emitted: GeneratedConfig) -> dict[str, Any]:
    """Flags that the command for the target's engine names, with their values."""
    settings = emitted.build.get(TARGET, {})
    argv = settings.get("flags", [])
    assert isinstance(argv, list), "a command line"
    named = trtllm_build.named_flags(str(settings["version"]), [str(word) for word in argv]) if argv else ()
    return {name: value for name, value in dict(emitted.engines).get(TARGET, {}).items() if name in named}


def client_changes(before: Recipe, version: str) -> Iterator[Change]:
    """Yield what is other for requests that go to Triton itself, and what a release leaves undone for all."""
    models = contract.note("models")
    yield Change(
        "requests", "changed", "models", list(inflight_batcher.models()), "models", [TARGET_MODEL],
        models.because, models.sources,
    )  # fmt: skip
    known = {
        tensor.name
        for have in (llmapi.tensors(version), llmapi.own_tensors(version))
        for tensor in have.inputs
    }
    missing, ignored = contract.note("input"), contract.note("ignored")
    for name, parameter in PARAMETERS.items():
        if _was_offered(name, parameter, before) and (parameter.llmapi or "") not in known:
            yield Change(
                "requests", "no counterpart", name, parameter.backend, None, None,
                missing.because, missing.sources,
            )  # fmt: skip
    for name in llmapi.ignored_sampling(version):
        tensor = PARAMETERS[name].backend
        yield Change("requests", "no counterpart", name, tensor, None, None, ignored.because, ignored.sources)


# Guides have the same names in both; beams, and the logits of answers, are refused by both.
_ALIKE = ("guide_type", "guide", "length_penalty", "top_log_probs")


def _was_offered(name: str, parameter: SamplingParameter, before: Recipe) -> bool:
    """Whether requests to the engine could have the parameter, and it had an effect."""
    if parameter.backend is None or name in _ALIKE:
        return False
    if name == "num_draft_tokens":
        return before.draft is not None
    return name != "prompt_log_probs" or before.serving.prompt_log_probs


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both plans; None is not known, or not there."""

    name: str
    unit: str
    before: float | str | None
    after: float | str | None


def figures(reports: tuple[PlanReport, PlanReport]) -> tuple[Figure, ...]:
    """Put the figures of two plans side by side: memory, limits, and the forecast of speed."""
    before, after = (dict(_figures(report)) for report in reports)
    return tuple(
        Figure(name, unit, before.get((name, unit)), after.get((name, unit)))
        for name, unit in dict.fromkeys((*before, *after))
    )


def _figures(report: PlanReport) -> Iterator[tuple[tuple[str, str], float | str | None]]:
    memory, limits = report.memory, report.recipe.limits
    if memory is not None:
        rank = memory.tightest
        yield ("GPUs", ""), len(memory.ranks)
        for name, groups in _GROUPS.items():
            yield (name, "GiB a GPU"), round(sum(map(rank.group, groups)) / 2**30, 2)
        yield ("KV cache", "tokens"), memory.tokens
        yield ("requests at a time in memory", ""), memory.sequences
        yield ("tokens in a step", ""), max(model.step_tokens for model in memory.spec.models)
    yield ("requests at a time, by the limits", ""), limits.max_concurrency
    yield ("prompt and answer, by the limits", "tokens"), limits.max_sequence_tokens
    if report.performance is not None:
        for (name, unit), value in _SPEED.items():
            figure = value(report.performance)
            yield (
                (name, unit),
                figure if isinstance(figure, int) or figure is None else float(f"{figure:.3g}"),
            )
    elif "performance" in report.unknown:
        yield ("speed", ""), f"not known: {report.unknown['performance']}"


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights",), "runtime, activations, communication": ("runtime", "activations", "communication"),
    "KV cache": ("kv_cache",), "CUDA graphs": ("graphs",),
}  # fmt: skip
_SPEED: Mapping[tuple[str, str], Callable[[Forecast], float | None]] = {
    ("first token, alone", "ms"): lambda plan: plan.ttft_ms.value,
    ("between tokens, alone", "ms"): lambda plan: plan.itl_ms.value,
    ("first token p95, at the most requests", "ms"): lambda plan: plan.curve[-1].ttft_ms if plan.curve else None,
    ("between tokens p95, at the most requests", "ms"): lambda plan: plan.curve[-1].itl_p95_ms if plan.curve else None,
    ("requests at a time within the SLO", ""): lambda plan: plan.within_slo.batch if plan.within_slo else 0,
    ("tokens a second within the SLO", ""): lambda plan: plan.tokens_per_s.value if plan.tokens_per_s else 0,
}  # fmt: skip


def written(value: Any) -> str:
    """Write a value of a record for people."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {written(inner)}" for key, inner in value.items() if inner is not None)
            + "}"
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value))
    return str(value).lower() if isinstance(value, bool) else "by default" if value is None else str(value)
