"""Tiny models calibrated by ModelOpt, each once a test session: importing and running it takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline import resources
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.recipe import Quantization
from pipeline.recipe.source import NamedDataset
from pipeline.stages.calibrate.calibration import calibrate
from pipeline.stages.dataset.freezing import freeze
from tests.support.models import LLAMA3_SCALING, make_checkpoint

# Two ranks and groups of 64 divide every size; queries are fewer than the hidden size, which hides mistakes
# less.
SIZES: dict[str, int] = {
    "hidden": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 256,
}
TRAINED = resources.folder("recipes") / "checkpoints/support-target"
SAMPLES = {"samples": 12, "max_tokens": 48, "seed": 3, "heldout_samples": 6}


@dataclass
class Calibrations:
    """Sources and calibrations, made when they are first asked for."""

    root: Path
    _made: dict[tuple[Any, ...], Path] = field(default_factory=dict)

    def source(self, architecture: str = "llama", dtype: str = "bfloat16", **changed: Any) -> Path:
        key = ("source", architecture, dtype, *sorted(changed.items()))
        if key not in self._made:
            folder = self.root / f"source{len(self._made)}"
            scaling = LLAMA3_SCALING if architecture == "llama" else None
            key_of_rope = "rope_theta" if architecture in ("qwen2", "gemma3_text") else "rope_parameters"
            rope = {"rope_scaling": scaling, "rope_key": key_of_rope}
            sizes: dict[str, Any] = {**SIZES, **rope, "dtype": dtype, **changed}
            self._made[key] = make_checkpoint(folder, architecture, **sizes)  # type: ignore[arg-type]
        return self._made[key]

    def dataset(self, source: Path | None = None, **changed: int) -> Path:
        """Frozen samples, tokenized for `source`."""
        key = ("dataset", source, *sorted(changed.items()))
        if key not in self._made:
            folder = self.root / f"dataset{len(self._made)}"
            folder.mkdir()
            wanted = {**SAMPLES, **changed}
            freeze(NamedDataset("support"), source or self.source(), **wanted, into=folder, progress=Silent())
            self._made[key] = folder
        return self._made[key]

    def trained(self, form: str, kv_cache: str = "auto") -> Path:
        """The target of the recipes, calibrated on a few samples (`trained_dataset`): hf/ and trtllm-tp2/."""
        key = ("trained", form, kv_cache)
        if key not in self._made:
            with answers_of(64):
                self._made[key] = self._calibrate(
                    TRAINED, self.trained_dataset(), form, kv_cache, (Parallelism(2),)
                )
        return self._made[key]

    def trained_dataset(self) -> Path:
        return self.dataset(TRAINED, samples=24, max_tokens=64, heldout_samples=24)

    def calibrated(
        self,
        form: str,
        kv_cache: str = "auto",
        architecture: str = "llama",
        dtype: str = "bfloat16",
        ranks: tuple[int, ...] = (1, 2),
        exports: tuple[Parallelism, ...] = (),
        **changed: Any,
    ) -> Path:
        """The folder that `calibrate` left: hf/, trtllm-tp1/, trtllm-tp2/, calibration.json.

        `exports`: sizes, where those of `ranks` are not all that is wanted.
        """
        sizes = exports or tuple(Parallelism(count) for count in ranks)
        key = ("calibrated", form, kv_cache, architecture, dtype, sizes, *sorted(changed.items()))
        if key not in self._made:
            source = self.source(architecture, dtype, **changed)
            self._made[key] = self._calibrate(source, self.dataset(), form, kv_cache, sizes)
        return self._made[key]

    def _calibrate(
        self, source: Path, dataset: Path, form: str, kv_cache: str, exports: tuple[Parallelism, ...]
    ) -> Path:
        folder = self.root / f"calibrated{len(self._made)}"
        folder.mkdir()
        calibrate(
            source,
            dataset,
            quantization(form, kv_cache),
            exports=exports,
            into=folder,
            progress=Silent(),
            device="cpu",
        )
        return folder


@contextmanager
def answers_of(tokens: int) -> Iterator[None]:
    """Calibrated models answer with so many tokens at most: 64 of random weights say nothing, and take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.stages.calibrate.model._MOST_TOKENS", tokens)
        yield


def quantization(form: str, kv_cache: str = "auto", block: int = 64, **calibration: Any) -> Quantization:
    """The section of a recipe."""
    settings = {
        "dataset": "support",
        "samples": 12,
        "max_tokens": 48,
        "allow_sample_count": True,
        **calibration,
    }
    return Quantization.model_validate(
        {"format": form, "kv_cache": kv_cache, "awq_block_size": block, "calibration": settings}
    )


def facts(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    return content
