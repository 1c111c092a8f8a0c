"""One call of the engine model: the client's tensors under the engine's names, and the responses as they come.

Speaks to `tensorrt_llm` through its tensors only, so that the C++ backend and the cpu engine can stand behind it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_client import EngineClient
from shared.prompt_log_probs import (
    PROMPT_LOG_PROBS,
    RETURN_PROMPT_LOG_PROBS,
    PromptLogProbTable,
    read_alternatives,
)
from shared.prompts import Prompts
from shared.refusal import RequestRefused
from shared.seeds import call_seed
from shared.tensors import Array, read, read_flag
from shared.token_socket import OnTokens


def logits_type(config: Mapping[str, Any]) -> npt.DTypeLike:
    """Read the type of an engine's `draft_logits` and `generation_logits` from the config of the model before it."""
    types = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
    return np.float16 if types.get("generation_logits") == "TYPE_FP16" else np.float32


@dataclass(frozen=True, slots=True)
class PriorOutput:
    """Tokens at the end of the prompt that belong to the answer: another server made them.

    An engine of ours is told how many they are, and counts them as its own. TensorRT-LLM's takes them for a part of the
    prompt: it is asked for fewer tokens, and draws with another seed, because it would begin with the numbers that made
    the first ones. What it counts over all tokens, such as penalties, stop and bad words, is the same either way.
    """

    length: int = 0
    counted: bool = False  # by the engine

    def apply(self, inputs: dict[str, Array]) -> None:
        """Change the inputs of an engine that are those of the whole answer."""
        if not self.length:
            return
        if self.counted:
            inputs["prior_output_len"] = np.array([[self.length]], np.int32)
            return
        inputs["request_output_len"] = inputs["request_output_len"] - np.int32(self.length)
        if "min_tokens" in inputs:
            inputs["min_tokens"] = np.maximum(inputs["min_tokens"] - np.int32(self.length), 0)
        if "seed" in inputs:
            seed = call_seed(int(inputs["seed"].flat[0]), self.length)
            inputs["seed"] = np.full_like(inputs["seed"], seed)


class EngineCall:
    """A request to the engine model that is under way.

    It has the id of the client's request if that is long enough to be unique. The client may then stop it as
    TensorRT-LLM's clients stop theirs: a request to the engine model with the same id and `stop`.
    """

    def __init__(
        self,
        model: EngineClient,
        request: Any,
        prompts: Prompts,
        *,
        context_logits: bool = False,
        vocab_size: int,
        prior_output: PriorOutput = PriorOutput(),
        on_tokens: OnTokens | None = None,
    ) -> None:
        """
        Args:
            model: The engine model.
            request: The client's request.
            prompts: Prompts of the request, as the engine takes them.
            context_logits: Log probabilities of prompts are computed here, from the logits that the engine returns.
            vocab_size: Without the engine's padding.
            prior_output: At the end of the prompt.
            on_tokens: See `EngineClient.responses`.

        Raises:
            RequestRefused: An input is given by two names.
        """
        self._model, self._on_tokens = model, on_tokens
        self._id = engine_id(request)
        self._over = False
        self.asked_for = asked_for(request)
        self._inputs = engine_inputs(request, prompts)
        prior_output.apply(self._inputs)
        outputs = [*self.asked_for]
        self._prompt_logits: PromptLogits | None = None
        if context_logits and RETURN_PROMPT_LOG_PROBS in self._inputs:
            self._prompt_logits = PromptLogits(self._inputs, prompts, vocab_size)
            outputs = [name for name in outputs if name not in PROMPT_LOG_PROBS] + ["context_logits"]
        self._outputs = ["output_ids", "sequence_length", *outputs, "batch_index", "sequence_index"]

    def responses(self) -> Iterator[dict[str, Array]]:
        """Each response of the engine that holds tensors, as name -> array.

        Raises:
            RequestRefused: The engine refused the request, or failed; the text is the engine's.
        """
        responses = self._model.responses(self._id, self._inputs, self._outputs, on_tokens=self._on_tokens)
        for tensors in responses:
            yield tensors if self._prompt_logits is None else tensors | self._prompt_logits.reduced(tensors)
        self._over = True

    def stop(self) -> None:
        """End it early: the engine frees what it holds, and `responses` ends soon after."""
        if not self._over:
            self._model.stop(self._id)


