"""LoRA adapters by their files: what is read, and everything that a server would leave out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.models.adapter import MAX_RANK, read_adapter
from pipeline.models.sizes import ModelSizes
from tests.support.adapters import make_adapter, make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base", "llama")


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    return make_adapter(tmp_path / "one", base, rank=4, lora_alpha=6)


def sizes(base: Path) -> ModelSizes:
    found = ModelSizes.from_config(json.loads((base / "config.json").read_text()))
    assert found is not None
    return found


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, tensors: dict[str, np.ndarray], drop: str = "?") -> None:
    file = folder / "adapter_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if drop not in name}
    save_file(kept | tensors, file)


def test_modules_ranks_and_scales(folder: Path, base: Path) -> None:
    adapter = read_adapter(folder)
    assert not adapter.faults
    assert not list(adapter.base_faults(sizes(base)))
    assert (len(adapter.modules), adapter.rank, adapter.base) == (14, 4, "base")
    assert {module.scale for module in adapter.modules} == {1.5}
    assert adapter.file_bytes == (folder / "adapter_model.safetensors").stat().st_size
    assert adapter.parameters == sum(
        value.size for value in load_file(folder / "adapter_model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3": must be LORA'),
        ({"use_dora": True}, "use_dora = true: DoRA"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]'),
        ({"bias": "lora_only"}, 'bias = "lora_only"'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = true"),
        ({"target_parameters": ["experts.down_proj"]}, "adapters of stacked experts"),
        ({"trainable_token_indices": [3]}, "rows of the embedding"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ({"lora_alpha": None}, "lora_alpha = null: must be a number"),
        ({"lora_alpha": 1e400}, "not finite"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern: must be numbers by names"),
    ],
)
def test_settings_that_servers_ignore(folder: Path, settings: dict[str, Any], fault: str) -> None:
    change_config(folder, **settings)
    (found,) = read_adapter(folder).faults
    assert fault in found


LAYER = "base_model.model.model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("tensors", "drop", "fault"),
    [
        ({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 64), np.float32)}, "?", "lm_head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 9), np.float32)}, "?", "embed_tokens"),
        ({f"{LAYER}q_proj.lora_magnitude_vector.weight": np.zeros(64, np.float32)}, "?", "magnitude"),
        ({f"{LAYER}q_proj.bias": np.zeros(64, np.float32)}, "?", "q_proj.bias"),
        ({}, "0.self_attn.q_proj.lora_B", "q_proj"),
        ({f"{LAYER}q_proj.lora_A.weight": np.zeros((5, 64), np.float32)}, "?", "q_proj"),
        ({f"{LAYER}q_proj.lora_A.weight": np.zeros((4, 64), np.int8)}, "?", "in another type than F32"),
        ({}, "lora", "holds no matrices"),
    ],
)  # fmt: skip
def test_tensors_that_servers_ignore(
    folder: Path, tensors: dict[str, np.ndarray], drop: str, fault: str
) -> None:
    change_tensors(folder, tensors, drop)
    (found,) = read_adapter(folder).faults
    assert fault in found


def test_everything_is_said_at_once(folder: Path) -> None:
    change_config(folder, use_dora=True, modules_to_save=["lm_head"], peft_type="X")
    change_tensors(folder, {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 64), np.float32)})
    assert len(read_adapter(folder).faults) == 4


def test_ranks_have_a_bound(tmp_path: Path, base: Path) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "x", base, rank=MAX_RANK + 1, targets=("q_proj",)))
    assert adapter.faults == (f"has rank {MAX_RANK + 1}; at most {MAX_RANK} is served",)


def test_an_adapter_of_another_base(folder: Path, base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    smaller = ModelSizes.from_config(config | {"num_hidden_layers": 1, "intermediate_size": 32})
    assert smaller is not None
    found = list(read_adapter(folder).base_faults(smaller))
    assert found == [
        "adapts layer 1; the base has layers 0 to 0",
        "is for layers of [64, 96], but those of the base are [64, 32]: layers.0.mlp.down_proj",
        "is for layers of [96, 64], but those of the base are [32, 64]: layers.*.mlp.gate_proj, layers.*.mlp.up_proj",
    ]


def test_layers_that_the_base_does_not_have(tmp_path: Path, base: Path) -> None:
    fused = make_base(tmp_path / "phi", "phi3")
    adapter = read_adapter(make_adapter(tmp_path / "x", fused, targets=("q_proj", "down_proj")))
    assert list(adapter.base_faults(sizes(base))) == [
        "adapts layers.*.self_attn.qkv_proj, which the base does not have"
    ]


def test_experts_are_named(folder: Path, base: Path) -> None:
    change_tensors(
        folder,
        {
            f"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_{part}.weight": np.zeros(
                shape, np.float32
            )
            for part, shape in (("A", (4, 64)), ("B", (96, 4)))
        },
    )
    (found,) = read_adapter(folder).base_faults(sizes(base))
    assert found.startswith("adapts experts (layers.0.mlp.experts.1.up_proj)")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 40), "not a safetensors file"),
        (lambda folder: os.symlink("/etc/passwd", folder / "x.safetensors"), "is a link"),
    ],
)  # fmt: skip
def test_damaged_files(folder: Path, damage: Any, fault: str) -> None:
    damage(folder)
    (found,) = read_adapter(folder).faults
    assert fault in found
