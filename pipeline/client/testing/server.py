"""The fake server: gRPC on loopback, one thread for each stream, started and stopped in a `with` block."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.tensors import datatype_name
from pipeline.client.testing.models import admission_fault, bls
from pipeline.client.testing.reply import Received, Reply, read_request, stream_reply

_STREAMS_AT_ONCE = 512


class FakeServer:
    """Triton as a client sees it, on loopback, with scripted answers. Starts and stops in a `with` block.

    Requests on one stream are answered one after the other.

    Attributes:
        url: host:port.
        port: of the gRPC service.
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
            port: of the gRPC service; 0 is any that is free.
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
        left = threading.Event()
        context.add_callback(left.set)
        self.requests.append(received)
        self._open[request.id] = received, left
        try:
            yield from stream_reply(self._choose(received), self.config, request, received, left, context)
        finally:
            self._open.pop(request.id, None)
            if not received.finished.is_set():
                received.cancelled.set()

    def _choose(self, received: Received) -> Reply:
        if isinstance(self._reply, Reply):
            return self._reply
        if callable(self._reply):
            return self._reply(received)
        return self._reply[next(self._count) % len(self._reply)]
