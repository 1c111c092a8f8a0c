"""Resident memory of the cpu engine beside what is planned for it, on a processor without bf16 arithmetic."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import deployment_spec, plan_memory
from pipeline.progress import Silent
from pipeline.reading import read_json
from pipeline.recipe import load_recipe
from pipeline.runtimes.cpu.ir import build_ir
from tests.support.models import make_checkpoint, quantize_checkpoint

BASE = {"layers": 1, "vocab": 2048}
MORE = {"layers": 5, "vocab": 16_384}
SHAPES = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072}
CALIBRATION = "calibration: {dataset: support, samples: 16, allow_sample_count: true}"


@pytest.mark.parametrize("form", ["none", pytest.param("int4_awq", marks=pytest.mark.models)])
def test_layers_and_output_projection_take_what_is_planned(tmp_path: Path, form: str) -> None:
    """By the difference of two models, so that what a process takes anyway does not count."""
    folders = [tmp_path / name for name in ("base", "more")]
    for folder, size in zip(folders, (BASE, MORE), strict=True):
        make_checkpoint(folder, dtype="bfloat16", repeated=True, **SHAPES, **size)
        quantized = folder
        if form != "none":
            quantized = quantize_checkpoint(folder, folder / form, form, group_size=128)
        build_ir(quantized, folder / "ir", progress=Silent())
    base, more = (_resident(folder / "ir") for folder in folders)
    planned = np.diff([_planned(folder, form) for folder in folders])[0]
    # Nodes and kernels of four layers take some MiB besides; a second packing of the small matrices takes 13 or more.
    assert 0.95 * planned < more - base < 1.1 * planned + (10 << 20)


def _planned(checkpoint: Path, form: str) -> int:
    recipe = load_recipe(
        "tiny-cpu",
        (
            f"quantization={{format: {form}{'' if form == 'none' else ', ' + CALIBRATION}}}",
            "runtime.precision=auto",
            "draft=null",
        ),
    )
    sizes = ModelSizes.from_config(read_json(checkpoint / "config.json"))
    assert sizes is not None
    asked = deployment_spec(recipe, {"target": sizes}, ram_bytes=1 << 36, bf16=False)
    assert asked is not None
    lines = plan_memory(asked).ranks[0].lines
    return sum(line.bytes for line in lines if line.name in ("attention", "mlp", "lm_head"))


def _resident(folder: Path) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_load_and_step, (folder,))


def _load_and_step(folder: Path) -> int:
    """Anonymous memory, but for the KV cache, after steps of all sizes that have kernels of their own."""
    from pipeline.runtimes.cpu.engine import EngineSettings, paged_model
    from pipeline.runtimes.cpu.engine.block_manager import BlockTable

    vars(paged_model)["chosen_precision"] = lambda *_, **__: ("f32", "no bf16 arithmetic")
    model = paged_model.PagedModel(folder, EngineSettings(threads=2))
    model.allocate([8])
    table = [BlockTable(np.arange(8, dtype=np.int32))]
    for tokens in (1, 6, 16, 64, 128):
        model.forward([paged_model.TokenSlice([9] * tokens, 0, table, 1)])
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return (int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) << 10) - 9 * sum(model.block_bytes)
