"""The small model that proposes tokens, which the target verifies many at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.recipe.quantization import DraftFormat
from pipeline.recipe.source import Checkpoint


class Draft(Checkpoint):
    """A draft: an ordinary model with the target's tokenizer, or an Eagle-3 head of the target."""

    method: Literal["draft_target", "eagle3"] = Field(
        default="draft_target", description="An independent model, or an Eagle-3 head (pytorch only)."
    )
    max_draft_tokens: int = Field(ge=1, le=64, description="Tokens proposed in one round.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="GPUs that share each layer of the draft (tensorrt only)."
    )
    quantization: DraftFormat = Field(
        default="none", description="Format of the draft's weights; calibrated like the target."
    )
