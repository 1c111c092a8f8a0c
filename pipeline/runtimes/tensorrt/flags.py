"""Limits of an engine and flags of trtllm-build: everything that makes an engine what it is, and no paths.

All limits are chosen so that trtllm-build keeps them as they are, except that it adds `max_draft_len` to `max_seq_len`
of an engine that verifies drafts.

Nothing is run here. A value that the builder would change by itself is asked for as it will be, so that config.json can
be held against it; a flag that it would turn off although the recipe needs it is refused before anything is built. All
flags that matter are given, because upstream's defaults differ by version; the value that suits a format is data
(`contracts.trtllm_build`).

Off unless the recipe says otherwise (`runtime.build_flags`): `reduce_fusion` and `user_buffer` (tensor-parallel Llama
only; upstream calls the gain a matter of the workload), the low-latency and SwiGLU GEMM plugins (FP8; the latter drops
a scale), and `gather_context_logits` (`serving.prompt_log_probs`). Always off: `gather_generation_logits` (a draft that
hands over its logits needs it at run time only), beam search, LoRA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import require_runtime
from pipeline.contracts.trtllm_build import argv_of, data
from pipeline.errors import Fault, InvalidInput, StageError
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.parallelism import parallelism
from pipeline.recipe import Recipe, TensorRTRuntime
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, CheckpointConfig, effects

ALGORITHMS: dict[str, str | None] = {  # recipe's format -> quant_algo of the checkpoint
    "none": None,
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "nvfp4": "NVFP4",
    "w4a16_nvfp4": "W4A16_NVFP4",
    "auto": "MIXED_PRECISION",
}
OWN_FLAGS = "runtime.build_flags"
_KV_CACHES: dict[str, str | None] = {"auto": None, "fp8": "FP8"}


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of one model's weights and KV cache, as the recipe names them."""

    weights: str
    kv_cache: str

    @property
    def algorithm(self) -> str | None:
        """`quant_algo` of upstream."""
        return ALGORITHMS[self.weights]

    @property
    def kv_algorithm(self) -> str | None:
        """`kv_cache_quant_algo` of upstream."""
        return _KV_CACHES[self.kv_cache]


def formats(recipe: Recipe, role: str) -> Formats:
    """Formats of the target or the draft. An uncalibrated checkpoint has no scales for another KV cache."""
    drafted = recipe.draft is not None and role == "draft"
    weights = recipe.draft.quantization if drafted and recipe.draft else recipe.quantization.format
    return Formats(weights, recipe.quantization.kv_cache if weights != "none" else "auto")


def checkpoint_formats(config: Mapping[str, Any]) -> Formats:
    """Formats of a checkpoint, by its config.json: the choice of `auto`, or the earlier quantization of a source.

    Raises:
        StageError: There is no such format here.
    """
    quantization = config.get("quantization") or {}
    weights = {algorithm: name for name, algorithm in ALGORITHMS.items()}
    kv_caches = {algorithm: name for name, algorithm in _KV_CACHES.items()}
    try:
        return Formats(
            weights[quantization.get("quant_algo")], kv_caches[quantization.get("kv_cache_quant_algo")]
        )
    except KeyError as error:
        raise StageError(
            f"the checkpoint is quantized by {error.args[0]}, which no recipe asks for"
        ) from None


def trtllm_build_flags(recipe: Recipe, role: str, stored: Formats | None = None) -> tuple[str, ...]:
    """Return all flags of trtllm-build for one engine but those with paths, in a fixed order.

    Those of `runtime.build_flags` are among them and win.

    Args:
        role: `target` or `draft`.
        stored: Formats of the checkpoint once it is there; until then the recipe's are taken.

    Raises:
        UserError: The version or the GPU is not known.
        InvalidInput: The builder would refuse the flags, or build something else than they say.
    """
    runtime = runtime_settings(recipe)
    require_runtime(runtime.version, "tensorrt")
    known = stored or formats(recipe, role)
    limits, sm = engine_limits(recipe, role), gpu(runtime.gpu).sm
    derived = {name: str(value) for name, value in _values(recipe, known, limits, sm)}
    own = runtime.build_flags if role == "target" else ()
    if stored is not None or known.weights != "auto":
        _refuse_changes(recipe, role, derived, own, known, sm)
    return _argv(derived, own)


