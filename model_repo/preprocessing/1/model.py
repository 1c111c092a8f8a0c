"""Triton model `preprocessing`: text to token ids, for the ensemble and for clients that call models one by one.

Tensors and behaviour are those of TensorRT-LLM's model of the same name (versions 1.0 to 1.2); it runs in front of
the C++ backend as well as in front of the cpu engine. Text only: inputs with images or video are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from shared.parameters import Parameters
from shared.prompts import PromptEncoder, pad_right
from shared.refusal import RequestRefused
from shared.tensors import Array, failure, read, read_texts, required, response
from shared.tokenizer import TextTokenizer

_MULTIMODAL = ("IMAGE_BYTES", "IMAGE_URL", "IMAGE_SIZES", "VIDEO_BYTES")


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = Parameters(args)
        self._tokenizer = TextTokenizer(
            parameters.path("tokenizer_dir"), add_special_tokens=parameters.flag("add_special_tokens", True)
        )
        self._encoder = PromptEncoder(
            self._tokenizer,
            end_id=parameters.number("end_id"),
            pad_id=parameters.number("pad_id"),
            stop_token_ids=parameters.numbers("stop_token_ids"),
            vocab_size=parameters.number("vocab_size"),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return response(**self._encode(request))
        except Exception as error:
            return failure(error)

    def _encode(self, request: Any) -> dict[str, Array]:
        for name in _MULTIMODAL:
            if read(request, name) is not None:
                raise RequestRefused(f"{name}: this model takes text only")
        required(request, "QUERY", "text_input of the ensemble")
        output_length = required(request, "REQUEST_OUTPUT_LEN", "max_tokens of the ensemble")
        texts = [row[0] for row in read_texts(request, "QUERY") or []]
        prompts = self._encoder.encode(
            texts,
            stop_words=read_texts(request, "STOP_WORDS_DICT"),
            bad_words=read_texts(request, "BAD_WORDS_DICT"),
            bias_words=read_texts(request, "EMBEDDING_BIAS_WORDS"),
            bias_weights=read(request, "EMBEDDING_BIAS_WEIGHTS"),
            end_id=read(request, "END_ID"),
            pad_id=read(request, "PAD_ID"),
            table_id=read(request, "PROMPT_TABLE_EXTRA_ID"),
        )
        outputs = {
            "INPUT_ID": prompts.input_ids,
            "REQUEST_INPUT_LEN": prompts.input_lengths,
            "STOP_WORDS_IDS": prompts.stop_words,
            "BAD_WORDS_IDS": prompts.bad_words,
            "EMBEDDING_BIAS": prompts.embedding_bias,
            "REQUEST_OUTPUT_LEN": output_length,
            "OUT_END_ID": prompts.end_id,
            "OUT_PAD_ID": prompts.pad_id,
        }
        if prompts.table_ids is not None:
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = prompts.table_ids
        return outputs | self._decoder_prompts(request, prompts.pad_id)

    def _decoder_prompts(self, request: Any, pad_id: Array) -> dict[str, Array]:
        """First tokens of an encoder-decoder's decoder: by default one pad token."""
        texts = read_texts(request, "DECODER_QUERY")
        rows = [self._tokenizer.encode(row[0]) for row in texts] if texts else pad_id.tolist()
        return {
            "DECODER_INPUT_ID": pad_right(rows, pad_id),
            "REQUEST_DECODER_INPUT_LEN": np.array([[len(row)] for row in rows], np.int32),
        }
