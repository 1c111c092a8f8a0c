"""What can be refused before a model is loaded: formats, groups and ranks that the sizes do not allow. Pure.

The rules are those of ModelOpt's TensorRT-LLM export (0.37 to 0.47) and of TensorRT-LLM's loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import Fault, InvalidInput
from pipeline.models import Architecture, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.recipe import Quantization
from pipeline.runtimes.tensorrt.checkpoint import FORMATS, split_faults

AWQ = (Format.INT4_AWQ, Format.W4A8_AWQ)
NVFP4_GROUP = 16


def check(
    architecture: Architecture, quantization: Quantization, exports: Sequence[Parallelism], *, has_cuda: bool
) -> Format:
    """The format to calibrate; InvalidInput with every reason why it cannot be done."""
    faults = [*_format_faults(architecture, quantization, has_cuda)]
    if not faults:
        form = Format(quantization.format)
        group = group_size(form, quantization)
        faults = [
            *_group_faults(architecture, form, group),
            *_rank_faults(architecture, form, group, exports),
        ]
    if faults:
        raise InvalidInput(f"{architecture.class_name} cannot be calibrated like this", faults)
    return form


def group_size(form: Format, quantization: Quantization) -> int | None:
    """Weights that share one scale; None where a row or the whole tensor does."""
    if form in AWQ:
        return quantization.awq_block_size
    return NVFP4_GROUP if form is Format.NVFP4 else None


def _format_faults(architecture: Architecture, quantization: Quantization, has_cuda: bool) -> Iterator[Fault]:
    if (architecture.experts or architecture.fused) and quantization.format not in (*FORMATS, "auto"):
        kind = "experts" if architecture.experts else "fused projections"
        yield Fault(
            f"is not offered for {architecture.class_name}, which has {kind}",
            key="quantization.format",
            value=quantization.format,
            fix=" or ".join(FORMATS),
        )
    if quantization.format == "auto":
        yield Fault(
            "is not supported yet",
            key="quantization.format",
            value="auto",
            fix=f"one of {', '.join(form.value for form in Format)}",
        )
    if quantization.format == "nvfp4" and not has_cuda:
        yield Fault(
            "needs a CUDA GPU to calibrate: ModelOpt simulates it nowhere else",
            key="quantization.format",
            value="nvfp4",
            fix="calibrate on a GPU, or use fp8 or int4_awq",
        )
    if quantization.format == "none" and quantization.kv_cache == "fp8":
        yield Fault(
            "is calibrated together with the weights, and format none calibrates nothing",
            key="quantization.kv_cache",
            value="fp8",
            fix="kv_cache: auto, or format: fp8",
        )


def _group_faults(architecture: Architecture, form: Format, group: int | None) -> Iterator[Fault]:
    if group is None:
        return
    halves = form is Format.INT4_AWQ and group == 128  # TensorRT-LLM has w4a8_awq in groups of 128 only
    for name, columns in _input_sizes(architecture).items():
        if columns % group:
            yield Fault(
                f"does not divide {name} = {columns}",
                key="quantization.awq_block_size" if form in AWQ else "quantization.format",
                value=group,
                fix="64" if halves and columns % 64 == 0 else "fp8 or int8_sq, which have no groups",
            )


def _rank_faults(
    architecture: Architecture, form: Format, group: int | None, exports: Sequence[Parallelism]
) -> Iterator[Fault]:
    model, key = architecture, "quantization.export_tensor_parallel"
    for size in exports:
        if size.tensor < 1:
            yield Fault("must be 1 or more", key=key, value=size.tensor)
        else:
            yield from split_faults(model, size, key)
    for count in sorted({size.tensor for size in exports if size.tensor > 0}):
        if group is None or form is Format.NONE:
            continue
        for name, columns in (
            ("attention", model.heads * model.head_dim),
            ("feed-forward", model.intermediate),
        ):
            if columns % count == 0 and (columns // count) % group:
                yield Fault(
                    f"leaves {columns // count} {name} columns a rank, which groups of {group} do not divide",
                    key=key,
                    value=count,
                )


def _input_sizes(architecture: Architecture) -> dict[str, int]:
    return {
        "hidden_size": architecture.hidden,
        "num_attention_heads * head_dim": architecture.heads * architecture.head_dim,
        "intermediate_size": architecture.intermediate,
    }
