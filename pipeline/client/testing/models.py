"""Configurations of the entry models that a fake server can stand for, and Triton's checks of a request's tensors.

Tensors as in TensorRT-LLM 1.x; messages as in Triton 24.10.
"""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.tensors import datatype_name

_BLS_INPUTS = {
    "text_input": "STRING", "max_tokens": "INT32", "decoder_text_input": "STRING", "bad_words": "STRING*",
    "stop_words": "STRING*", "exclude_input_in_output": "BOOL", "end_id": "INT32", "pad_id": "INT32", "top_k": "INT32",
    "top_p": "FP32", "temperature": "FP32", "length_penalty": "FP32", "repetition_penalty": "FP32",
    "min_tokens": "INT32", "presence_penalty": "FP32", "frequency_penalty": "FP32", "seed": "UINT64",
    "return_log_probs": "BOOL", "return_perf_metrics": "BOOL", "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL", "beam_width": "INT32", "stream": "BOOL", "num_draft_tokens": "INT32",
    "guided_decoding_guide_type": "STRING", "guided_decoding_guide": "STRING", "return_generation_logits": "BOOL",
}  # fmt: skip
# What our model takes and returns beyond upstream's.
_OWN_INPUTS = {
    "prompt_token_ids": "INT32*", "stop_token_ids": "INT32*", "include_stop_str_in_output": "BOOL",
    "skip_special_tokens": "BOOL", "logit_bias_token_ids": "INT32*", "logit_bias_values": "FP32*", "min_p": "FP32",
    "return_prompt_log_probs": "INT32", "stop": "BOOL", "return_output_ids": "BOOL", "prior_output_ids": "INT32*",
}  # fmt: skip
_OWN_OUTPUTS = {"prompt_log_probs": "FP32", "prompt_log_probs_ids": "INT32", "output_ids": "INT32"}
_BLS_OUTPUTS = {
    "text_output": "STRING", "cum_log_probs": "FP32", "output_log_probs": "FP32", "generation_logits": "FP32",
    "acceptance_rate": "FP32",
    "total_accepted_draft_tokens": "INT32", "total_draft_tokens": "INT32", "num_input_tokens": "INT32",
    "num_output_tokens": "INT32", "arrival_time_ns": "INT64", "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64", "kv_cache_reused_blocks": "INT32",
}  # fmt: skip
_LLMAPI_INPUTS = {
    "text_input": "STRING", "streaming": "BOOL", "sampling_param_temperature": "FP32", "sampling_param_top_k": "INT32",
    "sampling_param_top_p": "FP32", "sampling_param_frequency_penalty": "FP32",
    "sampling_param_presence_penalty": "FP32", "sampling_param_max_tokens": "INT32", "sampling_param_stop": "STRING*",
    "sampling_param_seed": "UINT64", "sampling_param_exclude_input_from_output": "BOOL", "return_finish_reason": "BOOL",
}  # fmt: skip
_LLMAPI_OUTPUTS = {"text_output": "STRING", "finish_reason": "STRING"}
_OWN_LLMAPI_INPUTS = {
    "prompt_token_ids": "INT32*", "sampling_param_min_p": "FP32", "sampling_param_min_tokens": "INT32",
    "sampling_param_repetition_penalty": "FP32", "sampling_param_bad": "STRING*", "sampling_param_ignore_eos": "BOOL",
    "sampling_param_stop_token_ids": "INT32*", "sampling_param_include_stop_str_in_output": "BOOL",
    "sampling_param_skip_special_tokens": "BOOL", "sampling_param_logit_bias_token_ids": "INT32*",
    "sampling_param_logit_bias_values": "FP32*", "return_output_ids": "BOOL", "prior_output_ids": "INT32*",
}  # fmt: skip