class PromptLogits:
    """Turns the logits that an engine returns of a whole prompt into the log probabilities of its tokens.

    An engine of TensorRT-LLM sends these logits with each response of a stream, so it is asked for one response.
    """

    def __init__(self, inputs: dict[str, Array], prompts: Prompts, vocab_size: int) -> None:
        """`inputs`: of the engine; changed to ask for logits."""
        self._alternatives = read_alternatives(inputs.pop(RETURN_PROMPT_LOG_PROBS))
        self._prompts, self._vocab_size = prompts, vocab_size
        yes = np.ones_like(inputs["request_output_len"], np.bool_)
        inputs["return_context_logits"] = yes
        if inputs.pop("streaming", ~yes).any():
            # A stream does not repeat the prompt, and a single response would.
            inputs["exclude_input_in_output"] = yes

    def reduced(self, tensors: dict[str, Array]) -> dict[str, Array]:
        """The log probabilities, where a response has logits [1, tokens, vocabulary with the engine's padding].

        Raises:
            RuntimeError: The engine did not compute all of them.
        """
        if "context_logits" not in tensors:
            return {}
        row = int(tensors["batch_index"].flat[0]) if "batch_index" in tensors else 0
        length = int(self._prompts.input_lengths[row, 0])
        table = PromptLogProbTable(self._prompts.input_ids[row, :length].tolist(), self._alternatives)
        table.read(tensors["context_logits"][0, :, : self._vocab_size])
        if not table.complete:
            raise RuntimeError("the engine has not computed the whole prompt: kv_cache.reuse must be false")
        return table.tensors()


# Inputs that go to the engine as they are: our name -> its name. Versions differ in some; a request has only those that
# config.pbtxt declares.
_PASSED = {
    "max_tokens": "request_output_len",
    "num_return_sequences": "num_return_sequences",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    # The name before 0.20, which clients still send.
    "min_length": "min_tokens",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    # The name before 0.20.
    "random_seed": "seed",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "exclude_input_in_output": "exclude_input_in_output",
    "beam_width": "beam_width",
    "stream": "streaming",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}
# The same beyond upstream's inputs: of the cpu engine, or answered here.
_OWN_PASSED = {name: name for name in ("min_p", "lora_name", RETURN_PROMPT_LOG_PROBS)}
_SCALARS = frozenset(_PASSED | _OWN_PASSED) - {
    "prompt_embedding_table",
    "lora_weights",
    "lora_config",
}  # [b, 1]

LOG_PROBS = ("cum_log_probs", "output_log_probs")
PERFORMANCE = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks",
    "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
    "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip
# Upstream's until 0.18; engines since then know `return_perf_metrics` only.
KV_CACHE_STATS = "return_kv_cache_reuse_stats"
# Outputs that the engine is asked for when the request sets a flag.
_ASKED_FOR = {
    "return_log_probs": LOG_PROBS,
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": PERFORMANCE,
    KV_CACHE_STATS: PERFORMANCE[:3],
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
}
UNIQUE_ID = 16  # characters: an id of that length or more is taken to be its client's alone


def engine_inputs(request: Any, prompts: Prompts) -> dict[str, Array]:
    """Inputs of the engine.

    Raises:
        RequestRefused: An input is given by two names.
    """
    return _prompt_inputs(prompts) | _passed_inputs(request)


def asked_for(request: Any) -> tuple[str, ...]:
    """The outputs that the request wants besides tokens."""
    names = [name for flag, names in _ASKED_FOR.items() if read_flag(request, flag) for name in names]
    if read(request, RETURN_PROMPT_LOG_PROBS) is not None:
        names += PROMPT_LOG_PROBS
    return tuple(dict.fromkeys(names))


def engine_id(request: Any) -> str:
    """The id by which the engine can be stopped: the client's own, if no other client is likely to have it, too."""
    given: str = request.request_id()
    return given if len(given) >= UNIQUE_ID else uuid.uuid4().hex


def _prompt_inputs(prompts: Prompts) -> dict[str, Array]:
    inputs: dict[str, Array] = {
        "input_ids": prompts.input_ids,
        "input_lengths": prompts.input_lengths,
        "end_id": prompts.end_id,
        "pad_id": prompts.pad_id,
    }
    optional = {
        "stop_words_list": prompts.stop_words,
        "bad_words_list": prompts.bad_words,
        "embedding_bias": prompts.embedding_bias,
    }
    if prompts.table_ids is not None:
        inputs["prompt_table_extra_ids"] = prompts.table_ids
    return inputs | {name: array for name, array in optional.items() if array.shape[-1]}


def _passed_inputs(request: Any) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for ours, theirs in {**_PASSED, **_OWN_PASSED}.items():
        array = read(request, ours)
        if array is not None:
            if theirs in inputs:
                raise RequestRefused(f"{ours}: is given by its older name, too")
            inputs[theirs] = array.reshape(-1, 1) if ours in _SCALARS else array
    if read_flag(request, KV_CACHE_STATS):
        inputs["return_perf_metrics"] = np.ones_like(inputs["request_output_len"], np.bool_)
    return inputs
