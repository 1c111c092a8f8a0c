"""Keys of a recipe that are tried, with their values and reasons: one table, cut to what a recipe's runtime reads.

Keys that change the answers (formats, precision), that clients rely on (lengths of prompts and answers) or that a
machine decides (GPUs, splits) are left out; `pipeline plan compare` covers those.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

from pipeline.bench.tune.settings import MAX_LENGTH
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.recipe import PyTorchRuntime, Recipe, load_recipe
from pipeline.recipe.loading import recipe_of_values
from pipeline.recipe.sections import RecipeValues
from pipeline.runtimes import runtime_of

Value = bool | int | float | str | None
Settings = Mapping[str, Value]  # key of a dimension -> value

_ALL, _GPU = ("cpu", "tensorrt", "pytorch"), ("tensorrt", "pytorch")


@dataclass(frozen=True, slots=True)
class TunableKey:
    """A key of the recipe that a search may change.

    Attributes:
        key: Dotted key; in draft lengths, 0 stands for no draft.
        runtimes: Runtimes whose engines or Triton models read it.
        values: Values that are tried beside the recipe's own.
        factors: Values as multiples of the recipe's own instead.
        unset: Runtime -> number that it takes where the recipe gives none; it has its place among `values`.
    """

    key: str
    runtimes: tuple[str, ...]
    reason: str
    values: tuple[Value, ...] = ()
    factors: tuple[float, ...] = ()
    unset: Mapping[str, float] | None = None


TUNABLE_KEYS = (
    TunableKey(
        "limits.max_concurrency", _ALL,
        "requests that generate at the same time: more fill the engine's steps, and make each of them longer",
        factors=(0.25, 0.5, 1, 2, 4),
    ),
    TunableKey(
        "limits.max_batch_tokens", _ALL,
        "tokens of one step: a prompt in few large steps has its first token early, and holds up everyone else's next",
        values=(128, 256, 512, 1024, 2048, 4096, 8192, 16384), unset={"cpu": 512, "tensorrt": 8192, "pytorch": 8192},
    ),
    TunableKey(
        "kv_cache.memory_fraction", _GPU,
        "share of the free GPU memory that is KV cache: more holds more requests, and leaves less for activations",
        values=(0.7, 0.8, 0.85, 0.9, 0.95), unset={"tensorrt": 0.9, "pytorch": 0.9},
    ),
    TunableKey(
        "kv_cache.reuse", _ALL,
        "pages of finished prompts are kept: a gain where prompts begin alike, bookkeeping where they do not",
        values=(False, True),
    ),
    TunableKey(
        "scheduler.chunked_context", _GPU,
        "long prompts in pieces between the tokens of others: steadier gaps, later first tokens",
        values=(False, True),
    ),
    TunableKey(
        "scheduler.policy", _GPU,
        "admitting a request as soon as it can start fills the KV cache better, and may have to evict one",
        values=("guaranteed_no_evict", "max_utilization"),
    ),
    TunableKey(
        "scheduler.max_queue_delay_us", _ALL,
        "waiting to batch arrivals together: fuller batches before and behind the engine, and a later first token",
        values=(0, 100, 500, 2000),
    ),
    TunableKey(
        "draft.max_draft_tokens", _ALL,
        "tokens that the draft proposes in a round; what is rejected was computed in vain (0: no draft)",
        values=(0, 1, 2, 3, 4, 5, 6, 8),
    ),
    TunableKey(
        "runtime.speculation", ("cpu",),
        "who runs the draft: the target's engine within its step, or tensorrt_llm_bls with an engine for each",
        values=("engine", "bls"),
    ),
    TunableKey(
        "runtime.speculation.max_draft_tokens", ("pytorch",),
        "tokens that n-grams propose in a round; what is rejected was computed in vain (0: no speculation)",
        values=(0, 1, 2, 3, 4, 5, 6, 8),
    ),
    TunableKey(
        "runtime.speculation.max_matching_tokens", ("pytorch",),
        "longest repetition that n-grams are looked up by: longer ones are rarer, and accepted more often",
        values=(1, 2, 3, 4),
    ),
    TunableKey(
        "runtime.threads", ("cpu",),
        "threads of the engine: more are faster until tokenizers, Triton and the gateway want the same processors",
        values=(1, 2, 4, 8, 16, 32, 64),
    ),
    TunableKey(
        "runtime.kv_cache_mib", ("cpu",),
        "memory of the KV cache: more keeps more prompts for reuse",
        values=(256, 1024, 4096),
    ),
    TunableKey(
        "runtime.cuda_graphs", ("pytorch",),
        "decoding steps replayed as CUDA graphs, of all batches up to limits.max_concurrency: less time to launch "
        "kernels, more memory",
        values=(False, True),
    ),
    TunableKey(
        "runtime.overlap_scheduler", ("pytorch",),
        "the next step is prepared while one runs: less time between steps, one step later to stop",
        values=(None, False),
    ),
    TunableKey(
        "runtime.instances", ("pytorch",),
        "copies of the model, each on GPUs of its own, between which Triton divides requests",
        values=(1, 2, 4),
    ),
)  # fmt: skip

DRAFT_LENGTHS = ("draft.max_draft_tokens", "runtime.speculation.max_draft_tokens")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One key of one search.

    Attributes:
        values: Values that are tried, the recipe's own among them; numbers ascend.
        own: The recipe's value, which is never overridden.
        compiled: Whether a change of it needs another engine.
    """

    key: str
    reason: str
    values: tuple[Value, ...]
    own: Value
    compiled: bool

    @property
    def ordered(self) -> bool:
        """Whether neighbours are alike: numbers are, names and switches are not."""
        return not any(isinstance(value, bool | str) for value in self.values)

    def override(self, value: Value) -> str:
        """Write a change as `--set` takes it; empty for the recipe's own value."""
        if value == self.own:
            return ""
        if self.key in DRAFT_LENGTHS and value == 0:
            return f"{self.key.rpartition('.')[0]}=null"
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        return f"{self.key}={text}"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Keys that one search may change, and those that are left out -> why."""

    dimensions: tuple[Dimension, ...]
    left_out: Mapping[str, str]

    @property
    def own(self) -> dict[str, Value]:
        """The recipe as it is."""
        return {dimension.key: dimension.own for dimension in self.dimensions}

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(len(dimension.values) for dimension in self.dimensions)

    def overrides(self, settings: Settings) -> tuple[str, ...]:
        """List the changes of settings as `--set` takes them."""
        changes = [
            text for dimension in self.dimensions if (text := dimension.override(settings[dimension.key]))
        ]
        gone = [text.partition("=")[0] for text in changes if text.endswith("=null") and _is_section(text)]
        # A value below a section that is removed would bring it back.
        return tuple(text for text in changes if not any(text.startswith(f"{section}.") for section in gone))

    def compiles(self, settings: Settings) -> bool:
        """Whether settings need another engine than the recipe's."""
        return any(
            dimension.compiled and settings[dimension.key] != dimension.own for dimension in self.dimensions
        )


