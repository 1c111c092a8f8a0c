"""How long a client waits. Time that the application itself spends between two reads is not counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None waits for ever.

    >>> Timeouts(first_token_s=5)
    Timeouts(connect_s=5.0, first_token_s=5, between_tokens_s=30.0)
    """

    connect_s: float | None = 5.0  # to reach the server and read what the model takes, once a client
    first_token_s: float | None = 60.0  # from sending the request: queue and prompt
    between_tokens_s: float | None = 30.0  # from one chunk to the next

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_token_s", "between_tokens_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value!r}: must be more than 0, or None to wait for ever")
