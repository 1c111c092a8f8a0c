"""The engine model, over the gRPC endpoint of the very server that runs this model.

Triton's own call between models (`InferenceRequest.exec(decoupled=True)`) would save the round trip, but it cannot
serve several requests of one process at once. Waiting for the next response, it holds the lock of the iterator while
it asks for the interpreter; Triton's thread holds the lock of all iterators while it asks for that of one; and a
third thread that begins a request holds the interpreter while it asks for the lock of all. With eight streams a
server stood still after some hundred requests, or the process died, because iterators are destroyed without holding
the interpreter. (Seen with 24.10; the sources of 2026 are the same in these points.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.experimental
import numpy as np
from shared.refusal import RequestRefused
from shared.tensors import Array
from shared.token_socket import PARAMETER, OnTokens, TokenReceiver
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

ADDRESS = "PIPELINE_TRITON_GRPC"  # environment: host:port, set by whoever starts the server
_DEFAULT_ADDRESS = "127.0.0.1:8001"
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # the thread that reads a stream waits on the connection itself
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
]

# Metadata of the calls that this thread makes: the position in a trace of the request that it serves.
_trace_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace_headers", default=())


def follow_trace(request: Any) -> None:
    """Let the calls that this thread makes from now on belong to the trace of `request`, if Triton traces it.

    The context is a JSON object of W3C headers, and None unless Triton's mode of tracing is OpenTelemetry's
    (python_backend, InferenceTrace.get_context; Triton 24.05 and newer).
    """
    context = request.trace().get_context()
    _trace_headers.set(tuple(json.loads(context).items()) if context else ())


class EngineClient:
    """One model of this server; safe to use from any number of threads, over one connection."""

    def __init__(self, name: str, *, own: bool = False) -> None:
        """`own`: the engine is this project's, which sends tokens by a socket to those who ask for that."""
        self._name = name
        self._tokens = TokenReceiver() if own else None
        self._channel = grpc.insecure_channel(os.environ.get(ADDRESS, _DEFAULT_ADDRESS), options=_OPTIONS)
        self._infer = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )

    def close(self) -> None:
        """End the connection."""
        self._channel.close()
        if self._tokens is not None:
            self._tokens.close()

    def responses(
        self,
        request_id: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[dict[str, Array]]:
        """The responses to one request as they come, each as output name -> array; empty ones are left out.

        `on_tokens`: may be called with tokens that come before the next response, from another thread; raises nothing.

        Raises:
            RequestRefused: The model refused the request, or failed; the text is the model's.
            ConnectionError: The model cannot be reached, or took longer than `timeout_s`.
        """
        request, tokens = self._request(request_id, inputs, outputs), self._tokens
        refused = None
        with nullcontext() if tokens is None or on_tokens is None else tokens.listen(on_tokens) as target:
            if target is not None:
                request.parameters[PARAMETER].string_param = target
            call = self._infer(request, timeout=timeout_s, metadata=_trace_headers.get())
            try:
                for message in call:
                    if tokens is not None and target is not None:
                        tokens.catch_up()
                    if message.error_message:
                        # read on: the model has one more, empty, to send
                        refused = RequestRefused(message.error_message)
                    elif message.infer_response.outputs:
                        yield _arrays(message.infer_response)
            except grpc.RpcError as error:
                raise ConnectionError(f"{self._name} cannot be reached: {error.details()}") from None
            finally:
                call.cancel()
        if refused is not None:
            raise refused

    def stop(self, request_id: str) -> None:
        """End the request of that id, if it is under way: the model frees what it holds, and its stream ends in order.

        That is kinder to Triton than a cancelled call: under load, one in some thousand of those ends Triton 24.10
        itself (server issue 8034).
        """
        one = np.ones((1, 1), np.int32)
        stop = np.ones((1, 1), np.bool_)
        inputs = {
            "input_ids": one,
            "input_lengths": one,
            "request_output_len": one,
            "stop": stop,
            "streaming": stop,
        }
        for _ in self.responses(request_id, inputs, ["output_ids", "sequence_length"]):
            pass

    def _request(
        self, request_id: str, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self._name, id=request_id)
        for name, array in inputs.items():
            kind = np_to_triton_dtype(array.dtype)
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            raw = serialize_byte_tensor(array).item() if kind == "BYTES" else array.tobytes()
            request.raw_input_contents.append(raw)
        for name in outputs:
            request.outputs.add(name=name)
        return request


def _arrays(response: pb.ModelInferResponse) -> dict[str, Array]:
    return {
        output.name: (
            deserialize_bytes_tensor(raw)
            if output.datatype == "BYTES"
            else np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        ).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