def search_space(recipe: Recipe, keys: Sequence[str] = (), fixed: Sequence[str] = ()) -> SearchSpace:
    """Cut the table to what a recipe's runtime reads and a user wants.

        recipe: The recipe as it is, with the values that the study fixes.
        keys: Keys that are tried; empty for all.
        fixed: Keys that are not.

    Raises:
        InvalidInput: Lists every name that is no key of the table, or that this recipe has no use for; or nothing is
            left.
    """
    known = {tunable.key: tunable for tunable in TUNABLE_KEYS}
    left_out = {tunable.key: reason for tunable in TUNABLE_KEYS if (reason := _no_use(tunable, recipe))}
    faults = []
    for option, names in (("keys", keys), ("fix", fixed)):
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.4)
                fix = f"did you mean {near[0]}? " if near else ""
                faults.append(
                    Fault(
                        "is not a key that is tuned",
                        where="--study",
                        key=option,
                        value=name,
                        fix=f"{fix}--dry-run names them all",
                    )
                )
            elif name in left_out and option == "keys":
                faults.append(
                    Fault(f"is not tuned here: {left_out[name]}", where="--study", key=option, value=name)
                )
    both = [name for name in keys if name in fixed]
    faults += [Fault("is in fix, too", where="--study", key="keys", value=name) for name in both]
    left_out |= {key: "by fix" for key in fixed if key in known and key not in left_out}
    left_out |= {key: "not in keys" for key in known if keys and key not in keys and key not in left_out}
    dimensions = [_dimension(tunable, recipe) for tunable in TUNABLE_KEYS if tunable.key not in left_out]
    left_out |= {
        dimension.key: "it can have one value only" for dimension in dimensions if len(dimension.values) < 2
    }
    chosen = tuple(dimension for dimension in dimensions if len(dimension.values) > 1)
    if not chosen and not faults:
        faults.append(Fault("nothing is left to try", fix="name other keys, or fix fewer"))
    if faults:
        raise InvalidInput("command line", faults)
    return SearchSpace(chosen, left_out)


