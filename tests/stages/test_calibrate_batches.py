"""Batches: every token once, none that is padding, sizes alike; and samples in a row do not see each other."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StageError
from pipeline.models import Architecture
from pipeline.stages.calibrate.measurement import check_packing, forward, make_batches
from pipeline.stages.calibrate.model import load
from pipeline.stages.dataset.freezing import read_samples
from tests.support.calibrated import Calibrations

pytestmark = pytest.mark.models

SAMPLES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=30), min_size=1, max_size=40)


@given(SAMPLES, st.integers(1, 200))
def test_every_token_is_there_once_at_its_position(samples: list[list[int]], budget: int) -> None:
    batches = make_batches(samples, budget)
    got = Counter(pair for batch in batches for pair in zip(batch.tokens, batch.positions, strict=True))
    assert got == Counter((token, place) for sample in samples for place, token in enumerate(sample))
    assert sum(batch.samples for batch in batches) == len(samples)
    assert all(batch.positions[0] == 0 and batch.positions.count(0) == batch.samples for batch in batches)


@given(SAMPLES, st.integers(1, 200))
def test_batches_hold_neighbours_in_length_and_are_alike(samples: list[list[int]], budget: int) -> None:
    batches = make_batches(samples, budget)
    lengths = [length for batch in batches for length in batch.lengths]
    assert lengths == sorted(lengths)
    longest = max(map(len, samples))
    assert all(len(batch.tokens) < budget + longest for batch in batches)
    mean = sum(map(len, samples)) / len(batches)
    assert all(abs(len(batch.tokens) - mean) <= longest for batch in batches)


@pytest.mark.parametrize(
    ("architecture", "window"),
    [("llama", None), ("mixtral", None), ("phi3", None), ("mistral", 4), ("qwen2", 4), ("qwen3", 4)],
)
def test_samples_in_one_row_are_kept_apart(
    calibrations: Calibrations, tmp_path: Path, architecture: str, window: int | None
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = calibrations.source(architecture, "float32")
    if window is not None:
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
        config = json.loads((source / "config.json").read_text())
        changed = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        source = tmp_path
    model = load(source, Architecture.read(source), "cpu")
    samples = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
    check_packing(model, samples)
    (row,) = make_batches(samples, 1000)
    eager = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    with torch.no_grad():
        ordered = [
            torch.tensor([sample]) for sample in sorted(samples, key=lambda sample: (len(sample), sample))
        ]
        alone = [eager.model(input_ids=sample).last_hidden_state for sample in ordered]
        together = forward(model, row)
    assert torch.cat(alone, dim=1).sub(together).abs().max() < 1e-4


def test_a_model_that_mixes_samples_is_found() -> None:
    import torch

    def mixing(input_ids: Any, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=input_ids.float().cumsum(dim=1)[:, :, None])

    model = SimpleNamespace(device=torch.device("cpu"), model=mixing)
    with pytest.raises(StageError, match="influence each other"):
        check_packing(model, [[1, 2, 3], [4, 5, 6]])


def test_tokens_of_another_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "calibration.jsonl"
    path.write_text('{"tokens":[1,2]}\n{"tokens":[3,99]}\n')
    assert read_samples(path, 100) == [[1, 2], [3, 99]]
    with pytest.raises(StageError, match=r"calibration\.jsonl:2: needs two tokens or more, all below 50"):
        read_samples(path, 50)
