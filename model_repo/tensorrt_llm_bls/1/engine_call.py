"""One call of the engine model: the client's tensors under the engine's names, and the responses as they come.

Speaks to `tensorrt_llm` through its tensors only, so that the C++ backend and the cpu engine can stand behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_inputs import asked_for, engine_id, engine_inputs
from engine_model import EngineModel
from shared.prompts import Prompts
from shared.tensors import Array


class EngineCall:
    """A request to the engine model that is under way.

    It has the id of the client's request if that is long enough to be unique. The client may then stop it as
    TensorRT-LLM's clients stop theirs: a request to the engine model with the same id and `stop`.
    """

    def __init__(self, model: EngineModel, request: Any, prompts: Prompts) -> None:
        self._model = model
        self._id = engine_id(request)
        self._over = False
        self.asked_for = asked_for(request)
        self._inputs = engine_inputs(request, prompts)
        self._outputs = ["output_ids", "sequence_length", *self.asked_for, "batch_index", "sequence_index"]

    def responses(self) -> Iterator[dict[str, Array]]:
        """Each response of the engine that holds tensors, as name -> array.

        Raises:
            Refused: the engine refused the request, or failed; the text is the engine's.
        """
        yield from self._model.responses(self._id, self._inputs, self._outputs)
        self._over = True

    def stop(self) -> None:
        """End it early: the engine frees what it holds, and `responses` ends soon after."""
        if not self._over:
            self._model.stop(self._id)