def draft_lengths(recipe: Recipe, lengths: Sequence[int]) -> SearchSpace:
    """Make the space of a sweep over draft lengths alone.

    Args:
        lengths: Lengths from 0, which is no draft, to 64.

    Raises:
        InvalidInput: The recipe has no draft; or lengths are out of bounds.
    """
    faults = [
        Fault(
            "is not a length of drafts",
            where="--study",
            key="draft_lengths",
            value=length,
            fix=f"write 0 to {MAX_LENGTH}",
        )
        for length in lengths
        if not 0 <= length <= MAX_LENGTH
    ]
    named = [
        tunable for tunable in TUNABLE_KEYS if tunable.key in DRAFT_LENGTHS and not _no_use(tunable, recipe)
    ]
    if not named:
        faults.append(
            Fault(
                "the recipe has no draft and no n-grams, whose length could be tried",
                where="--study",
                key="draft_lengths",
            )
        )
    elif len(set(lengths)) < 2 and not faults:
        faults.append(_fault("needs two lengths or more to compare"))
    if faults:
        raise InvalidInput("command line", faults)
    whole = _dimension(named[0], recipe)
    values = tuple(sorted({*lengths}))
    dimension = Dimension(whole.key, whole.reason, values, whole.own, _is_compiled(recipe, whole, values))
    return SearchSpace(
        (dimension,), {key.key: "draft_lengths" for key in TUNABLE_KEYS if key.key != dimension.key}
    )


_fault = partial(Fault, where="--study", key="draft_lengths")


def lengths_of(space: SearchSpace) -> tuple[Settings, ...]:
    """List the settings of a sweep over draft lengths."""
    (dimension,) = space.dimensions
    return tuple({dimension.key: value} for value in dimension.values)


def variant(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Replace values of a recipe, and validate it anew.

    Raises:
        InvalidInput: The values do not go together.
    """
    file = recipe.provenance.file
    if file is None:
        return recipe_of_values(recipe.model_dump(mode="json"), overrides, recipe.name)
    return load_recipe(file, (*recipe.provenance.overrides, *overrides))


def fixed_values(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Split KEY and KEY=VALUE of `fix` into keys and overrides; the override of a bare KEY is empty."""
    for value in values:
        key, equals, _ = value.partition("=")
        yield key.strip(), value if equals else ""


def _no_use(tunable: TunableKey, recipe: Recipe) -> str:
    """Reason why a recipe has no use for a key; empty if it has."""
    runtime = recipe.runtime
    if runtime.kind not in tunable.runtimes:
        return f"the runtime {runtime.kind} does not read it"
    if tunable.key in ("draft.max_draft_tokens", "runtime.speculation") and recipe.draft is None:
        return "the recipe has no draft"
    if tunable.key.startswith("runtime.speculation.") and (
        not isinstance(runtime, PyTorchRuntime)
        or runtime.speculation is None
        or runtime.speculation.method != "ngram"
    ):
        return "the recipe has no n-grams (runtime.speculation.method)"
    return ""


def _dimension(tunable: TunableKey, recipe: Recipe) -> Dimension:
    kind = recipe.runtime.kind
    own: Value = RecipeValues(recipe.model_dump(mode="json"))[tunable.key]
    values: list[Value] = list(tunable.values)
    if tunable.factors and isinstance(own, int):
        values = [max(1, round(own * factor)) for factor in tunable.factors]
    if tunable.key == "runtime.threads":
        values = [value for value in values if isinstance(value, int) and value <= (os.cpu_count() or 1)]
    taken = (tunable.unset or {}).get(kind) if own is None else None
    # The runtime's own choice is one of the values, and needs no override.
    tried = [own, *(value for value in values if value != taken and not _same(value, own))]
    numbers = [value for value in tried if _is_number(value)]
    if len(numbers) >= len(tried) - 1 and len(numbers) > 1:
        # Where the number that the runtime takes is not known, its own choice stands before all numbers.
        tried.sort(key=lambda value: (taken or -1) if value is None else float(value))
    dimension = Dimension(tunable.key, tunable.reason, tuple(tried), own, compiled=False)
    return replace(dimension, compiled=_is_compiled(recipe, dimension, dimension.values))


def _is_compiled(recipe: Recipe, dimension: Dimension, values: Sequence[Value]) -> bool:
    """Whether a value changes the settings that the recipe's own engines are built from."""
    now = _engine_settings(recipe)
    for value in values:
        try:
            changed = _engine_settings(variant(recipe, [text] if (text := dimension.override(value)) else []))
        except UserError:
            # Refused when it is tried, with the reason.
            continue
        if any(changed[role] != now[role] for role in changed if role in now):
            return True
    return False


def _engine_settings(recipe: Recipe) -> dict[str, object]:
    runtime = runtime_of(recipe)
    roles = ("target", "draft") if recipe.draft is not None else ("target",)
    return {role: runtime.build_settings(recipe, role) for role in roles}


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Value, other: Value) -> bool:
    return type(value) is type(other) and value == other


def _is_section(override: str) -> bool:
    return override.partition("=")[0] in {key.rpartition(".")[0] for key in DRAFT_LENGTHS}
