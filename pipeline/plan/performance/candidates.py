"""The deployments that a recipe could be: other GPUs, splits and formats, with its draft and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.contracts import engine_memory
from pipeline.contracts.gpus import gpu, support
from pipeline.contracts.rules import rule
from pipeline.models.sizes import ModelSizes
from pipeline.recipe import CpuRuntime, PyTorchRuntime, Recipe, TensorRTRuntime

FORMATS = ("none", "fp8", "int4_awq", "w4a8_awq", "nvfp4")
WAYS = (1, 2, 4, 8)


def candidates(
    recipe: Recipe, target: ModelSizes, devices: Sequence[str], *, drafts: bool
) -> Iterator[Recipe]:
    """Recipes that differ from the given one in those four things, and in what follows from them.

    Left out are formats that a GPU or the release is known not to run, weights that are published in a format that is
    not understood, and splits that its heads cannot be shared by.
    `drafts`: with the recipe's draft, too.
    """
    assert not isinstance(recipe.runtime, CpuRuntime), "the caller looked"
    for device in devices:
        for form in _formats(recipe):
            kv_cache = _kv_cache(recipe.runtime, device, form)
            if kv_cache is None or (form == "none" and target.stored not in engine_memory.formats()):
                continue
            for ways in WAYS:
                if target.heads % ways:
                    continue
                changed = _changed(recipe, recipe.runtime, device, form, kv_cache, ways)
                yield changed.model_copy(update={"draft": None})
                if drafts and recipe.draft is not None:
                    yield changed


def _formats(recipe: Recipe) -> tuple[str, ...]:
    chosen = recipe.quantization.format
    return FORMATS if chosen in FORMATS else (*FORMATS, chosen)


def _kv_cache(runtime: TensorRTRuntime | PyTorchRuntime, device: str, form: str) -> str | None:
    """FP8 beside formats that go with it, where the GPU has it; None: the format cannot be had there."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for kv_cache in ("fp8", "auto") if form in kept else ("auto",):
        found = support(gpu(device), form, kv_cache, runtime.kind, runtime.version)
        if not any(one.severity == "error" for one in found):
            return kv_cache
    return None


def _changed(
    recipe: Recipe,
    runtime: TensorRTRuntime | PyTorchRuntime,
    device: str,
    form: str,
    kv_cache: str,
    ways: int,
) -> Recipe:
    moved = {"gpu": device, "tensor_parallel": ways, "pipeline_parallel": 1}
    if runtime.expert_parallel is not None:
        moved["expert_parallel"] = ways
    quantized = {"format": form, "kv_cache": kv_cache}
    return recipe.model_copy(
        update={
            "runtime": runtime.model_copy(update=moved),
            "quantization": recipe.quantization.model_copy(update=quantized),
        }
    )
