"""Triton model `postprocessing`: token ids to text, for the ensemble and for clients that call models one by one.

Tensors and behaviour are those of TensorRT-LLM's model of the same name. It keeps nothing between calls, so in a
stream each piece is decoded alone: characters that lie across pieces break, and tokenizers with a leading space lose
it. `tensorrt_llm_bls` has neither fault. Run one instance only: several reorder the pieces of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.parameters import Parameters
from shared.tensors import failure, required, response, texts
from shared.tokenizer import TextDecoder, load_tokenizer


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = Parameters(args)
        self._decoder = TextDecoder(
            load_tokenizer(parameters.path("tokenizer_dir")),
            skip_special_tokens=parameters.flag("skip_special_tokens", True),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return response(OUTPUT=texts(self._decode(request)))
        except Exception as error:
            return failure(error)

    def _decode(self, request: Any) -> list[str]:
        """One text for each beam of each row, of the tokens within its length; the first row's come first."""
        tokens, lengths = required(request, "TOKENS_BATCH"), required(request, "SEQUENCE_LENGTH")
        return [
            self._decoder.decode(beam[:length])
            for beams, row in zip(tokens.tolist(), lengths.tolist(), strict=True)
            for beam, length in zip(beams, row, strict=True)
        ]
