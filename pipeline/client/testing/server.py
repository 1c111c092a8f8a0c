"""The fake server: gRPC on loopback, one thread for each stream, started and stopped in a `with` block.

`bls` and `llmapi` make the configurations of the entry models that it can stand for: tensors as in TensorRT-LLM 1.x.
What Triton refuses at admission is refused in the words of Triton 24.10.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.sampling import PARAMETERS, Layout
from pipeline.client.tensors import datatype_name
from pipeline.client.testing.reply import Received, Reply, read_request, stream_reply

_STREAMS_AT_ONCE = 512


# Inputs beside those of the sampling parameters: upstream's, and those of this project's models alone.
_BLS_INPUTS = {
    "text_input": "STRING", "decoder_text_input": "STRING", "exclude_input_in_output": "BOOL", "pad_id": "INT32",
    "return_perf_metrics": "BOOL", "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
    "beam_width": "INT32", "stream": "BOOL",
}  # fmt: skip
_OWN_BLS_INPUTS = {"prompt_token_ids": "INT32*", "stop": "BOOL", "prior_output_ids": "INT32*"}
_OWN_BLS_OUTPUTS = {"prompt_log_probs": "FP32", "prompt_log_probs_ids": "INT32", "output_ids": "INT32"}
_BLS_OUTPUTS = {
    "text_output": "STRING", "cum_log_probs": "FP32", "output_log_probs": "FP32", "generation_logits": "FP32",
    "acceptance_rate": "FP32",
    "total_accepted_draft_tokens": "INT32", "total_draft_tokens": "INT32", "num_input_tokens": "INT32",
    "num_output_tokens": "INT32", "arrival_time_ns": "INT64", "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64", "kv_cache_reused_blocks": "INT32",
}  # fmt: skip
_LLMAPI_INPUTS = {
    "text_input": "STRING", "streaming": "BOOL", "sampling_param_exclude_input_from_output": "BOOL",
    "return_finish_reason": "BOOL",
}  # fmt: skip
_OWN_LLMAPI_INPUTS = {"prompt_token_ids": "INT32*", "prior_output_ids": "INT32*"}
_LLMAPI_OUTPUTS = {"text_output": "STRING", "finish_reason": "STRING"}
_OWN_LLMAPI_OUTPUTS = {"output_ids": "INT32", "log_probs": "FP32", "log_probs_ids": "INT32"}


def _sampling_inputs(layout: Layout, *, upstream: bool) -> dict[str, str]:
    return {
        name: datatype
        for parameter in PARAMETERS.values()
        if not (upstream and layout in parameter.own)
        for name, datatype in parameter.inputs(layout).items()
        # A package has it only where its recipe says so.
        if name != "sampling_param_prompt_logprobs"
    }


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
        decoupled: whether it streams.
        cumulative: whether each response repeats the text so far (`accumulate_tokens`).
        token_ids: whether it returns token ids without being asked.
        upstream: whether it has the tensors of TensorRT-LLM's own model alone, not those of this project's.
    """
    inputs, outputs = _BLS_INPUTS | _sampling_inputs("backend", upstream=upstream), _BLS_OUTPUTS
    if not upstream:
        inputs, outputs = inputs | _OWN_BLS_INPUTS, outputs | _OWN_BLS_OUTPUTS
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
        decoupled: whether it streams.
        upstream: whether it has the tensors of TensorRT-LLM's own model alone, not those of this project's.
    """
    inputs, outputs = _LLMAPI_INPUTS | _sampling_inputs("llmapi", upstream=upstream), _LLMAPI_OUTPUTS
    if not upstream:
        inputs, outputs = inputs | _OWN_LLMAPI_INPUTS, outputs | _OWN_LLMAPI_OUTPUTS
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
    names = [tensor.name for tensor in request.inputs]
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
    missing = [name for name, tensor in declared.items() if not tensor.optional and name not in names]
    if missing:
        quoted = ",".join(f"'{name}'" for name in missing)
        return (
            f"{prefix}expected number of inputs between {sum(not tensor.optional for tensor in config.input)} and "
            f"{len(declared)} but got {len(names)} inputs for model '{model}'. Missing required input(s) [{quoted}]."
        )
    outputs = {tensor.name for tensor in config.output}
    unknown = next((tensor.name for tensor in request.outputs if tensor.name not in outputs), None)
    return None if unknown is None else f"unexpected inference output '{unknown}' for model '{model}'"


def _brackets(values: list[int]) -> str:
    return f"[{','.join(map(str, values))}]"


class FakeServer:
    """Triton as a client sees it, on loopback, with scripted answers. Starts and stops in a `with` block.

    Requests on one stream are answered one after the other.

    Attributes:
        url: host:port.
        config: configuration of the model.
        requests: the requests that were let in, in order.

    >>> with FakeServer([Reply(["first"]), Reply(["second"])]) as server:
    ...     server.url.split(":")[0]
    '127.0.0.1'
    """

    def __init__(
        self,
        reply: Reply | Sequence[Reply] | Callable[[Received], Reply] = Reply(),  # noqa: B008  (frozen)
        *,
        model: config_pb.ModelConfig | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Bind a port; `with` starts to answer.

        Args:
            reply: script of every answer, scripts that take turns, or a function from request to script.
            model: configuration of the model, made by `bls` (the default) or `llmapi`.
            port: port to listen on; 0 is any that is free.
            host: address of loopback; several servers may have the same port at different ones, such as 127.0.0.2.
            credentials: for TLS.
        """
        self.config = model or bls()
        self.requests: list[Received] = []
        self._reply = reply
        self._count = itertools.count()
        self._server: Any = grpc.server(
            ThreadPoolExecutor(_STREAMS_AT_ONCE, thread_name_prefix="fake-server")
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        address = f"{host}:{port}"
        self.port: int = (
            self._server.add_secure_port(address, credentials)
            if credentials
            else self._server.add_insecure_port(address)
        )
        self.url = f"{host}:{self.port}"
        # By the ids of their requests; the event ends the answer.
        self._open: dict[str, tuple[Received, threading.Event]] = {}

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close every connection at once, even in the middle of answers; return when the port is free."""
        self._server.stop(grace=None).wait()

    def _handlers(self) -> Any:
        unary = {
            "ServerLive": (pb.ServerLiveRequest, lambda *_: pb.ServerLiveResponse(live=True)),
            "ServerReady": (pb.ServerReadyRequest, lambda *_: pb.ServerReadyResponse(ready=True)),
            "ServerMetadata": (pb.ServerMetadataRequest, lambda *_: pb.ServerMetadataResponse(name="triton")),
            "ModelReady": (
                pb.ModelReadyRequest,
                lambda request, _: pb.ModelReadyResponse(ready=self._is(request)),
            ),
            "ModelMetadata": (pb.ModelMetadataRequest, self._metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
            "ModelInfer": (pb.ModelInferRequest, self._infer),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                function,
                request_deserializer=message.FromString,
                response_serializer=lambda reply: reply.SerializeToString(),
            )
            for name, (message, function) in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.ModelInferRequest.FromString,
            response_serializer=pb.ModelStreamInferResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)

    def _is(self, request: Any) -> bool:
        return bool(request.name == self.config.name)

    def _known(self, request: Any, context: Any) -> None:
        if not self._is(request):
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found"
            )

    def _model_config(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        self._known(request, context)
        return pb.ModelConfigResponse(config=self.config)

    def _metadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        self._known(request, context)
        reply = pb.ModelMetadataResponse(name=self.config.name, versions=["1"], platform="python")
        for side, tensors in ((reply.inputs, self.config.input), (reply.outputs, self.config.output)):
            for tensor in tensors:
                side.add(name=tensor.name, datatype=datatype_name(tensor.data_type), shape=tensor.dims)
        return reply

    def _infer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        if self.config.model_transaction_policy.decoupled:
            message = "ModelInfer RPC doesn't support models with decoupled transaction policy"
            context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        first = next(iter(self._answer(request, context)))
        if first.error_message:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, first.error_message)
        return first.infer_response

    def _stream(
        self, requests: Iterator[pb.ModelInferRequest], context: Any
    ) -> Iterator[pb.ModelStreamInferResponse]:
        for request in requests:
            yield from self._answer(request, context)

    def _answer(self, request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        fault = admission_fault(self.config, request)
        if fault is not None:
            refused = pb.ModelInferResponse(id=request.id)
            yield pb.ModelStreamInferResponse(error_message=fault, infer_response=refused)
            return
        received = read_request(request, {entry.key: entry.value for entry in context.invocation_metadata()})
        if received.tensors.get("stop") == [True]:
            # As the real model does it: the answer of that id ends, and so does this stream.
            if request.id in self._open:
                answered, over = self._open[request.id]
                answered.stopped.set()
                over.set()
            return
        client_left = threading.Event()
        context.add_callback(client_left.set)
        self.requests.append(received)
        self._open[request.id] = received, client_left
        try:
            yield from stream_reply(
                self._choose(received), self.config, request, received, client_left, context
            )
        finally:
            # The request may have been sent again meanwhile, by the same id.
            if self._open.get(request.id, (None,))[0] is received:
                del self._open[request.id]
            if not received.finished.is_set():
                received.cancelled.set()

    def _choose(self, received: Received) -> Reply:
        if isinstance(self._reply, Reply):
            return self._reply
        if callable(self._reply):
            return self._reply(received)
        return self._reply[next(self._count) % len(self._reply)]
