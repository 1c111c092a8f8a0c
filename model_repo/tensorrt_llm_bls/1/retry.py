"""Asks an engine again whose queue is full, for an answer that has begun.

The answer has its place among those that the engine has room for (`admission`), but Triton's queue in front of the
engine may be full for the moment in which several rounds arrive at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from threading import Event

from shared.refusal import Refused
from shared.tensors import Array

_FULL = re.compile(
    "maximum queue size", re.IGNORECASE
)  # in Triton's words, and in those of TensorRT-LLM's executor
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
DEADLINE_S = 30.0


def with_retries(
    call: Callable[[], Iterator[dict[str, Array]]], stopped: Event, deadline_s: float
) -> Iterator[dict[str, Array]]:
    """The responses to a request, which `call` makes anew while the engine's queue is full, unless `stopped`.

    Raises:
        Refused: the engine refused it for another reason, or still after `deadline_s`.
    """
    until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while True:
        try:
            yield from call()
        except Refused as error:
            if not _FULL.search(str(error)) or time.monotonic() > until:
                raise
        else:
            return
        if stopped.wait(pause):
            return
        pause = min(2 * pause, _LONGEST_PAUSE_S)
