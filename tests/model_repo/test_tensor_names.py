"""Names of tensors in the models' sources are those of every version that the sources run under."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.inflight_batcher import tensors, versions

CALL = Path(__file__).resolve().parents[2] / "model_repo/tensorrt_llm_bls/1/engine_call.py"
# Inputs of the BLS model that it uses itself, or refuses; all others go to the engine as they are.
USED = {
    "text_input", "decoder_text_input", "bad_words", "stop_words", "end_id", "pad_id", "prompt_table_extra_id",
    "embedding_bias_words", "embedding_bias_weights", "num_draft_tokens", "use_draft_logits",
    "image_input", "image_bytes_input", "image_url_input", "image_sizes_input", "video_bytes_input",
}  # fmt: skip


def constant(name: str) -> Any:
    """The value of a name that a module assigns at its top."""
    for node in ast.parse(CALL.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{CALL}: no {name}")


@pytest.mark.parametrize("version", versions())
def test_every_input_reaches_the_engine_under_the_versions_name(version: str) -> None:
    ours = {tensor.name for tensor in tensors("tensorrt_llm_bls", version).inputs}
    theirs = {tensor.name for tensor in tensors("tensorrt_llm", version).inputs}
    passed = constant("_PASSED")
    assert ours - USED <= set(passed)
    assert {passed[name] for name in ours - USED} <= theirs


@pytest.mark.parametrize("version", versions())
def test_outputs_that_are_asked_for_exist(version: str) -> None:
    engine = {tensor.name for tensor in tensors("tensorrt_llm", version).outputs}
    bls = {tensor.name for tensor in tensors("tensorrt_llm_bls", version).outputs}
    assert {*constant("LOG_PROBS"), *constant("PERFORMANCE")} <= engine & bls
