"""Rules about sizes: what must divide, what is padded or copied. The arithmetic is in `split_sizes`.

Each check is one rule of contracts/data/rules/splitting.yaml, under its id in CHECKS. A model whose sizes are not known
is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import rule
from pipeline.contracts.version_range import holds
from pipeline.models.sizes import ModelSizes
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.plan import rank_exports
from pipeline.plan.preflight.context import Check, Context, Objection, RecipeModel
from pipeline.plan.preflight.split_sizes import (
    blocks_split,
    experts_split,
    fitting_tensor_sizes,
    heads_split,
    inner_per_rank,
    kv_heads_split,
    padded_features,
    width_splits,
)
from pipeline.recipe.validators import AWQ

PIPELINE, EXPERT = "runtime.pipeline_parallel", "runtime.expert_parallel"
BLOCK, EXPORTS = "quantization.awq_block_size", "quantization.export_tensor_parallel"


def _attention_heads(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        if not heads_split(sizes, model.split.shared):
            yield Objection(
                (model.tensor_key, model.source_key),
                f"must divide the {sizes.heads} attention heads of {_name(model)}",
                _fitting(context, model, sizes),
            )


def _kv_heads_even(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        if sizes.kv_heads >= model.split.shared and not kv_heads_split(sizes, model.split.shared):
            yield Objection(
                (model.tensor_key, model.source_key),
                f"must divide the {sizes.kv_heads} key and value heads of {_name(model)}",
                _fitting(context, model, sizes),
            )


def _kv_heads_duplicate(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        if sizes.kv_heads < model.split.shared and not kv_heads_split(sizes, model.split.shared):
            yield Objection(
                (model.tensor_key, model.source_key),
                f"must be a multiple of the {sizes.kv_heads} key and value heads of {_name(model)}, "
                "each of which is copied to several ranks",
                _fitting(context, model, sizes),
            )


def _kv_heads_copied(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        copies, remainder = divmod(model.split.shared, sizes.kv_heads)
        if copies > 1 and not remainder:
            yield Objection(
                (model.tensor_key,),
                f"each of the {sizes.kv_heads} key and value heads of {_name(model)} lies on {copies} ranks, "
                "so a rank's KV cache is no smaller than with "
                f"{sizes.kv_heads}",
            )


def _width(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        if not width_splits(sizes, model.split):
            shared = f" (with {model.split.expert} groups of experts)" if sizes.experts else ""
            yield Objection(
                (model.tensor_key, model.source_key),
                f"must divide the hidden size {sizes.hidden} and the inner size {sizes.intermediate} of "
                f"{_name(model)}{shared}",
                _fitting(context, model, sizes),
            )


def _groups(context: Context) -> Iterator[Objection]:
    """Weights of a row that share a scale: whole groups, in every layer."""
    of_format: dict[str, int] = rule("quantization.groups").facts["sizes"]
    block = context.recipe.quantization.awq_block_size
    for model, sizes in context.sized:
        smallest = max(of_format.get(form, 1) for form in context.layer_formats(model))
        group = block if _has_awq(context, model) else smallest
        uneven = [columns for columns in _columns(sizes) if columns % group]
        if uneven:
            smaller = (
                group == 128 and not any(columns % 64 for columns in uneven) and _has_blocks_of_64(context)
            )
            yield Objection(
                (BLOCK if group == block else model.format_key, model.source_key),
                f"groups of {group} weights do not divide {' and '.join(map(str, uneven))} columns of {_name(model)}",
                "64" if smaller else "choose a format without groups, such as fp8",
            )


def _w4a8_groups(context: Context) -> Iterator[Objection]:
    """One finding for both models, which share the size of blocks."""
    only: int = rule("quantization.w4a8_group").facts["group"]
    wrong = [model for model in context.models if "w4a8_awq" in context.layer_formats(model)]
    if not wrong or context.recipe.quantization.awq_block_size == only:
        return
    keys = ["quantization.auto.formats" if model.format == "auto" else model.format_key for model in wrong]
    sizes = [model.sizes for model in wrong if model.sizes is not None]
    divides = not any(columns % only for size in sizes for columns in _columns(size))
    instead = f"{' and '.join(keys)} to int4_awq"
    yield Objection(
        (BLOCK, *(model.format_key for model in wrong)),
        f"must be {only} for w4a8_awq: TensorRT-LLM has no kernels for other groups",
        f"set {BLOCK} to {only}, or {instead}" if divides else f"set {instead}",
    )


def _has_blocks_of_64(context: Context) -> bool:
    """Whether they may be advised; both models have blocks of one size."""
    w4a8 = any("w4a8_awq" in context.layer_formats(model) for model in context.models)
    return context.gpu_runtime is None or not w4a8


def _columns(sizes: ModelSizes) -> tuple[int, ...]:
    """Inputs of the linear layers of a block, each size once."""
    return tuple(dict.fromkeys((sizes.hidden, sizes.heads * sizes.head_dim, sizes.intermediate)))


def _awq_blocks(context: Context) -> Iterator[Objection]:
    block = context.recipe.quantization.awq_block_size
    for model, sizes in context.sized:
        # Where blocks do not divide the model as a whole, no split is to blame.
        uneven = any(columns % block for columns in _columns(sizes))
        if not _has_awq(context, model) or uneven or blocks_split(sizes, model.split, block):
            continue
        halved = block == 128 and blocks_split(sizes, model.split, 64) and _has_blocks_of_64(context)
        attention, inner = sizes.heads * sizes.head_dim, inner_per_rank(sizes, model.split)[0]
        yield Objection(
            (model.tensor_key, BLOCK, model.format_key),
            f"leaves a rank of {_name(model)} {attention / model.split.shared:g} inputs of o_proj and {inner} of "
            f"down_proj, which {BLOCK} {block} must divide",
            (f"set {BLOCK} to 64, or " if halved else "") + _fitting(context, model, sizes),
        )


def _awq_padding(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        multiple = _awq_multiple(context, model)
        block = context.recipe.quantization.awq_block_size
        uneven = any(columns % block for columns in _columns(sizes))
        if multiple is None or uneven or not blocks_split(sizes, model.split, block):
            continue  # of blocks that are cut, other rules speak
        for name, (size, padded) in padded_features(sizes, model.split.shared, multiple).items():
            yield Objection(
                (model.tensor_key, model.format_key),
                f"makes TensorRT-LLM pad the {name} of {_name(model)} from {size} to {padded}, {multiple} x "
                f"{model.split.shared} being no divisor, and the checkpoint of a rank does not fill it",
                _fitting(context, model, sizes) or "choose fp8",
            )


def _awq_multiple(context: Context, model: RecipeModel) -> int | None:
    """Features of a rank that an engine's AWQ layers are multiples of; None if there are none."""
    least: dict[str, int] = rule("tp.awq_padding").facts["multiples"]
    formats = [least[form] for form in context.layer_formats(model) if form in least]
    if context.kind != "tensorrt" or not formats:
        return None
    return max(*formats, context.recipe.quantization.awq_block_size)


