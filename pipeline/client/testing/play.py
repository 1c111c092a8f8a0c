"""From a request to the messages of its scripted answer, in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import wire
from pipeline.client.model import read_model
from pipeline.client.testing.reply import Ending, Received, Reply

_HEADER = "triton_grpc_error"


def read_request(request: pb.ModelInferRequest, headers: Mapping[str, str]) -> Received:
    """A request in plain values."""
    tensors: dict[str, list[Any]] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        text = tensor.datatype == "BYTES"
        tensors[tensor.name] = (
            [value.decode() for value in wire.decode_bytes(raw)]
            if text
            else list(wire.decode_numbers(tensor.datatype, raw))
        )
    return Received(request_id=request.id, prompt=tensors["text_input"][0], tensors=tensors, headers=headers)


def play(
    reply: Reply,
    config: config_pb.ModelConfig,
    request: pb.ModelInferRequest,
    received: Received,
    left: threading.Event,
    context: Any,
) -> Iterator[pb.ModelStreamInferResponse]:
    """The messages of `reply`, each when it is due; ends early when `left` is set."""
    script = _Script(reply, config, request, received)
    for message, delay_s in script.messages():
        if left.wait(delay_s) if delay_s else left.is_set():
            return
        yield message
    match reply.ending:
        case Ending.HANG:
            left.wait()
            return
        case Ending.LOST:
            received.finished.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        case Ending.ERROR if received.headers.get(_HEADER) == "true":
            received.finished.set()
            context.abort(reply.code, reply.error)
        case Ending.ERROR:
            yield pb.ModelStreamInferResponse(
                error_message=reply.error, infer_response=script.response(final=True)
            )
        case Ending.EMPTY if script.decoupled:
            yield pb.ModelStreamInferResponse(infer_response=script.response(final=True))
    received.finished.set()


class _Script:
    def __init__(
        self, reply: Reply, config: config_pb.ModelConfig, request: pb.ModelInferRequest, received: Received
    ) -> None:
        self._reply, self._request = reply, request
        model = read_model(config)
        self.decoupled = model.decoupled
        self._cumulative = model.cumulative
        self._batched = model.batched
        self._asked = {name for name, values in received.tensors.items() if values == [True]}
        self._wanted = {tensor.name for tensor in request.outputs} or set(model.outputs)
        self._outputs = model.outputs

    def messages(self) -> Iterator[tuple[pb.ModelStreamInferResponse, float]]:
        """Each with the time before it."""
        reply = self._reply
        texts = [chunk.encode() if isinstance(chunk, str) else chunk for chunk in reply.chunks]
        per_chunk = reply.tokens_per_chunk
        if not self.decoupled:
            texts, per_chunk = [b"".join(texts)], per_chunk * len(texts)
        log_probs, token_ids = iter(reply.log_probs or ()), iter(reply.token_ids or ())
        logits = iter(reply.logits or ())
        so_far = b""
        for index, text in enumerate(texts):
            so_far += text
            last = index == len(texts) - 1
            marked = last and (reply.ending is Ending.MARKED or not self.decoupled)
            response = self.response(final=marked)
            self._add(response, "text_output", "BYTES", [so_far if self._cumulative else text])
            if "return_log_probs" in self._asked:
                self._add(response, "output_log_probs", "FP32", list(islice(log_probs, per_chunk)))
            if "return_generation_logits" in self._asked:
                rows = islice(logits, per_chunk)
                self._add(response, "generation_logits", "FP32", [value for row in rows for value in row])
            self._add(response, "output_ids", "INT32", list(islice(token_ids, per_chunk)))
            if "return_num_output_tokens" in self._asked:
                self._add(response, "num_output_tokens", "INT32", [per_chunk])
            if "return_num_input_tokens" in self._asked:
                self._add(response, "num_input_tokens", "INT32", [reply.input_tokens])
            if last and "return_perf_metrics" in self._asked:
                self._add(response, "total_draft_tokens", "INT32", [reply.draft_tokens])
                self._add(response, "total_accepted_draft_tokens", "INT32", [reply.accepted_tokens])
            if last and "return_finish_reason" in self._asked:
                self._add(response, "finish_reason", "BYTES", [b"stop"])
            yield (
                pb.ModelStreamInferResponse(infer_response=response),
                reply.delay_s if index else reply.first_delay_s,
            )

    def response(self, *, final: bool) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(
            model_name=self._request.model_name, model_version="1", id=self._request.id
        )
        response.parameters["triton_final_response"].bool_param = final
        return response

    def _add(
        self, response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[bytes | int | float]
    ) -> None:
        if name in self._wanted and name in self._outputs and (values or name != "output_ids"):
            batched = self._batched and name != "text_output"  # texts have one dimension, with a batch, too
            shape = [1, len(values)] if batched else [len(values)]
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(wire.encode(datatype, values))
