"""A request that cannot be honoured."""

from __future__ import annotations

# Why a request cannot have several responses.
NOT_DECOUPLED = "the model is not decoupled, and answers with one response (serving.decoupled in the recipe)"


class RequestRefused(ValueError):
    """A request that cannot be served; the text is one line that names the tensor and what would be right."""
