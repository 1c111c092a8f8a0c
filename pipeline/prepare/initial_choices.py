"""Choices of a first recipe: a draft, the GPU of this machine, a release; and reasons why an option is ruled out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.contracts import support
from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import Track, releases
from pipeline.contracts.version_range import is_candidate
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.compatibility import check_compatibility, feature_issue
from pipeline.plan.machine_facts import GpuFacts, contract_name
from pipeline.plan.memory.tensors import parameter_counts
from pipeline.plan.model_facts import TokenizerFacts, read_model_facts
from pipeline.plan.performance.compare import Comparison, DeploymentOption
from pipeline.prepare.report import PlanReport
from pipeline.recipe import Draft, HubSource, LocalSource, Recipe
from pipeline.recipe.catalog import CatalogEntry, entries

# Features that a recipe uses unless it says otherwise -> the setting that says otherwise.
_DEFAULT_FEATURES = {
    "chunked_prefill": ("scheduler", "chunked_context"),
    "kv_reuse": ("kv_cache", "reuse"),
}


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A draft as a packaged recipe has it, and a sentence that says why it is known to fit."""

    draft: Draft
    why: str

    @property
    def values(self) -> dict[str, Any]:
        """Values for a recipe, defaults left out."""
        keys = {"source", "revision", "method", "max_draft_tokens"}
        return self.draft.model_dump(mode="json", include=keys, exclude_defaults=True, exclude_none=True)


@cache
def _packaged() -> tuple[CatalogEntry, ...]:
    """The packaged recipes, which are read once: a first recipe asks for them several times."""
    return tuple(entries())


def known_draft(source: HubSource | LocalSource, sizes: ModelSizes, *, eagle: bool) -> KnownDraft | None:
    """Find a draft for a model.

    Args:
        eagle: Whether the runtime takes Eagle-3 heads.

    Returns:
        For a repository of the Hub, the draft of a packaged recipe for the same one; for a local folder, a local draft
        of at most half its size, whose tokenizer gives the same ids. None if there is none.
    """
    own = TokenizerFacts.read(source.path) if isinstance(source, LocalSource) else None
    for entry in _packaged():
        other = entry.recipe
        if other is None or other.draft is None or (other.draft.method == "eagle3" and not eagle):
            continue
        draft_source = other.draft.source
        if isinstance(source, HubSource):
            if other.model.source == source:
                return KnownDraft(other.draft, f"the draft of the recipe {other.name} for the same model")
        elif (
            own is not None
            and isinstance(draft_source, LocalSource)
            and TokenizerFacts.read(draft_source.path) == own
            and _is_smaller(draft_source.path, sizes)
        ):
            why = f"the draft of the recipe {other.name}, whose tokenizer gives the same ids"
            return KnownDraft(other.draft, why)
    return None


def _is_smaller(folder: Path, than: ModelSizes) -> bool:
    sizes = read_model_facts(folder).sizes
    return sizes is not None and 2 * _weights(sizes) <= _weights(than)


def _weights(sizes: ModelSizes) -> int:
    return sum(parameter_counts(sizes).values())


def machine_gpu(devices: Sequence[GpuFacts]) -> tuple[str, int]:
    """The GPU of this machine in the contracts, and how many there are of it."""
    named = [name for device in devices if (name := contract_name(device)) is not None]
    if not named:
        raise UserError(f"{devices[0].name} is none of the known GPUs; name one like it with --gpu")
    most = max(dict.fromkeys(named), key=named.count)
    return most, named.count(most)


def newest_release(kind: Track, device: str, architecture: str | None = None) -> str:
    """Find the newest stable release that has the runtime, a container, and knows the GPU.

    Args:
        architecture: Class of the model; the newest stable release that lists it is taken, else the first candidate
            that does, else the newest stable release.
    """
    stable = [release for release in reversed(releases()) if not release.candidate]
    candidates = [release for release in releases() if release.candidate]
    judged = [
        check_compatibility(release.version, kind, device)
        for release in (*stable, *candidates)
        if release.containers
    ]
    offered = [answer.version for answer in judged if answer.offered]
    if not offered or is_candidate(offered[0]):
        refused = (answer.reasons for answer in judged if not is_candidate(answer.version))
        reasons = (reason.text for group in refused for reason in group if reason.severity == "error")
        raise InvalidInput(device, [Fault(reason) for reason in dict.fromkeys(reasons)])
    listing = support.listing(architecture) if architecture is not None and kind == "pytorch" else ()
    return next((version for version in offered if version in listing), offered[0])


def why_release(version: str, kind: Track, architecture: str) -> str:
    """Say why `newest_release` chose a release."""
    if is_candidate(version):
        return f"a release candidate, the first that lists {architecture}: no stable release does"
    return f"the newest stable release with runtime {kind} whose container is known"


def lacking_features(architecture: str, version: str, device: str) -> dict[tuple[str, str], str]:
    """Map settings that a recipe has on by default to why upstream does not have that for a model on a GPU."""
    issues = {
        setting: feature_issue(architecture, name, version, gpu(device))
        for name, setting in _DEFAULT_FEATURES.items()
    }
    return {
        key: issue.problem for key, issue in issues.items() if issue is not None and issue.severity == "error"
    }


def example_recipe(form: str) -> Recipe:
    """A packaged recipe with a budget for this format."""
    fitting = (entry.recipe for entry in _packaged() if entry.quantization == form)
    return next(recipe for recipe in fitting if recipe is not None and recipe.quantization.gate is not None)


def draft_pays(best: DeploymentOption, comparison: Comparison) -> bool:
    """Whether the same deployment with its draft takes less time of the GPUs."""
    alike = (best.gpu, best.tensor_parallel, best.form)
    return any(
        option.draft
        and (option.gpu, option.tensor_parallel, option.form) == alike
        and option.gpu_seconds < best.gpu_seconds
        for option in comparison.serving
    )


def lacking(comparison: Comparison, gpus: int, kind: Track) -> Iterator[Fault]:
    """Yield why each possible option is ruled out."""
    if not (comparison.serving or comparison.refused):
        yield Fault("no format and no split of its heads runs there", key=f"runtime {kind}")
    for option in comparison.refused:
        if option.gpus <= gpus and not option.draft:
            yield Fault("; ".join(option.reasons), key=f"{option.label}, runtime {kind}")
    enough = sorted(
        {
            option.gpus: option.label
            for option in comparison.serving
            if option.gpus > gpus and not option.draft
        }.items()
    )
    if enough:
        yield Fault(
            "is not enough", key="--gpus", value=gpus, fix=f"{enough[0][1]} would serve it, runtime {kind}"
        )


def refusals(report: PlanReport, form: str) -> Iterator[Fault]:
    """Why `pipeline plan` refuses a recipe."""
    for finding in report.findings:
        if finding.stops:
            yield Fault(finding.problem, key=form or finding.keys[0], rule=finding.rule, fix=finding.fix)
    if report.memory is None:
        yield Fault(f"whether it fits is not known: {report.unknown.get('memory', '')}", key=form)
    elif report.memory.verdict == "does not fit":
        yield Fault(report.verdict, key=form or "memory")
