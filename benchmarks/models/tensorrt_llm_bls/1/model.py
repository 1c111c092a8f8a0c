"""Triton model that stands for an engine: $TOKENS words to each request, a word a step to all that are under way.

Steps follow each other as fast as words can be sent, or $STEP_MS apart. Prompts and parameters are not read.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

TOKENS = int(os.environ.get("TOKENS", "200"))
STEP_S = float(os.environ.get("STEP_MS", "0")) / 1e3


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, _args: Mapping[str, str]) -> None:
        words = [[f"token{n} ".encode()] for n in range(TOKENS)]
        self._words = [np.array(word, dtype=np.object_) for word in words]
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()  # response senders; None: stop
        self._engine = threading.Thread(target=self._run)
        self._engine.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._asked.put(request.get_response_sender())

    def finalize(self) -> None:
        self._asked.put(None)
        self._engine.join()

    def _run(self) -> None:
        under_way: deque[tuple[Any, int]] = deque()  # sender, words sent
        while True:
            while not under_way or not self._asked.empty():
                sender = self._asked.get()
                if sender is None:
                    return
                under_way.append((sender, 0))
            for _ in range(len(under_way)):
                sender, count = under_way.popleft()
                if count == TOKENS:
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    text = pb_utils.Tensor("text_output", self._words[count])
                    sender.send(pb_utils.InferenceResponse([text]))
                    under_way.append((sender, count + 1))
            if STEP_S and under_way:
                time.sleep(STEP_S)
