"""What an answer of many calls cost, as the outputs that describe one call.

Draft tokens are counted over the whole answer. Times run from the arrival of the first call, of either model, to the
last token of the last. Blocks of the KV cache are the target's: new ones are added up, reused ones are those of the
first call (later calls find what the answer itself left), and the total is that of the last call, which is the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import numpy as np
from shared.tensors import Array

_EARLIEST = ("arrival_time_ns", "first_scheduled_time_ns")
_TARGET_FIRST = ("first_token_time_ns", "kv_cache_reused_blocks")
_TARGET_LAST = ("last_token_time_ns", "kv_cache_alloc_total_blocks")
_TARGET_SUM = "kv_cache_alloc_new_blocks"


class Figures:
    """Gathers them call by call."""

    def __init__(self) -> None:
        self._values: dict[str, Array] = {}
        self._lock = Lock()

    def add_draft(self, outputs: Mapping[str, Array]) -> None:
        """The outputs of a call of the draft."""
        self._keep_earliest(outputs)

    def add_target(self, outputs: Mapping[str, Array]) -> None:
        """The outputs of a call of the target."""
        self._keep_earliest(outputs)
        for name in _TARGET_FIRST:
            if name in outputs:
                self._values.setdefault(name, outputs[name])
        self._values |= {name: outputs[name] for name in _TARGET_LAST if name in outputs}
        if _TARGET_SUM in outputs:
            self._values[_TARGET_SUM] = outputs[_TARGET_SUM] + self._values.get(_TARGET_SUM, 0)

    def outputs(self, *, proposed: int, accepted: int, inputs: int, made: int) -> dict[str, Array]:
        """All that is known, by name: of `inputs` tokens `made` more, with `accepted` of `proposed` draft tokens."""
        counts = {
            "total_draft_tokens": proposed,
            "total_accepted_draft_tokens": accepted,
            "num_input_tokens": inputs,
            "num_output_tokens": made,
        }
        return {
            **self._values,
            **{name: np.array([[count]], np.int32) for name, count in counts.items()},
            "acceptance_rate": np.array([[accepted / max(1, proposed)]], np.float32),
        }

    def _keep_earliest(self, outputs: Mapping[str, Array]) -> None:
        with self._lock:  # the first calls of both models run at once
            for name in _EARLIEST:
                if name in outputs:
                    self._values[name] = np.minimum(outputs[name], self._values.get(name, outputs[name]))
