"""What is read from the folder that trtllm-build leaves, and how a folder that is none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from tests.support.tensorrt import make_engine


def test_the_values_of_an_engine(tmp_path: Path) -> None:
    folder = make_engine(
        tmp_path / "engine", quantization="fp8", kv_cache="FP8", tensor_parallel=2, pipeline_parallel=2,
        max_draft_len=5, vocab_size=128256, plan_bytes=100,
    )  # fmt: skip
    (folder / "rank1_managed_weights.safetensors").write_bytes(b"1234")
    engine = EngineFolder.read(folder)
    assert (engine.version, engine.quantization, engine.kv_cache_quantization) == ("1.2.1", "FP8", "FP8")
    assert (engine.tensor_parallel, engine.pipeline_parallel, engine.world_size) == (2, 2, 4)
    assert (engine.max_seq_len, engine.max_draft_len, engine.verifies_drafts) == (9221, 5, True)
    assert (engine.layers, engine.heads, engine.kv_heads, engine.head_size) == (32, 32, 8, 128)
    assert engine.rank_bytes == (100, 104, 100, 100)
    assert engine.use_paged_context_fmha


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine")
    config = json.loads((folder / "config.json").read_text())
    for key in ("head_size", "num_key_value_heads", "logits_dtype", "quantization"):
        del config["pretrained_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineFolder.read(folder)
    assert (engine.head_size, engine.kv_heads, engine.logits_dtype) == (128, 32, "float32")
    assert engine.quantization is None
    assert not engine.verifies_drafts


@pytest.mark.parametrize("missing", ["config.json", "rank1.engine"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_engine(tmp_path / "engine", tensor_parallel=2)
    (folder / missing).unlink()
    with pytest.raises(StageError, match=f"no {missing}"):
        EngineFolder.read(folder)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine")
    (folder / "config.json").write_text('{"version": "1.2.1", "pretrained_config": {}}')
    with pytest.raises(StageError, match=r"config\.json: no key build_config"):
        EngineFolder.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(StageError, match=r"config\.json:1: is not JSON: Expecting"):
        EngineFolder.read(folder)
