"""Changes for a recipe that does not fit, or not at its concurrency: each change with figures of the same model.

Changes are overrides of the recipe (`--set`). A change that its GPU or the release is known not to take is left out;
what else speaks against one, preflight says when it is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.contracts.gpus import format_issues, gpu, gpus
from pipeline.contracts.rules import rule
from pipeline.plan.memory.capacity import MemoryPlan, plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.recipe import CpuRuntime, PyTorchRuntime, Recipe, TensorRTRuntime

_FORMATS = ("fp8", "int4_awq", "nvfp4")
_WAYS = (2, 4, 8)
_GPUS = 2  # larger GPUs that are named
_GpuRuntime = TensorRTRuntime | PyTorchRuntime
_Change = tuple[tuple[str, ...], DeploymentSpec]  # overrides, and what the deployment is then


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change of the recipe, and the memory that it comes to."""

    overrides: tuple[str, ...]  # "runtime.tensor_parallel=2"
    plan: MemoryPlan

    @property
    def command(self) -> str:
        """The change as options of a command line: "--set runtime.tensor_parallel=2"."""
        return " ".join(f"--set {override}" for override in self.overrides)


def alternatives(recipe: Recipe, spec: DeploymentSpec) -> tuple[Alternative, ...]:
    """List changes that hold more whole sequences than the recipe as it is; none where it fits.

    Args:
        spec: The recipe's demand, of `deployment_spec`.
    """
    now = plan_memory(spec)
    if now.verdict == "fits":
        return ()
    options = [Alternative(overrides, plan_memory(changed)) for overrides, changed in _changes(recipe, spec)]
    return tuple(
        change for change in options if change.plan.sequences > now.sequences or change.plan.verdict == "fits"
    )


def _changes(recipe: Recipe, spec: DeploymentSpec) -> Iterator[_Change]:
    runtime = recipe.runtime
    if isinstance(runtime, CpuRuntime):
        yield from _limits(recipe, spec)
        return
    yield from _tensor_parallel(runtime, spec)
    if isinstance(runtime, PyTorchRuntime):
        yield from _for_llm_api(spec)
    yield from _formats(recipe, runtime, spec)
    yield from _kv_cache(recipe, runtime, spec)
    yield from _limits(recipe, spec)
    yield from _larger_gpus(recipe, runtime, spec)


def _tensor_parallel(runtime: _GpuRuntime, spec: DeploymentSpec) -> Iterator[_Change]:
    target = spec.models[0]
    for ways in _WAYS:
        if ways <= target.split.tensor or target.sizes.heads % ways or target.split.expert > 1:
            continue
        # With the LLM API, a draft is split like its target.
        shared = len(spec.models) if runtime.kind == "pytorch" else 1
        models = tuple(
            replace(model, split=replace(model.split, tensor=ways)) if index < shared else model
            for index, model in enumerate(spec.models)
        )
        yield (f"runtime.tensor_parallel={ways}",), replace(spec, models=models)


def _for_llm_api(spec: DeploymentSpec) -> Iterator[_Change]:
    """Requests of its own for each GPU, and no more than their window of layers that see one."""
    target = spec.models[0]
    if target.split.tensor > 1 and target.sizes.experts and not target.split.attention_dp:
        models = tuple(replace(model, split=replace(model.split, attention_dp=True)) for model in spec.models)
        yield ("runtime.attention_dp=true",), replace(spec, models=models)
    kinds = [{cache.kind for cache in block.caches} for block in target.sizes.blocks]
    windows = target.sizes.windows
    if target.windows or not windows or any("chunked attention" in kind for kind in kinds):
        return
    length = next(
        size
        for size in range(1, len(windows) + 1)
        if all(window == windows[index % size] for index, window in enumerate(windows))
    )
    pattern = ",".join(str(window or target.sizes.max_positions) for window in windows[:length])
    override = f"runtime.llm_args.kv_cache_config.max_attention_window=[{pattern}]"
    bounded = replace(target, windows=windows[:length])
    yield (override,), replace(spec, models=(bounded, *spec.models[1:]))


def _formats(recipe: Recipe, runtime: _GpuRuntime, spec: DeploymentSpec) -> Iterator[_Change]:
    chosen, kv_cache = recipe.quantization.format, recipe.quantization.kv_cache
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for form in _FORMATS:
        if form == chosen or not _is_supported(runtime, form, kv_cache):
            continue
        overrides: tuple[str, ...] = (f"quantization.format={form}",)
        changes = {"format": form}
        if runtime.kind == "tensorrt" and kv_cache == "fp8" and form not in kept:
            overrides += ("quantization.kv_cache=auto",)  # the builder turns off what reuse and drafts need
            changes["kv_cache"] = spec.models[0].sizes.dtype
        if recipe.quantization.calibration is None:
            overrides += ("quantization.calibration.dataset=cnn_dailymail",)
        yield overrides, _with_target(spec, **changes)


def _kv_cache(recipe: Recipe, runtime: _GpuRuntime, spec: DeploymentSpec) -> Iterator[_Change]:
    chosen = recipe.quantization
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    keeps = runtime.kind == "pytorch" or chosen.format in kept
    if chosen.kv_cache == "auto" and keeps and _is_supported(runtime, chosen.format, "fp8"):
        yield ("quantization.kv_cache=fp8",), _with_target(spec, kv_cache="fp8")


def _limits(recipe: Recipe, spec: DeploymentSpec) -> Iterator[_Change]:
    """The concurrency that fits; and where nothing does, shorter sequences."""
    now, limits = plan_memory(spec), recipe.limits
    if now.sequences >= 1:
        yield (f"limits.max_concurrency={now.sequences}",), replace(spec, concurrency=now.sequences)
    beyond = spec.sequence_tokens - limits.max_input_tokens
    shorter = now.tokens // spec.rank_sequences // now.block_tokens * now.block_tokens - beyond
    if 0 < shorter < limits.max_input_tokens:
        yield (f"limits.max_input_tokens={shorter}",), replace(spec, sequence_tokens=shorter + beyond)


def _larger_gpus(recipe: Recipe, runtime: _GpuRuntime, spec: DeploymentSpec) -> Iterator[_Change]:
    """The smallest that are larger, and on which all of it fits."""
    named = 0
    for larger in sorted(gpus(), key=lambda product: product.driver_mib):
        changed = replace(spec, device=larger.name, capacity=larger.driver_mib * 2**20)
        moved = runtime.model_copy(update={"gpu": larger.name})
        fits = larger.driver_mib > gpu(runtime.gpu).driver_mib and plan_memory(changed).verdict == "fits"
        if fits and _is_supported(moved, recipe.quantization.format, recipe.quantization.kv_cache):
            yield (f"runtime.gpu={larger.name}",), changed
            named += 1
        if named == _GPUS:
            return


def _is_supported(runtime: _GpuRuntime, form: str, kv_cache: str) -> bool:
    issues = format_issues(gpu(runtime.gpu), form, kv_cache, runtime.kind, runtime.version)
    return not any(issue.severity == "error" for issue in issues)


def _with_target(spec: DeploymentSpec, **changes: str) -> DeploymentSpec:
    target: ModelSpec = replace(spec.models[0], **changes)  # type: ignore[arg-type]
    return replace(spec, models=(target, *spec.models[1:]))
