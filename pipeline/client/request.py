"""Builds the one message that a request consists of, for any of the layouts that `pipeline.client.tensors` knows."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tritonclient.grpc import service_pb2 as pb

from pipeline.client.answer import PartialAnswer
from pipeline.client.errors import Refused
from pipeline.client.sampling import (
    LOG_PROBS_INPUT,
    PARAMETERS,
    SamplingParameter,
    SamplingValue,
    bias_values,
)
from pipeline.client.tensors import ModelSignature, encode

TOKEN_IDS, RETURN_TOKEN_IDS = "output_ids", "return_output_ids"
# Token ids of the part of the answer that came before.
PRIOR_TOKEN_IDS = "prior_output_ids"
LOG_PROBS, LOGITS = "output_log_probs", "generation_logits"
# Of each token of the prompt, [tokens, 1 + k]: its own first, then those of the k most probable tokens.
PROMPT_LOG_PROBS, PROMPT_LOG_PROBS_IDS = "prompt_log_probs", "prompt_log_probs_ids"
# The same of each token of the answer so far: of the `llmapi` model.
LOG_PROB_ROWS, LOG_PROB_ROWS_IDS = "log_probs", "log_probs_ids"

# When the engine took the request in, when it began with it, and when the first token was there.
ARRIVAL, SCHEDULED, FIRST_TOKEN = "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"
# Blocks of the KV cache that held a part of the prompt already: of the TensorRT-LLM backend, and of the `llmapi` model.
REUSED_BLOCKS = ("kv_cache_reused_blocks", "kv_cache_reused_block")
_PERFORMANCE = (
    "total_draft_tokens", "total_accepted_draft_tokens", ARRIVAL, SCHEDULED, FIRST_TOKEN, *REUSED_BLOCKS,
)  # fmt: skip

# Input that requests statistics -> the outputs that then come. Requested from every model that has the input.
_COUNTS = {
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_perf_metrics": _PERFORMANCE,
    "sampling_param_return_perf_metrics": _PERFORMANCE,
    "return_finish_reason": ("finish_reason",),
}
# Input that a sampling parameter sends -> the outputs that then come.
_REQUESTED = {
    "return_log_probs": (LOG_PROBS,),
    "return_generation_logits": (LOGITS,),
    LOG_PROBS_INPUT: (LOG_PROB_ROWS, LOG_PROB_ROWS_IDS),
    RETURN_TOKEN_IDS: (TOKEN_IDS,),
    "return_prompt_log_probs": (PROMPT_LOG_PROBS, PROMPT_LOG_PROBS_IDS),
    "sampling_param_prompt_logprobs": (PROMPT_LOG_PROBS, PROMPT_LOG_PROBS_IDS),
}
# Inputs by their names in each layout.
_PROMPT = ("text_input",)
_PROMPT_TOKEN_IDS = ("prompt_token_ids",)
_END_ID = ("end_id",)
_STREAM = ("stream", "streaming")
_ATTEMPT_BYTES = 8
_ATTEMPT = re.compile(rf"\.[0-9a-f]{{{2 * _ATTEMPT_BYTES}}}$")
# Ends the answer to the request of the same id.
_STOP = "stop"
_EXCLUDE_INPUT = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
_WITHOUT_EFFECT_ON_GREEDY = ("top_k", "top_p", "min_p")

_TensorValues = dict[str, Sequence[bytes | str | bool | int | float]]


def build_request(
    model: ModelSignature,
    prompt: str | tuple[int, ...],
    sampling: Mapping[str, SamplingValue],
    *,
    request_id: str,
    prior: PartialAnswer | None = None,
) -> pb.ModelInferRequest:
    """Build the request for one streamed answer.

    Args:
        prompt: text or token ids, not empty.
        sampling: parameters as `read_sampling` returns them.
        request_id: id in the server's log.
        prior: part of the answer that came before.

    Raises:
        Refused: the model lacks an input for a parameter, or needs a parameter that is missing; lists all of them.
    """
    tensors, faults = _tensors(model, prompt, sampling)
    if prior is not None:
        if PRIOR_TOKEN_IDS in model.inputs:
            tensors[PRIOR_TOKEN_IDS] = prior.token_ids
        else:
            faults.append(f"model {model.name!r} does not go on with answers that came in part")
    layout = _layout(model, tuple((name, len(values)) for name, values in tensors.items()))
    faults += layout.faults
    if faults:
        raise Refused("; ".join(faults), request_id=request_id)
    return _filled(layout, model, tensors, request_id)


def attempt_id(request_id: str) -> str:
    """Make the id that the server knows one attempt of a request by; no other has it, so it can be stopped by it.

    >>> request_id_of(attempt_id("mine"))
    'mine'
    """
    return f"{request_id}.{secrets.token_hex(_ATTEMPT_BYTES)}"


def request_id_of(attempt_id: str) -> str:
    """Return the id of the request that an attempt is of."""
    return _ATTEMPT.sub("", attempt_id)


def build_stop_request(model: ModelSignature, attempt_id: str) -> pb.ModelInferRequest | None:
    """Build the request that ends an answer: its stream gets its last response at once, as if the answer were complete.

    Returns:
        The request; None if the model takes none.
    """
    if _STOP not in model.inputs:
        return None
    tensors: _TensorValues = {_STOP: [True]}
    for name, tensor in model.inputs.items():
        if not tensor.optional:
            tensors[name] = [""] if tensor.datatype == "BYTES" else [1]
    return _filled(_layout(model, tuple((name, 1) for name in tensors)), model, tensors, attempt_id)


class _RequestLayout(NamedTuple):
    """Part that requests with the same tensors share: the message without its values, and what is missing."""

    message: pb.ModelInferRequest
    faults: list[str]


@lru_cache(256)
def _layout(model: ModelSignature, lengths: tuple[tuple[str, int], ...]) -> _RequestLayout:
    """Lay out a request from the name and the number of elements of each input that it sends."""
    message = pb.ModelInferRequest(model_name=model.name)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, length in lengths:
        shape = [1, length] if model.batched else [length]
        message.inputs.add(name=name, datatype=model.inputs[name].datatype, shape=shape)
    for name in _outputs(model, dict(lengths)):
        message.outputs.add(name=name)
    missing = [
        name for name, tensor in model.inputs.items() if not tensor.optional and name not in dict(lengths)
    ]
    return _RequestLayout(message, [f"model {model.name!r} needs {_parameter_of(name)}" for name in missing])


def _filled(
    layout: _RequestLayout, model: ModelSignature, tensors: _TensorValues, request_id: str
) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest()
    message.CopyFrom(layout.message)
    message.id = request_id
    message.raw_input_contents.extend(
        [encode(model.inputs[name].datatype, values) for name, values in tensors.items()]
    )
    return message


def _tensors(
    model: ModelSignature, prompt: str | tuple[int, ...], sampling: Mapping[str, SamplingValue]
) -> tuple[_TensorValues, list[str]]:
    """Values by input name, and the faults."""
    text_input = model.input_named(_PROMPT)
    if text_input is None or "text_output" not in model.outputs:
        raise Refused(f"model {model.name!r} does not take and return text; ask its entry model")
    tensors: _TensorValues = {text_input: [prompt if isinstance(prompt, str) else ""]}
    faults = []
    if not isinstance(prompt, str):
        if ids := model.input_named(_PROMPT_TOKEN_IDS):
            tensors[ids] = prompt
        else:
            faults.append(f"model {model.name!r} does not take a prompt as token ids")
    for name, parameter, value in _carriers(model, sampling):
        tensor = model.input_named(parameter.tensors)
        if value == parameter.neutral and (tensor is None or parameter.kind == "bool"):
            continue
        if tensor is None:
            faults.append(f"model {model.name!r} does not take {name}")
        elif tensor == LOG_PROBS_INPUT:
            # Two parameters, one input: `log_probs` asks for none beside the token's own.
            most = sampling.get("top_log_probs")
            tensors[tensor] = [most if isinstance(most, int) else 0]
        elif isinstance(value, dict):
            tensors |= {tensor: list(value), bias_values(tensor): list(value.values())}
        elif model.inputs[tensor].datatype == "BOOL":
            tensors[tensor] = [bool(value)]
        else:
            tensors[tensor] = value if isinstance(value, tuple) else [value]
    if stream := model.input_named(_STREAM):
        tensors[stream] = [model.decoupled]
    if not model.decoupled and (exclude := model.input_named(_EXCLUDE_INPUT)):
        tensors[exclude] = [True]
    tensors |= {name: [True] for name in _COUNTS if name in model.inputs}
    return tensors, faults


def takes_partial_answers(model: ModelSignature) -> bool:
    """Whether a model returns the ids of its tokens, and goes on with an answer after them."""
    return {RETURN_TOKEN_IDS, PRIOR_TOKEN_IDS} <= model.inputs.keys() and TOKEN_IDS in model.outputs


def missing_inputs(model: ModelSignature, sampling: Mapping[str, SamplingValue]) -> list[str]:
    """Return the sampling parameters that a model has no input for, unless their values have no effect."""
    return [
        name
        for name, parameter, value in _carriers(model, sampling)
        if value != parameter.neutral and model.input_named(parameter.tensors) is None
    ]


def _carriers(
    model: ModelSignature, sampling: Mapping[str, SamplingValue]
) -> Iterator[tuple[str, SamplingParameter, SamplingValue]]:
    """Yield the name of each parameter, and the model's input and value for it.

    Temperature 0 is top_k 1, because not every release takes a temperature of 0. To ignore end tokens is to have none,
    where a model has no other way.
    """
    greedy = sampling.get("temperature") == 0
    for name, value in sampling.items():
        if greedy and name == "temperature":
            yield name, PARAMETERS["top_k"], 1
        elif name == "ignore_eos" and value and model.input_named(_END_ID):
            yield name, PARAMETERS["end_id"], -1
        elif not (greedy and name in _WITHOUT_EFFECT_ON_GREEDY):
            yield name, PARAMETERS[name], value


def _outputs(model: ModelSignature, tensors: Mapping[str, object]) -> list[str]:
    # Models of others have no input that asks for token ids.
    wanted = ["text_output", *([] if RETURN_TOKEN_IDS in model.inputs else [TOKEN_IDS])]
    named = {**_REQUESTED, **_COUNTS}
    wanted += [output for name, outputs in named.items() if name in tensors for output in outputs]
    return [name for name in wanted if name in model.outputs]


def _parameter_of(tensor: str) -> str:
    return next(
        (name for name, parameter in PARAMETERS.items() if tensor in parameter.tensors),
        f"the tensor {tensor!r}",
    )
