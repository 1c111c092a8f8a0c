"""What one deployment takes: the lengths and the concurrency that every later size is derived from."""

from __future__ import annotations

from pydantic import Field

from pipeline.recipe.section import Section


class Limits(Section):
    """Engine limits, Triton parameters and client limits all come from here."""

    max_input_tokens: int = Field(ge=1, le=10_000_000, description="Longest prompt.")
    max_output_tokens: int = Field(ge=1, le=1_000_000, description="Longest answer.")
    max_concurrency: int = Field(ge=1, le=8192, description="Requests that generate at the same time.")
    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Tokens in one step of the engine; by default chosen by the runtime.",
    )

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and answer together."""
        return self.max_input_tokens + self.max_output_tokens
