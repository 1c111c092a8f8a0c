"""What is refused before a model is loaded, all reasons at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput
from pipeline.models import Architecture, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.stages.calibrate import calibrate
from pipeline.stages.calibrate.refusals import check
from tests.support.calibrated import quantization
from tests.support.models import make_checkpoint

MODEL = Architecture.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)


def sizes(*ranks: int) -> list[Parallelism]:
    return [Parallelism(count) for count in ranks]


def problems(
    form: str,
    ranks: Sequence[int] = (),
    model: Architecture = MODEL,
    has_cuda: bool = False,
    **settings: object,
) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        check(model, quantization(form, **settings), sizes(*ranks), has_cuda=has_cuda)  # type: ignore[arg-type]
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize("form", ["none", "fp8", "int4_awq", "w4a8_awq", "int8_sq"])
def test_a_common_model_passes_in_every_format(form: str) -> None:
    assert check(MODEL, quantization(form, block=128), sizes(1, 2, 4, 8), has_cuda=False) is Format(form)


def test_more_ranks_than_key_value_heads_share_them() -> None:
    assert check(MODEL, quantization("fp8"), sizes(16), has_cuda=False) is Format.FP8


def test_nvfp4_needs_a_gpu() -> None:
    (problem,) = problems("nvfp4")
    assert "needs a CUDA GPU" in problem
    assert check(MODEL, quantization("nvfp4"), sizes(1), has_cuda=True) is Format.NVFP4


def test_what_is_not_supported() -> None:
    assert "not supported yet" in problems("auto")[0]
    assert "format none calibrates nothing" in problems("none", kv_cache="fp8")[0]


def test_groups_that_do_not_divide_the_model() -> None:
    odd = replace(MODEL, hidden=4096 + 64, intermediate=14336 + 32)
    found = problems("int4_awq", model=odd, block=128)
    assert len(found) == 2
    assert "does not divide hidden_size = 4160 (64)" in found[0]
    assert "intermediate_size = 14368 (fp8 or int8_sq" in found[1]
    check(odd, quantization("fp8"), sizes(1), has_cuda=False)
    assert "(fp8 or int8_sq" in problems("w4a8_awq", model=odd, block=128)[0], (
        "64 is advised for int4_awq alone"
    )


def test_ranks_that_do_not_divide_the_model_are_all_named() -> None:
    found = problems("fp8", ranks=(0, 3, 12))
    assert any("= 0: must be 1 or more" in text for text in found)
    assert any("= 3: does not divide the 32 attention heads" in text for text in found)
    assert any("= 12: neither divides the 8 key-value heads" in text for text in found)
    assert any("= 3: does not divide the 14336 feed-forward columns" in text for text in found)


def test_groups_within_a_rank() -> None:
    small = replace(MODEL, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512)
    check(small, quantization("int4_awq", block=64), sizes(1, 2, 4), has_cuda=False)
    found = problems("int4_awq", ranks=(1, 2, 4), model=small, block=128)
    assert found == [
        "quantization.export_tensor_parallel = 4: leaves 64 attention columns a rank, "
        "which groups of 128 do not divide",
    ]


def test_the_stage_refuses_before_it_reads_weights(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    (source / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="needs a CUDA GPU"):
        calibrate(
            source,
            None,
            quantization("nvfp4"),
            exports=[Parallelism()],
            into=tmp_path,
            progress=Silent(),
            device="cpu",
        )


def test_stages_that_do_not_divide_the_layers() -> None:
    with pytest.raises(InvalidInput, match="pipeline_parallel = 3: does not divide the 32 layers"):
        check(MODEL, quantization("fp8"), [Parallelism(2, 3)], has_cuda=False)