def _argv(derived: Mapping[str, str], own: Sequence[str]) -> tuple[str, ...]:
    """Join derived flags and `own`, the entries of runtime.build_flags, which `preflight` judges."""
    by_flag: dict[str, tuple[str, ...]] = {
        name: (f"--{name}", value) if value else (f"--{name}",) for name, value in derived.items()
    }
    by_flag |= {_name(entry): argv_of(entry) for entry in own}
    return tuple(argument for arguments in by_flag.values() for argument in arguments)


def _values(
    recipe: Recipe, stored: Formats, limits: EngineLimits, sm: int
) -> Iterator[tuple[str, str | int]]:
    yield "max_batch_size", limits.max_batch_size
    yield "max_input_len", limits.max_input_len
    yield "max_seq_len", limits.max_seq_len
    yield "max_num_tokens", limits.max_num_tokens
    yield "max_beam_width", limits.max_beam_width
    if limits.max_draft_len:
        yield "speculative_decoding_mode", "draft_tokens_external"
        yield "max_draft_len", limits.max_draft_len
    yield "kv_cache_type", "paged"
    yield "tokens_per_block", limits.tokens_per_block
    yield "remove_input_padding", "enable"
    yield "context_fmha", "enable"
    yield "use_paged_context_fmha", _toggle(limits.paged_context_fmha)
    yield "use_fp8_context_fmha", _toggle(_computes_in_fp8(stored, sm))
    yield "paged_state", "disable"  # of recurrent models; the builder would turn it off with a warning
    for entry in data()["recommended"]:
        by_format = entry.get("by_format", {})
        if stored.weights in by_format:
            yield entry["flag"], by_format[stored.weights]
    # Kernels that depend on the load make a draft's and its target's greedy tokens part more often.
    yield "multiple_profiles", _toggle(recipe.draft is None)
    yield "logits_dtype", "float32"
    yield "profiling_verbosity", "layer_names_only"
    yield "log_level", "info"
    # A switch. With a draft the builder refuses it, and so does the plan.
    if recipe.serving.prompt_log_probs and recipe.draft is None:
        yield "gather_context_logits", ""


def _computes_in_fp8(stored: Formats, sm: int) -> bool:
    """Whether attention over prompts is in FP8: with an FP8 KV cache, where the weights' format goes with it."""
    facts = data()["fp8_context"]
    able: bool = stored.algorithm in facts["algorithms"] and sm >= facts["oldest_sm"]
    return able and stored.kv_cache == "fp8"


def _refuse_changes(
    recipe: Recipe, role: str, derived: Mapping[str, str], own: Sequence[str], stored: Formats, sm: int
) -> None:
    """Raise InvalidInput if the builder would refuse or change something.

    Entries of runtime.build_flags that are to blame are named one by one, so that the recipe without them is taken;
    otherwise the formats are named.
    """
    runtime, sizes, known = runtime_settings(recipe), parallelism(recipe, role), offline_sizes(recipe)
    model = CheckpointConfig(
        architecture=known[role].architecture if role in known else None,
        quant_algo=stored.algorithm,
        kv_cache_quant_algo=stored.kv_algorithm,
        tensor_parallel=sizes.tensor,
    )

    def objections(entries: Sequence[str]) -> dict[str, str]:
        return _objections(effects(runtime.version, _argv(derived, entries), model, sm))

    where = f"with quantization.kv_cache {stored.kv_cache} on {runtime.gpu}"
    faults, left = list[Fault](), list(own)
    while reasons := objections(left):
        blamed = [entry for entry in left if reasons != objections([e for e in left if e != entry])]
        if not blamed:
            key = "quantization.format" if role == "target" else "draft.quantization"
            fix = "choose other formats, another GPU, or do without what needs the flag"
            faults += [
                Fault(f"{where}, {text}", key=key, value=stored.weights, fix=fix) for text in reasons.values()
            ]
            break
        entry = next((entry for entry in blamed if _name(entry) in reasons), blamed[0])
        text = reasons.get(_name(entry)) or next(iter(reasons.values()))
        faults.append(Fault(f"has {entry}: {where}, {text}", key=OWN_FLAGS, fix=f"leave out {entry}"))
        left.remove(entry)
    if faults:
        raise InvalidInput(f"recipe {recipe.name}, engine of the {role}", faults)


