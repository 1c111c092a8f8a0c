"""Scripted answers of a fake server, the requests that it received, and the stream responses that a reply becomes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, islice
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.answer import PromptLogProbs
from pipeline.client.log_probs import TopLogProbsRequest
from pipeline.client.request import (
    LOG_PROB_ROWS,
    LOG_PROB_ROWS_IDS,
    PROMPT_LOG_PROBS,
    PROMPT_LOG_PROBS_IDS,
    RETURN_TOKEN_IDS,
    TOKEN_IDS,
    request_id_of,
)
from pipeline.client.sampling import LOG_PROBS_INPUT
from pipeline.client.tensors import decode_bytes, decode_numbers, encode, read_signature

# With it, a client asks Triton to end a stream with the status of an error.
_STATUS_HEADER = "triton_grpc_error"
_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
# By the server's clock, which starts anywhere.
_ARRIVAL_MS = 1e6


class Ending(Enum):
    """How a scripted answer ends."""

    EMPTY = "an empty final response marks the end, as the models of this project send it"
    MARKED = "the last chunk is marked as the final response"
    ERROR = "the model raises `Reply.error`"
    HANG = "nothing more comes, until the client leaves"
    LOST = "the server goes away: status UNAVAILABLE"
    UNMARKED = "the server closes the stream without a final response"


@dataclass(frozen=True, slots=True)
class Reply:
    """The script of one answer.

    Attributes:
        chunks: texts; bytes for chunks that end within a character.
        first_delay_s: seconds before the first chunk.
        delay_s: seconds before each further chunk.
        ending: how the answer ends.
        error: message of the model, for `Ending.ERROR`.
        code: status of that error, for clients that ask for a status (header `triton_grpc_error`).
        tokens_per_chunk: tokens that each chunk counts for; one number, or one for each chunk.
        log_probs: a value per token; sent if the request asks for them.
        logits: one row over the vocabulary per token; sent if the request asks for them or for the most probable ones.
        token_ids: an id per token; sent if the request asks for them, or the model returns them without being asked
            (`bls(token_ids=True)`).
        prompt_log_probs: log probabilities of the prompt; sent with the first chunk if the request asks for them.
        input_tokens: tokens of the prompt, as the server counts them.
        draft_tokens: tokens that a draft model proposed.
        accepted_tokens: proposed tokens that were accepted.
        queue_ms: time that the request waited to be scheduled.
        prefill_ms: from there to the first token.
        reused_blocks: blocks of the KV cache that held a part of the prompt already.

    >>> Reply(["Hel", "lo"], delay_s=0.02, draft_tokens=4, accepted_tokens=3)      # doctest: +SKIP
    """

    chunks: Sequence[str | bytes] = ("Hello", " world")
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    ending: Ending = Ending.EMPTY
    error: str = "the model failed"
    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    tokens_per_chunk: int | Sequence[int] = 1
    log_probs: Sequence[float] | None = None
    logits: Sequence[Sequence[float]] | None = None
    token_ids: Sequence[int] | None = None
    prompt_log_probs: PromptLogProbs | None = None
    input_tokens: int = 5
    draft_tokens: int = 0
    accepted_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    reused_blocks: int = 0


@dataclass(slots=True)
class Received:
    """A request as the server received it.

    Attributes:
        request_id: as the client gave it.
        prompt: the rendered prompt; empty if it came as token ids.
        tensors: values of every input, flat: {"max_tokens": [64], "stream": [True], …}.
        headers: gRPC metadata.
        cancelled: set when the client leaves before the end.
        stopped: set when the client asks for an early end, by a request with `stop`.
        finished: set when everything in the script has been sent.
    """

    request_id: str
    prompt: str
    tensors: Mapping[str, list[Any]]
    headers: Mapping[str, str]
    cancelled: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)


def read_request(request: pb.ModelInferRequest, headers: Mapping[str, str]) -> Received:
    """Decode the tensors of a request."""
    tensors: dict[str, list[Any]] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        text = tensor.datatype == "BYTES"
        tensors[tensor.name] = (
            [value.decode() for value in decode_bytes(raw)]
            if text
            else list(decode_numbers(tensor.datatype, raw))
        )
    return Received(
        request_id=request_id_of(request.id),
        prompt=tensors["text_input"][0],
        tensors=tensors,
        headers=headers,
    )


def stream_reply(
    reply: Reply,
    config: config_pb.ModelConfig,
    request: pb.ModelInferRequest,
    received: Received,
    client_left: threading.Event,
    context: Any,
) -> Iterator[pb.ModelStreamInferResponse]:
    """Yield the messages of a reply, each when it is due.

    Args:
        received: the request, decoded; `finished` is set at the end.
        client_left: set when the client has left; ends the reply.
        context: context of the gRPC call.
    """
    responses = _Responses(reply, config, request, received)
    for message, delay_s in responses.messages():
        if client_left.wait(delay_s) if delay_s else client_left.is_set():
            return
        yield message
    match reply.ending:
        case Ending.HANG:
            client_left.wait()
            return
        case Ending.LOST:
            received.finished.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        case Ending.ERROR if received.headers.get(_STATUS_HEADER) == "true":
            received.finished.set()
            context.abort(reply.code, reply.error)
        case Ending.ERROR:
            yield pb.ModelStreamInferResponse(
                error_message=reply.error, infer_response=responses.response(final=True)
            )
        case Ending.EMPTY if responses.decoupled:
            yield pb.ModelStreamInferResponse(infer_response=responses.response(final=True))
    received.finished.set()


class _Responses:
    """Builds the responses of one reply for the layout of the model."""

    def __init__(
        self, reply: Reply, config: config_pb.ModelConfig, request: pb.ModelInferRequest, received: Received
    ) -> None:
        self._reply, self._request = reply, request
        model = read_signature(config)
        self.decoupled = model.decoupled
        self._cumulative = model.cumulative
        self._batched = model.batched
        self._requested = {name for name, values in received.tensors.items() if values == [True]}
        self._wanted = {tensor.name for tensor in request.outputs} or set(model.outputs)
        self._outputs = model.outputs
        self._alternatives: int | None = next(iter(received.tensors.get(LOG_PROBS_INPUT, ())), None)
        if RETURN_TOKEN_IDS in model.inputs and RETURN_TOKEN_IDS not in self._requested:
            self._wanted.discard(TOKEN_IDS)

    def messages(self) -> Iterator[tuple[pb.ModelStreamInferResponse, float]]:
        """Yield each response with the seconds to wait before it."""
        reply = self._reply
        texts = [chunk.encode() if isinstance(chunk, str) else chunk for chunk in reply.chunks]
        per_chunk_counts = reply.tokens_per_chunk
        counts = (
            [per_chunk_counts] * len(texts) if isinstance(per_chunk_counts, int) else list(per_chunk_counts)
        )
        if not self.decoupled:
            texts, counts = [b"".join(texts)], [sum(counts)]
        log_probs, ids = iter(reply.log_probs or ()), iter(reply.token_ids or ())
        logits = iter(reply.logits or ())
        so_far, ids_so_far = b"", list[int]()
        for index, (text, per_chunk) in enumerate(zip(texts, counts, strict=True)):
            so_far += text
            last = index == len(texts) - 1
            marked = last and (reply.ending is Ending.MARKED or not self.decoupled)
            response = self.response(final=marked)
            self._add(response, "text_output", "BYTES", [so_far if self._cumulative else text])
            if "return_log_probs" in self._requested:
                self._add(response, "output_log_probs", "FP32", list(islice(log_probs, per_chunk)))
            if "return_generation_logits" in self._requested:
                rows = islice(logits, per_chunk)
                self._add(response, "generation_logits", "FP32", [value for row in rows for value in row])
            new_ids = list(islice(ids, per_chunk))
            ids_so_far += new_ids
            self._add(response, TOKEN_IDS, "INT32", ids_so_far if self._cumulative else new_ids)
            if self._alternatives is not None:
                self._add_log_prob_rows(response, sum(counts[: index + 1]), self._alternatives)
            if index == 0 and reply.prompt_log_probs is not None:
                self._add_prompt_log_probs(response, reply.prompt_log_probs)
            if "return_num_output_tokens" in self._requested:
                self._add(response, "num_output_tokens", "INT32", [per_chunk])
            if "return_num_input_tokens" in self._requested:
                self._add(response, "num_input_tokens", "INT32", [reply.input_tokens])
            if last and "return_perf_metrics" in self._requested:
                self._add(response, "total_draft_tokens", "INT32", [reply.draft_tokens])
                self._add(response, "total_accepted_draft_tokens", "INT32", [reply.accepted_tokens])
                times_ms = accumulate((_ARRIVAL_MS, reply.queue_ms, reply.prefill_ms))
                for name, time_ms in zip(_TIMES, times_ms, strict=True):
                    self._add(response, name, "INT64", [round(time_ms * 1e6)])
                self._add(response, "kv_cache_reused_blocks", "INT32", [reply.reused_blocks])
            if last and "return_finish_reason" in self._requested:
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

    def _add_log_prob_rows(self, response: pb.ModelInferResponse, tokens: int, k: int) -> None:
        """Add rows of each token's own log probability and the k most probable ones, from the first token on."""
        own, ids = self._reply.log_probs or (), self._reply.token_ids or range(tokens)
        cells: list[tuple[int, float]] = []
        for at in range(min(tokens, len(own))):
            cells.append((ids[at], own[at]))
            if k and self._reply.logits:
                (top,) = TopLogProbsRequest(k).read("FP32", encode("FP32", self._reply.logits[at]), 1)
                cells += top
        columns = 1 + (k if self._reply.logits else 0)
        self._add(response, LOG_PROB_ROWS, "FP32", [value for _, value in cells], columns)
        self._add(response, LOG_PROB_ROWS_IDS, "INT32", [token for token, _ in cells], columns)

    def _add_prompt_log_probs(self, response: pb.ModelInferResponse, prompt: PromptLogProbs) -> None:
        """Add what the script says, as rows of the prompt's own token and the most probable ones."""
        columns = 1 + max(map(len, prompt.top_log_probs))
        rows = zip(prompt.token_ids, prompt.log_probs, prompt.top_log_probs, strict=True)
        cells = [
            cell
            for token, value, top in rows
            for cell in [(token, value), *top, *[(-1, None)] * (columns - 1 - len(top))]
        ]
        values = [math.nan if value is None else value for _, value in cells]
        self._add(response, PROMPT_LOG_PROBS, "FP32", values, columns)
        self._add(response, PROMPT_LOG_PROBS_IDS, "INT32", [token for token, _ in cells], columns)

    def _add(
        self,
        response: pb.ModelInferResponse,
        name: str,
        datatype: str,
        values: Sequence[bytes | int | float],
        columns: int | None = None,
    ) -> None:
        if name in self._wanted and name in self._outputs and (values or name != "output_ids"):
            # Texts have one dimension, with a batch, too.
            batched = self._batched and name != "text_output"
            shape = [len(values)] if columns is None else [len(values) // columns, columns]
            shape = [1, *shape] if batched else shape
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(encode(datatype, values))
