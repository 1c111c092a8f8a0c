"""From the recipe's limits to those that an engine is asked to be built with.

Pure. All numbers are chosen so that trtllm-build keeps them as they are, except that it adds `max_draft_len` to
`max_seq_len` of an engine that verifies drafts; `built_seq_len` is what its config.json then says.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.recipe import Recipe

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

    @property
    def built_seq_len(self) -> int:
        """`max_seq_len` of the engine: the builder adds the drafts, and leaves as much room for answers."""
        return self.max_seq_len + self.max_draft_len


def engine_limits(recipe: Recipe, role: str) -> EngineLimits:
    """The limits of the target's or the draft's engine.

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
    """Tokens that one step must hold: one of each request and its drafts, and without chunks a whole prompt."""
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
    least, given = least_step_tokens(recipe, drafted), recipe.limits.max_batch_tokens
    wanted = max(least, given if given is not None else _STEP_TOKENS)
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