def _padded_vocabulary(context: Context) -> Iterator[Objection]:
    for model, sizes in context.sized:
        over = sizes.vocab % model.split.shared
        if over:
            padded = sizes.vocab + model.split.shared - over
            yield Objection(
                (model.tensor_key,),
                f"the vocabulary of {_name(model)} is padded from {sizes.vocab} to {padded} tokens, and logits with it",
            )


def _padded_for_awq(context: Context) -> Iterator[Objection]:
    multiple: int = rule("vocab.pad_awq").facts["multiple"]
    for model, sizes in context.sized:
        if _has_awq(context, model) and sizes.vocab % multiple:
            padded = -(-sizes.vocab // multiple) * multiple
            yield Objection(
                (model.format_key,),
                f"the output projection of {_name(model)} is padded from {sizes.vocab} to {padded} tokens",
            )


def _layers(context: Context) -> Iterator[Objection]:
    model, sizes = context.target, context.target.sizes
    if sizes is not None and model.split.pipeline > sizes.layers:
        yield Objection(
            (PIPELINE, model.source_key),
            f"is more than the {sizes.layers} layers of {_name(model)}",
            f"at most {sizes.layers}",
        )
    stages = context.arguments.get("pp_partition")
    if sizes is not None and stages and (len(stages) != model.split.pipeline or sum(stages) != sizes.layers):
        yield Objection(
            ("runtime.llm_args", PIPELINE),
            f"has pp_partition {stages}, which are {sum(stages)} layers in {len(stages)} stages",
            f"give {PIPELINE} numbers, {sizes.layers} together, or remove pp_partition",
        )


def _even_layers(context: Context) -> Iterator[Objection]:
    model, sizes = context.target, context.target.sizes
    if context.arguments.get("pp_partition"):
        return
    if sizes is not None and model.split.pipeline <= sizes.layers and sizes.layers % model.split.pipeline:
        divisors = [n for n in range(1, model.split.pipeline * 2) if sizes.layers % n == 0]
        yield Objection(
            (PIPELINE, model.source_key),
            f"does not divide the {sizes.layers} layers of {_name(model)}",
            "one of " + ", ".join(map(str, divisors)),
        )


def _models_without_stages(context: Context) -> Iterator[Objection]:
    model, runtime = context.target, context.gpu_runtime
    if runtime is None or model.split.pipeline == 1:
        return
    for entry in rule("pp.models").facts["models"]:
        named = (entry["architecture"], entry["runtime"]) == (model.architecture, runtime.kind)
        if named and holds(runtime.version, entry.get("since"), None):
            yield Objection(
                (PIPELINE, model.source_key), f"must be 1 for {model.architecture}", f"remove {PIPELINE}"
            )


def _experts(context: Context) -> Iterator[Objection]:
    model, sizes = context.target, context.target.sizes
    if sizes is not None and sizes.experts and not experts_split(sizes, model.split.expert):
        fits = [
            n
            for n in range(1, model.split.tensor + 1)
            if not model.split.tensor % n and not sizes.experts % n
        ]
        yield Objection(
            (EXPERT, model.source_key),
            f"must divide the {sizes.experts} experts of {_name(model)}",
            "one of " + ", ".join(map(str, fits)),
        )


def _dense(context: Context) -> Iterator[Objection]:
    model, sizes = context.target, context.target.sizes
    if sizes is not None and not sizes.experts and model.split.expert > 1:
        yield Objection(
            (EXPERT, model.source_key), f"is given, but {_name(model)} has no experts", f"remove {EXPERT}"
        )


def _wide_experts(context: Context) -> Iterator[Objection]:
    split = context.target.split
    if (context.arguments.get("moe_config") or {}).get("backend") == "WIDEEP" and split.request_groups == 1:
        alone = split.tensor == 1
        yield Objection(
            ("runtime.llm_args", context.target.tensor_key if alone else "runtime.attention_dp"),
            "has moe_config.backend WIDEEP, which needs several GPUs with runtime.attention_dp",
            "remove moe_config.backend"
            if alone
            else "set runtime.attention_dp to true, or remove moe_config.backend",
        )


def _world(context: Context) -> Iterator[Objection]:
    """The settings of a package require the GPUs of its largest model, for each instance."""
    required = context.emitted.of_package("requirements").get("gpus")
    if required is not None and required != context.world:
        yield Objection(
            (context.target.tensor_key, PIPELINE),
            f"needs {context.world} GPUs with the other sizes, the package would require {required}",
        )


def _exports(context: Context) -> Iterator[Objection]:
    """Tensor-parallel sizes that calibration exports besides those of the engine."""
    model, sizes, recipe = context.target, context.target.sizes, context.recipe
    if sizes is None or model.format == "none":
        return
    group = recipe.quantization.awq_block_size if _has_awq(context, model) else None
    for split in rank_exports(recipe, model.role):
        faults = [] if split == model.split else list(_export_faults(sizes, split, group))
        if faults:
            yield Objection((EXPORTS, model.source_key), f"{split.tensor} {' and '.join(faults)}")


def _export_faults(sizes: ModelSizes, split: Parallelism, group: int | None) -> Iterator[str]:
    if not heads_split(sizes, split.tensor):
        yield f"does not divide the {sizes.heads} attention heads"
    if not kv_heads_split(sizes, split.tensor):
        yield f"neither divides the {sizes.kv_heads} key-value heads nor is divided by them"
    if not width_splits(sizes, split):
        yield f"does not divide the {sizes.intermediate} feed-forward columns"
    elif group is not None and not blocks_split(sizes, split, group):
        yield f"leaves columns a rank which groups of {group} do not divide"


def _has_awq(context: Context, model: RecipeModel) -> bool:
    auto = context.recipe.quantization.auto
    return model.format in AWQ or (
        model.format == "auto" and auto is not None and bool({*auto.formats} & {*AWQ})
    )


def _name(model: RecipeModel) -> str:
    return f"the {model.role}"


def _fitting(context: Context, model: RecipeModel, sizes: ModelSizes) -> str:
    """Tensor-parallel sizes that break no rule of this file; of the target, with the recipe's other sizes."""
    block = context.recipe.quantization.awq_block_size if _has_awq(context, model) else None
    expert = model.split.expert if sizes.experts else 1
    fits = fitting_tensor_sizes(
        sizes,
        block,
        expert,
        multiple=_awq_multiple(context, model) or 1,
        attention_dp=model.split.attention_dp,
    )
    return f"set {model.tensor_key} to {' or '.join(map(str, fits))}" if fits else ""


CHECKS: Mapping[str, Check] = {
    "tp.attention_heads": _attention_heads,
    "tp.kv_heads_even": _kv_heads_even,
    "tp.kv_heads_duplicate": _kv_heads_duplicate,
    "tp.kv_heads_copied": _kv_heads_copied,
    "tp.hidden_and_ffn": _width,
    "quantization.groups": _groups,
    "quantization.w4a8_group": _w4a8_groups,
    "tp.awq_block": _awq_blocks,
    "tp.awq_padding": _awq_padding,
    "quantization.exports": _exports,
    "vocab.pad_tp": _padded_vocabulary,
    "vocab.pad_awq": _padded_for_awq,
    "pp.layers": _layers,
    "pp.layers_even": _even_layers,
    "pp.models": _models_without_stages,
    "moe.ep": _experts,
    "moe.dense": _dense,
    "moe.wide_ep": _wide_experts,
    "pp.world": _world,
}