def bls(
    name: str = "tensorrt_llm_bls",
    *,
    decoupled: bool = True,
    cumulative: bool = False,
    token_ids: bool = False,
    upstream: bool = False,
) -> config_pb.ModelConfig:
    """Make the configuration of `tensorrt_llm_bls`, or of `ensemble`, whose tensors are the same.

    Args:
        name: of the model.
        decoupled: whether it streams.
        cumulative: whether each response repeats the text so far (`accumulate_tokens`).
        token_ids: whether it returns token ids without being asked.
        upstream: whether it has the tensors of TensorRT-LLM's own model alone.
    """
    inputs, outputs = _BLS_INPUTS, _BLS_OUTPUTS
    if not upstream:
        inputs, outputs = inputs | _OWN_INPUTS, outputs | _OWN_OUTPUTS
    if token_ids:
        inputs = {name: kind for name, kind in inputs.items() if name != "return_output_ids"}
        outputs = outputs | {"output_ids": "INT32"}
    config = _config(name, inputs, outputs, required={"text_input", "max_tokens"})
    config.max_batch_size = 8
    config.model_transaction_policy.decoupled = decoupled
    config.parameters["accumulate_tokens"].string_value = str(cumulative).lower()
    if not upstream:
        config.parameters["tokens_per_block"].string_value = "32"
    return config


def llmapi(
    name: str = "tensorrt_llm", *, decoupled: bool = True, upstream: bool = False
) -> config_pb.ModelConfig:
    """Make the configuration of the LLM API's model.

    It has no batch dimension, its own tensor names, and cumulative text.

    Args:
        name: of the model.
        decoupled: whether it streams.
        upstream: whether it has the tensors of TensorRT-LLM's own model alone.
    """
    inputs = _LLMAPI_INPUTS if upstream else _LLMAPI_INPUTS | _OWN_LLMAPI_INPUTS
    outputs = _LLMAPI_OUTPUTS if upstream else _LLMAPI_OUTPUTS | {"output_ids": "INT32"}
    config = _config(name, inputs, outputs, required={"text_input"})
    config.model_transaction_policy.decoupled = decoupled
    return config


def _config(
    name: str, inputs: dict[str, str], outputs: dict[str, str], *, required: set[str]
) -> config_pb.ModelConfig:
    config = config_pb.ModelConfig(name=name, backend="python")
    for tensor, kind in inputs.items():
        dims = [-1] if kind.endswith("*") or (tensor not in required and kind == "STRING") else [1]
        data_type = config_pb.DataType.Value(f"TYPE_{kind.rstrip('*')}")
        config.input.add(name=tensor, data_type=data_type, dims=dims, optional=tensor not in required)
    for tensor, kind in outputs.items():
        config.output.add(name=tensor, data_type=config_pb.DataType.Value(f"TYPE_{kind}"), dims=[-1])
    return config


def admission_fault(config: config_pb.ModelConfig, request: pb.ModelInferRequest) -> str | None:
    """Return Triton's reason to refuse a request before a model sees it, or None if it takes it."""
    model = config.name
    if request.model_name != model:
        return f"Request for unknown model: '{request.model_name}' is not found"
    declared = {tensor.name: tensor for tensor in config.input}
    given = [tensor.name for tensor in request.inputs]
    prefix = f"[request id: {request.id or '<id_unknown>'}] "
    for tensor in request.inputs:
        if tensor.name not in declared:
            return f"unexpected inference input '{tensor.name}' for model '{model}'"
        expected = datatype_name(declared[tensor.name].data_type)
        if tensor.datatype != expected:
            return (
                f"{prefix}inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{model}' expects '{expected}'"
            )
        dims = [*([-1] if config.max_batch_size > 0 else []), *declared[tensor.name].dims]
        shape = list(tensor.shape)
        fits = len(shape) == len(dims) and all(
            want in (-1, got) for want, got in zip(dims, shape, strict=True)
        )
        if not fits:
            return (
                f"{prefix}unexpected shape for input '{tensor.name}' for model '{model}'. "
                f"Expected {_brackets(dims)}, got {_brackets(shape)}."
            )
    missing = [name for name, tensor in declared.items() if not tensor.optional and name not in given]
    if missing:
        quoted = ",".join(f"'{name}'" for name in missing)
        return (
            f"{prefix}expected number of inputs between {sum(not tensor.optional for tensor in config.input)} and "
            f"{len(declared)} but got {len(given)} inputs for model '{model}'. Missing required input(s) [{quoted}]."
        )
    outputs = {tensor.name for tensor in config.output}
    unknown = next((tensor.name for tensor in request.outputs if tensor.name not in outputs), None)
    return None if unknown is None else f"unexpected inference output '{unknown}' for model '{model}'"


def _brackets(values: list[int]) -> str:
    return f"[{','.join(map(str, values))}]"