def _objections(outcome: BuildEffects) -> dict[str, str]:
    """Map flags to how the builder changes them, and "" to why it refuses the whole command."""
    if outcome.refusal:
        return {"": outcome.refusal}
    return {change.flag: str(change) for change in outcome.changes}


def _name(entry: str) -> str:
    """Flag of an entry of runtime.build_flags."""
    return entry.partition("=")[0]


def _toggle(on: bool) -> str:
    return "enable" if on else "disable"


TOKENS_PER_BLOCK = 32  # of the KV cache; upstream's default since 0.17, before it was 64 and 128
_STEP_TOKENS = 8192  # upstream's default of max_num_tokens, more brings little (upstream warns above 16384)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Names are those of trtllm-build's flags; lengths and budgets are in tokens."""

    max_batch_size: int  # requests in one step
    max_input_len: int
    max_seq_len: int  # prompt and answer; without the drafts
    max_num_tokens: int  # in one step of all requests together
    max_beam_width: int
    max_draft_len: int  # drafted tokens that are verified at once; 0: an ordinary engine
    tokens_per_block: int
    paged_context_fmha: (
        bool  # whether attention over a prompt may read pages; reuse, chunks and drafts need it
    )


def engine_limits(recipe: Recipe, role: str) -> EngineLimits:
    """Choose the limits of the target's or the draft's engine.

    Both take the same sequences: in each round, the BLS sends both all of the text so far as a prompt.
    """
    limits, draft = recipe.limits, recipe.draft
    drafted = draft.max_draft_tokens if draft is not None and role == "target" else 0
    longest = limits.max_sequence_tokens
    return EngineLimits(
        max_batch_size=limits.max_concurrency,
        max_input_len=limits.max_input_tokens if draft is None else longest - 1,
        max_seq_len=longest,
        max_num_tokens=_step_tokens(recipe, drafted),
        max_beam_width=1,
        max_draft_len=drafted,
        tokens_per_block=TOKENS_PER_BLOCK,
        paged_context_fmha=recipe.kv_cache.reuse or recipe.scheduler.chunked_context or draft is not None,
    )


def least_step_tokens(recipe: Recipe, drafted: int) -> int:
    """Count the tokens that one step must hold: one a request and its drafts, and without chunks a whole prompt."""
    each = recipe.limits.max_concurrency * (drafted + 1)
    if recipe.scheduler.chunked_context:
        return max(each, TOKENS_PER_BLOCK)
    return max(each, TOKENS_PER_BLOCK, _longest_prompt(recipe, drafted))


def _longest_prompt(recipe: Recipe, drafted: int) -> int:
    """With a draft, the answer so far is part of the prompt, and the drafts that are verified come with it."""
    if recipe.draft is None:
        return recipe.limits.max_input_tokens
    return min(recipe.limits.max_sequence_tokens - 1 + drafted, _most(recipe))


def _step_tokens(recipe: Recipe, drafted: int) -> int:
    """`max_num_tokens`: a whole number of blocks wherever that fits between what is needed and what is kept."""
    least, limit = least_step_tokens(recipe, drafted), recipe.limits.max_batch_tokens
    wanted = max(least, limit if limit is not None else _STEP_TOKENS)
    most = max(_most(recipe), TOKENS_PER_BLOCK)
    wanted = min(wanted, most)
    down = wanted - wanted % TOKENS_PER_BLOCK
    up = down + TOKENS_PER_BLOCK
    if down >= least:
        return down
    return up if up <= most else most


def _most(recipe: Recipe) -> int:
    """All sequences at their full length; the builder clips larger budgets to this."""
    return recipe.limits.max_sequence_tokens * recipe.limits.max_concurrency


def runtime_settings(recipe: Recipe) -> TensorRTRuntime:
    """Return the section `runtime` of a recipe of this runtime."""
    assert isinstance(recipe.runtime, TensorRTRuntime), "chosen by runtime.kind"
    return recipe.runtime
