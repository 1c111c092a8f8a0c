"""A first recipe for a model of one's own: what fits a GPU or this machine, with the reason of every derived value.

    first = initial_recipe(InitRequest(source=HubSource("org/name"), gpu="l4-24g"), store)
    first.recipe, first.reasons["limits.max_concurrency"]

Nothing is judged by rules of its own: sizes come from `model_probe`, formats, splits and loads from the comparison that
`pipeline plan compare` prints, budgets and drafts from the packaged recipes, and the result is held against the very
report of `pipeline plan`. What fits nowhere is refused with what each option lacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.contracts.gpus import gpu as gpu_of
from pipeline.contracts.releases import half
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.inventory import take
from pipeline.models.sizes import ModelSizes
from pipeline.plan.performance.compare import Comparison, DeploymentOption
from pipeline.plan.plan import TARGET
from pipeline.plan.settings import ComparisonOptions, InitSettings
from pipeline.prepare.initial_choices import (
    KnownDraft,
    draft_pays,
    example_recipe,
    known_draft,
    lacking,
    lacking_features,
    machine_gpu,
    newest_release,
    refusals,
    why_release,
)
from pipeline.prepare.model_probe import probe_models
from pipeline.prepare.report import PlanReport, compare_recipe, make_report
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, LocalSource, Recipe
from pipeline.sources import HubCheckpoint, is_offline, resolve_checkpoint
from pipeline.store import Store

Kind = Literal["cpu", "tensorrt", "pytorch"]

# What costs the least quality comes first; weights that are published quantized stay as they are.
_FORMATS: Mapping[Kind, tuple[str, ...]] = {
    "cpu": ("none", "fp8", "int4_awq"),
    "tensorrt": ("fp8", "none", "int4_awq"),
    "pytorch": ("fp8", "none", "int4_awq", "nvfp4"),
}
# Prompt, answer, requests at a time: the most that is proposed. Memory and the SLO decide what is left of the last.
_MOST = {"cpu": (2048, 512, 8), "tensorrt": (8192, 1024, 64), "pytorch": (8192, 1024, 64)}
_SLO = {"ttft_p95_ms": 2000, "itl_p95_ms": 50}
_ACCEPTANCE = 0.7
_MAX_GPUS = 8
# Requests at a time, for which more GPUs are taken: of those that are there, and of those that would have to be had.
_ENOUGH, _ENOUGH_OF_UNKNOWN = 16, 4
_GPU_DEADLINE_S = 10.0
_LIMITS = ("max_input_tokens", "max_output_tokens", "max_concurrency")


class InitRequest(InitSettings):
    """A recipe that does not exist yet: its model, and what a user says of the deployment."""

    source: HubSource | LocalSource


@dataclass(frozen=True, slots=True)
class InitialRecipe:
    """A recipe that fits, as values to be written, and why each derived value is what it is.

    Attributes:
        values: Values to write; None for a key that is left out on purpose.
        reasons: Dotted key -> a sentence.
        report: The report of `pipeline plan` on it.
        place: Where it is to run: "2 x l4-24g", or "this machine's CPU".
    """

    recipe: Recipe
    values: Mapping[str, Any]
    reasons: Mapping[str, str]
    report: PlanReport
    place: str


def initial_recipe(request: InitRequest, store: Store, *, progress: Progress | None = None) -> InitialRecipe:
    """Propose a recipe for a model.

    Returns:
        A recipe that `pipeline plan` does not refuse.

    Raises:
        UserError: The GPU is not known, or the sizes of the model cannot be read.
        InvalidInput: The model fits nowhere; with a fault for each option.
        SourceError: The Hub does not give the model.
    """
    draft = _Draft(request, store, progress or Silent())
    kind = draft.settle_place()
    draft.settle_model()
    return draft.on_cpu() if kind == "cpu" else draft.on_gpus(kind)


@dataclass
class _Draft:
    """A recipe in the making."""

    request: InitRequest
    store: Store
    progress: Progress
    gpu: str = ""
    gpus: int = _MAX_GPUS
    sizes: ModelSizes = field(init=False)
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    # Where it runs

    def settle_place(self) -> Kind:
        """Choose the runtime: on GPUs the one that upstream goes on with, unless another is asked for."""
        wanted = self.request
        if wanted.runtime == "cpu":
            if wanted.gpu is not None or wanted.gpus is not None:
                raise UserError("--runtime cpu is for this machine's CPU: leave out --gpu and --gpus")
            self.reasons["runtime.kind"] = "as asked for"
            return "cpu"
        if wanted.gpu is not None:
            self.gpu = gpu_of(wanted.gpu).name
            self.reasons["runtime.gpu"] = "as asked for"
        else:
            devices = take(only=("gpus",), deadline_s=_GPU_DEADLINE_S).facts().gpus or ()
            if not devices:
                if wanted.runtime is not None or wanted.gpus is not None:
                    raise UserError("this machine has no GPU that its driver reports: name one with --gpu")
                self.reasons["runtime.kind"] = "this machine has no GPU; --gpu NAME writes for one elsewhere"
                return "cpu"
            self.gpu, self.gpus = machine_gpu(devices)
            self.reasons["runtime.gpu"] = f"what this machine has: {len(devices)} x {devices[0].name}"
        self.gpus = wanted.gpus or self.gpus
        return wanted.runtime or "pytorch"

    # What it runs

    def settle_model(self) -> None:
        source = self.request.source
        name = source.repo if isinstance(source, HubSource) else source.path.name
        slug = re.sub(r"[^a-z0-9.-]+", "-", name.rpartition("/")[2].lower()).strip("-.")[:63].strip("-.")
        self.values["name"] = self.request.name or slug or "model"
        self.values["model"] = {"source": str(source), **self._revision(source)}
        base = self._recipe(limits=dict(zip(_LIMITS, (1, 1, 1), strict=True)), runtime={"kind": "cpu"})
        probe = probe_models(base, self.store, progress=self.progress).get(TARGET)
        if probe is None:
            raise UserError(
                f"{source}: its sizes are not among those that are known, and HF_HUB_OFFLINE forbids to ask the Hub"
            )
        if probe.sizes is None:
            raise UserError(
                f"{source} is a {probe.architecture}, whose sizes cannot be read: {probe.unknown}"
            )
        self.sizes = probe.sizes

    def _revision(self, source: HubSource | LocalSource) -> dict[str, str]:
        """The commit that the default branch is now, so that the build is repeatable."""
        if isinstance(source, LocalSource) or is_offline():
            return {}
        recipe = Recipe.model_validate(
            {"name": "x", "model": {"source": str(source)}, "limits": dict.fromkeys(_LIMITS, 1)}
        )
        checkpoint = resolve_checkpoint(recipe.model, store=self.store, progress=self.progress)
        assert isinstance(checkpoint, HubCheckpoint), "it is of the Hub"
        self.reasons["model.revision"] = (
            "the commit of the default branch now: with it, the build is repeatable"
        )
        return {"revision": checkpoint.commit}

    def _limits(self, kind: Kind, draft: KnownDraft | None) -> dict[str, int]:
        """Lengths that the model was made for."""
        longest = self.sizes.max_positions
        room = longest - (0 if draft is None else draft.draft.max_draft_tokens)
        request, most = self.request, _MOST[kind]
        output = request.max_output_tokens or min(most[1], room // 4)
        prompt = request.max_input_tokens or min(most[0], room - output)
        self.reasons["limits.max_input_tokens"] = (
            f"prompt and answer together may take {longest} positions, as config.json says; what is longer takes memory"
        )
        return dict(zip(_LIMITS, (prompt, output, most[2]), strict=True))

    def _quantization(self, form: str, kind: Kind) -> dict[str, Any]:
        """A format with calibration and budget as a packaged recipe has them."""
        if form == "none":
            return {"format": "none"}
        example = example_recipe(form)
        quantization = example.quantization.model_dump(mode="json", include={"calibration", "gate"})
        calibration = {key: quantization["calibration"][key] for key in ("dataset", "samples", "max_tokens")}
        gate = {key: quantization["gate"][key] for key in ("max_perplexity_increase", "min_top1_agreement")}
        if kind == "cpu":
            calibration["samples"] = 128
        self.reasons["quantization.calibration"] = (
            "text on which the scales are measured; a file of your own traffic is better: local:my-set.jsonl"
        )
        self.reasons["quantization.gate"] = f"what quality it may cost, as in the recipe {example.name}"
        return {"format": form, "calibration": calibration, "gate": gate}

    def _forms(self, kind: Kind) -> tuple[str, ...]:
        return _FORMATS[kind] if self.sizes.stored == "none" else ("none",)

    def _stored(self) -> str:
        return (
            "the weights stay as they are published"
            if self.sizes.stored == "none"
            else f"the weights are published in {self.sizes.stored}, and stay so"
        )

    def _recipe(self, **sections: Any) -> Recipe:
        values = {**self.values, **sections}
        try:
            return Recipe.model_validate({key: value for key, value in values.items() if value is not None})
        except ValidationError as error:
            faults = [
                Fault(detail["msg"], key=".".join(map(str, detail["loc"]))) for detail in error.errors()
            ]
            raise InvalidInput(str(self.request.source), faults) from None

    # On this machine's CPU

    def on_cpu(self) -> InitialRecipe:
        """The first format that fits into memory, with as many requests as its pool holds."""
        draft = self._known_draft("cpu")
        limits, faults = self._limits("cpu", draft), list[Fault]()
        for form in self._forms("cpu"):
            sections = {
                "draft": None if draft is None else draft.values,
                "quantization": self._quantization(form, "cpu"),
                "runtime": {"kind": "cpu"},
                "limits": limits,
            }
            report = self._report(self._recipe(**sections))
            if report.refused or report.memory is None:
                faults += refusals(report, form)
                continue
            memory = report.memory
            self.reasons["limits.max_concurrency"] = (
                f"{memory.sequences} requests of these lengths are held at a time, and a CPU shares its pace among all"
            )
            self.reasons["quantization.format"] = (
                f"{self._stored()}: nothing is calibrated; it fits into "
                if form == "none"
                else f"{', '.join(self._forms('cpu')[: len(faults)])} does not fit; this does, into "
            ) + f"{memory.spec.capacity / 2**30:.0f} GiB of memory"
            if draft is not None:
                self.reasons["draft"] = (
                    f"{draft.why}; the engine lets it propose only while measuring says that it pays"
                )
            sections["limits"] = {**limits, "max_concurrency": memory.concurrency}
            return self._finished(sections, "this machine's CPU")
        raise InvalidInput(f"{self.request.source} on this machine's CPU", faults)

    # On GPUs

    def on_gpus(self, kind: Kind) -> InitialRecipe:
        """The best format on the fewest GPUs, among those that the comparison says serve within the SLO."""
        assert kind != "cpu", "the caller looked"
        version = newest_release(kind, self.gpu, self.sizes.architecture)
        self.reasons["runtime.version"] = why_release(version, kind, self.sizes.architecture)
        without = self._without(kind, version)
        draft = self._known_draft(kind)
        limits = self._limits(kind, draft)
        runtime = {"kind": kind, "version": version, "gpu": self.gpu, "tensor_parallel": 1}
        base = {
            "draft": None if draft is None else draft.values,
            "quantization": self._quantization("fp8", kind),
            "runtime": runtime,
            **without,
        }
        options = ComparisonOptions(devices=(self.gpu,), acceptance=None if draft is None else _ACCEPTANCE)
        # Slow is better than nothing, and so are short prompts; the forecast stands in the plan.
        for slo, shorter in ((_SLO, 1), (None, 1), (None, 8)):
            if shorter > 1 and self.request.max_input_tokens is None:
                limits["max_input_tokens"] = max(1, limits["max_input_tokens"] // shorter)
            recipe = self._recipe(**base, limits=limits, slo=slo)
            comparison = compare_recipe(recipe, self.store, options, lifted=False)
            best = self._best(kind, comparison)
            if best is not None:
                break
        if best is None:
            raise InvalidInput(
                f"{self.request.source} on {self.gpu}", list(lacking(comparison, self.gpus, kind))
            )
        assert best.best is not None, "it serves"
        self._explain(kind, best, comparison, slo)
        quantization = self._quantization(best.form, kind)
        if best.kv_cache == "fp8":
            quantization["kv_cache"] = "fp8"
            self.reasons["quantization.kv_cache"] = f"{self.gpu} computes in it: twice the tokens in memory"
        paying = draft is not None and draft_pays(best, comparison)
        if draft is not None:
            self.reasons["draft"] = (
                f"{draft.why}; by the forecast, with {_ACCEPTANCE:.0%} of its tokens accepted and "
                f"{best.best.batch} requests at a time, it {'pays' if paying else 'does not pay, and is left out'}"
            )
        sections: dict[str, Any] = {
            "draft": draft.values if paying and draft is not None else None,
            "quantization": quantization,
            "runtime": runtime | {"tensor_parallel": best.tensor_parallel},
            "limits": {**limits, "max_concurrency": best.best.batch},
            "slo": slo,
            **without,
        }
        return self._finished(sections, f"{best.gpus} x {self.gpu}")

    def _without(self, kind: Kind, version: str) -> dict[str, dict[str, bool]]:
        """Settings that turn off what upstream does not have for the model."""
        lacks = lacking_features(self.sizes.architecture, version, self.gpu) if kind == "pytorch" else {}
        self.reasons |= {f"{section}.{key}": why for (section, key), why in lacks.items()}
        return {section: {key: False} for section, key in lacks}

    def _best(self, kind: Kind, comparison: Comparison) -> DeploymentOption | None:
        """The first format that serves; of its splits, the smallest that serves enough, or else the most."""

        known = self.gpus < _MAX_GPUS or self.request.gpus is not None
        enough = _ENOUGH if known else _ENOUGH_OF_UNKNOWN

        def load(option: DeploymentOption) -> int:
            return min(enough, option.best.batch if option.best is not None else 0)

        for form in self._forms(kind):
            alike = [option for option in comparison.serving if (option.form, option.draft) == (form, False)]
            if fitting := [option for option in alike if option.gpus <= self.gpus]:
                return min(fitting, key=lambda option: (-load(option), option.gpus))
        return None

    def _explain(
        self,
        kind: Kind,
        best: DeploymentOption,
        comparison: Comparison,
        slo: Mapping[str, Any] | None,
    ) -> None:
        assert best.best is not None, "it serves"
        reasons = self.reasons
        if kind != "cpu":
            reasons["runtime.kind"] = half(kind)
        fewer = {
            option.gpus: option.best.batch if option.best is not None else 0
            for option in (*comparison.refused, *comparison.serving)
            if (option.form, option.draft) == (best.form, False) and option.gpus < best.gpus
        }
        counts = ", ".join(f"{load} on {gpus}" for gpus, load in sorted(fewer.items()))
        reasons["runtime.tensor_parallel"] = (
            f"requests at a time on fewer of them: {counts}" if fewer else "one GPU is enough"
        )
        reasons["quantization.format"] = (
            self._stored()
            if best.form == "none"
            else f"{self.gpu} runs it; of {', '.join(self._forms(kind))} it is the first that serves, which "
            "costs the least quality"
        )
        capacity = f"{best.sequences} requests of these lengths lie in memory at a time"
        reasons["limits.max_concurrency"] = (
            f"{capacity}; the forecast keeps {best.best.batch} of at most {_MOST[kind][2]} within the SLO"
            if slo is not None
            else f"{capacity}; the forecast keeps up with {best.best.batch}"
        )
        if slo is None:
            reasons["slo"] = (
                f"no goal is set: the forecast of the first token is {best.best.ttft_ms:.0f} ms, between tokens "
                f"{best.best.itl_p95_ms:.0f} ms"
            )
        else:
            reasons["slo"] = (
                "goals to begin with: the longest prompts answered within 2 s, and 20 tokens a second, faster than "
                f"people read; the forecast of that load is {best.best.ttft_ms:.0f} and {best.best.itl_p95_ms:.0f} ms"
            )

    def _known_draft(self, kind: Kind) -> KnownDraft | None:
        return known_draft(self.request.source, self.sizes, eagle=kind == "pytorch")

    # The result

    def _report(self, recipe: Recipe) -> PlanReport:
        return make_report(recipe, self.store, progress=self.progress)

    def _finished(self, sections: Mapping[str, Any], place: str) -> InitialRecipe:
        """Hold the recipe against what `pipeline plan` says."""
        values = {**self.values, **sections}
        recipe = self._recipe(**sections)
        report = self._report(recipe)
        if report.refused:
            raise InvalidInput(f"{self.request.source} on {place}", list(refusals(report, "")))
        return InitialRecipe(recipe, values, self.reasons, report, place)
