"""Logits and greedy tokens of one model in its three forms: transformers, stateful OpenVINO, paged OpenVINO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov

from pipeline.runtimes.cpu.engine.paged_model import signal_stack_kept, turn_long
from pipeline.runtimes.cpu.engine.processor import integer_options


def prompt(length: int, vocab: int = 512, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


class Stateful:
    """The model as `build_ir` wrote it, one sequence at a time.

    Args:
        long: By the long factors of longrope.
        model: In place of that of the folder.
    """

    def __init__(self, folder: Path, *, long: bool = False, model: ov.Model | None = None) -> None:
        options = json.loads((folder / "engine.json").read_text())["compile_options"]
        with signal_stack_kept():
            core = ov.Core()
            model = model or core.read_model(folder / "openvino_model.xml")
            if long:
                turn_long(model)
            exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
            options |= {"INFERENCE_NUM_THREADS": 1, **exact, **integer_options(model)}
            self.compiled = core.compile_model(model, "CPU", options)
        self._request = self.compiled.create_infer_request()

    def logits(self, tokens: Sequence[int], past: int = 0) -> np.ndarray:
        """[len(tokens), vocab]; `past` tokens went before, and 0 begins anew."""
        if past == 0:
            self._request.reset_state()
        ids = np.array([tokens], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones((1, past + len(tokens)), np.int64),
            "position_ids": np.arange(past, past + len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return self._request.infer(inputs)["logits"][0].copy()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        answer: list[int] = []
        logits, past = self.logits(tokens), len(tokens)
        for _ in range(count):
            answer.append(int(logits[-1].argmax()))
            logits, past = self.logits(answer[-1:], past), past + 1
        return answer


class Paged:
    """The engine's form of the model, one sequence at a time."""

    def __init__(
        self, folder: Path, longest: int | None = None, precision: Literal["auto", "f32", "bf16"] = "f32"
    ) -> None:
        from pipeline.runtimes.cpu.engine import EngineSettings
        from tests.support.engine import UnsettledModel

        self._model = UnsettledModel(
            folder, EngineSettings(threads=1, max_sequence_tokens=longest, precision=precision)
        )
        self._model.allocate([16] * len(self._model.windows))

    def logits(self, tokens: list[int], chunks: Sequence[int]) -> np.ndarray:
        """[len(tokens), vocab], computed a chunk at a time."""
        from pipeline.runtimes.cpu.engine.block_manager import BlockTable
        from pipeline.runtimes.cpu.engine.paged_model import TokenSlice

        # Blocks in no order.
        tables = [BlockTable(np.array([7, 2, 11, 3, 5, 13, 1, 8], np.int32)) for _ in self._model.windows]
        rows, past = [], 0
        for count in chunks:
            for table, window in zip(tables, self._model.windows, strict=True):
                table.first = max(0, past - window + 1) // 32 if window else 0
                table.blocks[: table.first] = 99  # there is no such block
            piece = TokenSlice(tokens[past : past + count], past, tables, count)
            rows.append(self._model.forward([piece]).copy())
            past += count
        assert past == len(tokens)
        return np.concatenate(rows)


def reference(checkpoint: Path) -> Any:
    """transformers' own model in float32, which finds every weight, and none that it does not know."""
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()
